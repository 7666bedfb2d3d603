"""The weight map: which tensors a family has, what they are called at the source and what they are called here.

Lives in ``checkpoint`` because the readers and the pack writer are its consumers; a family in ``models`` builds
one from its config and hands it over as an argument. It must not know any model: no name is written here.

Rules that a reader holds to:
- Every tensor of the checkpoint is either consumed by exactly one entry or matches a prefix of ``ignored``;
  anything else is an error that lists names.
- Of an entry's (or an expert entry's) alternatives exactly one must be present, whole. Two present, or parts of
  one, is an error. None present is an error too, unless the entry is in an optional group whose tensors are all
  absent, or is tied.
- ``shape`` is the canonical shape and comes from the config alone, never from the file. A source may have extra
  axes of size one (a depthwise convolution is stored C x 1 x W).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ExpertEntry", "ExpertSource", "WeightEntry", "WeightKind", "WeightMap", "WeightRole"]

WeightKind = Literal["matrix", "vector", "conv", "table", "integers"]
"""``matrix``: O x I, becomes a ``Matrix``. ``vector``: FP32 tensor. ``conv``: depthwise, C x W, FP32 tensor.
``table``: a row-gathered embedding too large to load, kept in its file. ``integers``: int64,
compared or kept exactly."""

WeightRole = Literal["dense", "router", "hyper", "norm", "embedding", "head", "table"]
"""What the weight is for, which decides its default format in a pack: ``dense``, ``embedding`` and ``head`` follow the
dense option, ``hyper`` its own option, ``router`` (and other gates of few rows) and ``norm`` (all vectors and
convolutions) stay FP32."""


@dataclass(frozen=True)
class WeightEntry:
    """One dense weight under its canonical name."""

    name: str
    shape: tuple[int, ...]
    kind: WeightKind
    role: WeightRole
    sources: tuple[tuple[str, ...], ...]
    """Alternatives. Each is a list of tensor names; several are parts joined along axis 0 in that order (rows of the
    parts add up to ``shape[0]``; their sizes are whatever the file says)."""
    group: str | None = None
    """Entries of one optional group (``mtp``) are all present or all absent. None: required."""
    tied_to: str | None = None
    """Canonical name whose data this one shares. The sources must then be absent from the checkpoint; finding one is
    an error (the config and the file contradict each other)."""
    columns: tuple[int, int] | None = None
    """Half-open range of the source's columns (axis 1) that this entry takes; other entries take the rest of it."""


@dataclass(frozen=True)
class ExpertSource:
    """One way in which a layer's routed experts may be stored. Either ``gate`` and ``up``, or ``gate_up``, is set.

    A pattern that contains ``{expert}`` names a 2-D tensor of one expert; one that does not names a packed 3-D tensor
    with the experts along axis 0. ``orientation`` ``output_first`` means O x I per expert (gate, up: I x H; down:
    H x I; gate_up: 2I x H, gate rows first, then up rows); ``input_first`` is the transpose of each. Quantised
    checkpoints append their own suffixes to the pattern with a final ``.weight`` removed.
    """

    down: str
    gate: str | None = None
    up: str | None = None
    gate_up: str | None = None
    orientation: Literal["output_first", "input_first"] = "output_first"

    @property
    def packed(self) -> bool:
        return "{expert}" not in self.down


@dataclass(frozen=True)
class ExpertEntry:
    """The routed experts of one layer. ``layer`` is the number that the expert executor is called with."""

    layer: int
    num_experts: int
    hidden: int
    intermediate: int
    sources: tuple[ExpertSource, ...]
    """Alternatives; exactly one must be present, for every expert."""
    group: str | None = None


@dataclass(frozen=True)
class WeightMap:
    """All weights of one model, in load order."""

    dense: tuple[WeightEntry, ...]
    experts: tuple[ExpertEntry, ...]
    ignored: tuple[str, ...] = ()
    """Prefixes of source names that are known and deliberately not read (a vision tower)."""

    def entry(self, name: str) -> WeightEntry:
        """The dense entry of a canonical name. ``KeyError`` when there is none."""
        for entry in self.dense:
            if entry.name == name:
                return entry
        raise KeyError(name)
