"""States against an independent model: a plain list of everything that was ever committed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError, RequestError
from strata.kernels.ops import DeltaRows
from strata.kvcache.attention_cache import AttentionCache, IndexCache
from strata.kvcache.recurrent_state import ConvolutionTail, DeltaState, TokenHistory
from strata.kvcache.sequence_state import SequenceState

CPU = torch.device("cpu")
WINDOWS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=12)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(WINDOWS, st.integers(1, 5), st.booleans())
def test_tail_is_the_last_committed_rows(windows: list[tuple[int, int]], kept: int, certain: bool) -> None:
    tail, committed, number = ConvolutionTail(kept, 2, CPU), [0.0] * kept, 0.0
    for rows, accepted in windows:
        values = [number + i + 1 for i in range(rows)]
        number += rows
        accepted = rows if certain else min(rows, accepted)
        tail.record(torch.tensor(values)[:, None].expand(rows, 2), certain=certain)
        tail.commit(accepted)
        committed += values[:accepted]
        assert tail.rows_UC[:, 0].tolist() == committed[-kept:]
        assert tail.rows_UC.is_contiguous()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(WINDOWS)
def test_history_is_the_last_committed_ids(windows: list[tuple[int, int]]) -> None:
    history, committed, number = TokenHistory(2, 99), [99, 99], 0
    for rows, accepted in windows:
        ids = list(range(number, number + rows))
        number += rows
        assert history.windows(ids) == [committed[-2:] + ids]
        history.record(ids)
        history.commit(min(rows, accepted))
        committed += ids[: min(rows, accepted)]
        assert list(history.ids) == committed[-2:]


def delta_rows(rows: int, first: float) -> DeltaRows:
    values = torch.arange(first, first + rows)
    return DeltaRows(values.view(rows, 1, 1), values.view(rows, 1, 1), values.view(rows, 1), -values.view(rows, 1))


def test_delta_state_hands_accepted_rows_to_the_next_forward_once() -> None:
    state = DeltaState(1, 1, 1, 3, 2, CPU)
    assert state.pending is None
    state.record(torch.zeros(4, 2), delta_rows(4, 1.0), written=False)
    assert state.pending is None
    state.commit(3)
    assert state.pending is not None
    assert state.pending.beta_TN.flatten().tolist() == [1.0, 2.0, 3.0]
    state.record(torch.zeros(2, 2), delta_rows(2, 7.0), written=False)
    assert state.pending is None
    state.commit(0)
    assert state.pending is None
    state.record(torch.zeros(20, 2), delta_rows(20, 1.0), written=True)
    state.commit(20)
    assert state.pending is None


def test_saved_delta_state_is_independent() -> None:
    state = DeltaState(1, 2, 2, 3, 2, CPU)
    state.record(torch.ones(2, 2), delta_rows(2, 1.0), written=False)
    state.commit(2)
    saved = state.save()
    state.state_NDV.fill_(9)
    state.record(torch.full((1, 2), 5.0), delta_rows(1, 8.0), written=False)
    state.commit(1)
    state.restore(saved)
    assert state.state_NDV.abs().max() == 0
    assert state.tail.rows_UC[:, 0].tolist() == [0, 1, 1]
    assert state.pending is not None
    assert state.pending.beta_TN.flatten().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kv", ["f32", "bf16"])
def test_cache_overwrites_rejected_rows(kv: str) -> None:
    cache = AttentionCache(10, 2, 3, kv, CPU)  # type: ignore[arg-type]
    cache.append(0, torch.full((4, 2, 3), 1.0), torch.full((4, 2, 3), -1.0))
    k, v = cache.append(2, torch.full((3, 2, 3), 2.0), torch.full((3, 2, 3), -2.0))
    assert k.shape == (5, 2, 3)
    assert k[:, 0, 0].tolist() == [1, 1, 2, 2, 2]
    assert v[:, 1, 2].tolist() == [-1, -1, -2, -2, -2]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(WINDOWS, st.integers(1, 5))
def test_index_finishes_every_block_with_its_committed_rows(windows: list[tuple[int, int]], block: int) -> None:
    """A block's key is here the sum of its raw keys; rejected rows must never stay in it."""
    cache, committed = IndexCache(80, 1, block, CPU), []
    for number, (rows, accepted) in enumerate(windows):
        values = [100.0 * number + i for i in range(rows)]
        start = len(committed)
        positions, raw = cache.append(start, torch.tensor(values)[:, None])
        assert list(positions) == list(range(start // block * block, (start + rows) // block * block, block))
        complete, keys = cache.finish(start, rows, raw.sum(1))
        everything = committed + values
        assert complete == len(everything) // block
        expected = [sum(everything[b * block : (b + 1) * block]) for b in range(complete)]
        assert keys[:, 0].tolist() == expected
        committed += values[: min(rows, accepted)]


def test_sequence_limits_and_commit_rules() -> None:
    state = SequenceState(4, {0: AttentionCache(4, 1, 1, "f32", CPU)})
    with pytest.raises(RequestError, match="0 rows at position 0"):
        state.begin(0)
    assert state.begin(3) == 0
    state.commit(2)
    assert state.length == 2
    with pytest.raises(RequestError, match="3 rows at position 2 do not fit a context of 4"):
        state.begin(3)
    state.begin(2)
    with pytest.raises(AssertionError):
        state.commit(3)
    state.commit(0)
    assert state.begin(2, certain=True) == 2
    with pytest.raises(AssertionError, match="committed whole"):
        state.commit(1)
    with pytest.raises(EngineError, match="half advanced"):
        state.begin(1)
    state.commit(2)
    assert state.length == 4
    state.truncate(1)
    assert state.begin(1) == 1
