"""Manifests with a right digest and a wrong content: each is one line before a weight is read (faults 11, 25, 57)."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from strata.checkpoint.pack_checksum import tensor_checksum
from strata.checkpoint.pack_reader import PackReader
from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint
from strata.engine.models import shipped_pack
from strata.errors import CheckpointError
from strata.kernels.ops import Matrix
from strata.models import find
from tests.checkpoint.signed_manifests import ABSENT, ODD_VALUES, Place, changed, places, rewrite, sign, sign_text
from tests.checkpoint.tiny_family import EXPERTS, LAYERS, TinyConfig, find_tiny, save_checkpoint, tiny_tensors
from tests.cli.test_packs import CONFIG as OTHER_CONFIG

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyConfig(tied=True)
    source = save_checkpoint(tmp_path_factory.mktemp("source") / "tiny", tiny_tensors(config), asdict(config))
    (source / "tokenizer.json").write_text('{"a": 1}')
    options = PackOptions(expert_file_bytes=3 * 8192)
    return pack_checkpoint(source, tmp_path_factory.mktemp("packs") / "pack", find_tiny, options)


@pytest.fixture(scope="module")
def raw(whole: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((whole / "manifest.json").read_bytes())
    return table


@pytest.fixture
def pack(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "pack"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every byte that a load, and an answer, would take from a pack. Raises what the reader raises."""
    found = {}
    with PackReader(folder, find_tiny) as reader:
        reader.check()
        for name, weight in reader.load_dense().items():
            if isinstance(weight, Matrix):
                scales = b"" if weight.scales is None else weight.scales.numpy().tobytes()
                found[name] = weight.data.contiguous().view(torch.uint8).numpy().tobytes() + scales
            elif isinstance(weight, torch.Tensor):
                found[name] = weight.numpy().tobytes()
            else:
                found[name] = weight.read_rows(0, weight.rows).numpy().tobytes()
        for layer in reader.expert_layers:
            for expert in range(reader.num_experts):
                blob, scales_of = reader.read_expert(layer, expert)
                found[f"{layer}.{expert}"] = blob.numpy().tobytes() + scales_of.numpy().tobytes()
        for name in reader.manifest.tokenizer_files:
            found[name] = reader.read_tokenizer_file(name)
    return found


def said(error: CheckpointError) -> str:
    """The one line."""
    line = str(error)
    assert line.isprintable()
    assert len(line) < 5000
    return line


def kinds_of_places(raw: dict[str, Any]) -> Iterator[Place]:
    """Every field of every section; of dense weights one of each kind. The config is a family's, see below."""
    seen = set()
    for place in places(raw):
        if place[0] in ("config", "manifest_sha256") and len(place) > (place[0] == "config"):
            continue
        if place[0] == "dense" and len(place) > 1:
            one = raw["dense"][place[1]]
            field = (one["kind"], one["format"], one["tied_to"] is None, one["source_columns"] is None, *place[2:])
            if field in seen:
                continue
            seen.add(field)
        yield place


def is_equivalent(raw: dict[str, Any], place: Place, name: str) -> bool:
    """What may be accepted: the same value, a null that is left out, and words that no answer depends on."""
    before: Any = raw
    for key in place:
        before = before[key]
    value = ODD_VALUES[name]
    if value is ABSENT:
        return before is None and place[-1] in ("tied_to", "source_columns")
    if type(value) is type(before) and value == before:
        return True
    if place in (("needs",), ("written_by",), ("source_name",)):
        return name in ("no text", "a path")
    return place[-3:-2] == ("parts",) and place[-1] == 0 and name == "a path"  # the name of a tensor in an export


FEW_VALUES = ("null", "an empty list", "2**64-1", "true", "a path")


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW_VALUES, pytest.param(tuple(ODD_VALUES), marks=pytest.mark.long)])
def test_every_field_with_every_odd_value_is_refused_or_changes_nothing(
    pack: Path, raw: dict[str, Any], names: tuple[str, ...]
) -> None:
    expected = contents(pack)
    wrong, accepted = [], 0
    for place in kinds_of_places(raw):
        for name in names:
            sign(pack, changed(raw, place, ODD_VALUES[name]))
            try:
                found = contents(pack)
            except CheckpointError as error:
                said(error)
                assert str(pack) in str(error), (place, name)
                continue
            accepted += 1
            if found != expected or not is_equivalent(raw, place, name):
                wrong.append((place, name))
    assert wrong == []
    assert accepted > 10, "values that are the same are among them"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside, max_size=3),
    max_leaves=6,
)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_value_anywhere_is_refused_or_changes_nothing(pack: Path, raw: dict[str, Any], data: st.DataObject) -> None:
    everywhere = list(kinds_of_places(raw))
    table = changed(raw, data.draw(st.sampled_from(everywhere)), data.draw(JSON_VALUES))
    sign(pack, table)
    try:
        found = contents(pack)
    except CheckpointError as error:
        said(error)
        return
    assert set(found) == {*raw["dense"], *raw["tables"], "tokenizer.json"} | {
        f"{layer}.{expert}" for layer in range(LAYERS) for expert in range(EXPERTS)
    }


# What another value makes another model, which only the digest tells: whole numbers and names that fit all weights.
OTHER_MODELS = {
    ("text_config", "seed"): {"0"},
    ("text_config", "output_gate_type"): {"null", "absent"},
    ("text_config", "split_ngram_parts"): {"null", "absent"},
    ("text_config", "rope_parameters"): {"null", "absent", "an empty object"},
    ("text_config", "rope_parameters", "rope_theta"): {"1.0"},
    ("text_config", "rope_parameters", "partial_rotary_factor"): {"1.0", "null", "absent"},
    ("text_config", "eos_token_id"): {"0"},
    ("text_config", "eos_token_id", 0): {"0", "absent"},
    ("text_config", "eos_token_id", 1): {"0", "absent"},
    ("rope_theta",): {"1.0"},
    ("norm_topk_prob",): {"null", "absent"},
    ("eos_token_id",): {"null", "absent", "0", "an empty list"},
}


@pytest.mark.parametrize("model", ["built-in", "other family"])
def test_every_key_of_a_config_with_every_odd_value(model: str, tmp_path: Path) -> None:
    """A family's own reading of the config, then its weights against those of the manifest."""
    shipped = shipped_pack()
    assert shipped is not None
    raw = json.loads((shipped / "manifest.json").read_bytes())["config"] if model == "built-in" else OTHER_CONFIG
    family = find(raw)
    expected = family.read_config(raw)
    weights = family.weight_map(expected)
    wrong = []
    for place in places(raw):
        for name, value in ODD_VALUES.items():
            sign(tmp_path, {"config": changed(raw, place, value)})
            config = json.loads((tmp_path / "manifest.json").read_bytes())["config"]
            try:
                found = find(config).read_config(config)
                if found != expected and find(config).weight_map(found) != weights:
                    continue  # the manifest's weights are not this config's, which is an error of its own
            except CheckpointError as error:
                said(error)
                continue
            if found != expected and name not in OTHER_MODELS.get(place, ()):
                wrong.append((place, name))
    assert wrong == []


def test_the_built_in_manifest_is_held_against_its_family(tmp_path: Path) -> None:
    shipped = shipped_pack()
    assert shipped is not None
    pack = Path(shutil.copytree(shipped, tmp_path / "pack"))
    raw = json.loads((pack / "manifest.json").read_bytes())
    cases: list[tuple[Place, Any, str]] = [
        (("config", "text_config", "ple_layer_ids"), ABSENT, "no optional group"),
        (("config", "text_config", "ngram_size"), 2, "ngram"),
        (("config", "text_config", "heads_per_ngram"), 8, "ngram"),
        (("config", "text_config", "ngram_vocab_size_base"), ABSENT, "the size of table"),
        (("config", "text_config", "num_experts"), 25, "gate.weight"),
        (("config", "text_config", "tie_word_embeddings"), True, ""),
        (("config", "tie_word_embeddings"), True, "tied_to of dense weight 'lm_head.weight'"),
        (("config", "text_config", "layer_types"), ["linear_attention"] * 8, "are missing"),
        (("config", "architectures"), ["Unheard"], "manifest.json: config: architecture Unheard"),
        (("absent_groups",), ["mtp", "layers.1.ple.hash"], "are left over"),
        (("absent_groups",), [], "are missing"),
        (("experts",), None, "expert-tables.safetensors"),
        (("family",), "another", "family is another, qwen4_exp is needed"),
    ]
    for place, value, words in cases:
        sign(pack, changed(raw, place, value))
        if not words:  # the text part's own flag is not the one that is read
            PackReader(pack, find).close()
            continue
        with pytest.raises(CheckpointError) as caught:
            PackReader(pack, find)
        assert words in said(caught.value), (place, said(caught.value))


def two_ends(raw: dict[str, Any]) -> None:
    raw["tables"]["table"]["file"] = raw["experts"]["files"][0]


def other_dense(name: str, **fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda raw: raw["dense"][name].update(fields)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a layer twice": (lambda raw: raw["experts"].update(layers=[0, 0]), "names a layer twice"),
    "a layer too many": (lambda raw: raw["experts"].update(layers=[0, 1, 2]), "number of experts.names"),
    "other layers": (lambda raw: raw["experts"].update(layers=[1, 0]), r"experts.layers is \[1, 0\], \[0, 1\]"),
    "no layers": (lambda raw: raw["experts"].update(layers=[], names=[]), "experts.layers"),
    "no files": (lambda raw: raw["experts"].update(files=[]), "number of experts.files is 0"),
    "a file twice": (lambda raw: raw["experts"]["files"].__setitem__(1, raw["experts"]["files"][0]), "two ends"),
    "a file of two": (two_ends, "two ends"),
    "no experts": (lambda raw: raw.update(experts=None), "files: 1 are left over"),
    "fewer experts": (lambda raw: raw["experts"].update(num_experts=3), "number of experts.files"),
    "no shape": (other_dense("layers.0.norm", shape=[]), "parts have 64 rows, the weight has 1"),
    "no shape of a matrix": (other_dense("embed.weight", shape=[]), "is a matrix of shape"),
    "another shape": (other_dense("layers.0.odd.weight", shape=[5, 51]), "shape of dense weight 'layers.0.odd.weight'"),
    "another kind": (other_dense("layers.0.norm", kind="integers", format="i64"), "kind of dense weight"),
    "a format of no vector": (other_dense("layers.0.norm", format="bf16"), "a vector in bf16"),
    "tied to nothing": (other_dense("head.weight", tied_to="nothing"), "tied to 'nothing'"),
    "tied to itself": (other_dense("head.weight", tied_to="head.weight"), "tied to 'head.weight'"),
    "tied to another shape": (other_dense("head.weight", tied_to="layers.0.q.weight"), "of another kind"),
    "not tied": (other_dense("head.weight", tied_to=None, parts=[["head", 40]]), "'head.weight' is not"),
    "tied and stored": (other_dense("head.weight", parts=[["head", 40]]), "of its own"),
    "parts of fewer rows": (other_dense("embed.weight", parts=[["x", 39]]), "39 rows"),
    "a source twice": (other_dense("layers.0.odd.weight", parts=[["model.embed.weight", 5]]), "one source"),
    "columns that overlap": (other_dense("draft.y", source_columns=[63, 70]), "overlap"),
    "columns of another width": (other_dense("draft.y", source_columns=[64, 72]), "cannot be columns"),
    "a weight left over": (
        lambda raw: raw["dense"].update(more=raw["dense"]["ids"] | {"parts": [["more", 3]], "checksums": {}}),
        "dense: 1 are left over: 'more'",
    ),
    "a weight missing": (lambda raw: raw["dense"].pop("layers.1.norm"), "dense: 1 are missing: 'layers.1.norm'"),
    "a table missing": (lambda raw: raw["tables"].clear(), "tables: 1 are missing"),
    "more rows": (lambda raw: raw["tables"]["table"].update(rows=38), "parts have 37 rows"),
    "no parts": (lambda raw: raw["tables"]["table"].update(parts=[]), "parts have 0 rows"),
    "an unknown group": (lambda raw: raw.update(absent_groups=["vision"]), "no optional group"),
    "a group that is there": (lambda raw: raw.update(absent_groups=["draft"]), "dense: 2 are left over"),
    "a tokenizer file twice": (lambda raw: raw.update(tokenizer_files=["tokenizer.json"] * 2), "two ends"),
    "a tokenizer file that is none": (lambda raw: raw.update(tokenizer_files=["dense.safetensors"]), "another file"),
    "a file that nobody needs": (lambda raw: raw.update(tokenizer_files=[]), "files: 1 are left over"),
    "another family": (lambda raw: raw.update(family="other"), "family is other, tiny is needed"),
    "checksums too many": (
        lambda raw: raw["dense"]["ids"]["checksums"].update(more="0" * 16), "'ids' has checksums of ids, more"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_fields_say_together_is_checked(pack: Path, case: str) -> None:
    change, message = WRONG[case]
    rewrite(pack, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        PackReader(pack, find_tiny)
    assert str(pack) in said(caught.value)


def test_json_that_is_none_or_says_a_key_twice(pack: Path) -> None:
    text = (pack / "manifest.json").read_text()
    digest = json.loads(text)["manifest_sha256"]
    plain = text.replace(digest, "0" * 64)
    for wrong, words in (
        (plain.replace('"version": 1,', '"version": 1, "version": 1,'), "'version' is there twice"),
        (plain.replace('"version": 1,', '"version": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + ","), "not JSON"),
        (plain.replace('"version": 1,', '"version": 1, "x": ' + "9" * 10_000 + ","), "not JSON"),
        (plain.rstrip()[:-1], "not JSON"),
    ):
        sign_text(pack, wrong)
        with pytest.raises(CheckpointError, match=words) as caught:
            PackReader(pack, find_tiny)
        said(caught.value)


def resign_tables(folder: Path, scales: torch.Tensor) -> None:
    """Other tensor scales, with all digests right."""
    path = folder / "expert-tables.safetensors"
    save_file({**load_file(path), "tensor_scales": scales}, path)
    record = {"nbytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    rewrite(folder, lambda raw: raw["files"].update({path.name: record}))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "finite FP32"),
        (float("inf"), "finite FP32"),
        (0.0, "above zero"),
        (-1e-3, "above zero"),
        (1.3e35, "finite FP32"),  # times 6 x 448 more than FP32 holds
        (11_000, "layer's median"),
        (9_000, ""),
        (1.0, ""),
    ],
)
def test_a_scale_of_no_sense_is_refused(pack: Path, value: float, words: str) -> None:
    """Factors of the median where they are above one."""
    scales = load_file(pack / "expert-tables.safetensors")["tensor_scales"]
    median = float(scales[1].double().median())
    scales[1, 2, 1] = value * median if 1 < value < 1e5 else value
    resign_tables(pack, scales)
    if not words:
        assert torch.equal(PackReader(pack, find_tiny).tensor_scales, scales)
        return
    with pytest.raises(CheckpointError, match=rf"layer 1, expert 2, up is .*{words}") as caught:
        PackReader(pack, find_tiny)
    said(caught.value)


def test_a_matrix_of_zeros_keeps_its_scale_of_one_beside_tiny_ones(tmp_path: Path) -> None:
    """A real expert may be all zeros; a scale of one on any other weights is far above its neighbours."""
    tensors = {
        name: tensor * 1e-6 if ".experts." in name else tensor
        for name, tensor in tiny_tensors(dtype=torch.float32).items()
    }
    tensors["model.layers.0.experts.3.up.weight"].zero_()
    source = save_checkpoint(tmp_path / "source", tensors)
    pack = pack_checkpoint(source, tmp_path / "pack", find_tiny)
    with PackReader(pack, find_tiny) as reader:
        assert float(reader.tensor_scales[0, 3, 1]) == 1
        scales = reader.tensor_scales.clone()
    scales[0, 3, 0] = 1
    resign_tables(pack, scales)
    with pytest.raises(CheckpointError, match=r"layer 0, expert 3, gate is 1, .*layer's median"):
        PackReader(pack, find_tiny)


@pytest.mark.parametrize("experts", ["q8_0", "bf16"])
def test_formats_without_tensor_scales_have_ones(pack: Path, tmp_path: Path, experts: str) -> None:
    source = save_checkpoint(tmp_path / "source", tiny_tensors())
    options = PackOptions(experts=experts)  # type: ignore[arg-type]
    other = pack_checkpoint(source, tmp_path / "other", find_tiny, options)
    scales = load_file(other / "expert-tables.safetensors")["tensor_scales"]
    scales[0, 0, 0] = 1.5
    resign_tables(other, scales)
    with pytest.raises(CheckpointError, match=f"is 1, as all are in {experts}"):
        PackReader(other, find_tiny)


@pytest.mark.parametrize("name", ["embed.weight.scales", "layers.0.norm", "layers.0.mix.weight"])
def test_dense_values_that_are_no_numbers_are_refused_by_load_and_by_check(pack: Path, name: str) -> None:
    path = pack / "dense.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[3] = float("inf")
    save_file(tensors, path)
    record = {"nbytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}

    def change(raw: dict[str, Any]) -> None:
        raw["files"][path.name] = record
        sums = {key: value for one in raw["dense"].values() for key, value in one["checksums"].items()}
        assert name in sums
        for one in raw["dense"].values():
            if name in one["checksums"]:
                data = tensors[name].contiguous().view(-1).view(torch.uint8).numpy()
                one["checksums"][name] = tensor_checksum(data)

    rewrite(pack, change)
    for read in (PackReader.load_dense, PackReader.check):
        with PackReader(pack, find_tiny) as reader, pytest.raises(CheckpointError, match=f"'{name}' holds values"):
            read(reader)


def test_every_opening_of_a_pack_names_the_family() -> None:
    """Without it a manifest is held against itself alone: no command may open a pack that way."""
    found = []
    for path in (ROOT / "src" / "strata").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "PackReader(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "PackReader":
                found.append((path.name, len(node.args)))
    assert len(found) >= 5
    assert [one for one in found if one[1] != 2] == []
