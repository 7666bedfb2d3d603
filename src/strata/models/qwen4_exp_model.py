"""Qwen4-Exp's blocks in order, built from weights.

Lives in ``models`` beside ``qwen4_exp``, apart from it because this half needs torch. It must not know tiers,
backends or files. Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from strata.errors import CheckpointError
from strata.kernels.ops import DeltaWeights, ExpertExecutor, HyperWeights, Matrix, NgramWeights, Ops
from strata.kvcache.attention_cache import AttentionCache, IndexCache, KvFormat
from strata.kvcache.parts import StateParts
from strata.kvcache.recurrent_state import ConvolutionTail, DeltaState, TokenHistory
from strata.kvcache.sequence_state import NgramState, SequenceState
from strata.kvcache.training_state import PassingCache, PassingDelta, PassingIndex, PassingNgram, TrainingState
from strata.layers.attention import Attention
from strata.layers.delta_net import DeltaNet
from strata.layers.hyper_connection import hyper_connected
from strata.layers.indexer import Indexer
from strata.layers.moe import MixtureOfExperts, SharedExpert
from strata.layers.ngram import NgramEmbedding, TensorTable
from strata.layers.rope import RopeTable
from strata.layers.rows import Rows, take_rows, wanted_rows
from strata.models.weight_view import WeightView, matrix_rows

if TYPE_CHECKING:
    from strata.models.family import LogitRows, Weights
    from strata.models.qwen4_exp import NgramConfig, Qwen4ExpConfig
    from strata.models.qwen4_exp_mtp import DraftBlock

__all__ = ["Block", "Qwen4Exp", "build_block", "build_mixer", "new_attention_cache"]


@dataclass(frozen=True, eq=False)
class Block:
    """One layer: its number, its mixers, the gated delta net or attention between them, experts, perhaps n-grams."""

    layer: int
    ngram: NgramEmbedding | None
    attention_mixer: HyperWeights
    attention: Attention | DeltaNet
    experts_mixer: HyperWeights
    moe: MixtureOfExperts

    def forward(
        self, ops: Ops, x_TSH: torch.Tensor, rows: Rows, state: StateParts, experts: ExpertExecutor
    ) -> torch.Tensor:
        if self.ngram is not None:
            x_TSH = self.ngram.forward(ops, x_TSH, rows, state.ngram[self.layer])
        x_TSH = hyper_connected(ops, x_TSH, self.attention_mixer, partial(self._attend, ops, rows=rows, state=state))
        return hyper_connected(ops, x_TSH, self.experts_mixer, partial(self.moe.forward, ops, experts=experts))

    def _attend(self, ops: Ops, x_TH: torch.Tensor, rows: Rows, state: StateParts) -> torch.Tensor:
        if isinstance(self.attention, DeltaNet):
            return self.attention.forward(ops, x_TH, rows, state.delta[self.layer])
        return self.attention.forward(ops, x_TH, rows, state.attention[self.layer])


class Qwen4Exp:
    """See ``Model``. ``mtp`` is the draft block, None when its weights are not in the checkpoint."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights) -> None:
        from strata.models.qwen4_exp_mtp import DraftBlock

        view = WeightView(weights)
        self.config = config
        self.embedding = view.matrix("embed_tokens.weight", config.vocabulary, config.hidden)
        self._blocks = [
            build_block(config, view.under(f"layers.{layer}."), layer, kind == "linear")
            for layer, kind in enumerate(config.layer_kinds)
        ]
        self._mixer = build_mixer(config, view.under("hyper_connection_mixer."), inject=False)
        head = "embed_tokens.weight" if config.tied else "lm_head.weight"
        self._head = view.matrix(head, config.vocabulary, config.hidden)
        self.device = self.embedding.data.device
        self.rope = RopeTable(config.rope_theta, config.rotary, self.device)
        draft = view.under("mtp.")
        self.mtp: DraftBlock | None = DraftBlock(self, draft) if draft.has("fc.hidden") else None

    def new_state(self, max_positions: int, kv: KvFormat = "f32") -> SequenceState:
        config, device = self.config, self.device
        linear = [layer for layer, kind in enumerate(config.layer_kinds) if kind == "linear"]
        attention = [layer for layer, kind in enumerate(config.layer_kinds) if kind == "attention"]
        heads, widths = config.value_heads, (config.key_width, config.value_width)
        tail = (config.conv_taps - 1, config.delta_channels)
        return SequenceState(
            max_positions,
            {layer: new_attention_cache(config, max_positions, kv, device) for layer in attention},
            {layer: DeltaState(heads, *widths, *tail, device) for layer in linear},
            {} if config.ngram is None else self._new_ngrams(config.ngram),
        )

    def _new_ngrams(self, ngram: NgramConfig) -> dict[int, NgramState]:
        channels = self.config.streams * self.config.hidden
        return {
            layer: NgramState(
                TokenHistory(ngram.order - 1, ngram.boundary), ConvolutionTail(ngram.tail_rows, channels, self.device)
            )
            for layer in ngram.blocks
        }

    def new_training_state(self, sequences: int) -> TrainingState:
        config, ngram = self.config, self.config.ngram
        kinds = list(enumerate(config.layer_kinds))
        index = PassingIndex(sequences, config.index_block)
        return TrainingState(
            sequences,
            {layer: PassingCache(index) for layer, kind in kinds if kind == "attention"},
            {layer: PassingDelta() for layer, kind in kinds if kind == "linear"},
            {layer: PassingNgram(sequences, ngram.order - 1, ngram.boundary) for layer in ngram.blocks}
            if ngram
            else None,
        )

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
        x_TSH = self.streams(ops, ids, state, experts, certain=certain)
        if logits == "none":
            return None
        return self.head(ops, wanted_rows(x_TSH, logits))

    def streams(
        self, ops: Ops, ids: Sequence[int], state: StateParts, experts: ExpertExecutor, *, certain: bool = False
    ) -> torch.Tensor:
        """x_TSH after the last block: what ``head`` and the draft block read."""
        rows = take_rows(self.rope, ids, state, certain=certain)
        x_TSH = ops.start_streams(ops.embedding(ids, self.embedding), self.config.streams)
        for block in self._blocks:
            x_TSH = block.forward(ops, x_TSH, rows, state, experts)
        return x_TSH

    def head(self, ops: Ops, x_TSH: torch.Tensor, mixer: HyperWeights | None = None) -> torch.Tensor:
        """logits_TV of streams; ``mixer`` replaces the final mixer (the draft block has its own)."""
        u_TH, _ = ops.hyper_mix(x_TSH, self._mixer if mixer is None else mixer)
        return ops.linear(u_TH, self._head)


def new_attention_cache(
    config: Qwen4ExpConfig, max_positions: int, kv: KvFormat, device: torch.device
) -> AttentionCache:
    index = IndexCache(max_positions, config.index_width, config.index_block, device)
    return AttentionCache(max_positions, config.kv_heads, config.head_width, kv, device, index)


def build_mixer(config: Qwen4ExpConfig, view: WeightView, *, inject: bool) -> HyperWeights:
    """The mixer whose names lie under ``view``."""
    wide = config.streams * config.hidden
    return HyperWeights(
        norm_SH=view.tensor("hc_norm.weight", config.streams, config.hidden),
        down=view.matrix("input_mix_weight_down.weight", config.mixer_rank, wide),
        up=view.matrix("input_mix_weight_up.weight", wide, config.mixer_rank),
        inject=view.matrix("block_inject_weight.weight", config.streams, wide) if inject else None,
        eps=config.eps,
    )


def build_block(config: Qwen4ExpConfig, view: WeightView, layer: int, linear: bool) -> Block:
    """The block whose names lie under ``view``; ``layer`` is what state and experts know it by."""
    has_ngram = config.ngram is not None and layer in config.ngram.blocks
    return Block(
        layer=layer,
        ngram=_ngram(config, view.under("ple."), layer) if has_ngram else None,
        attention_mixer=build_mixer(config, view.under("attn_hyper_connection."), inject=True),
        attention=_delta_net(config, view.under("linear_attn."))
        if linear
        else _attention(config, view.under("self_attn.")),
        experts_mixer=build_mixer(config, view.under("mlp_hyper_connection."), inject=True),
        moe=_moe(config, view.under("mlp."), layer),
    )


def _attention(config: Qwen4ExpConfig, view: WeightView) -> Attention:
    hidden, width, q = config.hidden, config.head_width, config.heads * config.head_width
    index_q = config.index_heads * config.index_width
    index: Matrix = view.matrix("indexer.index_qk_proj.weight", index_q + config.index_width, hidden)
    indexer = Indexer(
        query=matrix_rows(index, 0, index_q),
        key=matrix_rows(index, index_q, index_q + config.index_width),
        query_norm_D=view.tensor("indexer.q_layernorm.weight", config.index_width),
        key_norm_D=view.tensor("indexer.k_layernorm.weight", config.index_width),
        eps=config.eps,
        heads=config.index_heads,
        width=config.index_width,
        block=config.index_block,
        top_blocks=config.index_top_blocks,
    )
    return Attention(
        query=view.matrix("q_proj.weight", 2 * q, hidden),
        key=view.matrix("k_proj.weight", config.kv_heads * width, hidden),
        value=view.matrix("v_proj.weight", config.kv_heads * width, hidden),
        output=view.matrix("o_proj.weight", hidden, q),
        query_norm_D=view.tensor("q_norm.weight", width),
        key_norm_D=view.tensor("k_norm.weight", width),
        eps=config.eps,
        heads=config.heads,
        kv_heads=config.kv_heads,
        width=width,
        gated=True,
        plus_one=True,
        indexer=indexer,
    )


def _delta_net(config: Qwen4ExpConfig, view: WeightView) -> DeltaNet:
    hidden, heads, values = config.hidden, config.value_heads, config.value_heads * config.value_width
    weights = DeltaWeights(
        conv_CW=view.tensor("conv1d.weight", config.delta_channels, config.conv_taps),
        log_decay_N=view.tensor("A_log", heads),
        dt_bias_N=view.tensor("dt_bias", heads),
        key_heads=config.key_heads,
        value_heads=heads,
        key_width=config.key_width,
        value_width=config.value_width,
    )
    return DeltaNet(
        qkv=view.matrix("in_proj_qkv.weight", config.delta_channels, hidden),
        z=view.matrix("in_proj_z.weight", values, hidden),
        beta=view.matrix("in_proj_b.weight", heads, hidden),
        decay=view.matrix("in_proj_a.weight", heads, hidden),
        output=view.matrix("out_proj.weight", hidden, values),
        weights=weights,
        norm_V=view.tensor("norm.weight", config.value_width),
        eps=config.eps,
        gate=config.delta_gate,
    )


def _moe(config: Qwen4ExpConfig, view: WeightView, layer: int) -> MixtureOfExperts:
    hidden, shared = config.hidden, config.shared_intermediate
    return MixtureOfExperts(
        layer=layer,
        router=view.matrix("gate.weight", config.num_experts, hidden),
        top_k=config.top_k,
        renormalise=config.renormalise,
        shared=SharedExpert(
            gate=view.matrix("shared_expert.gate_proj.weight", shared, hidden),
            up=view.matrix("shared_expert.up_proj.weight", shared, hidden),
            down=view.matrix("shared_expert.down_proj.weight", hidden, shared),
            weight=view.matrix("shared_expert_gate.weight", 1, hidden),
        ),
    )


def _ngram(config: Qwen4ExpConfig, view: WeightView, layer: int) -> NgramEmbedding:
    ngram, wide, streams = config.ngram, config.streams * config.hidden, (config.streams, config.hidden)
    assert ngram is not None
    hashing = ngram.hash(ngram.blocks.index(layer), config.vocabulary)
    for name, expected in (
        ("layer_multipliers", hashing.multipliers),
        ("ngram_heads_vocab_sizes", hashing.sizes),
        ("ngram_heads_offsets", hashing.offsets),
    ):
        found = view.integers(f"ple_embedding.{name}")
        if found is not None and found != expected:
            raise CheckpointError(
                f"layer {layer}: {name} is {found[:4]}, the config's seed and sizes give {expected[:4]}",
                "the n-gram hash of this checkpoint is another than the one implemented",
            )
    table = view.table("ple_embedding.ngram_embedding.weight")
    return NgramEmbedding(
        hash=hashing,
        table=TensorTable(table) if isinstance(table, torch.Tensor) else table,
        key=view.matrix("key_proj.weight", wide, ngram.width),
        value=view.matrix("value_proj.weight", config.hidden, ngram.width),
        weights=NgramWeights(
            view.tensor("norm_key.weight", *streams),
            view.tensor("norm_query.weight", *streams),
            view.tensor("norm_conv.weight", *streams),
            config.eps,
        ),
        conv_CW=view.tensor("conv1d.weight", wide, ngram.taps),
        dilation=ngram.order,
    )
