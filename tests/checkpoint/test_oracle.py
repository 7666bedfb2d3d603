"""End to end against the publishers' own code: written by transformers, quantised by compressed-tensors, read by us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
)

from strata.checkpoint.export import export_checkpoint
from strata.checkpoint.pack_reader import PackReader
from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint
from strata.checkpoint.safetensors_reader import Checkpoint
from strata.checkpoint.source_model import SourceModel
from strata.kernels.reference import ExpertWeights, ReferenceExperts, ReferenceOps
from strata.models import find
from strata.quant.blocks import QuantisedMatrix, dequantise
from tests.models.oracle import defined_ties, randomise, tiny_qwen4_config, worst

IDS = [3, 17, 5, 99, 1, 64, 2, 2, 100, 31, 7, 8, 120, 44, 45, 46, 9, 77, 3, 17, 5, 98, 0, 1]
PARITY = 2e-5


def make_qwen3() -> Any:
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    return randomise(Qwen3MoeForCausalLM(config), seed=1).eval()


def make_qwen4() -> Any:
    return randomise(Qwen4ExpForCausalLM(tiny_qwen4_config(moe_intermediate_size=32)), seed=2).eval()


def make_qwen4_multimodal() -> Any:
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    text = tiny_qwen4_config(moe_intermediate_size=32).to_dict()
    config = Qwen4ExpConfig(text_config=text, vision_config=vision)
    return randomise(Qwen4ExpForConditionalGeneration(config), seed=3).eval()


MODELS = {"qwen3_moe": make_qwen3, "qwen4_exp": make_qwen4, "qwen4_exp multimodal": make_qwen4_multimodal}


@pytest.fixture(params=list(MODELS))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model whose weights are BF16 values, kept in FP32, and the checkpoint that transformers wrote of it."""
    torch.manual_seed(0)
    model = MODELS[request.param]()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16).float())
    model.save_pretrained(tmp_path / "source")
    return model, tmp_path / "source"


def oracle_logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), defined_ties():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]


def pack_logits(path: Path) -> torch.Tensor:
    """The reference path over a pack: dense weights as loaded, experts decoded from their blobs."""
    with PackReader(path) as reader, torch.no_grad():
        family = find(reader.config)
        model = family.build(family.read_config(reader.config), reader.load_dense())
        layers = {}
        for layer in reader.expert_layers:
            read = [reader.read_expert(layer, expert) for expert in range(reader.num_experts)]
            assert reader.layout is not None
            gate, up, down = reader.layout.dequantise(
                torch.stack([b for b, _ in read]), torch.stack([s for _, s in read])
            )
            layers[layer] = ExpertWeights(torch.cat([gate, up], 1), down)
        state = model.new_state(len(IDS))
        logits = model.forward(ReferenceOps(), IDS, state, ReferenceExperts(layers), certain=True)
        assert logits is not None
        return logits


def test_a_written_checkpoint_packs_exactly(written: tuple[Any, Path], tmp_path: Path) -> None:
    model, source = written
    path = pack_checkpoint(source, tmp_path / "pack", find, PackOptions(experts="bf16", dense="f32", hyper="f32"))
    assert worst(pack_logits(path), oracle_logits(model)) <= PARITY


def test_default_formats_stay_close(written: tuple[Any, Path], tmp_path: Path) -> None:
    model, source = written
    path = pack_checkpoint(source, tmp_path / "pack", find, PackOptions(experts="q8_0"))
    expected = oracle_logits(model)
    error = (pack_logits(path) - expected).norm() / expected.norm()
    assert error <= 0.12  # a tiny random model with gains above one; formats alone are held elsewhere


def compress(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One linear weight through compressed-tensors' own calibration arithmetic and compressor."""
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    groups = weight.reshape(weight.shape[0], -1, 16)
    global_scale = generate_gparam(weight.amin(), weight.amax())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    return NVFP4PackedCompressor.compress(state, scheme)


def decompress(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """FP32 by compressed-tensors' own decoding."""
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    rows, half = state["weight_packed"].shape
    return dequantize(
        x_q=unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, dtype=torch.float32),
        scale=state["weight_scale"].float(),
        args=scheme.weights,
        dtype=torch.float32,
        global_scale=state["weight_global_scale"],
    )


def quantise_checkpoint(source: Path, target: Path, style: str) -> dict[str, torch.Tensor]:
    """Experts in NVFP4 in a publisher's naming; everything else as it was. Returns decoded weights by tensor name."""
    tensors = load_file(source / "model.safetensors")
    decoded, stored = dict(tensors), {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            stored[name] = tensor
            continue
        state = compress(tensor)
        decoded[name] = decompress(state)
        base = name.removesuffix(".weight")
        if style == "modelopt":
            stored[f"{base}.weight"] = state["weight_packed"]
            stored[f"{base}.weight_scale_2"] = 1.0 / state["weight_global_scale"][0]
            stored[f"{base}.weight_scale"] = state["weight_scale"]
        else:
            stored |= {f"{base}.{key}": value for key, value in state.items()}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        if style == "modelopt"
        else {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    )
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(stored, target / "model.safetensors")
    return decoded


@pytest.mark.parametrize("style", ["compressed-tensors", "modelopt"])
def test_nvfp4_by_compressed_tensors(written: tuple[Any, Path], tmp_path: Path, style: str) -> None:
    model, source = written
    decoded = quantise_checkpoint(source, tmp_path / "nvfp4", style)
    path = pack_checkpoint(tmp_path / "nvfp4", tmp_path / "pack", find, PackOptions(dense="f32", hyper="f32"))
    stored = load_file(tmp_path / "nvfp4" / "model.safetensors")
    with PackReader(path) as reader, Checkpoint(tmp_path / "nvfp4") as checkpoint:
        family = find(checkpoint.config)
        read = SourceModel(checkpoint, family.weight_map(family.read_config(checkpoint.config)))
        assert reader.layout is not None
        for layer in reader.expert_layers:
            names = read.expert_names(layer)
            for expert in range(reader.num_experts):
                blob, scales = reader.read_expert(layer, expert)
                weights = read.read_expert(layer, expert)
                parts = zip(("gate", "up", "down"), names, reader.layout.unpack(blob[None], scales[None]), strict=True)
                for part, pattern, packed in parts:
                    name = pattern.replace("{expert}", str(expert))
                    base = name.removesuffix(".weight")
                    codes = stored[f"{base}.weight_packed" if style == "compressed-tensors" else name]
                    block_scales = stored[f"{base}.weight_scale"].view(torch.uint8)
                    assert torch.equal(packed.codes[0], codes)
                    assert packed.scales is not None
                    assert torch.equal(packed.scales[0], block_scales)
                    matrix = getattr(weights, part)
                    assert isinstance(matrix, QuantisedMatrix)
                    assert torch.equal(dequantise(packed)[0], dequantise(matrix))
                    # The oracle divides by the stored reciprocal, we multiply: one rounding apart at the most.
                    torch.testing.assert_close(dequantise(matrix), decoded[name], rtol=2.4e-7, atol=0)
    model.load_state_dict(type(model).from_pretrained(save_decoded(source, tmp_path / "decoded", decoded)).state_dict())
    assert worst(pack_logits(path), oracle_logits(model)) <= PARITY


def save_decoded(source: Path, target: Path, decoded: dict[str, torch.Tensor]) -> Path:
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(decoded, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_export_is_the_checkpoint_again(written: tuple[Any, Path], tmp_path: Path, shard_bytes: int) -> None:
    model, source = written
    path = pack_checkpoint(source, tmp_path / "pack", find, PackOptions(experts="bf16", dense="bf16"))
    exported = export_checkpoint(path, tmp_path / "exported", shard_bytes=shard_bytes)
    assert (len(list(exported.glob("*.safetensors"))) > 1) == (shard_bytes < 1 << 30)
    original = load_file(source / "model.safetensors")
    again = {name: tensor for file in exported.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(again) == {name for name in original if "visual" not in name}
    for name, tensor in again.items():
        expected = original[name]
        assert tensor.dtype == (torch.bfloat16 if expected.is_floating_point() else expected.dtype)
        assert torch.equal(tensor, expected.to(tensor.dtype))
    loaded = type(model).from_pretrained(exported, dtype=torch.float32).eval()
    assert torch.equal(oracle_logits(loaded), oracle_logits(model))


def test_export_of_a_quantised_pack_has_its_logits(written: tuple[Any, Path], tmp_path: Path) -> None:
    model, source = written
    path = pack_checkpoint(source, tmp_path / "pack", find)
    exported = export_checkpoint(path, tmp_path / "exported")
    loaded = type(model).from_pretrained(exported, dtype=torch.float32).eval()
    expected = oracle_logits(loaded)
    assert (pack_logits(path) - expected).norm() / expected.norm() <= 0.03  # one rounding of each weight to BF16
    repacked = pack_checkpoint(
        exported, tmp_path / "repacked", find, PackOptions(experts="bf16", dense="f32", hyper="f32")
    )
    assert worst(pack_logits(repacked), expected) <= PARITY
