"""Oracles for the model families: tiny random transformers models and their weights under canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from strata.checkpoint.weight_map import ExpertEntry, ExpertSource, WeightEntry, WeightMap
from strata.kernels.ops import Matrix
from strata.kernels.reference import ExpertWeights, ReferenceExperts, ReferenceOps
from strata.models import find
from strata.models.family import Model


@dataclass
class Pair:
    """A transformers model and the same weights as a Strata model with its expert executor."""

    oracle: Any
    model: Model
    experts: ReferenceExperts

    def oracle_logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    def logits(self, ids: list[int], chunks: list[int] | None = None, **state_options: Any) -> torch.Tensor:
        """Logits of all rows, the prompt cut into chunks (the last size repeats)."""
        state = self.model.new_state(len(ids), **state_options)
        sizes = list(chunks or [len(ids)])
        found = []
        with torch.no_grad():
            while state.length < len(ids):
                size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
                part = ids[state.length : state.length + size]
                rows = self.model.forward(ReferenceOps(), part, state, self.experts, certain=True)
                assert rows is not None
                found.append(rows)
                state.commit(len(part))
        return torch.cat(found)


def _take(entry: WeightEntry, tensors: Mapping[str, torch.Tensor], used: set[str]) -> torch.Tensor | None:
    present = [names for names in entry.sources if all(name in tensors for name in names)]
    if not present:
        return None
    assert len(present) == 1, entry.name
    used.update(present[0])
    joined = torch.cat([tensors[name] for name in present[0]]) if len(present[0]) > 1 else tensors[present[0][0]]
    if entry.columns is not None:
        joined = joined[:, entry.columns[0] : entry.columns[1]].contiguous()
    assert joined.numel() == torch.Size(entry.shape).numel(), (entry.name, joined.shape, entry.shape)
    return joined.reshape(entry.shape)


def _take_experts(entry: ExpertEntry, tensors: Mapping[str, torch.Tensor], used: set[str]) -> ExpertWeights | None:
    def get(source: ExpertSource, pattern: str) -> torch.Tensor:
        if source.packed:
            used.add(pattern)
            return tensors[pattern]
        names = [pattern.format(expert=e) for e in range(entry.num_experts)]
        used.update(names)
        return torch.stack([tensors[name] for name in names])

    for source in entry.sources:
        patterns = [p for p in (source.gate, source.up, source.gate_up, source.down) if p is not None]
        if not all(pattern.format(expert=0) in tensors for pattern in patterns):
            continue
        if source.gate_up is not None:
            gate_up = get(source, source.gate_up)
        else:
            assert source.gate is not None
            assert source.up is not None
            gate_up = torch.cat((get(source, source.gate), get(source, source.up)), dim=1)
        return ExpertWeights(gate_up, get(source, source.down))
    return None


def load_weights(
    wanted: WeightMap, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[int, ExpertWeights]]:
    """Canonical dense weights and experts of a state dict; every tensor must be used or ignored by the map."""
    used: set[str] = set()
    dense: dict[str, Any] = {}
    for entry in wanted.dense:
        if entry.tied_to is not None:
            continue
        found = _take(entry, tensors, used)
        if found is None:
            assert entry.group is not None, f"{entry.name} is absent"
            continue
        dense[entry.name] = Matrix("f32", found, found.shape[1]) if entry.kind == "matrix" else found
    experts = {}
    for expert in wanted.experts:
        layer = _take_experts(expert, tensors, used)
        assert layer is not None or expert.group is not None, expert.layer
        if layer is not None:
            experts[expert.layer] = layer
    rest = {name for name in tensors if name not in used and not name.startswith(tuple(wanted.ignored or ("\0",)))}
    tied = {name for entry in wanted.dense if entry.tied_to for names in entry.sources for name in names}
    assert not rest - tied, sorted(rest - tied)
    return dense, experts


def make_pair(oracle: Any, extra: Mapping[str, torch.Tensor] | None = None) -> Pair:
    raw = oracle.config.to_dict()
    raw.setdefault("architectures", [type(oracle).__name__])
    raw["architectures"] = raw["architectures"] or [type(oracle).__name__]
    family = find(raw)
    config = family.read_config(raw)
    tensors = {name: tensor.detach() for name, tensor in oracle.state_dict().items()} | dict(extra or {})
    dense, experts = load_weights(family.weight_map(config), tensors)
    return Pair(oracle.eval(), family.build(config, dense), ReferenceExperts(experts))


def randomise(oracle: Any, seed: int, scale: float = 0.35) -> Any:
    """Weights large enough that every path matters: transformers' own start leaves norms 0 or 1, convolutions 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.add_(noise * 0.2)
            elif "conv1d" in name:
                weight.copy_(noise * 0.4)
            elif "embed" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * scale / (weight.shape[-1] / 16) ** 0.5)
    return oracle


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over all values, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def defined_ties() -> Iterator[None]:
    """The oracle's block selection leaves equal scores (relu's zeros are common) to torch.topk, which picks any of
    them. Here the lower block wins, as the engine defines it; what is selected by score is untouched."""
    original = torch.Tensor.topk

    def stable(scores: torch.Tensor, k: int, dim: int = -1) -> Any:
        order = scores.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((order.values.narrow(dim, 0, k), order.indices.narrow(dim, 0, k)))

    torch.Tensor.topk = stable  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]


def tiny_qwen3(**changes: Any) -> Pair:
    """Three layers, 8 experts, hidden 64."""
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    return make_pair(randomise(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | changes)), seed=1))


def tiny_qwen4_config(**changes: Any) -> Qwen4ExpTextConfig:
    """Four layers, the last of attention; n-grams at block 1; 4 index blocks of 4 tokens."""
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "hc_lowrank": 16,
        "ple_layer_ids": [2],
        "ple_embed_dim": 96,
        "ngram_vocab_size_base": 100,
        "heads_per_ngram": 2,
        "split_ngram_parts": 4,
        "indexer_n_heads": 3,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "eos_token_id": [5, 6],
        "output_gate_type": "sigmoid",
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    }
    return Qwen4ExpTextConfig(**sizes | changes)


def tiny_qwen4(extra: Mapping[str, torch.Tensor] | None = None, **changes: Any) -> Pair:
    torch.manual_seed(0)
    return make_pair(randomise(Qwen4ExpForCausalLM(tiny_qwen4_config(**changes)), seed=3), extra)


def sample_ids(count: int, seed: int = 0, vocabulary: int = 128) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
    return ids


def assert_greedy_agrees(pair: Pair, prompt: list[int], count: int) -> int:
    """Decodes ``count`` tokens one by one after the oracle's greedy text; where the oracle's two best logits are more
    than 1e-3 apart, the engine's token must be the same. Returns how many tokens were decided."""
    ops, state, decided = ReferenceOps(), pair.model.new_state(len(prompt) + count), 0
    with torch.no_grad():
        out = pair.oracle(input_ids=torch.tensor([prompt]), use_cache=True)
        ours = pair.model.forward(ops, prompt, state, pair.experts, "last", certain=True)
        state.commit(len(prompt))
        for _ in range(count):
            best = torch.topk(out.logits[0, -1], 2)
            token = int(best.indices[0])
            assert ours is not None
            if best.values[0] - best.values[1] > 1e-3:
                decided += 1
                assert ops.argmax(ours) == [token]
            if state.length == state.max_positions:
                break
            out = pair.oracle(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
            ours = pair.model.forward(ops, [token], state, pair.experts, "last")
            state.commit(1)
    return decided
