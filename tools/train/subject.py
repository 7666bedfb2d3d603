"""A pack under test: the project's own engine over whole windows of text, greedy text, drafts and picks.

Lives beside the trainer. Everything is computed as a user's PC computes it (native operations, experts through their
tiers), in long chunks. Knows packs and tokens, not where they come from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from strata.config_sources import resolve_here
from strata.engine.cache_bench import RecordedPicks
from strata.engine.models import OpenModel, open_model
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.kernels.ops import ExpertExecutor
from strata.kernels.reference import ExpertWeights, ReferenceExperts

__all__ = ["Subject", "TextFigures"]

CHUNK = 512


@dataclass(frozen=True)
class TextFigures:
    """Nats of each window. ``agreed`` of ``drafted`` rows: the draft block said what the model itself said next."""

    nats: tuple[float, ...]
    agreed: int = 0
    drafted: int = 0


class Subject:
    """An open pack. ``close`` once, or ``with``."""

    def __init__(self, pack: Path, context: int = 4096) -> None:
        requested = resolve_here(
            arguments={"model": str(pack), "device": "cpu", "max_context": context, "log_level": "warning"}
        )
        self.opened: OpenModel = open_model(str(pack))
        self.runtime = Runtime.open(self.opened, requested)
        self.model: Any = self.runtime.model
        self.context = context

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.runtime.close()
        self.opened.close()

    def dense(self) -> Any:
        """The same weights with an index budget of the whole context: no block is ever left out."""
        raw = copy.deepcopy(self.opened.reader.config)
        raw["text_config"]["indexer_budget"] = self.context
        return self.opened.family.build(self.opened.family.read_config(raw), self.opened.dense())

    def float_experts(self) -> ReferenceExperts:
        """The pack's routed experts with activations in FP32 instead of the format's 8 bits."""
        reader, layers = self.opened.reader, {}
        assert reader.layout is not None
        for layer in reader.expert_layers:
            read = [reader.read_expert(layer, expert) for expert in range(reader.num_experts)]
            blobs, scales = torch.stack([blob for blob, _ in read]), torch.stack([scale for _, scale in read])
            gate, up, down = reader.layout.dequantise(blobs, scales)
            layers[layer] = ExpertWeights(torch.cat([gate, up], 1), down)
        return ReferenceExperts(layers)

    @torch.no_grad()
    def text(
        self,
        windows: Sequence[Sequence[int]],
        *,
        experts: ExpertExecutor | None = None,
        model: Any = None,
        drafts: bool = False,
    ) -> TextFigures:
        """Nats of every token after each window's first (a window is T + 1 ids), and the drafts' agreement."""
        nats, agreed, drafted = [], 0, 0
        for window in windows:
            said, draft = [], []
            nats.append(0.0)
            targets = torch.tensor(window[1:])
            for first, logits, drafted_logits in self._rows(window, experts, model, drafts):
                nats[-1] += float(F.cross_entropy(logits, targets[first : first + len(logits)], reduction="sum"))
                said.append(logits.argmax(-1))
                draft += [] if drafted_logits is None else [drafted_logits.argmax(-1)]
            if drafts:
                agreed += int((torch.cat(draft)[:-1] == torch.cat(said)[1:]).sum())
                drafted += len(targets) - 1
        return TextFigures(tuple(nats), agreed, drafted)

    def _rows(
        self, window: Sequence[int], experts: ExpertExecutor | None, model: Any, drafts: bool
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """(first row, logits of the rows, the draft block's logits of the same rows) chunk by chunk."""
        model, experts, ops = model or self.model, experts or self.runtime.experts, self.runtime.ops
        length = len(window) - 1
        state = model.new_state(length)
        draft_state = model.mtp.new_state(length) if drafts else None
        for first in range(0, length, CHUNK):
            last = min(length, first + CHUNK)
            x = model.streams(ops, window[first:last], state, experts, certain=True)
            state.commit(last - first)
            drafted = None
            if draft_state is not None:
                drafted, _ = model.mtp.forward(ops, window[first + 1 : last + 1], x, draft_state, experts)
                draft_state.commit(last - first)
            yield first, model.head(ops, x), drafted

    @torch.no_grad()
    def said(self, ids: Sequence[int], model: Any = None) -> list[int]:
        """The likeliest next id after each row."""
        rows = [logits.argmax(-1) for _, logits, _ in self._rows([*ids, 0], None, model, False)]
        return [int(i) for i in torch.cat(rows)]

    def greedy(self, prompt: Sequence[int], limit: int, ended: Callable[[list[int]], bool]) -> list[int]:
        """Up to ``limit`` greedy ids by the engine's own rounds, until ``ended`` says so (the last id is kept)."""
        session, found = Session(self.runtime), []
        logits = session.read_prompt(prompt)
        while True:
            found.append(int(logits.numpy().argmax()))
            if len(found) == limit or ended(found):
                return found
            logits = session.round([found[-1]])[0]
            session.commit(1, decoded=True)

    @torch.no_grad()
    def picks(self, windows: Sequence[Sequence[int]]) -> torch.Tensor:
        """int64 [layers, experts], the draft block's last: how many rows picked each expert."""
        recorded = RecordedPicks(self.runtime.experts)
        for window in windows:
            for _ in self._rows(window, recorded, None, True):
                pass
        count = self.opened.reader.num_experts
        layers = [torch.cat(recorded.ids[layer]).flatten().long() for layer in self.opened.reader.expert_layers]
        return torch.stack([torch.bincount(ids, minlength=count) for ids in layers])
