"""Random models: the same seed gives the same bytes, another one others, and logits that a sampler can work with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strata.checkpoint.export import export_checkpoint
from strata.checkpoint.pack_reader import PackReader
from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint
from strata.checkpoint.random_model import RandomSource, write_random_pack
from strata.checkpoint.weight_map import WeightEntry, WeightMap
from strata.errors import CheckpointError
from strata.kernels.ops import Matrix
from strata.kernels.reference import ExpertWeights, ReferenceExperts, ReferenceOps
from strata.models import find
from tests.checkpoint.tiny_family import TinyConfig, TinyFamily, find_tiny
from tests.models.oracle import tiny_qwen4_config

QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
}
QWEN4 = {**tiny_qwen4_config().to_dict(), "architectures": ["Qwen4ExpForCausalLM"]}


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_bytes_follow_the_seed(tmp_path: Path) -> None:
    one = read_all(write_random_pack(tmp_path / "one", {}, find_tiny, seed=5))
    assert read_all(write_random_pack(tmp_path / "two", {}, find_tiny, seed=5)) == one
    other = read_all(write_random_pack(tmp_path / "other", {}, find_tiny, seed=6))
    assert [name for name in one if one[name] == other[name]] == []


def test_slices_do_not_change_values() -> None:
    source = RandomSource({}, TinyFamily().weight_map(TinyConfig()), 3)
    for name in ("embed.weight", "layers.0.norm", "layers.1.conv.weight", "table"):
        whole = torch.cat(list(source.read_rows(name, 1000)))
        assert torch.equal(torch.cat(list(source.read_rows(name, 3))), whole)
        assert torch.equal(torch.cat(list(source.read_rows(name, 1))), whole)


def test_hash_integers_are_given_or_their_group_is_left_out(tmp_path: Path) -> None:
    assert "hash" in RandomSource({}, TinyFamily().weight_map(TinyConfig()), 0).absent_groups
    values = torch.tensor([7, 2**50, -1])
    path = write_random_pack(tmp_path / "pack", {}, find_tiny, integers={"ids": values}, without=frozenset({"draft"}))
    with PackReader(path) as reader:
        weights = reader.load_dense()
        assert torch.equal(weights["ids"], values)  # type: ignore[arg-type]
        assert "draft.x" not in weights
        assert reader.manifest.absent_groups == ["draft"]
    needed = WeightEntry("ids", (3,), "integers", "table", (("ids",),))
    with pytest.raises(CheckpointError, match="needs the values of ids"):
        RandomSource({}, WeightMap((needed,), ()), 0)


@pytest.mark.parametrize(
    "config", [QWEN3, {**QWEN3, "tie_word_embeddings": True}, QWEN4], ids=["qwen3", "tied", "qwen4"]
)
def test_logits_are_sane(tmp_path: Path, config: dict) -> None:
    path = write_random_pack(tmp_path / "pack", config, find, PackOptions(experts="bf16", dense="f32"))
    with PackReader(path) as reader, torch.no_grad():
        family = find(config)
        model = family.build(family.read_config(config), reader.load_dense())
        assert reader.layout is not None
        layers = {}
        for layer in reader.expert_layers:
            read = [reader.read_expert(layer, expert) for expert in range(reader.num_experts)]
            gate, up, down = reader.layout.dequantise(
                torch.stack([b for b, _ in read]), torch.stack([s for _, s in read])
            )
            layers[layer] = ExpertWeights(torch.cat([gate, up], 1), down)
        ids = [int(i) for i in torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(1))]
        logits = model.forward(ReferenceOps(), ids, model.new_state(60), ReferenceExperts(layers), certain=True)
        assert logits is not None
        assert torch.isfinite(logits).all()
        assert 0.5 <= logits.std() <= 4.0
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).median() > 0.1
        assert len(set(logits.argmax(-1).tolist())) > 10  # not one token for ever


def test_a_model_with_its_draft_block_survives_export_and_packing(tmp_path: Path) -> None:
    """Every weight of the family, the draft block and its two halves of one projection included, in BF16."""
    options = PackOptions(experts="bf16", dense="bf16")
    one = write_random_pack(tmp_path / "one", QWEN4, find, options)
    exported = export_checkpoint(one, tmp_path / "hf")
    two = pack_checkpoint(exported, tmp_path / "two", find, options)
    with PackReader(one) as first, PackReader(two) as second:
        assert any(name.startswith("mtp.") for name in first.manifest.dense)
        assert first.expert_layers == second.expert_layers
        ours, theirs = first.load_dense(), second.load_dense()
        assert list(ours) == list(theirs)
        for name, weight in ours.items():
            other = theirs[name]
            if isinstance(weight, Matrix):
                assert isinstance(other, Matrix)
                # Routers are FP32 in a pack and BF16 in an export; everything else is the same bits.
                assert torch.equal(weight.data.bfloat16(), other.data.bfloat16()), name
            elif isinstance(weight, torch.Tensor):
                assert isinstance(other, torch.Tensor)
                assert torch.equal(weight.bfloat16(), other.bfloat16()), name
        assert torch.equal(first.tensor_scales, second.tensor_scales)
        assert (first.checksums == second.checksums).all()
