"""What the driver's module says where something is missing, too old or refused, and what it reads of a card."""

from __future__ import annotations

import inspect
import sys
import threading

import pytest
import torch
from cuda.bindings import driver as real_driver
from cuda.bindings import nvrtc as real_nvrtc

from strata.errors import ConfigError, EngineError
from strata.kernels.cuda.cuda_device import check_card, open_device
from strata.kernels.cuda.driver import Card, CudaError, ask, find_card, open_context, read_cards
from strata.kernels.cuda.early_start import EarlyStart
from tests.kernels import fake_cuda
from tests.kernels.fake_cuda import CUresult, FakeCard, FakeCuda


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


def test_the_fake_has_the_real_calls_and_numbers() -> None:
    calls = 0
    for prefix, real in (("cu", real_driver), ("nvrtc", real_nvrtc)):
        for name, method in inspect.getmembers(FakeCuda, inspect.isfunction):
            if name.startswith(prefix) and name[len(prefix)].isupper():
                names = list(inspect.signature(method).parameters)[1:]
                assert fake_cuda.parameters(getattr(real, name)) == names, name
                calls += 1
    assert calls > 40
    for kind in fake_cuda.ENUMS:
        for member in kind:
            assert int(getattr(getattr(real_driver, kind.__name__), member.name)) == member, member
    for constant in ("CU_MEMHOSTALLOC_PORTABLE", "CU_MEMHOSTREGISTER_PORTABLE"):
        assert getattr(real_driver, constant) == 1
    for constant in ("CU_MEMHOSTALLOC_DEVICEMAP", "CU_MEMHOSTREGISTER_DEVICEMAP"):
        assert getattr(real_driver, constant) == 2


def test_what_is_read_of_a_card(fake: FakeCuda) -> None:
    fake.cards = [FakeCard(), FakeCard(name=b"Other", architecture=(12, 0), timeout=1, integrated=1, memory_total=5)]
    assert read_cards() == [
        Card(0, "Fake 9000", "0000:01:00.0", 90, 12, 1 << 30, 232_448, 50 << 20, False, False, (13, 0)),
        Card(1, "Other", "0000:02:00.0", 120, 12, 5, 232_448, 50 << 20, True, True, (13, 0)),
    ]


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError) as caught:
        read_cards()
    assert "cuda-python" in caught.value.message
    assert caught.value.hint == "pip install 'strata-moe[cuda]'"


def test_no_driver(fake: FakeCuda) -> None:
    fake.has_driver = False
    with pytest.raises(ConfigError, match=r"no NVIDIA driver is installed: .*libcuda.*580.*--device cpu"):
        read_cards()


def test_an_old_driver_is_one_line_with_both_versions(fake: FakeCuda) -> None:
    fake.driver_version = 12080
    with pytest.raises(ConfigError) as caught:
        read_cards()
    line = str(caught.value)
    assert "\n" not in line
    assert all(word in line for word in ("CUDA 12.8", "CUDA 13.0", "580", "--device cpu"))
    assert "cuInit" not in fake.calls
    fake.driver_version = 13010
    assert read_cards()[0].cuda == (13, 1)


@pytest.mark.parametrize(
    ("status", "cards", "words"),
    [
        (CUresult.CUDA_SUCCESS, 0, "CUDA_ERROR_NO_DEVICE: words of no device"),
        (CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 1, "SYSTEM_DRIVER_MISMATCH: words of system driver mismatch"),
    ],
)
def test_cuda_that_does_not_start_says_so_itself(fake: FakeCuda, status: CUresult, cards: int, words: str) -> None:
    fake.init_status, fake.cards = status, [FakeCard()] * cards
    with pytest.raises(ConfigError, match=words):
        read_cards()


@pytest.mark.parametrize(
    ("cards", "index", "words"),
    [
        (1, 1, r"--device cuda:1: 1 CUDA device here \(cuda:0 = Fake 9000\) \(use --device cuda:0\)"),
        (2, 7, r"--device cuda:7: 2 CUDA devices here .*use --device cuda:1"),
    ],
)
def test_a_card_that_is_not_there(fake: FakeCuda, cards: int, index: int, words: str) -> None:
    fake.cards = [FakeCard() for _ in range(cards)]
    with pytest.raises(ConfigError, match=words):
        find_card(index)


def test_what_using_a_card_takes(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_card(0).name == "Fake 9000"
    fake.cards[0].architecture = (7, 0)
    with pytest.raises(ConfigError, match="sm_70, Strata needs sm_75"):
        check_card(0)
    fake.cards[0].architecture = (7, 5)
    fake.has_compiler = False
    with pytest.raises(
        ConfigError, match=r"run-time compiler is missing: .*libnvrtc.*pip install 'strata-moe\[cuda\]'"
    ):
        check_card(0)
    fake.has_compiler = True
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="built without CUDA"):
        check_card(0)


def test_a_failed_call_says_what_and_why_in_cudas_words(fake: FakeCuda) -> None:
    assert ask((CUresult.CUDA_SUCCESS,), "x") is None
    assert ask((CUresult.CUDA_SUCCESS, 5), "x") == 5
    assert ask((CUresult.CUDA_SUCCESS, 5, 6), "x") == [5, 6]
    with pytest.raises(CudaError) as caught:
        ask((CUresult.CUDA_ERROR_LAUNCH_FAILED, None), "running round 3")
    assert isinstance(caught.value, EngineError)
    assert caught.value.message == "running round 3 failed: CUDA_ERROR_LAUNCH_FAILED: words of launch failed"
    assert caught.value.name == "CUDA_ERROR_LAUNCH_FAILED"


def test_the_primary_context_is_shared_and_released_once(fake: FakeCuda) -> None:
    one, two = open_context(0), open_context(0)
    assert fake.cards[0].contexts == 2
    assert one.memory() == (900 << 20, 1 << 30)
    for context in (one, two, two):
        context.close()
    assert fake.cards[0].contexts == 0


def test_another_thread_gets_the_context(fake: FakeCuda) -> None:
    context = open_context(0)
    fake.calls.clear()
    thread = threading.Thread(target=context.memory)
    thread.start()
    thread.join()
    assert fake.calls == ["cuCtxSetCurrent", "cuMemGetInfo"]


def test_a_device_opens_and_closes_whole(fake: FakeCuda) -> None:
    with open_device(0, cap_bytes=1 << 20) as device:
        assert device.backend.info().memory_total == 1 << 20
        assert device.describe() == "Fake 9000 (cuda:0, sm_90, 12 multiprocessors), driver for CUDA 13.0"
        assert fake.live["stream"] == 1
    device.close()
    assert fake.live["stream"] == 0
    assert fake.cards[0].contexts == 0


def test_a_context_is_opened_early_and_stays_for_whoever_opens_the_card(fake: FakeCuda) -> None:
    with EarlyStart(0):
        context = open_context(0)
    assert fake.cards[0].contexts == 1
    assert fake.calls.count("cuDevicePrimaryCtxRetain") == 2
    context.close()
    assert fake.cards[0].contexts == 0


def test_a_card_that_nobody_opens_after_all_is_let_go(fake: FakeCuda) -> None:
    with pytest.raises(KeyboardInterrupt), EarlyStart(0):
        raise KeyboardInterrupt
    assert fake.cards[0].contexts == 0
    assert fake.calls.count("cuDevicePrimaryCtxRetain") == 1


def refuse_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("missing", ["card", "driver", "package", "context", "thread", "nothing asked"])
def test_what_an_early_start_lacks_is_told_by_whoever_opens_the_card(
    missing: str, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if missing == "card":
        fake.cards = []
    elif missing == "driver":
        fake.has_driver = False
    elif missing == "package":
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    elif missing == "context":
        refused = (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        monkeypatch.setattr(sys.modules["cuda.bindings.driver"], "cuDevicePrimaryCtxRetain", lambda dev: refused)
    elif missing == "thread":
        monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    with EarlyStart(None if missing == "nothing asked" else 0):
        pass
    assert "cuDevicePrimaryCtxRelease" not in fake.calls
    assert capfd.readouterr() == ("", "")
    if missing == "nothing asked":
        assert not fake.calls
