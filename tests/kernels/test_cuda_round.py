"""A layer's experts in a recorded round, on emulated kernels: every split between GPU and CPU gives the CPU's bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from strata.engine.mailbox_check import PROBE_LIMIT_MS, MailboxCheck, check_mailbox, probe_launches
from strata.errors import EngineError
from strata.experts.policy import split_pinned
from strata.kernels.cpu.conductor import Conductor, RamTables
from strata.kernels.cpu.experts import ExpertKernel, group_picks
from strata.kernels.cuda.expert_step import ExpertStep, ExpertTables, RoundMemory
from strata.kernels.cuda.mailbox import Mailbox
from strata.kernels.cuda.ops import CudaOps
from strata.kernels.cuda.program import MAX_WINDOW, Program, RoundInputs
from strata.kernels.host import HostBackend
from strata.quant import ExpertFormat, ExpertLayout
from tests.emulator.machine import EmulatedMachine
from tests.kernels.cuda_runs import noise, random_matrix

LAYERS, EXPERTS, TOP_K = 2, 6, 3
HIDDEN, INNER = 100, 37


@dataclass
class Bench:
    """One round of two layers; ``y`` after ``run`` are the two sums."""

    layout: ExpertLayout
    blobs: torch.Tensor
    scales: np.ndarray
    backend: HostBackend
    mailbox: Mailbox
    tables: ExpertTables
    memory: RoundMemory
    conductor: Conductor
    machine: EmulatedMachine
    ticket: int = 0
    num_launches: int = 0

    def address(self, layer: int, expert: int) -> int:
        return self.blobs.data_ptr() + (layer * EXPERTS + expert) * self.layout.blob_bytes

    def place(self, where: str) -> None:
        """One letter an expert, layer after layer: v(ram), p(inned), c(pu)."""
        for flat, letter in enumerate(where):
            address = self.address(*divmod(flat, EXPERTS))
            self.tables.where.view(-1)[flat] = address if letter == "v" else 0
            self.tables.alias.view(-1)[flat] = address if letter == "p" else 0

    def run(
        self, x: torch.Tensor, ids: list[torch.Tensor], weights: torch.Tensor, limit_ms: int = 20_000
    ) -> list[torch.Tensor]:
        return self.record(x, lambda _, step: [step(n, x, ids[n], weights) for n in range(LAYERS)], limit_ms)

    def record(
        self, x: torch.Tensor, record: Callable[[CudaOps, ExpertStep], list[torch.Tensor]], limit_ms: int = 20_000
    ) -> list[torch.Tensor]:
        rows = x.shape[0]
        program = Program(torch.device("cpu"), 3)
        ops = CudaOps(program, RoundInputs.on(program.device))
        step = ExpertStep(ops, self.layout, self.tables, self.memory, self.mailbox, rows, TOP_K)
        words = torch.zeros(MAX_WINDOW + 3, dtype=torch.int32)
        ys = record(ops, step)
        layers = program.take()
        self.num_launches = len(layers)
        program.launch(
            "round.begin", (1,), 32, self.mailbox.device("inputs"), words, len(words), self.memory.state, LAYERS,
            self.memory.flags, MAX_WINDOW,
        )  # fmt: skip
        begin = program.take()
        program.launch(
            "round.publish", (1,), 32, x, self.mailbox.device("logits"), 0, 0, words, self.mailbox.device("best"),
            self.memory.flags, self.mailbox.device("row_flags"), rows, words[-1:], self.memory.state,
            self.mailbox.device("box"),
        )  # fmt: skip
        self.ticket += 1
        self.mailbox.inputs[0], self.mailbox.inputs[1] = self.ticket, limit_ms * 1000
        self.mailbox.inputs[-1] = self.ticket
        runnable = self.machine.prepare([*begin, *layers, *program.take()])
        self.conductor.begin()
        try:
            runnable.run()
            self.machine.synchronize()
        finally:
            self.conductor.end()
        assert self.mailbox.box.ended == self.ticket
        return ys


def expected(bench: Bench, x: torch.Tensor, ids: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    kernel, found = ExpertKernel(bench.layout), []
    for layer in range(LAYERS):
        tasks = group_picks(ids[layer].numpy())
        stride = np.arange(EXPERTS, dtype=np.uint64) * np.uint64(bench.layout.blob_bytes)
        tasks.place(np.uint64(bench.address(layer, 0)) + stride, bench.scales[layer])
        parts = torch.zeros(x.shape[0] * TOP_K, bench.layout.hidden)
        flags = kernel.compute(tasks, x, parts)
        found.append(kernel.combine(parts, weights, flags))
    return found


def make(
    format: ExpertFormat, fraction: float = 0.0, balance: bool = True, hidden: int = HIDDEN, inner: int = INNER
) -> Bench:
    layout = ExpertLayout(hidden, inner, format)
    random = torch.Generator().manual_seed(5)
    total = LAYERS * EXPERTS
    wide, tall = (inner, hidden), (hidden, inner)
    blobs, scales = layout.pack_weights(
        *(torch.randn(total, *shape, generator=random) * shape[-1] ** -0.5 for shape in (wide, wide, tall))
    )
    raw = torch.empty(blobs.numel() + 4096, dtype=torch.uint8)
    start = -raw.data_ptr() % 4096
    pages = raw[start : start + blobs.numel()].view(blobs.shape).copy_(blobs)
    table = scales.numpy().reshape(LAYERS, EXPERTS, 3)
    backend = HostBackend(1 << 20)
    mailbox = Mailbox(backend, hidden, TOP_K, 8, MAX_WINDOW + 3)
    device = torch.device("cpu")
    tables = ExpertTables.on(device, torch.from_numpy(table), fraction, balance=balance)
    stride = np.arange(total, dtype=np.uint64) * np.uint64(layout.blob_bytes)
    ram = RamTables(np.uint64(pages.data_ptr()) + stride, np.full(total, 2, np.uint8), np.ascontiguousarray(table))
    parts = {name: mailbox.host(name) for name in ("box", "x", "tasks", "rows", "slots", "out", "flags")}
    conductor = Conductor(layout, parts, MAX_WINDOW, MAX_WINDOW * TOP_K, ram)
    return Bench(
        layout, pages, table, backend, mailbox, tables, RoundMemory.on(device), conductor, EmulatedMachine()
    )  # fmt: skip


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = make("nvfp4")
    yield made
    made.conductor.close()
    made.mailbox.close()


def inputs(rows: int, seed: int = 0, hidden: int = HIDDEN) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=random)
    ids = [
        torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(rows)]).to(torch.int32)
        for _ in range(LAYERS)
    ]
    return x, ids, torch.rand(rows, TOP_K, generator=random)


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for f, w in zip(found, wanted, strict=True):
        assert torch.equal(f.view(torch.int32), w.view(torch.int32))


@pytest.mark.parametrize("format", ["nvfp4", "q8_0", "bf16"])
@pytest.mark.parametrize("where", ["vvvvvvvvvvvv", "cccccccccccc", "vcvcvccvcvcv", "pppcvvvvcppp"])
def test_every_split_gives_the_same_bits(format: ExpertFormat, where: str) -> None:
    for fraction in (0.0, 0.5, 1.0):
        made = make(format, fraction)
        try:
            made.place(where)
            for rows in (1, 3, 8):
                x, ids, weights = inputs(rows, rows)
                same(made.run(x, ids, weights), expected(made, x, ids, weights))
        finally:
            made.conductor.close()
            made.mailbox.close()


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_router_and_a_product_are_done_in_the_experts_first_launch(bench: Bench, rows: int) -> None:
    """With the bits of launches of their own."""
    x, _, _ = inputs(rows)
    bench.place("vcpvccvcvpcv")
    logits, gate, up = noise(rows, EXPERTS), noise(rows, 96), noise(rows, 96, seed=1)
    down = random_matrix(HIDDEN, 96, "q8_0")

    def record(ops: CudaOps, step: ExpertStep, *, apart: bool) -> list[torch.Tensor]:
        found = []
        for layer in range(LAYERS):
            product = ops.gated_linear(gate, up, down, "silu")
            if apart:
                ops.settle()
            ids, weights = ops.router(logits, TOP_K, renormalise=True)
            if apart:
                ops.settle()
            found += [product, ids, weights, step(layer, x, ids, weights)]
        return found

    together = bench.record(x, lambda ops, step: record(ops, step, apart=False))
    assert bench.num_launches == 4 * LAYERS
    apart = bench.record(x, lambda ops, step: record(ops, step, apart=True))
    assert bench.num_launches == 6 * LAYERS
    same(together, apart)


@pytest.mark.parametrize("balance", [True, False])
def test_the_share_of_the_link_is_the_policys(balance: bool) -> None:
    made = make("nvfp4", 0.4, balance)
    try:
        made.place("pppccvvpcpvp")
        x, ids, weights = inputs(2)
        made.run(x, ids, weights)
        aliases = others = 0
        letters = ["pppccv", "vpcpvp"]
        for layer in range(LAYERS):
            picked = {letters[layer][e] + str(e) for e in ids[layer].flatten().tolist()}
            pinned, cpu = sum(p[0] == "p" for p in picked), sum(p[0] == "c" for p in picked)
            taken = split_pinned(pinned, cpu, float(np.float32(0.4)), balance=balance)
            aliases += taken
            others += pinned - taken + cpu
        assert (made.mailbox.box.aliases, made.mailbox.box.others) == (aliases, others)
        assert made.tables.counts.sum() == 2 * 2 * TOP_K
    finally:
        made.conductor.close()
        made.mailbox.close()


def test_a_row_that_is_not_finite_is_flagged_wherever_it_is_computed(bench: Bench) -> None:
    for where in ("v" * 12, "c" * 12):
        bench.place(where)
        x, ids, weights = inputs(3)
        x[1, 7] = float("nan")
        bench.run(x, ids, weights)
        assert bench.mailbox.row_flags[:3].tolist() == [0, 1, 0]


@pytest.mark.parametrize("exchange", [1, 2])
@pytest.mark.parametrize("kind", ["sleep", "die", "abort"])
def test_a_round_without_an_answer_ends_and_the_next_is_right(bench: Bench, kind: str, exchange: int) -> None:
    bench.place("vvcccc" * 2)
    x, ids, weights = inputs(2, 3)
    box = bench.mailbox.box
    for limit_ms in (200, 2_000, 20_000):  # on a busy machine the first exchange alone may take the shortest
        bench.conductor.plan_fault(kind, exchange, 3 * limit_ms)  # type: ignore[arg-type]
        restarts = bench.conductor.counters().restarts
        try:
            bench.run(x, ids, weights, limit_ms=limit_ms)
            died = False
        except EngineError as error:
            died = True
            assert "died" in str(error)
        if box.aborted_layer == exchange - 1:
            break
    assert died == (kind == "die")
    assert box.aborted == {"sleep": 2, "die": 2, "abort": 1}[kind]
    assert box.aborted_layer == exchange - 1
    same(bench.run(x, ids, weights), expected(bench, x, ids, weights))
    assert bench.mailbox.box.aborted == 0
    assert bench.conductor.counters().restarts - restarts == (kind == "die")


def probe(bench: Bench, exchanges: int = LAYERS) -> MailboxCheck:
    """The mailbox's self-test, answered by the bench's conductor."""
    program = Program(torch.device("cpu"), 3)
    words = torch.zeros(MAX_WINDOW + 3, dtype=torch.int32)
    program.launch(
        "round.begin", (1,), 32, bench.mailbox.device("inputs"), words, len(words), bench.memory.state, exchanges,
        bench.memory.flags, MAX_WINDOW,
    )  # fmt: skip
    launches = program.take() + probe_launches(program, bench.mailbox, bench.memory, exchanges, HIDDEN)
    program.launch(
        "round.publish", (1,), 32, bench.memory.state, bench.mailbox.device("logits"), 0, 0, words,
        bench.mailbox.device("best"), bench.memory.flags, bench.mailbox.device("row_flags"), 1, words[-1:],
        bench.memory.state, bench.mailbox.device("box"),
    )  # fmt: skip

    def begin() -> None:
        bench.ticket += 1
        bench.mailbox.inputs[0], bench.mailbox.inputs[1] = bench.ticket, 200_000
        bench.mailbox.inputs[-1] = bench.ticket

    launches += program.take()
    return check_mailbox(bench.machine, launches, bench.mailbox, bench.conductor, begin, exchanges)


def test_the_mailboxs_self_test_sees_data_go_there_and_back(bench: Bench) -> None:
    found = probe(bench)
    assert found.microseconds is not None
    assert 0 < found.microseconds < 1e6
    assert bench.conductor.counters().exchanges == 0, "no layer was served"
    bench.place("vvcccc" * 2)
    x, ids, weights = inputs(2)
    same(bench.run(x, ids, weights), expected(bench, x, ids, weights))


@pytest.mark.parametrize("kind", ["sleep", "die", "abort"])
def test_a_self_test_that_fails_once_is_repeated(bench: Bench, kind: str) -> None:
    bench.conductor.plan_fault(kind, 2, 400)  # type: ignore[arg-type]
    assert probe(bench).microseconds is not None


def test_a_mailbox_that_nobody_answers_fails_its_self_test(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = bench.conductor.begin

    def mute() -> None:
        bench.conductor.plan_fault("abort", 1)
        begin()

    monkeypatch.setattr(bench.conductor, "begin", mute)
    found = probe(bench)
    assert found.microseconds is None
    assert found.reason == f"3 times no answer within {PROBE_LIMIT_MS} ms"


def test_a_post_that_came_while_the_thread_slept_is_answered_when_a_round_begins(bench: Bench) -> None:
    """A round may be given up while the thread has no processor; what it has posted must not keep every other out."""
    box = bench.mailbox.box
    time.sleep(0.1)  # after a millisecond without a round it sleeps
    box.layer, box.posted = -2, box.posted + 1
    bench.conductor.begin(20_000)
    bench.conductor.end()
    assert box.done == box.posted


def test_an_answer_that_comes_before_its_data_fails_the_self_test(bench: Bench) -> None:
    """The conductor answers into memory that the card does not read: what it finds there is not what it has sent."""
    elsewhere = torch.zeros(HIDDEN)
    parts = {name: bench.mailbox.host(name) for name in ("box", "x", "tasks", "rows", "slots", "flags")}
    right = bench.conductor
    ram = right._kept[0]
    bench.conductor = Conductor(
        bench.layout, {**parts, "out": elsewhere.data_ptr()}, MAX_WINDOW, MAX_WINDOW * TOP_K, ram
    )  # fmt: skip
    right.close()
    assert probe(bench) == MailboxCheck(None, "what came back is not what was sent")
