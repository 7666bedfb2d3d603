"""Rounds and prompt chunks on packs of transformers' checkpoints: the oracle, the mirror, the law of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from strata.engine.engine import Engine
from strata.engine.runtime import Runtime
from strata.engine.session import Session, chunk_bounds
from strata.kernels.ops import ExpertExecutor, Matrix
from strata.kernels.reference import ReferenceOps
from strata.quant.blocks import dequantise
from tests.engine.conftest import VOCABULARY, load
from tests.kernels import expert_mirror, rows_mirror
from tests.models.oracle import Pair, defined_ties, sample_ids, worst


def prompt(count: int, seed: int = 0) -> list[int]:
    return sample_ids(count, seed, VOCABULARY - 30)


def every_row(session: Session, ids: list[int]) -> torch.Tensor:
    rows = []
    for token in ids:
        rows.append(session.round([token])[0])
        session.commit(1)
    return torch.stack(rows)


def test_exact_pack_equals_transformers(pair: Pair, packs: dict[str, Path]) -> None:
    """BF16 experts with the rest in FP32 against transformers in FP32 on the same (BF16-rounded) expert weights."""
    ids = prompt(120)
    rounded = {name: value for name, value in pair.oracle.state_dict().items() if ".experts." in name}
    before = {name: value.clone() for name, value in rounded.items()}
    for value in rounded.values():
        value.copy_(value.bfloat16().float())
    try:
        with defined_ties():
            expected = pair.oracle_logits(ids)
    finally:
        for name, value in rounded.items():
            value.copy_(before[name])
    with load(packs["exact"], kv=32, prefill="50") as engine:
        assert worst(every_row(Session(engine._runtime), ids), expected) < 2e-5
        session = Session(engine._runtime)
        assert worst(session.read_prompt(ids), expected[-1]) < 2e-5


class MirrorExperts:
    """Experts in float64 on activations that were quantised as the arithmetic's definition says."""

    def __init__(self, runtime: Runtime, path: Path) -> None:
        from strata.checkpoint.pack_reader import PackReader

        self._reader = PackReader(path)
        self._known: dict[tuple[int, int], list[np.ndarray]] = {}

    def weights(self, layer: int, expert: int) -> list[np.ndarray]:
        if (layer, expert) not in self._known:
            blob, scales = self._reader.read_expert(self._reader.expert_layers[layer], expert)
            layout = self._reader.layout
            assert layout is not None
            matrices = layout.unpack(blob.unsqueeze(0), scales.unsqueeze(0))
            self._known[layer, expert] = [dequantise(matrix)[0].double().numpy() for matrix in matrices]
        return self._known[layer, expert]

    @staticmethod
    def rounded(x: np.ndarray) -> np.ndarray:
        codes, scales, _ = expert_mirror.quantise_rows(x.astype(np.float32))
        groups = codes.reshape(*scales.shape, 16) * scales[..., None].astype(np.float64)
        return groups.reshape(len(x), -1)[:, : x.shape[1]]

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        x = self.rounded(x_TH.numpy())
        y = np.zeros(x_TH.shape)
        for t in range(len(x)):
            for k in range(ids_TK.shape[1]):
                gate, up, down = self.weights(layer, int(ids_TK[t, k]))
                a = gate @ x[t]
                hidden = a / (1 + np.exp(-a)) * (up @ x[t])
                y[t] += float(weights_TK[t, k]) * (down @ self.rounded(hidden[None])[0])
        return torch.from_numpy(y.astype(np.float32))


class MirrorOps(ReferenceOps):
    """torch's operations, with activations of Q8_0 products rounded to 16 bits as their definition says."""

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        if weight_OI.format == "q8_0":
            rows = rows_mirror.coded(x_TI.reshape(-1, x_TI.shape[-1]).numpy())
            x_TI = torch.from_numpy(rows).view(x_TI.shape)
        return super().linear(x_TI, weight_OI)


def reference_rows(engine: Engine, experts: ExpertExecutor, ids: list[int]) -> torch.Tensor:
    """The same model on torch's operations with the given experts."""
    runtime = engine._runtime
    state = runtime.model.new_state(len(ids), runtime.kv)
    with torch.no_grad():
        rows = runtime.model.forward(MirrorOps(), ids, state, experts, certain=True)
    assert rows is not None
    return rows


@pytest.mark.parametrize(("pack", "median"), [("experts", 1e-5), ("default", 1e-3)])
def test_rounds_and_prompts_equal_the_mirror(packs: dict[str, Path], pack: str, median: float) -> None:
    """A value that lies on a rounding border of an activation's code may fall to the other side after a change in the
    last bit of FP32. With 8-bit codes alone all rows but a few are far from any. The 16-bit codes of Q8_0 products have
    256 times as many borders, and what falls there (3e-5) reaches a border of 8 bits in some rows."""
    ids = prompt(60, seed=3)
    with load(packs[pack], kv=32) as engine:
        expected = reference_rows(engine, MirrorExperts(engine._runtime, packs[pack]), ids)
        found = every_row(Session(engine._runtime), ids)
        errors = torch.tensor([worst(found[t], expected[t]) for t in range(len(ids))])
        assert float(errors.median()) < median
        assert float(errors.max()) < 3e-2
        assert torch.equal(Session(engine._runtime).read_prompt(ids), found[-1])


class Picks:
    """An executor that keeps the picks of every layer beside what another computes."""

    def __init__(self, experts: ExpertExecutor) -> None:
        self._experts = experts
        self.ids: list[torch.Tensor] = []

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        self.ids.append(ids_TK.sort(-1).values)
        return self._experts(layer, x_TH, ids_TK, weights_TK)


class Dequantised(MirrorExperts):
    """The same weights with activations as they are: transformers on the dequantised weights."""

    @staticmethod
    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64)


def test_quantised_pack_is_near_the_dequantised_weights(packs: dict[str, Path]) -> None:
    """What 8-bit activations cost. A pick at a router's tie may fall to the other side, which no tolerance covers, so
    rows are compared whose picks are the same in every layer; they must be most."""
    ids = prompt(100, seed=5)
    with load(packs["default"], kv=32) as engine:
        theirs = Picks(Dequantised(engine._runtime, packs["default"]))
        expected = reference_rows(engine, theirs, ids)
        runtime = engine._runtime
        ours = Picks(runtime.experts)
        state = runtime.model.new_state(len(ids), runtime.kv)
        found = runtime.model.forward(runtime.ops, ids, state, ours, certain=True)
        assert found is not None
    same = torch.stack([(a == b).all(-1) for a, b in zip(ours.ids, theirs.ids, strict=True)]).all(0)
    assert float(same.float().mean()) > 0.8
    found, expected = found[same], expected[same]
    assert 0 < float((found - expected).norm() / expected.norm()) <= 3e-2
    ours_log, theirs_log = found.log_softmax(-1), expected.log_softmax(-1)
    assert float((theirs_log.exp() * (theirs_log - ours_log)).sum(-1).mean()) < 1e-2


def test_a_token_is_the_same_bits_in_windows_of_1_to_8_rows(runtime: Runtime) -> None:
    text, following = prompt(70), prompt(8, seed=9)
    found: dict[int, torch.Tensor] = {}
    for rows in range(1, 9):
        session = Session(runtime)
        session.read_prompt(text)
        logits = session.round(following[:rows])
        for t in range(rows):
            assert torch.equal(found.setdefault(t, logits[t]), logits[t]), f"row {t} of a window of {rows}"


@pytest.mark.parametrize("cuts", [[1] * 130, [130], [7, 64, 59], [65, 65]])
def test_chunks_windows_and_rounds_are_the_same_bits(runtime: Runtime, cuts: list[int]) -> None:
    ids = prompt(130, seed=2)
    whole = Session(runtime)
    expected = whole.read_prompt(ids)
    session, at = Session(runtime), 0
    for size in cuts:
        logits = session.read_prompt(ids[at : at + size]) if size > 8 else session.round(ids[at : at + size])[-1]
        if size <= 8:
            session.commit(size)
        at += size
    assert torch.equal(logits, expected)
    assert torch.equal(whole.round([3])[0], session.round([3])[0])


def test_rejected_rows_leave_no_trace(runtime: Runtime) -> None:
    ids = prompt(40, seed=4)
    plain, drafted = Session(runtime), Session(runtime)
    plain.read_prompt(ids[:20])
    drafted.read_prompt(ids[:20])
    expected = every_row(plain, ids[20:])
    rows: list[torch.Tensor] = []
    while len(rows) < 20:
        window = [*ids[20 + len(rows) : 22 + len(rows)], 7, 11][: 20 - len(rows) + 2]
        logits = drafted.round(window)
        accepted = min(2, 20 - len(rows))
        rows.extend(logits[:accepted])
        drafted.commit(accepted)
    assert torch.equal(torch.stack(rows), expected)


def test_chunk_bounds_depend_on_position_alone() -> None:
    assert list(chunk_bounds(0, 10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(chunk_bounds(3, 10, 4)) == [(3, 4), (4, 8), (8, 10)]
    assert list(chunk_bounds(5, 5, 4)) == []


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(pair: Pair, packs: dict[str, Path]) -> None:
    """200 tokens of the engine on the exact pack, wherever the oracle's best two logits are more than 1e-3 apart."""
    decided, ids = 0, prompt(9, seed=6)
    with load(packs["exact"], kv=32) as engine, torch.no_grad(), defined_ties():
        session = Session(engine._runtime)
        ours = session.read_prompt(ids)
        out = pair.oracle(input_ids=torch.tensor([ids]), use_cache=True)
        for _ in range(200):
            theirs = out.logits[0, -1]
            best = torch.topk(theirs, 2)
            token = int(best.indices[0])
            if best.values[0] - best.values[1] > 1e-3 * float(theirs.abs().max()):
                decided += 1
                assert int(ours.argmax()) == token
            out = pair.oracle(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
            ours = session.round([token])[0]
            session.commit(1)
    assert decided > 150
