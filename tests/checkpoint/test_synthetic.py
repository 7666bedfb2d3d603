"""Computed weights: the bytes of an independent mirror, valid in every format, exact in BF16 when written out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from safetensors import safe_open

from strata.checkpoint.export import export_reader
from strata.checkpoint.pack_checksum import row_checks
from strata.checkpoint.synthetic_reader import Scaling, SyntheticReader, SyntheticWeights
from strata.checkpoint.synthetic_routing import (
    HOT_PICKS,
    HOT_SHARE,
    REPEATS,
    STAY,
    check_routing,
    num_topics,
    routing_numbers,
)
from strata.checkpoint.table_rows import TableFile, row_bytes
from strata.checkpoint.weight_memory import ReusedMemory
from strata.errors import ConfigError
from strata.kernels.cpu import pool
from strata.kernels.cpu.stager import ReadFailure, Stager
from strata.kernels.cpu.synthetic import (
    RMS_OF_CODES,
    BlobRecipe,
    compute_blob,
    compute_rows,
    compute_values,
    key_of,
    recipe_of,
)
from strata.kernels.ops import Matrix
from strata.models import find
from strata.models.synthetic_shapes import SYNTHETIC_SHAPES, gain_of, is_router, synthetic_config, synthetic_map
from strata.quant.blocks import ExpertFormat
from strata.quant.layout import ExpertLayout

MASK = (1 << 64) - 1
FORMATS: list[ExpertFormat] = ["nvfp4", "q8_0", "bf16"]


def mirror(key: int, place: int) -> int:
    """Word ``place`` of a key, in big integers."""
    x = (key + (place + 1) * 0x9E3779B97F4A7C15) & MASK
    product = x * ((x ^ 0xD6E8FEB86659FD93) | 1)
    return (product >> 64) ^ (product & MASK)


def reader(
    tmp_path: Path, shape: str = "tiny-hyper", weights: SyntheticWeights = SyntheticWeights()
) -> SyntheticReader:
    raw = synthetic_config(shape, 2)
    config = find(raw).read_config(raw)
    scaling = Scaling(gain_of, is_router)
    return SyntheticReader(tmp_path, raw, config.family, synthetic_map(raw), config.top_k, scaling, weights)


@pytest.mark.parametrize("format", FORMATS)
def test_a_blob_is_what_the_mirror_says(format: ExpertFormat) -> None:
    layout = ExpertLayout(128, 64, format)
    recipe = recipe_of(layout, 12345)
    words = compute_blob(recipe, layout.blob_bytes).view("<u8")
    _, payload, block, codes, code_and, code_or, scale_and, scale_or = recipe.words
    for place in (0, 1, 63, 64, 65, 71, payload // 8 - 1):
        in_codes = place * 8 % block < codes
        mask, bits = (code_and, code_or) if in_codes else (scale_and, scale_or)
        assert int(words[place]) == (mirror(12345, place) & mask | bits), place
    assert not words[payload // 8 :].any()


@pytest.mark.parametrize("format", FORMATS)
def test_blobs_are_valid_and_as_large_as_declared(format: ExpertFormat) -> None:
    layout = ExpertLayout(256, 128, format)
    blobs = torch.stack([torch.from_numpy(compute_blob(recipe_of(layout, key), layout.blob_bytes)) for key in (1, 2)])
    scales = torch.ones(2, 3)
    layout.check(blobs, scales, "computed")
    for matrix in layout.dequantise(blobs, scales):
        assert matrix.square().mean().sqrt().item() == pytest.approx(RMS_OF_CODES[format], rel=0.02)
        assert abs(matrix.mean().item()) < 0.02 * RMS_OF_CODES[format]
        assert torch.equal(matrix, matrix.to(torch.bfloat16).float())
        assert not torch.equal(matrix[0], matrix[1])


def test_threads_compute_the_same_blob_where_it_is_wanted() -> None:
    layout = ExpertLayout(128, 64, "nvfp4")
    memory = np.full(9 * layout.blob_bytes, 7, np.uint8)
    first = memory.ctypes.data + -memory.ctypes.data % 4096
    stager = Stager(2)
    recipes = [recipe_of(layout, key) for key in range(7)]
    for ticket in [
        stager.compute(one.fill, one.words, first + at * layout.blob_bytes, layout.blob_bytes)
        for at, one in enumerate(recipes)
    ]:
        stager.wait(ticket)
    start = first - memory.ctypes.data
    for at, one in enumerate(recipes):
        found = memory[start + at * layout.blob_bytes :][: layout.blob_bytes]
        assert np.array_equal(found, compute_blob(one, layout.blob_bytes)), at
    wrong = BlobRecipe(recipes[0].fill, (1, 100, 0, 0, 0, 0, 0, 0))
    with pytest.raises(ReadFailure, match="computed"):
        stager.wait(stager.compute(wrong.fill, wrong.words, first, layout.blob_bytes))
    stager.close()


def test_values_do_not_depend_on_threads_or_on_where_they_begin() -> None:
    count = (1 << 19) + 24
    found = []
    for threads in (1, 3):
        pool.configure(threads)
        found.append(compute_values((count,), 9, 100, 0, torch.int8))
    pool.configure(None)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][64:1000], compute_values((936,), 9, 100, 0, torch.int8, first=64))
    assert (int(found[0].min()), int(found[0].max())) == (-100, 100)
    word = mirror(9, 3)
    expected = [((word >> 8 * at & 0xFF) * 201 >> 8) - 100 for at in range(8)]
    assert found[0][24:32].tolist() == expected
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(compute_values((999,), 9, 100, -7, dtype).float(), found[0][:999].float() / 128)


def test_table_rows_carry_their_check_word_and_are_gathered(tmp_path: Path) -> None:
    columns, nbytes = 40, row_bytes(40, "q8_0")
    rows, whole = np.empty((100, nbytes), np.uint8), np.empty((105, nbytes), np.uint8)
    compute_rows(rows, 5, columns, 3, 55, -5)
    assert np.array_equal(row_checks(rows[:, :-4], np.arange(5, 105)), rows[:, -4:].copy().view("<u4").ravel())
    compute_rows(whole, 0, columns, 3, 55, -5)
    assert np.array_equal(rows, whole[5:])
    (tmp_path / "table").write_bytes(whole.tobytes())
    with TableFile(tmp_path / "table", 105, columns, "q8_0") as table:
        values = table.read_rows(0, 105)
    assert torch.equal(values, compute_values((105, columns), 3, 55, -5, torch.float32))


@pytest.mark.parametrize(("count", "top_k"), [(512, 10), (128, 8)])
def test_the_released_shapes_have_the_wanted_routing(count: int, top_k: int) -> None:
    """Scores drawn by numpy, not by the model: bias + topic + own noise, the top k picked."""
    random = np.random.default_rng(1)
    rows, topics, hot = 4096, 256, round(HOT_SHARE * count)
    topic = np.zeros(rows, int)
    for row in range(1, rows):
        topic[row] = topic[row - 1] if random.random() < STAY else random.integers(topics)
    found = {}
    for routing in ("skewed", "independent", "uniform"):
        numbers = routing_numbers(check_routing(routing), count, top_k)
        shared = random.standard_normal((topics, count))[topic]
        noise = np.sqrt(numbers.topic) * shared + np.sqrt(1 - numbers.topic) * random.standard_normal((rows, count))
        picked = np.zeros((rows, count), bool)
        np.put_along_axis(picked, np.argsort(-(numbers.bias + noise), axis=1)[:, :top_k], True, 1)
        most = np.sort(picked.sum(0))[::-1][:hot].sum() / (rows * top_k)
        repeats = (picked[1:] & picked[:-1]).sum() / (top_k * (rows - 1))
        distinct = np.mean([picked[first : first + 512].any(0).mean() for first in range(0, rows, 512)])
        found[routing] = (most, repeats, distinct)
    for routing in ("skewed", "independent"):
        assert found[routing][0] == pytest.approx(HOT_PICKS, abs=0.03)
        assert found[routing][2] >= 0.95
    assert found["skewed"][1] == pytest.approx(REPEATS, abs=0.03)
    assert found["independent"][1] < 0.3
    assert found["uniform"][0] < 0.25
    assert found["uniform"][1] == pytest.approx(top_k / count, rel=0.1)


def test_a_routing_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="'zipf' is not known"):
        check_routing("zipf")


def test_dense_weights_have_the_planned_sizes_and_known_parts(tmp_path: Path) -> None:
    with reader(tmp_path) as opened:
        weights = opened.load_dense()
        nbytes = sum(
            one.nbytes if isinstance(one, Matrix) else one.numel() * one.element_size()
            for one in weights.values()
            if not isinstance(one, TableFile)
        )
        assert nbytes == opened.dense_bytes
        embedding = weights["embed_tokens.weight"]
        assert isinstance(embedding, Matrix)
        assert embedding.scales is not None
        codes = embedding.data
        assert codes.float().square().mean().sqrt().item() / 32 == pytest.approx(1, rel=0.02)
        topics = num_topics(len(codes))
        assert torch.equal(codes[3, :32], codes[100, :32]), "the constant part"
        assert torch.equal(codes[3, 32:128], codes[3 + topics, 32:128]), "the topic's part"
        assert not torch.equal(codes[3, 32:128], codes[4, 32:128])
        assert not torch.equal(codes[3, 128:], codes[3 + topics, 128:])
        router = weights["layers.0.mlp.gate.weight"]
        assert isinstance(router, Matrix)
        assert torch.equal(router.data, router.data.to(torch.bfloat16).float())
        table = weights["layers.1.ple.ple_embedding.ngram_embedding.weight"]
        assert isinstance(table, TableFile)
        assert table.read_rows(1, 2).square().mean().sqrt().item() == pytest.approx(1, rel=0.2)


def test_weights_in_memory_that_is_used_again_are_the_same(tmp_path: Path) -> None:
    memory = ReusedMemory()
    with reader(tmp_path, "tiny-hyper") as opened:
        for name in opened.manifest.dense:
            memory.restart()
            found, wanted = opened.load_weight(name, memory.take), opened.load_weight(name)
            if isinstance(found, Matrix):
                assert isinstance(wanted, Matrix)
                assert torch.equal(found.data, wanted.data), name
                assert found.scales is wanted.scales or torch.equal(found.scales, wanted.scales), name  # type: ignore[arg-type]
            else:
                assert torch.equal(found, wanted), name  # type: ignore[arg-type]


def test_a_bias_is_what_a_normal_number_exceeds(tmp_path: Path) -> None:
    """The constant part of an embedding times the router's constant part is the bias: its share of picks follows."""
    with reader(tmp_path, "tiny-attention") as opened:
        embedding, router = opened.load_weight("embed_tokens.weight"), opened.load_weight("layers.1.mlp.gate.weight")
    assert isinstance(embedding, Matrix)
    assert isinstance(router, Matrix)
    scores = (embedding.data.float() / 32) @ router.data.T
    bias = (embedding.data[0, :32].float() / 32) @ router.data[:, :32].T
    noise = (scores - bias).std(0)
    assert noise.mean().item() == pytest.approx(1, rel=0.1)
    numbers = routing_numbers("skewed", 64, 4)
    assert bias.sort(descending=True).values.numpy() == pytest.approx(numbers.bias, abs=0.02)
    shares = [NormalDist().cdf(value) for value in numbers.bias]
    assert sum(shares) == pytest.approx(4, rel=0.05)


def test_a_written_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with reader(tmp_path / "kept", "tiny-attention") as opened:
        written = export_reader(opened, tmp_path / "checkpoint")
        assert opened.layout is not None
        with safe_open(written / "model.safetensors", "pt") as file:
            names = set(file.keys())
            blob, scales = opened.read_expert(1, 5)
            gate, _, down = opened.layout.dequantise(blob[None], scales[None])
            assert torch.equal(file.get_tensor("model.layers.1.mlp.experts.5.gate_proj.weight").float(), gate[0])
            assert torch.equal(file.get_tensor("model.layers.1.mlp.experts.5.down_proj.weight").float(), down[0])
            for name, entry in opened.manifest.dense.items():
                weight = opened.load_weight(name)
                if isinstance(weight, Matrix):
                    factor = 1 if weight.scales is None else weight.scales.float().repeat_interleave(32, 1)
                    plain = weight.data.float() * factor
                else:
                    assert isinstance(weight, torch.Tensor)
                    plain = weight
                assert torch.equal(file.get_tensor(entry.parts[0][0]).float(), plain), name
    assert len(names) == 2 * (9 + 3 * 64) + 3


def test_shapes_are_cut_and_refused() -> None:
    assert len(SYNTHETIC_SHAPES) >= 5
    for name in SYNTHETIC_SHAPES:
        raw = synthetic_config(name, 2)
        assert find(raw).read_config(raw).num_layers == 2
        tables = [entry.shape for entry in synthetic_map(raw).dense if entry.kind == "table"]
        assert all(3_200_000 <= rows < 3_210_000 or name.startswith(("tiny", "wide")) for rows, _ in tables)
    with pytest.raises(ConfigError, match="no synthetic shape 'nothing'"):
        synthetic_config("nothing")
    with pytest.raises(ConfigError, match="--layers 9: tiny-hyper has 4 layers"):
        synthetic_config("tiny-hyper", 9)


def test_widths_that_would_need_padding_are_refused(tmp_path: Path) -> None:
    raw = synthetic_config("tiny-attention", 1) | {"moe_intermediate_size": 48}
    config = find(raw).read_config(raw)
    with pytest.raises(ConfigError, match="256 x 48 cannot be computed"):
        SyntheticReader(tmp_path, raw, config.family, synthetic_map(raw), config.top_k, Scaling(gain_of, is_router))


def test_seeds_and_names_give_other_weights(tmp_path: Path) -> None:
    assert key_of(1, "a") != key_of(2, "a") != key_of(2, "b")
    one, other = (reader(tmp_path, weights=SyntheticWeights(seed=seed)) for seed in (1, 2))
    assert not torch.equal(one.read_expert(0, 0)[0], other.read_expert(0, 0)[0])
    same = dataclasses.replace(one.weights, routing="uniform")
    assert torch.equal(one.read_expert(0, 0)[0], reader(tmp_path, weights=same).read_expert(0, 0)[0])
