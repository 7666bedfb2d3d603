"""Rules that all tests run under: oracles must be there, nothing is skipped but for hardware, nobody's home is touched.

A test marked gpu, avx512 or browser is left out where the machine lacks that, and counted in the last line, as are
those marked long, which run with --long alone (`make test-all`). Any other skip is a failure, as is a missing oracle
package: a test that silently does not run proves nothing.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Two workers share the machine: torch's own threads would only fight over it. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A suite started in the background has SIGINT ignored, and so have the programs it starts; tests that press Ctrl-C on
# them would wait for ever. A handler of our own becomes the default action in what is started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
ORACLES = ("transformers", "compressed_tensors", "openai", "hypothesis", "httpx", "xdist", "pytest_timeout")
REQUIRE = "STRATA_TESTS_REQUIRE"


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and importlib.util.find_spec("cuda") is not None


def has_avx512() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_vnni" in cpuinfo.read_text()


def has_browser() -> bool:
    return any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))) and bool(
        shutil.which("chromedriver")
    )


LEFT_LONG = pytest.StashKey[int]()
HARDWARE = {"gpu": has_gpu, "avx512": has_avx512, "browser": has_browser}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long, as make test-all does")


def pytest_configure(config: pytest.Config) -> None:
    missing = [name for name in ORACLES if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(f"packages that the tests need are missing: {', '.join(missing)}; run `make test`")
    from hypothesis import settings

    settings.register_profile("strata", derandomize=True, deadline=None, max_examples=50, database=None)
    settings.load_profile("strata")


def leave_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left)
    config.stash[LEFT_LONG] = len(left)
    if hasattr(config, "workeroutput"):  # a process of xdist; each collects the same
        config.workeroutput["left_long"] = len(left)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """xdist: a worker is done. Its count comes to the process that prints."""
    count = getattr(node, "workeroutput", {}).get("left_long", 0)
    node.config.stash[LEFT_LONG] = max(node.config.stash.get(LEFT_LONG, 0), count)


@pytest.hookimpl(trylast=True)  # what -m and -k leave out is not counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        leave_long(config, items)
    required = os.environ.get(REQUIRE, "")
    for name, is_present in HARDWARE.items():
        marked = [item for item in items if item.get_closest_marker(name)]
        if not marked or name == required or is_present():
            continue
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"{name}: not on this machine"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:  # a wrapper's generator also takes and returns the report
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not any(map(item.get_closest_marker, HARDWARE)):
        report.outcome = "failed"
        report.longrepr = f"skipped, which only tests marked {', '.join(HARDWARE)} may be: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"a whole file may not be skipped: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = dict.fromkeys(HARDWARE, 0)
    for report in terminalreporter.stats.get("skipped", ()):
        for name in HARDWARE:
            counts[name] += name in report.keywords
    config.stash[LEFT_OUT] = counts


LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_unconfigure(config: pytest.Config) -> None:
    counts = config.stash.get(LEFT_OUT, None)
    if counts is not None:
        left = config.stash.get(LEFT_LONG, 0)
        if left:
            print(f"left for make test-all: {left}")
        print("not run on this machine: " + ", ".join(f"{count} {name}" for name, count in counts.items()))


@pytest.fixture(scope="session")
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strata-home")


@pytest.fixture(autouse=True)
def own_environment(
    request: pytest.FixtureRequest, session_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Each test sees a STRATA_HOME of the run and no STRATA_ option of the user; logging is put back after it.

    Where there is a card, ``auto`` would take it: only tests marked gpu may.
    """
    for name in list(os.environ):
        if name.startswith("STRATA_") and name not in (REQUIRE, "STRATA_ISA", "STRATA_NATIVE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("STRATA_HOME", str(session_home))
    if has_gpu() and request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("STRATA_DEVICE", "cpu")
    yield
    logger = logging.getLogger("strata")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT
