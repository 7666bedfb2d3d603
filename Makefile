# Two commands do everything on a fresh machine: `make run` and `make test`.
# PYTHON=python3.12 picks the interpreter; PROMPT='...' and ARGS='...' are passed to the demo.

PY := .venv/bin/python
WORKERS ?= 2
export PROMPT
export PYTHON

# A current environment costs a moment; else the machine is checked before anything is downloaded.
define prepare
@$(PY) tools/environment.py --current $(1) 2>/dev/null || \
  { python=$$(sh tools/check.sh) && "$$python" tools/environment.py $(1); }
endef

.PHONY: help build run test test-all test-sanitize lint format bench clean lock generate environment environment-dev environment-bench environment-all native test-gpu test-cpu512 test-windows check

help:
	@echo "make run          install, build, and run the demo   [PROMPT='def read_lines(path):'] [ARGS='--threads 2']"
	@echo "make test         install, build, and run all tests  [ARGS='-k config']"
	@echo "make test-all     the same with the tests marked long, test-sanitize and verify-full"
	@echo "make test-sanitize native kernels with every read and write checked"
	@echo "make build        install, and compile the native library"
	@echo "make lint         ruff and strict types"
	@echo "make bench        all benchmarks; results in benchmarks/results  ARGS='--machine NAME'"
	@echo "make test-gpu     the tests that need an NVIDIA card"
	@echo "make test-cpu512  the tests that need AVX-512"
	@echo "make verify-full  strata verify with every arm at every length, and its planted faults"
	@echo "make test-windows the Windows memory calls under wine"
	@echo "make generate     rewrite the generated pages from their sources"
	@echo "make clean        remove what was built and installed here"

run: environment native
	@.venv/bin/strata demo $${PROMPT:+--prompt "$$PROMPT"} $(ARGS)

test: environment-dev native
	@$(PY) -m pytest -n $(WORKERS) -q $(ARGS)

# Everything: what make test leaves out takes minutes, so it is run before a change is merged and not while working.
test-all: environment-dev native
	@$(PY) -m pytest -n $(WORKERS) -q --long $(ARGS)
	@$(MAKE) --no-print-directory test-sanitize verify-full

# Rows, experts, pool and stager twice (decision record 0111): with the library whose reads and writes are checked, and with
# the shipped one where malloc hands out no zeros. Leaks are not looked for: Python and torch keep what they have.
CHECKED := tests/kernels/test_rows_*.py $(foreach name,every_row_count experts expert_padding packing picks pool stager \
  guard,tests/kernels/test_$(name).py)
test-sanitize: environment-dev native
	@$(PY) tools/build_native.py --sanitize
	@LD_PRELOAD=$$($(PY) tools/build_native.py --sanitizer-runtime) PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 STRATA_NATIVE=$(CURDIR)/build/sanitized/libstrata_cpu.so \
	  $(PY) -m pytest -n $(WORKERS) -q -k "not cuda and not widths_of_models" $(CHECKED)
	@PYTHONMALLOC=malloc MALLOC_PERTURB_=170 $(PY) -m pytest -n $(WORKERS) -q -k "not cuda" $(CHECKED)

# The Windows calls, cross-compiled and run under wine. Not part of `make test`: wine is large.
test-windows: environment-dev
	@$(PY) tools/test_windows.py

# Both run only marked tests and fail where the hardware is missing: here they are asked for by name.
test-gpu: environment-dev native
	@STRATA_TESTS_REQUIRE=gpu $(PY) -m pytest -m gpu -q $(ARGS)

test-cpu512: environment-dev native
	@STRATA_TESTS_REQUIRE=avx512 $(PY) -m pytest -m avx512 -q $(ARGS)

# The whole product of placements and lengths, then the planted faults: about ten minutes.
.PHONY: verify-full
verify-full: environment native
	@$(PY) -m strata verify --full $(ARGS)
	@$(PY) -m strata verify --self-test $(ARGS)

lint: environment-dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: environment-dev
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: environment-bench native
	@$(PY) benchmarks/run_all.py $(ARGS)

generate: environment-all
	@$(PY) tools/reference.py
	@$(PY) tools/licences.py
	@$(PY) tools/decision_index.py
	@$(PY) tools/fits_table.py

lock: environment-all
	@$(PY) tools/lock.py

environment: ; $(call prepare,)
environment-dev: ; $(call prepare,--extra dev)
environment-bench: ; $(call prepare,--extra dev --extra bench)
environment-all: ; $(call prepare,--extra dev --extra bench --extra cuda)

build: environment native

native:
	@$(PY) tools/build_native.py

check:
	@sh tools/check.sh

clean:
	rm -rf .venv build dist src/*.egg-info src/strata/_native .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
