"""From one row of logits to one token: the only place that decides what is said next.

Plain functions over a FP32 row in host memory; a row's token depends on that row, the request's parameters, its own
earlier tokens and (seed, step), never on its neighbours. Arithmetic is float64, so that a sum over a vocabulary does
not depend on the width of a vector unit more than the last digit. It must not know models, tiers or text.

Order, which users of other engines will recognise:
1. non-finite logits end the request; 2. forbidden ids, then ``logit_bias``; 3. repetition penalty over prompt and
answer (positive logits divided, others multiplied); 4. frequency and presence penalty over the answer;
5. temperature; 6. top-k; 7. top-p over what top-k left; 8. min-p relative to the likeliest; 9. one draw.
Log-probabilities are the model's own: of the logits as they came, before step 2.

Ties: lower ids rank first everywhere, so greedy takes the lowest id among equals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.engine.philox import fresh_seed, uniform
from strata.engine.sampling_params import SamplingParams
from strata.errors import EngineError

__all__ = ["Choice", "Sampler", "Workspace", "distribution", "draw", "ranked", "token_logprobs"]

Row = npt.NDArray[np.float32]
Row64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Choice:
    """A chosen token. ``logprob`` and ``top`` (likeliest first) are filled when the request asked for them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Workspace:
    """Arrays of a vocabulary's size that are filled anew for each token.

    Fresh memory of 2 MB is given back to the system and taken again by each allocation: on `cpu2` the page faults cost
    2.5 ms, more than the arithmetic.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Row64] = {}

    def wide(self, name: str, values: Row | Row64) -> Row64:
        """``values`` in float64, in the array called ``name``; valid until that name is asked for again."""
        array = self.blank(name, len(values))
        np.copyto(array, values)
        return array

    def blank(self, name: str, size: int) -> Row64:
        """The array called ``name``, its values unspecified."""
        array = self._arrays.get(name)
        if array is None or len(array) != size:
            array = self._arrays[name] = np.empty(size, dtype=np.float64)
        return array


class Sampler:
    """The sampling of one request: its parameters, its seed and what it said so far.

    ``pick`` reads, ``accept`` advances; a window of drafts is verified by picking and accepting row after row, so the
    tokens are the same with drafts and without.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int] = (), *, end_ids: Collection[int] = ()) -> None:
        """``prompt`` counts for the repetition penalty; ``end_ids`` are forbidden while ``min_tokens`` or
        ``ignore_eos`` ask for it."""
        self.params = params
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.step = 0
        self._work = Workspace()
        self._end_ids = np.array(sorted({*end_ids, *params.stop_token_ids}), dtype=np.int64)
        self._eos_ids = np.array(sorted(set(end_ids)), dtype=np.int64)
        self._counts: Counter[int] = Counter()
        self._repeats = params.repetition_penalty != 1.0
        self._seen: set[int] = set(prompt) if self._repeats else set()
        self._seen_ids = _as_ids(self._seen)

    @property
    def takes_largest(self) -> bool:
        """Whether the current step's choice is the lowest id among the largest logits, with nothing else to say."""
        params = self.params
        adjusts = params.logit_bias or len(self._forbidden()) or self._counts or self._seen
        return params.greedy and params.logprobs is None and not adjusts

    def pick(self, logits: npt.ArrayLike, *, row: str = "0") -> Choice:
        """Choose for the current step from ``logits`` (vocabulary, FP32, host memory; not changed, not kept).

        ``row`` names the row in errors. Raises EngineError when a logit is not finite.
        """
        values = finite_row(logits, row)
        adjusted = self._adjusted(values)
        if self.params.greedy:
            token = int(np.argmax(adjusted))
        else:
            ids, weights = distribution(adjusted, self.params, self._work)
            token = draw(ids, weights, uniform(self.seed, self.step), self._work)
        if self.params.logprobs is None:
            return Choice(token)
        logprob, top = token_logprobs(values, token, self.params.logprobs, self._work)
        return Choice(token, logprob, top)

    def accept(self, token: int) -> None:
        """Take ``token`` as said; the next ``pick`` is for the step after it."""
        self.step += 1
        if self.params.penalised:
            self._counts[token] += 1
        if self._repeats and token not in self._seen:
            self._seen.add(token)
            self._seen_ids = np.append(self._seen_ids, token)

    def _adjusted(self, values: Row) -> Row | Row64:
        """Steps 2 to 4; the row itself where nothing applies."""
        params = self.params
        forbidden = self._forbidden()
        forbidden = forbidden[forbidden < len(values)]
        if not (params.logit_bias or len(forbidden) or self._counts or self._seen):
            return values
        adjusted = self._work.wide("adjusted", values)
        for id_, bias in params.logit_bias.items():
            if id_ < len(adjusted):
                adjusted[id_] += bias
        adjusted[forbidden] = -np.inf
        if self._repeats:
            seen = self._seen_ids[self._seen_ids < len(adjusted)]
            old = adjusted[seen]
            adjusted[seen] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        if self._counts and (params.frequency_penalty or params.presence_penalty):
            said = _as_ids(self._counts)
            counts = np.fromiter(self._counts.values(), dtype=np.float64, count=len(self._counts))
            inside = said < len(adjusted)
            adjusted[said[inside]] -= params.frequency_penalty * counts[inside] + params.presence_penalty
        return adjusted

    def _forbidden(self) -> Ids:
        if self.step < self.params.min_tokens:
            return self._end_ids
        return self._eos_ids if self.params.ignore_eos else self._end_ids[:0]


def finite_row(logits: npt.ArrayLike, row: str) -> Row:
    """``logits`` as a FP32 vector; raises EngineError naming ``row`` and the first place that is not finite."""
    values = np.asarray(logits, dtype=np.float32)
    assert values.ndim == 1, f"one row of logits is sampled at a time, not {values.shape}"
    if not len(values):
        raise EngineError(f"row {row}: no logits", "the model has an empty vocabulary")
    finite = np.isfinite(values)
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise EngineError(
            f"row {row}: {len(bad)} of {len(values)} logits are not finite, first {values[bad[0]]} at id {bad[0]}",
            "the weights or a kernel are at fault: 'strata verify' finds which",
        )
    return values


def ranked(values: Row | Row64, count: int, work: Workspace | None = None) -> Ids:
    """The ``count`` ids of the largest values, largest first, lower ids first among equals."""
    total = len(values)
    if count < total:
        parted = (work or Workspace()).wide("parted", values)
        parted.partition(total - count)
        least = parted[total - count]
        above = np.flatnonzero(values > least)
        ids = np.concatenate([above, np.flatnonzero(values == least)[: count - len(above)]])
    else:
        ids = np.arange(total)
    # Ids ascend within equal values here, and a stable sort keeps that.
    order: Ids = ids[np.argsort(-values[ids], kind="stable")]
    return order


def distribution(
    values: Row | Row64, params: SamplingParams, work: Workspace | None = None
) -> tuple[Ids | None, Row64]:
    """Steps 5 to 8: the ids that may be drawn, ascending, and their weights (likeliest 1, not normalised).

    Ids are None when all may be: ids and places are the same then. ``values`` may hold -inf for forbidden ids.
    ``params.temperature`` is above 0. The weights may lie in ``work`` and are valid until its next use.
    """
    work = work or Workspace()
    if 0 < params.top_k < len(values):
        ids = ranked(values, params.top_k, work)
        weights = _weights(values[ids].astype(np.float64), params.temperature)
        if params.top_p < 1.0:
            kept = _prefix(weights, params.top_p * float(weights.sum()))
            ids, weights = ids[:kept], weights[:kept]
    else:
        weights = _weights(work.wide("weights", values), params.temperature)
        if params.top_p < 1.0:
            ids, weights = _nucleus(weights, params.top_p, work)
        elif params.min_p > 0.0:
            ids = np.flatnonzero(weights >= params.min_p)
            return ids, weights[ids]
        else:
            return None, weights
    order = np.argsort(ids)
    ids, weights = ids[order], weights[order]
    likely = weights >= params.min_p  # the likeliest has weight 1
    return ids[likely], weights[likely]


def draw(ids: Ids | None, weights: Row64, number: float, work: Workspace | None = None) -> int:
    """The id at which the running sum of ``weights`` passes ``number`` (in [0, 1)) of their total."""
    work = work or Workspace()
    running = np.cumsum(weights, out=work.blank("running", len(weights)))
    index = int(np.searchsorted(running, number * running[-1], side="right"))
    if index == len(weights):
        # The product rounded up to the total: the last id with any weight is meant.
        index = int(np.flatnonzero(weights)[-1])
    return index if ids is None else int(ids[index])


def token_logprobs(
    values: Row, token: int, count: int, work: Workspace | None = None
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of ``token`` under softmax of ``values``, and of the ``count`` likeliest ids."""
    work = work or Workspace()
    largest = float(values.max())
    total = float(_weights(work.wide("weights", values), 1.0).sum())
    log_total = largest + math.log(total)
    top: list[int] = ranked(values, min(count, len(values)), work).tolist() if count else []
    return float(values[token]) - log_total, tuple((id_, float(values[id_]) - log_total) for id_ in top)


def _weights(wide: Row64, temperature: float) -> Row64:
    """``wide``, overwritten by exp((value - largest) / temperature)."""
    wide -= wide.max()
    with np.errstate(over="ignore", under="ignore"):
        if temperature != 1.0:
            wide /= temperature
        weights: Row64 = np.exp(wide, out=wide)
    return weights


def _nucleus(weights: Row64, top_p: float, work: Workspace) -> tuple[Ids, Row64]:
    """Top-p over a whole vocabulary without sorting it: rank the likeliest 256, then four times as many, until
    their mass suffices. A trained model's nucleus is rarely wider than the first step."""
    wanted = top_p * float(weights.sum())
    count = 256
    while True:
        ids = ranked(weights, min(count, len(weights)), work)
        ordered = weights[ids]
        if count >= len(weights) or float(np.cumsum(ordered)[-1]) >= wanted:
            kept = _prefix(ordered, wanted)
            return ids[:kept], ordered[:kept]
        count *= 4


def _prefix(ordered: Row64, wanted: float) -> int:
    """How many of the weights, largest first, are needed to reach ``wanted``; at least one."""
    return min(int(np.searchsorted(np.cumsum(ordered), wanted, side="left")) + 1, len(ordered))


def _as_ids(ids: Collection[int]) -> Ids:
    return np.fromiter(ids, dtype=np.int64, count=len(ids))
