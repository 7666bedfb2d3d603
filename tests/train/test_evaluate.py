"""What the evaluation measures, on a tiny model: its bits are the trainer's, its helpers find what they seek."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.checkpoint.export import export_checkpoint
from strata.checkpoint.manifest import read_manifest
from strata.checkpoint.pack_reader import PackReader
from strata.experts.profile import ExpertProfile
from strata.text.byte_tokenizer import byte_tokenizer
from tests.train.small_sizes import SMALL

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

from checkpoint import export, import_weights
from data import RetrievalMaker
from evaluate import find_answers, is_dedented
from model import Config, TrainModel
from ship import FORMATS, make_pack
from subject import Subject

SIZES: dict[str, Any] = SMALL | {"vocabulary": 272, "index_budget": 64, "eos": (256, 258)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainModel, Path]:
    """A model of BF16 values and its checkpoint with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    model = TrainModel(Config(**SIZES))
    model.initialise(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias")) and "norm" not in name:
                p.mul_(3.0)
    export(model, folder)
    byte_tokenizer(folder)
    import_weights(model, folder)
    return model, folder


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    found: list[list[int]] = torch.randint(0, 256, (2, 194), generator=torch.Generator().manual_seed(2)).tolist()
    return found


@torch.no_grad()
def test_the_packs_nats_drafts_and_sparse_rows_are_the_trainers(
    trained: tuple[TrainModel, Path], windows: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subject.CHUNK", 50)
    model, folder = trained
    ids = torch.tensor(windows)
    none = torch.zeros(1, dtype=torch.long)
    with Subject(make_pack(folder, tmp_path / "bf16", FORMATS["bf16"]), context=192) as subject:
        rows = [window[:193] for window in windows]
        for sparse, over in ((True, None), (False, subject.dense())):
            x, _ = model.hidden(ids[:, :192], none, sparse)
            nats = model.cross_entropy(x, ids[:, 1:193], False).sum(1)
            assert subject.text(rows, model=over).nats == pytest.approx(nats.tolist(), rel=1e-4)
        said = model.logits(model.hidden(ids[:, :192], none, True)[0]).argmax(-1)
        assert subject.said(windows[0][:192]) == said[0].tolist()
        y, _ = model.drafted(model.hidden(ids[:, :192], none, True)[0], ids[:, 1:193], none, sparse=True)
        agreed = int((model.logits(y, draft=True).argmax(-1)[:, :-1] == said[:, 1:]).sum())
        figures = subject.text(rows, drafts=True)
        assert (figures.agreed, figures.drafted) == (agreed, 2 * 191)


def test_float_activations_are_no_change_where_experts_are_bf16(
    trained: tuple[TrainModel, Path], windows: list[list[int]], tmp_path: Path
) -> None:
    with Subject(make_pack(trained[1], tmp_path / "bf16", FORMATS["bf16"]), context=192) as subject:
        own, exact = (subject.text([w[:193] for w in windows], experts=e).nats for e in (None, subject.float_experts()))
        assert own == pytest.approx(exact, rel=1e-5)
    with Subject(make_pack(trained[1], tmp_path / "nvfp4", FORMATS["nvfp4"]), context=192) as subject:
        own, exact = (subject.text([w[:193] for w in windows], experts=e).nats for e in (None, subject.float_experts()))
        assert own != pytest.approx(exact, rel=1e-7)
        assert own == pytest.approx(exact, rel=0.02)


def test_picks_count_every_row_of_every_layer_and_the_draft_block(
    trained: tuple[TrainModel, Path], windows: list[list[int]], tmp_path: Path
) -> None:
    pack = make_pack(trained[1], tmp_path / "pack", FORMATS["nvfp4"])
    with Subject(pack, context=192) as subject:
        picks = subject.picks([w[:193] for w in windows])
    assert picks.sum(1).tolist() == [2 * 192 * 4] * 5
    ExpertProfile(2 * 192, picks.numpy()).write(pack, read_manifest(pack).manifest_sha256)
    with Subject(pack, context=192) as subject:  # the profile places experts and changes nothing
        assert torch.equal(subject.picks([w[:193] for w in windows]), picks)


def test_the_shipped_formats_keep_table_rows_to_an_eighth(trained: tuple[TrainModel, Path], tmp_path: Path) -> None:
    """E4M3 has three mantissa bits: half a step of the largest binade at most."""
    model, folder = trained
    with PackReader(make_pack(folder, tmp_path / "shipped", FORMATS["shipped"])) as reader:
        (name,) = reader.manifest.tables
        assert reader.manifest.tables[name].format == "f8_e4m3"
        rows: Any = reader.load_weight(name)
        table = model.layers[1].ple.ple_embedding.ngram_embedding.weight.detach()
        found = rows.read_rows(0, len(table))
        largest = table.abs().amax(1, keepdim=True)
        assert float(((found - table).abs() / largest).max()) <= 1 / 16 / 1.75 + 1e-6
        assert reader.manifest.source_name == "strata-small"


def test_greedy_ids_are_those_of_whole_forwards(
    trained: tuple[TrainModel, Path], windows: list[list[int]], tmp_path: Path
) -> None:
    with Subject(make_pack(trained[1], tmp_path / "pack", FORMATS["nvfp4"]), context=192) as subject:
        prompt = windows[0][:100]
        found = subject.greedy(prompt, 6, lambda ids: False)
        assert len(found) == 6
        for count in range(6):
            assert subject.said([*prompt, *found[:count]])[-1] == found[count]
        assert subject.greedy(prompt, 6, lambda ids: len(ids) == 2) == found[:2]


def test_answers_are_found_where_the_document_asks_for_them() -> None:
    pieces = {
        "open": [1, 2],
        "set": [3, 4],
        "is": [3, 5],
        "close": [6, 7],
        "assert": [8],
        "newline": [7],
    }
    words = [([20 + i], [40 + i]) for i in range(12)]
    meta = {
        "retrieval": {"words": words, "pieces": pieces, "tables": [([9], [10])]},
        "special": {"<|endoftext|>": 0},
    }
    filler = np.array(([11, 12, 13, 7] * 200), dtype=np.uint16)
    maker, rng = RetrievalMaker(meta, filler), np.random.default_rng(0)
    for queries in (2, 5):
        ids, answers = maker.document(rng, 600, queries)
        places = find_answers(ids, answers, pieces["is"])
        assert places == sorted(places)
        for at, answer in zip(places, answers, strict=True):
            assert ids[at : at + len(answer)] == answer
            assert ids[at - 2 : at] == pieces["is"]


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        ("    return 1\n\n\n", False),
        ("    return 1\ndef", False),
        ("    return 1\ndef f():\n", True),
        ("    if a:\n        b\n\n    return c\n", False),
    ],
)
def test_a_completion_ends_with_the_first_whole_line_that_is_not_indented(body: str, ended: bool) -> None:
    assert is_dedented(body) is ended


def test_training_goes_on_from_what_a_pack_exports(trained: tuple[TrainModel, Path], tmp_path: Path) -> None:
    model, folder = trained
    pack = make_pack(folder, tmp_path / "pack", FORMATS["bf16"])
    again = TrainModel(model.c)
    import_weights(again, export_checkpoint(pack, tmp_path / "exported"))
    for (name, expected), found in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(found, expected.to(torch.bfloat16).float()), name
