"""What every family module offers, and what its config and model look like from outside.

Lives in ``models`` as the contract that ``engine``, ``checkpoint`` and ``memory`` are written against. It must not
import torch: configs are read by commands that never touch a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from strata.checkpoint.weight_map import WeightMap
    from strata.kernels.ops import ExpertExecutor, Matrix, Ops
    from strata.kvcache.attention_cache import KvFormat
    from strata.kvcache.parts import StateParts
    from strata.kvcache.sequence_state import SequenceState
    from strata.kvcache.training_state import TrainingState
    from strata.layers.ngram import NgramTable

__all__ = ["Family", "FamilyConfig", "LogitRows", "Model", "Weights"]

LogitRows = Literal["all", "last", "none"]

if TYPE_CHECKING:
    Weights = Mapping[str, Matrix | torch.Tensor | NgramTable]
else:
    Weights = Mapping


class FamilyConfig(Protocol):
    """The numbers that other rooms need of a checked config. Sizes in values unless named ``bytes``."""

    @property
    def family(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def expert_intermediate(self) -> int: ...
    @property
    def head_width(self) -> int:
        """Width of an attention head."""

    @property
    def max_positions(self) -> int:
        """The context the model was trained for."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def state_bytes(self, max_positions: int, kv: KvFormat) -> int:
        """Bytes of one ``SequenceState``, so that a plan can be made before anything is allocated."""

    def position_bytes(self, kv: KvFormat) -> int:
        """Bytes of it that each position adds, rounded up to a whole byte."""

    def round_bytes(self, max_positions: int, window: int) -> int:
        """Bytes that recorded rounds of up to ``window`` rows take on a card beside one ``SequenceState``: what layers
        hand on, which no other layer's memory is used for, records of the window, tables of positions."""

    def chunk_bytes(self) -> int:
        """Bytes that a prompt's chunk on a card takes for each of its rows: what its passes keep between layers, and
        the rows, inner activations and outputs of its experts."""

    def frame_bytes(self, max_positions: int, rows: int) -> int:
        """Bytes that one pass of ``rows`` rows takes besides, at the end of a context of ``max_positions``."""

    def gathered_bytes(self, window: int) -> int:
        """Bytes of RAM for what a host gathers for a round of up to ``window`` rows on a card."""

    def mixing_work(self, positions: int) -> int:
        """Multiply-adds of one row in attention and recurrent states, with ``positions`` before it, for a forecast."""


class Model(Protocol):
    """A built model; borrows its weights. One instance serves any number of sequences, one forward at a time."""

    @property
    def config(self) -> FamilyConfig: ...

    def new_state(self, max_positions: int, kv: KvFormat = "f32") -> SequenceState:
        """An empty sequence on the weights' device."""

    def new_training_state(self, sequences: int) -> TrainingState:
        """For a forward with ``TrainingOps(sequences)``: rows are whole sequences laid one after another."""

    def forward(
        self,
        ops: Ops,
        ids: Sequence[int],
        state: StateParts,
        experts: ExpertExecutor,
        logits: LogitRows | int = "all",
        *,
        certain: bool = False,
    ) -> torch.Tensor | None:
        """logits_TV of all rows, of the last row or that of a number (1 x V), or None. The rows take positions
        ``state.length ...`` and are recorded: ``state.commit(n)`` accepts the first n. ``certain`` (a prompt) lets
        recurrent state advance with the rows instead of recording them; all of them must then be committed."""


class Family(Protocol):
    """One file of this room."""

    def read_config(self, raw: Mapping[str, Any]) -> FamilyConfig:
        """Raises ``CheckpointError`` for anything that is not implemented."""

    def weight_map(self, config: Any) -> WeightMap:
        """All tensors of a checkpoint of this config."""

    def build(self, config: Any, weights: Weights) -> Model:
        """``weights`` holds the map's dense entries by canonical name. Raises ``CheckpointError`` when one is absent or
        of another shape."""
