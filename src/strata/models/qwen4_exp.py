"""Qwen4-Exp (Qwen3.8-Flash-Next): config check and sizes.

Lives in ``models``; the weight names are in ``qwen4_exp_weights``, the blocks in ``qwen4_exp_model``, the draft block
in ``qwen4_exp_mtp``. It must not know tiers, backends or files. Importing it does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from strata.models.config_reader import MAX_EPS, MAX_LAYERS, MAX_THETA, ConfigReader
from strata.models.qwen4_exp_weights import weight_map
from strata.models.round_sizes import chunk_expert_bytes, cut_values, expert_values

if TYPE_CHECKING:
    from strata.kvcache.attention_cache import KvFormat
    from strata.layers.ngram_hash import NgramHash
    from strata.models.family import Weights
    from strata.models.qwen4_exp_model import Qwen4Exp

__all__ = ["LayerKind", "NgramConfig", "Qwen4ExpConfig", "build", "read_config", "weight_map"]

LayerKind = Literal["linear", "attention"]

# One kind under three names: of released configs, of transformers 5.17, and of later ones.
_LAYER_KINDS: Mapping[str, LayerKind] = {
    "linear_attention": "linear",
    "full_attention": "attention",
    "qwen_sparse_attention": "attention",
    "indexed_attention": "attention",
}


# Far above any released model: each head of each module is a prime to be found, each part a name.
_MOST_NGRAMS, _MOST_ORDERS, _MOST_HEADS, _MOST_PARTS = 16, 8, 64, 1 << 14


@dataclass(frozen=True)
class NgramConfig:
    """The n-gram embeddings (PLE): one module per entry of ``blocks``, which are 0-based block numbers."""

    blocks: tuple[int, ...]
    width: int  # all heads of a token together
    taps: int
    order: int
    heads: int
    base: int
    divisor: int
    seed: int
    parts: int
    boundary: int  # the id after which n-grams restart

    def hash(self, module: int, vocabulary: int) -> NgramHash:
        from strata.layers.ngram_hash import NgramHash

        return NgramHash(module, self.order, self.heads, vocabulary, self.base, self.seed, self.boundary)

    @property
    def tail_rows(self) -> int:
        return (self.taps - 1) * self.order


@dataclass(frozen=True)
class Qwen4ExpConfig:
    """See ``FamilyConfig``. ``key_*`` and ``value_*`` are the gated delta net's, ``index_*`` the sparse index's."""

    vocabulary: int
    hidden: int
    num_layers: int
    layer_kinds: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_width: int
    rotary: int
    rope_theta: float
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    conv_taps: int
    delta_gate: Literal["sigmoid", "silu"]
    index_heads: int
    index_width: int
    index_block: int
    index_top_blocks: int
    streams: int
    mixer_rank: int
    num_experts: int
    top_k: int
    renormalise: bool
    expert_intermediate: int
    shared_intermediate: int
    ngram: NgramConfig | None
    eps: float
    max_positions: int
    tied: bool
    eos_ids: tuple[int, ...]
    multimodal: bool
    family: str = "qwen4_exp"

    @property
    def delta_channels(self) -> int:
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    def attention_bytes(self, max_positions: int, kv: KvFormat) -> int:
        """Bytes of one attention layer's cache: keys and values, raw index keys and the keys of blocks."""
        values = max_positions * 2 * self.kv_heads * self.head_width * (4 if kv == "f32" else 2)
        return values + (max_positions + max_positions // self.index_block) * self.index_width * 4

    def position_bytes(self, kv: KvFormat) -> int:
        """An index block's key is shared by its tokens."""
        block = self.attention_bytes(self.index_block, kv)
        return self.layer_kinds.count("attention") * -(-block // self.index_block)

    def round_bytes(self, max_positions: int, window: int) -> int:
        q, kv, wide = self.heads * self.head_width, self.kv_heads * self.head_width, self.streams * self.hidden
        keys, values = self.key_heads * self.key_width, self.value_heads * self.value_width
        linear, attention = self.layer_kinds.count("linear"), self.layer_kinds.count("attention")
        layer = 2 * wide + 6 * self.hidden + 3 * self.shared_intermediate + self.num_experts + 4 * self.streams
        delta = 5 * values + self.delta_channels + 2 * keys + 4 * self.value_heads
        attend = 5 * q + 4 * kv + 3 * self.index_heads * self.index_width + self.index_top_blocks
        row = self.num_layers * layer + linear * delta + attention * attend + 6 * wide + 3 * self.hidden
        row += self.vocabulary + expert_values(self.hidden, self.expert_intermediate, self.top_k)
        attended = min(max_positions, (self.index_top_blocks + 1) * self.index_block)
        row += cut_values(self.heads, self.head_width, attended) + -(-max_positions // self.index_block)
        records = linear * 2 * (window * (keys + values + 2 * self.value_heads))
        records += linear * 2 * (self.conv_taps - 1 + window) * self.delta_channels
        if self.ngram is not None:
            row += 4 * wide + self.ngram.width
            records += len(self.ngram.blocks) * 2 * (self.ngram.tail_rows + window) * wide
        return 4 * (window * row + records + max_positions * self.rotary)

    def chunk_bytes(self) -> int:
        held = 4 * (self.streams + 3) * self.hidden
        return held + chunk_expert_bytes(self.hidden, self.expert_intermediate, self.top_k)

    def frame_bytes(self, max_positions: int, rows: int) -> int:
        q, kv, wide = self.heads * self.head_width, self.kv_heads * self.head_width, self.streams * self.hidden
        delta = 2 * self.delta_channels + 4 * (self.value_heads * self.value_width + self.key_heads * self.key_width)
        row = 4 * (max(3 * wide, delta, 8 * q) + 4 * self.hidden + 2 * self.num_experts)
        scores = 12 * (max_positions + rows) // self.index_block  # of each row, with one head's beside them
        return rows * (row + scores) + (max_positions + rows) * 8 * kv

    def gathered_bytes(self, window: int) -> int:
        return 0 if self.ngram is None else len(self.ngram.blocks) * window * self.ngram.width * 4

    def mixing_work(self, positions: int) -> int:
        attended = min(positions, (self.index_top_blocks + 1) * self.index_block)
        attention = 2 * self.heads * self.head_width * attended
        attention += self.index_heads * self.index_width * (positions // self.index_block)
        delta = 3 * self.value_heads * self.key_width * self.value_width
        return self.layer_kinds.count("attention") * attention + self.layer_kinds.count("linear") * delta

    def state_bytes(self, max_positions: int, kv: KvFormat) -> int:
        matrix = self.value_heads * self.key_width * self.value_width
        delta = 4 * (matrix + (self.conv_taps - 1) * self.delta_channels)
        layers = self.layer_kinds
        total = layers.count("linear") * delta + layers.count("attention") * self.attention_bytes(max_positions, kv)
        if self.ngram is not None:
            total += len(self.ngram.blocks) * self.ngram.tail_rows * self.streams * self.hidden * 4
        return total


def read_config(raw: Mapping[str, Any]) -> Qwen4ExpConfig:
    """Reads the text part of a multimodal config, or a text-only one. Raises ``CheckpointError``."""
    outer = ConfigReader(raw)
    multimodal = outer.has("text_config")
    text = outer.nested("text_config") if multimodal else outer
    text.choice("model_type", ("qwen4_exp_text", "qwen4_exp"), default="qwen4_exp_text")
    text.refuse_foreign_arithmetic()
    text.require("attn_output_gate", True)
    if text.integer("mtp_num_hidden_layers", default=0, least=0) > 1:
        raise text.refusal("mtp_num_hidden_layers is more than the one draft block that is implemented")
    kinds = _layer_kinds(text)
    sizes = _attention_sizes(text) | _delta_sizes(text) | _expert_sizes(text)
    vocabulary, hidden = text.integer("vocab_size"), text.integer("hidden_size")
    return Qwen4ExpConfig(
        vocabulary=vocabulary,
        hidden=hidden,
        num_layers=len(kinds),
        layer_kinds=kinds,
        streams=text.integer("hc_count", default=4, least=2),
        mixer_rank=text.integer("hc_lowrank", default=320),
        ngram=_ngram(text, kinds, hidden),
        eps=text.number("rms_norm_eps", default=1e-6, most=MAX_EPS),
        max_positions=text.integer("max_position_embeddings"),
        tied=outer.flag("tie_word_embeddings", default=False),
        eos_ids=text.ids("eos_token_id"),
        multimodal=multimodal,
        **sizes,
    )


def _layer_kinds(text: ConfigReader) -> tuple[LayerKind, ...]:
    count = text.integer("num_hidden_layers", most=MAX_LAYERS)
    interval = text.integer("full_attention_interval", default=4)
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    names = text.value("layer_types", default=default)
    if not isinstance(names, list) or len(names) != count:
        raise text.refusal(f"layer_types does not name a kind for each of {count} layers")
    unknown = sorted({str(name) for name in names} - set(_LAYER_KINDS))
    if unknown:
        raise text.refusal(f"layer kind {', '.join(unknown)} is not implemented", f"read are {', '.join(_LAYER_KINDS)}")
    return tuple(_LAYER_KINDS[name] for name in names)


def _attention_sizes(text: ConfigReader) -> dict[str, Any]:
    rope = text.rope()
    heads, kv_heads, width = (text.integer(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    rotary = int(width * rope.number("partial_rotary_factor", default=1.0, most=1.0))
    index_width, block = text.integer("indexer_head_dim"), text.integer("indexer_compress_ratio")
    budget = text.integer("indexer_budget")
    text.require("indexer_kv_heads", 1)
    if heads % kv_heads:
        raise text.refusal(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    if rotary % 2 or not 0 < rotary <= min(width, index_width):
        raise text.refusal(f"{rotary} rotary dimensions do not fit heads of {width} and index heads of {index_width}")
    if budget % block:
        raise text.refusal(f"indexer_budget {budget} is no multiple of indexer_compress_ratio {block}")
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_width": width,
        "rotary": rotary,
        "rope_theta": rope.number("rope_theta", default=10000.0, most=MAX_THETA),
        "index_heads": text.integer("indexer_n_heads"),
        "index_width": index_width,
        "index_block": block,
        "index_top_blocks": budget // block,
    }


def _delta_sizes(text: ConfigReader) -> dict[str, Any]:
    key_heads, value_heads = text.integer("linear_num_key_heads"), text.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise text.refusal(f"{value_heads} linear value heads are no multiple of {key_heads} key heads")
    return {
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_width": text.integer("linear_key_head_dim"),
        "value_width": text.integer("linear_value_head_dim"),
        "conv_taps": text.integer("linear_conv_kernel_dim", default=4, least=2),
        "delta_gate": text.choice("output_gate_type", ("sigmoid", "silu"), default="silu"),
    }


def _expert_sizes(text: ConfigReader) -> dict[str, Any]:
    num_experts, top_k = text.integer("num_experts", "num_local_experts"), text.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise text.refusal(f"num_experts_per_tok {top_k} is more than num_experts {num_experts}")
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "renormalise": text.flag("norm_topk_prob", default=True),
        "expert_intermediate": text.integer("moe_intermediate_size"),
        "shared_intermediate": text.integer("shared_expert_intermediate_size"),
    }


def _ngram(text: ConfigReader, kinds: tuple[LayerKind, ...], hidden: int) -> NgramConfig | None:
    ids = text.value("ple_layer_ids", default=[])
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise text.refusal(f"ple_layer_ids is {ids!r}, a list of 1-based layer numbers is expected")
    blocks = tuple(i - 1 for i in sorted(set(cast("list[int]", ids))))
    if not blocks:
        return None
    if not all(0 <= block < len(kinds) and kinds[block] == "linear" for block in blocks):
        raise text.refusal(f"ple_layer_ids {ids} must name linear attention layers out of 1..{len(kinds)}")
    if len(blocks) > _MOST_NGRAMS:
        raise text.refusal(f"ple_layer_ids names {len(blocks)} layers, up to {_MOST_NGRAMS} are read")
    order = text.integer("ngram_size", default=3, least=2, most=_MOST_ORDERS)
    heads = text.integer("heads_per_ngram", default=8, most=_MOST_HEADS)
    width = text.integer("ple_embed_dim", default=hidden)
    if width % ((order - 1) * heads):
        raise text.refusal(f"ple_embed_dim {width} is no multiple of {(order - 1) * heads} n-gram heads")
    eos_ids = text.ids("eos_token_id")
    if not eos_ids:
        raise text.refusal("eos_token_id is missing, but n-grams restart after it")
    return NgramConfig(
        blocks=blocks,
        width=width,
        taps=text.integer("ple_conv_kernel_size", default=4, least=2),
        order=order,
        heads=heads,
        base=text.integer("ngram_vocab_size_base", default=20_000_000, least=2),
        divisor=text.integer("make_ngram_vocab_size_divisible_by", default=128),
        seed=text.integer("seed", default=1234, least=0),
        parts=text.integer("split_ngram_parts", default=512, most=_MOST_PARTS),
        boundary=eos_ids[0],
    )


def build(config: Qwen4ExpConfig, weights: Weights) -> Qwen4Exp:
    """A model over borrowed weights, with its draft block when those are there. Raises ``CheckpointError``."""
    from strata.models.qwen4_exp_model import Qwen4Exp

    return Qwen4Exp(config, weights)
