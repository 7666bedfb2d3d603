#!/bin/sh
# Builds the native library, holds every instruction set and the GPU to the same bits, and measures the expert
# kernels: what a machine with AVX-512 or an NVIDIA card adds to `make test`. Needs a Python with torch, numpy, pytest
# and hypothesis (and cuda-bindings for the GPU); nothing is installed. Usage: tools/check_experts.sh MACHINE [THREADS]
set -u
machine=${1:?name of this machine in benchmarks/results}
threads=${2:-15}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
export PYTHONPATH=src
$python tools/build_native.py --quiet 2>/dev/null || exit 1
$python -c "from strata.kernels.cpu import library as l; print('levels:', *l.available_isa_levels(), '| in force:', l.isa())"
test="$python -m pytest -q --noconftest -p no:cacheprovider"
echo "== bits: levels, formats, rows, threads"
$test tests/quant tests/kernels/test_experts.py tests/kernels/test_pool.py 2>&1 | tail -15
gpu=
if command -v nvidia-smi >/dev/null && $python -c "import cuda.bindings" 2>/dev/null; then
    gpu=--gpu
    echo "== bits: GPU against CPU"
    $test tests/kernels/test_expert_cuda.py 2>&1 | tail -15
fi
echo "== wake-up of the pool, microseconds: median and largest, at once and after 500 us of rest"
$python -c "
from strata.kernels.cpu import pool
pool.configure($threads)
print(pool.threads(), 'threads:', pool.latency(2000), pool.latency(300, 500))"
echo "== rates"
for level in avx2 avxvnni; do
    STRATA_ISA=$level $python -c "
from strata.kernels.bench import bench_kernels
r = bench_kernels(threads=$threads, gib=2, repeats=3, rows=(1, 2, 4, 8))
print('$level', *(f'{n} {f.value} ({f.percent} %)' for n, f in r.figures.items()))" 2>&1 | tail -1
done
for count in 4 8 12 16; do
    $python -c "
from strata.kernels.bench import bench_kernels
r = bench_kernels(threads=$count, gib=3, repeats=3, rows=(1, 2, 4, 8))
print('$count threads', *(f'{n} {f.value} ({f.percent} % of {f.ceiling})' for n, f in r.figures.items()))" 2>&1 | tail -1
done
echo "== how far ahead weights are asked for, bytes (AVX-512)"
flags="-O3 -std=c++17 -fPIC -ffp-contract=off -fno-fast-math -pthread -fvisibility=hidden -w"
flags="$flags -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c"
work=$(mktemp -d)
cp build/native/*.o "$work"
for ahead in 0 1024 2048 4096 8192; do
    ${CXX:-g++} $flags -DSTRATA_PREFETCH_BYTES=$ahead -c csrc/cpu/expert_avx512.cpp -o "$work/expert_avx512.o" &&
        ${CXX:-g++} -shared -pthread -o "$work/$ahead.so" "$work"/*.o -lm && $python -c "
from pathlib import Path
from strata.kernels.cpu import library
library._PATH = Path('$work/$ahead.so')
from strata.kernels.bench import bench_kernels
r = bench_kernels(threads=$threads, gib=3, repeats=3)
print('$ahead bytes', *(f'{n} {f.value} ({f.percent} % of {f.ceiling})' for n, f in r.figures.items()))" 2>&1 | tail -1
done
rm -r "$work"
for format in q8_0 bf16; do
    $python -c "
from strata.kernels.bench import bench_kernels
r = bench_kernels(threads=$threads, gib=3, repeats=3, format='$format')
print('$format', *(f'{n} {f.value} ({f.percent} % of {f.ceiling})' for n, f in r.figures.items()))" 2>&1 | tail -1
done
$python benchmarks/kernels.py --machine "$machine" --threads "$threads" $gpu
