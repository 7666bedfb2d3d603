"""Qwen4-Exp's tensors: what they are called in checkpoints and here.

Lives in ``models`` beside ``qwen4_exp``: the mapping of names apart from the mathematics. Canonical names are the
published text-only ones without ``model.``; the draft block's are the published ones (``mtp.``). It must not import
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.checkpoint.weight_map import ExpertEntry, WeightEntry, WeightMap, WeightRole
from strata.models.expert_sources import expert_sources

if TYPE_CHECKING:
    from strata.models.qwen4_exp import NgramConfig, Qwen4ExpConfig

__all__ = ["weight_map"]

MTP = "mtp"


class _Names:
    """Collects entries under the prefixes of one place (the text model, or the draft block)."""

    def __init__(self, config: Qwen4ExpConfig, prefixes: tuple[str, ...], group: str | None) -> None:
        self.config = config
        self.prefixes = prefixes
        self.group = group
        self.dense: list[WeightEntry] = []
        self.experts: list[ExpertEntry] = []

    def sources(self, name: str) -> tuple[tuple[str, ...], ...]:
        return tuple((prefix + name,) for prefix in self.prefixes)

    def canonical(self, name: str) -> str:
        return f"mtp.{name}" if self.group == MTP else name

    def matrix(self, name: str, rows: int, columns: int, role: WeightRole = "dense") -> None:
        shape = (rows, columns)
        self.dense.append(WeightEntry(self.canonical(name), shape, "matrix", role, self.sources(name), self.group))

    def vector(self, name: str, size: int) -> None:
        self.dense.append(WeightEntry(self.canonical(name), (size,), "vector", "norm", self.sources(name), self.group))

    def convolution(self, name: str, channels: int, taps: int) -> None:
        shape = (channels, taps)
        self.dense.append(WeightEntry(self.canonical(name), shape, "conv", "norm", self.sources(name), self.group))

    def mixer(self, at: str, *, inject: bool) -> None:
        """One hyper-connection mixer."""
        config, wide = self.config, self.config.streams * self.config.hidden
        self.vector(at + "hc_norm.weight", wide)
        self.matrix(at + "input_mix_weight_down.weight", config.mixer_rank, wide, "hyper")
        self.matrix(at + "input_mix_weight_up.weight", wide, config.mixer_rank, "hyper")
        if inject:
            self.matrix(at + "block_inject_weight.weight", config.streams, wide, "hyper")

    def attention(self, at: str) -> None:
        config, hidden = self.config, self.config.hidden
        q, kv = config.heads * config.head_width, config.kv_heads * config.head_width
        self.matrix(at + "q_proj.weight", 2 * q, hidden)
        self.matrix(at + "k_proj.weight", kv, hidden)
        self.matrix(at + "v_proj.weight", kv, hidden)
        self.matrix(at + "o_proj.weight", hidden, q)
        self.vector(at + "q_norm.weight", config.head_width)
        self.vector(at + "k_norm.weight", config.head_width)
        self.matrix(at + "indexer.index_qk_proj.weight", (config.index_heads + 1) * config.index_width, hidden)
        self.vector(at + "indexer.q_layernorm.weight", config.index_width)
        self.vector(at + "indexer.k_layernorm.weight", config.index_width)

    def delta_net(self, at: str) -> None:
        config, hidden = self.config, self.config.hidden
        values = config.value_heads * config.value_width
        self.matrix(at + "in_proj_qkv.weight", config.delta_channels, hidden)
        self.matrix(at + "in_proj_z.weight", values, hidden)
        self.matrix(at + "in_proj_b.weight", config.value_heads, hidden, "router")
        self.matrix(at + "in_proj_a.weight", config.value_heads, hidden, "router")
        self.convolution(at + "conv1d.weight", config.delta_channels, config.conv_taps)
        self.vector(at + "A_log", config.value_heads)
        self.vector(at + "dt_bias", config.value_heads)
        self.vector(at + "norm.weight", config.value_width)
        self.matrix(at + "out_proj.weight", hidden, values)

    def moe(self, at: str, layer: int) -> None:
        config, hidden, shared = self.config, self.config.hidden, self.config.shared_intermediate
        self.matrix(at + "gate.weight", config.num_experts, hidden, "router")
        self.matrix(at + "shared_expert.gate_proj.weight", shared, hidden)
        self.matrix(at + "shared_expert.up_proj.weight", shared, hidden)
        self.matrix(at + "shared_expert.down_proj.weight", hidden, shared)
        self.matrix(at + "shared_expert_gate.weight", 1, hidden, "router")
        sources = expert_sources(tuple(f"{prefix}{at}experts." for prefix in self.prefixes))
        self.experts.append(
            ExpertEntry(layer, config.num_experts, hidden, config.expert_intermediate, sources, self.group)
        )

    def block(self, at: str, layer: int, *, linear: bool) -> None:
        self.mixer(at + "attn_hyper_connection.", inject=True)
        if linear:
            self.delta_net(at + "linear_attn.")
        else:
            self.attention(at + "self_attn.")
        self.mixer(at + "mlp_hyper_connection.", inject=True)
        self.moe(at + "mlp.", layer)

    def ngram(self, at: str, module: int, ngram: NgramConfig) -> None:
        config, wide = self.config, self.config.streams * self.config.hidden
        self.matrix(at + "key_proj.weight", wide, ngram.width)
        self.matrix(at + "value_proj.weight", config.hidden, ngram.width)
        for norm in ("norm_key", "norm_query", "norm_conv"):
            self.vector(f"{at}{norm}.weight", wide)
        self.convolution(at + "conv1d.weight", wide, ngram.taps)
        hashing = ngram.hash(module, config.vocabulary)
        table = at + "ple_embedding.ngram_embedding."
        whole = self.sources(table + "weight")
        parts = tuple(
            tuple(f"{prefix}{table}shard_{part}.weight" for part in range(ngram.parts)) for prefix in self.prefixes
        )
        shape = (hashing.table_rows(ngram.divisor), ngram.width // hashing.all_heads)
        self.dense.append(WeightEntry(table + "weight", shape, "table", "table", whole + parts))
        for name, size in (
            ("layer_multipliers", ngram.order),
            ("ngram_heads_vocab_sizes", hashing.all_heads),
            ("ngram_heads_offsets", hashing.all_heads),
        ):
            full = f"{at}ple_embedding.{name}"
            group = f"{at}hash"
            self.dense.append(WeightEntry(full, (size,), "integers", "table", self.sources(full), group))


def weight_map(config: Qwen4ExpConfig) -> WeightMap:
    """Text-only and multimodal layouts; the vision tower is known and not read. The draft block is an optional group.

    The draft block's two projections are one published matrix over (embedding, hidden), read as two column ranges.
    """
    hidden = config.hidden
    text = _Names(config, ("model.", "model.language_model."), None)
    text.matrix("embed_tokens.weight", config.vocabulary, hidden, "embedding")
    for layer, kind in enumerate(config.layer_kinds):
        if config.ngram is not None and layer in config.ngram.blocks:
            text.ngram(f"layers.{layer}.ple.", config.ngram.blocks.index(layer), config.ngram)
        text.block(f"layers.{layer}.", layer, linear=kind == "linear")
    text.mixer("hyper_connection_mixer.", inject=False)
    tied_to = "embed_tokens.weight" if config.tied else None
    head = WeightEntry(
        "lm_head.weight", (config.vocabulary, hidden), "matrix", "head", (("lm_head.weight",),), tied_to=tied_to
    )
    draft = _Names(config, ("mtp.",), MTP)
    draft.vector("pre_fc_norm_embedding.weight", hidden)
    draft.vector("pre_fc_norm_hidden.weight", hidden)
    for name, first in (("fc.embedding", 0), ("fc.hidden", hidden)):
        columns = (first, first + hidden)
        shape = (hidden, hidden)
        draft.dense.append(
            WeightEntry(f"mtp.{name}", shape, "matrix", "dense", (("mtp.fc.weight",),), MTP, columns=columns)
        )
    draft.block("layers.0.", config.num_layers, linear=False)
    draft.mixer("hyper_connection_mixer.", inject=False)
    return WeightMap(
        (*text.dense, head, *draft.dense), (*text.experts, *draft.experts), ignored=("model.visual.", "visual.")
    )
