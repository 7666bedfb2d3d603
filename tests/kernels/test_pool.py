"""The thread pool: order of processors, number of threads, concurrent callers, errors, sleep and wake."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from strata.errors import ConfigError, EngineError
from strata.kernels.cpu import library, pool
from strata.kernels.cpu.experts import ExpertKernel, group_picks
from strata.quant import ExpertLayout
from tests.kernels.test_cuda_round import make


def test_threads_take_cores_of_the_nodes_in_turn_then_their_second_threads() -> None:
    # Two nodes of two cores with two threads each: processors 0-3 on node 0, 4-7 on node 1.
    machine = {cpu: (cpu // 4, f"core{cpu // 2}") for cpu in range(8)}
    assert pool.order_cpus(machine) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert pool.order_cpus({3: (0, "a"), 9: (0, "b")}) == [3, 9]


def test_the_default_is_at_least_one_and_at_most_the_affinity() -> None:
    import os

    assert 1 <= pool.default_threads() <= len(os.sched_getaffinity(0))


def test_every_thread_joins_and_wakes_from_sleep() -> None:
    pool.configure(3)
    assert pool.threads() == 3
    before = pool.statistics()
    pool.latency(rounds=20, pause_us=2000)
    after = pool.statistics()
    assert after.jobs - before.jobs == 20
    assert after.joins - before.joins == 40
    assert after.wakes - before.wakes >= 20  # 2 ms of rest is longer than a worker looks for work


def test_work_is_measured_by_thread_and_only_where_asked() -> None:
    pool.configure(2)
    with pool.measure_busy() as seconds:
        assert seconds() == [0.0, 0.0]
        pool.latency(rounds=50)
        first = seconds()
        assert first[0] > 0.0
        pool.latency(rounds=50)
        assert seconds()[0] > first[0]
    after = seconds()
    pool.latency(rounds=50)
    assert seconds() == after
    with pool.measure_busy() as seconds:
        assert seconds() == [0.0, 0.0]


@pytest.mark.parametrize("number", [0, -3, 257])
def test_a_number_of_threads_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"--threads {number}: the thread pool holds 1 to 256"):
        pool.configure(number)


def test_an_idle_pool_uses_no_processor() -> None:
    pool.configure(4)
    pool.latency(rounds=1)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_concurrent_callers_each_get_their_own_result() -> None:
    pool.configure(3)
    layout = ExpertLayout(256, 128, "nvfp4")
    random = torch.Generator().manual_seed(0)
    shapes = ((4, 128, 256), (4, 128, 256), (4, 256, 128))
    blobs, scales = layout.pack_weights(*(torch.randn(s, generator=random) for s in shapes))
    raw = torch.empty(blobs.numel() + 4096, dtype=torch.uint8)
    start = -raw.data_ptr() % 4096
    place = raw[start : start + blobs.numel()].view(blobs.shape).copy_(blobs)
    addresses = np.array([place[e].data_ptr() for e in range(4)], np.uint64)
    kernel = ExpertKernel(layout)
    xs = torch.randn(6, 2, 256, generator=random)
    tasks = group_picks(np.array([[0, 1], [2, 3]], np.int32))
    tasks.place(addresses, scales.numpy())

    def compute(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 2, 256)
        kernel.compute(tasks, x, out)
        return out

    expected = [compute(x) for x in xs]
    wrong: list[int] = []

    def caller(i: int) -> None:
        for _ in range(30):
            if not torch.equal(compute(xs[i]), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(6)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not wrong


def test_a_level_that_the_processor_lacks_is_refused_and_named() -> None:
    missing = [level for level in library.ISA_LEVELS if level not in library.available_isa_levels()]
    for level in missing:
        with pytest.raises(ConfigError, match=level):
            library.select_isa(level)
    with pytest.raises(ConfigError, match="sse9"):
        library.select_isa("sse9")


def test_the_words_of_a_failure_belong_to_its_thread() -> None:
    with pytest.raises(EngineError, match="0 rounds"):
        pool.latency(rounds=0)


def test_a_processor_that_another_thread_keeps_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {cpu: (0, f"core{cpu}") for cpu in range(4)}
    monkeypatch.setattr(pool, "_allowed", lambda: cores)
    assert (pool.default_threads(), pool.default_threads(1)) == (4, 3)
    monkeypatch.setattr(pool, "_allowed", lambda: {cpu: (0, f"core{cpu // 2}") for cpu in range(8)})
    assert (pool.default_threads(), pool.default_threads(1)) == (4, 4), "second threads of the cores are free"
    assert [pool.default_threads(busy, quota=2.5) for busy in (0, 1, 9)] == [2, 1, 1]
    assert [pool.default_threads(quota=quota) for quota in (0.2, 1.0, 64.0)] == [1, 1, 4]


def test_workers_of_a_cards_rounds_look_longer_for_the_next_layer() -> None:
    usual = pool.patience_us()
    made = make("nvfp4")
    try:
        assert pool.patience_us() == 1000.0 == 5 * usual
        other = make("nvfp4")
        other.conductor.close()
        other.mailbox.close()
        assert pool.patience_us() == 1000.0
    finally:
        made.conductor.close()
        made.mailbox.close()
    assert pool.patience_us() == usual
