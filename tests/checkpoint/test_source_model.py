"""The accounting of a checkpoint against its map, and every way of storing the same weights (faults 22-25, 27)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.checkpoint.safetensors_reader import Checkpoint
from strata.checkpoint.source_model import ExpertWeights, SourceModel
from strata.errors import CheckpointError
from strata.quant.blocks import QuantisedMatrix, dequantise
from tests.checkpoint.tiny_family import EXPERTS, LAYERS, Tensors, TinyConfig, TinyFamily, save_checkpoint, tiny_tensors

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def open_source(folder: Path, tensors: Tensors, config: TinyConfig = TinyConfig(), shards: int = 1) -> SourceModel:
    raw = asdict(config)
    checkpoint = Checkpoint(save_checkpoint(folder, tensors, raw, shards))
    return SourceModel(checkpoint, TinyFamily().weight_map(config))


def value(weight: torch.Tensor | QuantisedMatrix) -> torch.Tensor:
    return dequantise(weight) if isinstance(weight, QuantisedMatrix) else weight


def same_expert(one: ExpertWeights, two: ExpertWeights) -> bool:
    return all(torch.equal(value(getattr(one, p)), value(getattr(two, p))) for p in ("gate", "up", "down"))


def fuse(tensors: Tensors, layout: str, config: TinyConfig) -> Tensors:
    """The same weights with the experts stored otherwise."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}.experts."
        gate, up, down = (
            torch.stack([tensors[f"{base}{e}.{part}.weight"] for e in range(EXPERTS)])
            for part in ("gate", "up", "down")
        )
        if layout == "fused":
            for expert in range(EXPERTS):
                result[f"{base}{expert}.gate_up.weight"] = torch.cat([gate[expert], up[expert]])
                result[f"{base}{expert}.down.weight"] = down[expert]
            continue
        packed = {"down": down, "gate": gate, "up": up}
        if layout == "packed_fused":
            packed = {"down": down, "gate_up": torch.cat([gate, up], 1)}
        for part, tensor in packed.items():
            result[base + part] = (
                tensor if config.orientation == "output_first" else tensor.transpose(1, 2).contiguous()
            )
    return result


@pytest.mark.parametrize("inner", [16, 32, 64, 96])  # 2 * inner below, at, and above hidden; inner at it and above
@pytest.mark.parametrize("layout", ["fused", "packed", "packed_fused"])
@pytest.mark.parametrize("orientation", ["output_first", "input_first"])
def test_layouts_of_the_same_experts_load_equal(tmp_path: Path, inner: int, layout: str, orientation: str) -> None:
    config = TinyConfig(intermediate=inner, orientation=orientation)
    tensors = tiny_tensors(config)
    plain = open_source(tmp_path / "plain", tensors, config)
    other = open_source(tmp_path / "other", fuse(tensors, layout, config), config)
    for layer in range(LAYERS):
        assert plain.expert_names(layer) == other.expert_names(layer)
        for expert in range(EXPERTS):
            assert same_expert(plain.read_expert(layer, expert), other.read_expert(layer, expert))
    one = plain.read_expert(1, 2)
    assert torch.equal(value(one.down), tensors["model.layers.1.experts.2.down.weight"])


def test_orientation_is_never_guessed_from_the_shape(tmp_path: Path) -> None:
    written = TinyConfig(intermediate=64, orientation="input_first")  # square: both readings fit the shape
    config = TinyConfig(intermediate=64, orientation="output_first")
    tensors = fuse(tiny_tensors(written), "packed", written)
    source = open_source(tmp_path, tensors, config)
    assert torch.equal(value(source.read_expert(0, 1).gate), tensors["model.layers.0.experts.gate"][1])
    narrow = TinyConfig(intermediate=48, orientation="input_first")
    tensors = fuse(tiny_tensors(narrow), "packed_fused", narrow)
    with pytest.raises(CheckpointError, match=r"needs \[4, 96, 64\] \(output first\)"):
        open_source(tmp_path / "narrow", tensors, TinyConfig(intermediate=48))


def test_dense_weights_parts_columns_and_extra_axes(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    source = open_source(tmp_path, tensors, shards=3)
    assert torch.equal(
        source.read_dense("layers.1.q.weight"),
        torch.cat([tensors["model.layers.1.a.weight"], tensors["model.layers.1.b.weight"]]),
    )
    assert torch.equal(source.read_dense("draft.y"), tensors["model.draft.fc.weight"][:, 64:])
    assert torch.equal(source.read_dense("draft.x"), tensors["model.draft.fc.weight"][:, :64])
    assert torch.equal(source.read_dense("layers.0.conv.weight"), tensors["model.layers.0.conv.weight"][:, 0])
    assert torch.equal(source.read_dense("ids"), tensors["model.ids"])
    whole = source.read_dense("table")
    assert torch.equal(whole, torch.cat([tensors[f"model.t.{part}.weight"] for part in range(3)]))
    for at_once in (1, 7, 100):
        assert torch.equal(torch.cat(list(source.read_rows("table", at_once))), whole)
    assert source.absent_groups == frozenset()


def test_the_multimodal_prefix_is_the_same_model(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    moved = {name.replace("model.", "model.text.", 1): tensor for name, tensor in tensors.items()}
    plain, other = open_source(tmp_path / "a", tensors), open_source(tmp_path / "b", moved)
    for entry in plain.entries:
        assert torch.equal(plain.read_dense(entry.name), other.read_dense(entry.name))
    assert same_expert(plain.read_expert(0, 0), other.read_expert(0, 0))
    assert other.expert_names(0)[0] == "model.text.layers.0.experts.{expert}.gate.weight"


def test_every_tensor_is_read_exactly_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: tensor for name, tensor in tiny_tensors().items() if "draft" not in name}
    source = open_source(tmp_path, tensors)
    rows: Counter[tuple[str, int]] = Counter()
    plain_read = Checkpoint.read

    def spy(self: Checkpoint, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        rows.update((name, row) for row in range(start, self.specs[name].shape[0] if stop is None else stop))
        return plain_read(self, name, start, stop)

    monkeypatch.setattr(Checkpoint, "read", spy)
    for entry in source.entries:
        list(source.read_rows(entry.name, 3))
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            source.read_expert(layer, expert)
    wanted = {(name, row) for name, tensor in tensors.items() if name != "vision.patch" for row in range(len(tensor))}
    assert dict(rows) == dict.fromkeys(wanted, 1)


Change = dict[str, torch.Tensor | None]
X = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.embed.weight": None}, r"1 weights are missing: model\.embed\.weight"),
        ({"model.layers.1.b.weight": None}, r"missing: model\.layers\.1\.b\.weight"),
        ({"model.layers.0.experts.3.up.weight": None}, r"missing: model\.layers\.0\.experts\.3\.up\.weight"),
        ({"model.t.2.weight": None, "model.t.1.weight": None}, r"2 weights are missing: model\.t\.1.*model\.t\.2"),
        (
            {"model.extra": X, "model.more": X},
            r"2 tensors are unknown: model\.extra, model\.more.*suffixes that are read",
        ),
        ({"model.layers.0.odd.qweight": X}, r"unknown: model\.layers\.0\.odd\.qweight"),
        ({"model.text.embed.weight": torch.zeros(40, 64)}, "'embed.weight' is stored in two ways"),
        ({"model.layers.0.experts.gate": torch.zeros(4, 48, 64)}, r"unknown: model\.layers\.0\.experts\.gate"),
        (
            {"model.embed.weight": torch.zeros(41, 64)},
            r"model\.embed\.weight has shape \[41, 64\], the config needs \[40, 64\]",
        ),
        ({"model.embed.weight": torch.zeros(40, 64, 2)}, r"shape \[40, 64, 2\]"),
        ({"model.layers.0.a.weight": torch.zeros(9, 64)}, r"shape \[9, 64\], \[16, 64\], the config needs \[24, 64\]"),
        ({"model.layers.0.conv.weight": torch.zeros(10, 2, 4)}, r"shape \[10, 2, 4\]"),
        ({"model.draft.fc.weight": torch.zeros(5, 72)}, "serves two weights"),
        ({"model.layers.0.norm": torch.zeros(64, dtype=torch.int64)}, "of type I64"),
        ({"model.ids": torch.zeros(3)}, "of type F32"),
        ({"model.embed.weight": torch.zeros(40, 64, dtype=torch.float64)}, "type F64, which is not read"),
        ({"model.layers.1.experts.0.up.weight": torch.zeros(47, 64)}, r"the config needs \[48, 64\]"),
    ],
)
def test_what_does_not_fit_the_map_is_an_error_that_lists_names(tmp_path: Path, change: Change, message: str) -> None:
    tensors = {**tiny_tensors(), **change}
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def test_a_twice_stored_layer_of_experts_is_an_error(tmp_path: Path) -> None:
    both = {**fuse(tiny_tensors(), "packed", TinyConfig()), **tiny_tensors()}
    with pytest.raises(CheckpointError, match="experts of layer 0 are stored in two ways"):
        open_source(tmp_path, both)


def test_optional_groups_are_whole_or_absent(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["model.ids"]
    source = open_source(tmp_path / "a", tensors)
    assert source.absent_groups == {"hash"}
    assert "ids" not in {entry.name for entry in source.entries}
    del tensors["model.draft.fc.weight"]
    assert open_source(tmp_path / "b", tensors).absent_groups == {"hash", "draft"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("present", [False, True])
def test_tied_and_untied_heads(tmp_path: Path, tied: bool, present: bool) -> None:
    """Fault 27: four combinations, two of them errors."""
    tensors = tiny_tensors(TinyConfig(tied=not present))
    if tied == present:
        with pytest.raises(CheckpointError, match=r"head\.weight.*tie_word_embeddings"):
            open_source(tmp_path, tensors, TinyConfig(tied=tied))
        return
    source = open_source(tmp_path, tensors, TinyConfig(tied=tied))
    assert ("head.weight" in source._found) == present


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, poison: float, dtype: torch.dtype) -> None:
    tensors = tiny_tensors(dtype=dtype)
    tensors["model.layers.1.odd.weight"][2, 3] = torch.finfo(dtype).max
    tensors["model.layers.0.odd.weight"][4, 49] = poison
    tensors["model.layers.1.experts.2.down.weight"][0, 0] = poison
    source = open_source(tmp_path, tensors)
    assert source.read_dense("layers.1.odd.weight")[2, 3] == torch.finfo(dtype).max
    with pytest.raises(CheckpointError, match=r"layers\.0\.odd\.weight holds values that are not finite"):
        source.read_dense("layers.0.odd.weight")
    with pytest.raises(CheckpointError, match=r"experts\.2\.down"):
        source.read_expert(1, 2)


def pack_nvfp4(tensors: Tensors, base: str, shape: tuple[int, int], style: str, seed: int) -> torch.Tensor:
    """Replaces a weight by random codes in a publisher's naming; returns what they stand for, transcribed."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    codes = rng.integers(0, 16, (rows, columns))
    scales = rng.integers(0, 0x7F, (rows, columns // 16)).astype(np.uint8)
    multiplier = np.float32(2.0 ** rng.integers(-9, -2))
    tensors.pop(f"{base}.weight", None)
    packed = torch.from_numpy((codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8))
    stored_scales = torch.from_numpy(scales).view(torch.float8_e4m3fn)
    if style == "compressed-tensors":
        tensors[f"{base}.weight_packed"] = packed
        tensors[f"{base}.weight_global_scale"] = torch.tensor([1 / multiplier])
        tensors[f"{base}.input_global_scale"] = torch.tensor([3.0])
    else:
        tensors[f"{base}.weight"] = packed
        tensors[f"{base}.weight_scale_2"] = torch.tensor(multiplier)
        tensors[f"{base}.input_scale"] = torch.tensor(0.5)
    tensors[f"{base}.weight_scale"] = stored_scales

    def e4m3(code: int) -> float:
        exponent, mantissa = code >> 3, code & 7
        return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)

    decoded = np.array([[(-1 if c & 8 else 1) * E2M1[c & 7] for c in row] for row in codes])
    spread = np.array([[e4m3(int(s)) for s in row] for row in scales]).repeat(16, 1)
    return torch.from_numpy((decoded * spread * multiplier).astype(np.float32))


def nvfp4_tensors(style: str) -> tuple[Tensors, dict[str, torch.Tensor]]:
    tensors, expected = tiny_tensors(), {}
    bases = [name.removesuffix(".weight") for name in tensors if ".experts." in name]
    for seed, base in enumerate([*bases, "model.layers.0.a"]):
        shape = tensors[f"{base}.weight"].shape
        expected[base] = pack_nvfp4(tensors, base, (shape[0], shape[1]), style, seed)
    return tensors, expected


@pytest.mark.parametrize("style", ["compressed-tensors", "modelopt"])
def test_nvfp4_of_both_tools(tmp_path: Path, style: str) -> None:
    """Gate and up keep their own global scales; activations' scales are known and not used."""
    tensors, expected = nvfp4_tensors(style)
    source = open_source(tmp_path, tensors)
    for layer in range(LAYERS):
        assert source.experts_are_nvfp4(layer)
        for expert in range(EXPERTS):
            got = source.read_expert(layer, expert)
            base = f"model.layers.{layer}.experts.{expert}."
            for part in ("gate", "up", "down"):
                matrix = getattr(got, part)
                assert isinstance(matrix, QuantisedMatrix)
                assert torch.equal(dequantise(matrix), expected[base + part])
    dense = source.read_dense("layers.0.q.weight")
    assert torch.equal(dense[:8], expected["model.layers.0.a"])
    assert torch.equal(dense[8:], tensors["model.layers.0.b.weight"].float())


@pytest.mark.parametrize("joint", [".", "_"])
def test_nvfp4_packed_over_experts(tmp_path: Path, joint: str) -> None:
    """ModelOpt naming on 3-D tensors; one tensor scale an expert, shared by the fused gate and up."""
    tensors, expected = nvfp4_tensors("modelopt")
    packed = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}.experts."
        for part in ("gate", "up", "down"):
            for suffix, new in (("weight", ""), ("weight_scale", "weight_scale"), ("weight_scale_2", "weight_scale_2")):
                stack = torch.stack([tensors[f"{base}{expert}.{part}.{suffix}"] for expert in range(EXPERTS)])
                packed[f"{base}{part}" + (f"{joint}{new}" if new else "")] = stack
    source = open_source(tmp_path, packed)
    for expert in range(EXPERTS):
        got = source.read_expert(1, expert)
        assert torch.equal(value(got.up), expected[f"model.layers.1.experts.{expert}.up"])
        assert torch.equal(value(got.down), expected[f"model.layers.1.experts.{expert}.down"])


def set_scale(name: str, number: float) -> Tensors:
    return {name: torch.tensor([number])}


GATE = "model.layers.0.experts.1.gate."


@pytest.mark.parametrize(
    ("style", "name", "number"),
    [
        (style, name, number)
        for style, name in (("compressed-tensors", "weight_global_scale"), ("modelopt", "weight_scale_2"))
        for number in (0.0, -0.0, -1.0, math.inf, -math.inf, math.nan)
    ],
)
def test_tensor_scales_without_meaning_are_refused(tmp_path: Path, style: str, name: str, number: float) -> None:
    tensors, _ = nvfp4_tensors(style)
    tensors[GATE + name] = torch.tensor([number])
    source = open_source(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"experts\.1\.gate"):
        source.read_expert(0, 1)


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x81, 0xB8])
def test_block_scales_without_meaning_are_refused(tmp_path: Path, code: int) -> None:
    tensors, _ = nvfp4_tensors("modelopt")
    tensors[GATE + "weight_scale"].view(torch.uint8)[7, 3] = code
    with pytest.raises(CheckpointError, match=r"experts\.1\.gate"):
        open_source(tmp_path, tensors).read_expert(0, 1)


def test_zero_blocks_are_zero(tmp_path: Path) -> None:
    tensors, _ = nvfp4_tensors("modelopt")
    tensors[GATE + "weight_scale"].view(torch.uint8)[7, :2] = torch.tensor([0x00, 0x80], dtype=torch.uint8)
    gate = value(open_source(tmp_path, tensors).read_expert(0, 1).gate)
    assert (gate[7, :32] == 0).all()
    assert (gate[7, 32:] != 0).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": None}, "no weight_scale"),
        ({"weight_scale_2": None}, "no weight_scale_2"),
        ({"weight_scale": torch.zeros(48, 5).to(torch.float8_e4m3fn)}, r"needed is F8_E4M3 \[48, 4\]"),
        ({"weight_scale": torch.ones(48, 4)}, "needed is F8_E4M3"),
        ({"weight_scale_2": torch.ones(2)}, "2 values"),
        ({"weight": torch.zeros(48, 33, dtype=torch.uint8)}, "not NVFP4"),
        ({"weight_packed": torch.zeros(48, 32, dtype=torch.uint8)}, "stored twice"),
        ({"weight_zero_point": X}, r"unknown: .*gate\.weight_zero_point"),
        ({"g_idx": X}, r"unknown: .*gate\.g_idx"),
    ],
)
def test_nvfp4_parts_that_do_not_fit(tmp_path: Path, change: Change, message: str) -> None:
    tensors, _ = nvfp4_tensors("modelopt")
    changed = {**tensors, **{GATE + name: tensor for name, tensor in change.items()}}
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path, {name: tensor for name, tensor in changed.items() if tensor is not None})


def test_nvfp4_with_inputs_first_is_refused(tmp_path: Path) -> None:
    config = TinyConfig(intermediate=64, orientation="input_first")
    tensors = fuse(tiny_tensors(config), "packed", config)
    for layer in range(LAYERS):
        for part in ("gate", "up", "down"):
            base = f"model.layers.{layer}.experts.{part}"
            tensors[base] = torch.zeros(4, 64, 32, dtype=torch.uint8)
            tensors[base + ".weight_scale"] = torch.ones(4, 64, 4).to(torch.float8_e4m3fn)
            tensors[base + ".weight_scale_2"] = torch.ones(4)
    with pytest.raises(CheckpointError, match="NVFP4 with inputs first"):
        open_source(tmp_path, tensors, config)


@pytest.mark.parametrize("kind", ["one", "row", "column", "block"])
def test_fp8_dense_weights(tmp_path: Path, kind: str) -> None:
    tensors = tiny_tensors()
    codes = (torch.randn(5, 50) * 20).to(torch.float8_e4m3fn)
    scales = {
        "one": torch.tensor(0.25),
        "row": torch.tensor([0.5, 2.0, 0.125, 3.0, 1.5]),
        "column": torch.tensor([[0.5], [2.0], [0.125], [3.0], [1.5]]),
        "block": torch.tensor([[0.5, 2.0], [4.0, 0.25], [1.0, 8.0]]),
    }[kind]
    tensors["model.layers.0.odd.weight"] = codes
    tensors["model.layers.0.odd.weight_scale" + ("_inv" if kind == "block" else "")] = scales
    folder = save_checkpoint(
        tmp_path, tensors, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 32]}}
    )
    source = SourceModel(Checkpoint(folder), TinyFamily().weight_map(TinyConfig()))
    got = source.read_dense("layers.0.odd.weight")
    for row in range(5):
        for column in range(50):
            scale = (
                scales[row // 2, column // 32]
                if kind == "block"
                else scales.expand(5)
                if kind == "one"
                else scales[row]
            )
            scale = scale[row] if kind == "one" else scale
            assert got[row, column].item() == (codes[row, column].float() * scale).item()
    assert torch.equal(torch.cat(list(source.read_rows("layers.0.odd.weight", 2))), got)


@pytest.mark.parametrize("number", [0.0, math.nan, math.inf, -1.0])
def test_fp8_scales_without_meaning_are_refused(tmp_path: Path, number: float) -> None:
    tensors = tiny_tensors()
    tensors["model.layers.0.odd.weight"] = torch.ones(5, 50).to(torch.float8_e4m3fn)
    tensors["model.layers.0.odd.weight_scale"] = torch.tensor([number])
    with pytest.raises(CheckpointError, match="finite number above zero"):
        open_source(tmp_path, tensors).read_dense("layers.0.odd.weight")


def test_fp8_without_scale_and_fp8_experts_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.layers.0.odd.weight"] = torch.ones(5, 50).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="needs one scale"):
        open_source(tmp_path / "a", tensors)
    tensors = tiny_tensors()
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[name + "_scale"] = torch.tensor(1.0)
    with pytest.raises(CheckpointError, match="stored in FP8, which is not read"):
        open_source(tmp_path / "b", tensors)
