"""The whole synthetic benchmark on tiny shapes: routing by counts on the real forward pass, figures, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.benchmark_record import Figure, Record
from strata.checkpoint.export import plain_weight
from strata.checkpoint.synthetic_reader import SyntheticWeights
from strata.cli.app import main
from strata.config_sources import resolve_here
from strata.engine.cache_bench import record_trace
from strata.engine.ceilings import Ceilings, RoundBytes, round_seconds
from strata.engine.kept_runs import KeptRuns
from strata.engine.memory_use import CardUse, MemoryUse
from strata.engine.models import open_model
from strata.engine.ready_probe import probe_ready
from strata.engine.routing_counts import count_routing
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.engine.synthetic_bench import SyntheticCase, check_experts, find_arms, results_name
from strata.engine.synthetic_model import open_synthetic
from strata.engine.synthetic_text import token_list
from strata.engine.timeline import Timeline
from strata.errors import ConfigError
from strata.kernels.ops import Matrix
from tests.engine.emulated_device import EmulatedDevice

OPTIONS = ["--device", "cpu", "--threads", "1", "--ram-gib", "4", "--log-level", "error"]
SMALL = ["--decode", "24", "--learn", "128", "--runs", "2", "--expert-cache", "24"]


def requested(**options: object) -> Any:
    return resolve_here(arguments={"device": "cpu", "threads": 1, "ram_gib": 4, **options})


def picked(shape: str, routing: str, rows: int) -> Any:
    """[rows, layers, experts] of the model's own forward pass."""
    weights = SyntheticWeights(routing=routing)  # type: ignore[arg-type]
    model = open_synthetic(shape, None, weights)
    runtime = Runtime.open(model, requested())
    trace = record_trace(runtime, [token_list(runtime.vocabulary, rows, "measured")])
    counts = runtime.count_picks()
    runtime.close()
    model.close()
    found = np.zeros((rows, trace.shape[1], model.config.num_experts), bool)
    np.put_along_axis(found, trace, True, 2)
    assert np.array_equal(found.sum(0), counts)
    return found


@pytest.mark.parametrize("shape", ["tiny-attention", "tiny-hyper"])
def test_the_forward_pass_routes_as_built(shape: str) -> None:
    skewed, uniform = (count_routing(picked(shape, routing, 600)) for routing in ("skewed", "uniform"))
    assert skewed.hot_picks == pytest.approx(0.72, abs=0.05)
    assert skewed.repeats == pytest.approx(0.40, abs=0.05)
    assert skewed.distinct is not None
    assert skewed.distinct >= 0.95
    assert uniform.hot_picks < 0.35
    assert uniform.repeats == pytest.approx(4 / 64, abs=0.03)


def test_counts_of_hand_made_picks() -> None:
    rows = np.zeros((4, 1, 100), bool)
    for row, experts in enumerate(([0, 1], [1, 2], [1, 2], [5, 90])):
        rows[row, 0, experts] = True
    found = count_routing(rows)
    assert found.repeats == pytest.approx((1 + 2 + 0) / 3 / 2)
    assert found.hot_picks == 1.0
    assert found.distinct is None
    assert "50.0 % of a row's picks" in found.line()


def test_lists_of_tokens_are_fixed_and_cover_the_vocabulary() -> None:
    ids = np.array(token_list(1000, 20000, "measured"))
    assert (ids.min(), ids.max(), len(set(ids.tolist()))) == (0, 999, 1000)
    topics = ids % 15
    assert (topics[1:] == topics[:-1]).mean() == pytest.approx(0.8 + 0.2 / 15, abs=0.01)
    other = np.array(token_list(1000, 20000, "profile"))
    assert (ids == other).mean() < 0.01


def test_decode_is_measured_kept_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "home"))
    out = ["--out", str(tmp_path / "results"), "--machine", "test"]
    words = ["bench", "decode", "--synthetic", "tiny-hyper", "--layers", "2", *OPTIONS, *SMALL, *out]
    assert main([*words, "--arm", "skewed"]) == 0
    text = capsys.readouterr().out
    for part in ("learned on 128 other tokens", "routing, counted over 24 tokens", "hit rate", "bytes a token",
                 "served since the start", "measured: RAM", "% of the bound", "planned for the model"):  # fmt: skip
        assert part in text, part
    assert text.count("run: ") == 2
    assert main([*words, "--arm", "skewed", "--arm", "uniform"]) == 0
    again = capsys.readouterr().out
    assert again.count("run: ") == 2, "the skewed arm is there already, the uniform one is new"
    assert "kept, learned on 128 other tokens" in again
    table = json.loads((tmp_path / "results" / "test" / "tiny-hyper-2layers-cpugib.json").read_text())
    assert json.loads(again.splitlines()[-1])["figures"] == table["figures"]
    figure = table["figures"]["decode_plain"]
    assert set(table["figures"]) == {"decode_plain", "decode_plain_uniform"}
    assert figure["runs"] == 2
    assert figure["min"] <= figure["value"] <= figure["max"]
    assert figure["percent"] == round(100 * figure["value"] / figure["ceiling"], 1)
    assert (figure["routing"], figure["kv"], figure["dense"], figure["context_tokens"]) == (
        "skewed",
        "16",
        "q8_0",
        1024,
    )
    assert 0 < figure["hit_rate"] < 1
    assert table["machine"]["skewed"]["rows"] == 24


def test_each_run_has_its_own_part_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    forced: list[int] = []
    plain = Session.greedy_round

    def greedy_round(session: Session, ids: list[int]) -> int:
        forced.extend(ids)
        return plain(session, ids)

    monkeypatch.setattr(Session, "greedy_round", greedy_round)
    words = [
        "bench",
        "decode",
        "--synthetic",
        "tiny-hyper",
        "--layers",
        "2",
        *OPTIONS,
        "--decode",
        "6",
        "--learn",
        "64",
    ]
    assert main([*words, "--runs", "3"]) == 0
    vocabulary = open_synthetic("tiny-hyper", 2).config.vocabulary
    assert forced[-18:] == token_list(vocabulary, 18, "measured")


def test_depth_needs_its_context_and_compares_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    words = ["bench", "decode", "--synthetic", "tiny-hyper", *OPTIONS, "--decode", "4", "--learn", "64", "--runs", "1"]
    assert main([*words, "--arm", "depth"]) == 2
    assert "arm depth decodes at 131,072 positions" in capsys.readouterr().err
    assert main([*words, "--arm", "depth", "--max-context", "132096"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]["decode_128k_over_1k"]
    assert found["unit"] == "ratio"
    assert found["context_tokens"] == 131072


def test_a_made_up_sequence_is_taken_as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_synthetic("tiny-hyper")
    runtime = Runtime.open(model, requested(max_context=1024))
    session = Session(runtime)
    session.pretend(1000)
    assert session.length == 1000
    first = session.round([5])
    session.commit(1)
    session.pretend(1000)
    assert (first == session.round([5])).all()
    session.reset()
    assert not (first == session.round([5])).all()
    runtime.close()
    model.close()


def test_ready_is_measured_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    case = SyntheticCase("tiny-attention", 1, SyntheticWeights())
    run = probe_ready(case, requested())
    assert 0 < run.torch < run.imports < run.ready < run.first_round
    assert [stage.name for stage in run.stages][:2] == ["probe", "card"]
    assert all(0 <= stage.begin <= stage.end <= run.load for stage in run.stages)
    compiled = "" if run.bytecode else " (compiled from source, Python kept no bytecode of it)"
    assert run.lines()[1].startswith(f"seconds: import of torch {run.torch:.2f}{compiled}; of the load probe ")
    assert run.as_details()["ready_stages"].keys() >= {"dense weights", "page-locking", "experts into RAM", "slots"}  # type: ignore[attr-defined]
    assert run.held == 64 * 28672
    assert run.read == 0
    assert not run.on_card
    assert run.memory[0].startswith("RAM ")
    assert run.details["ram_most_gib"] >= run.details["ram_gib"] > 0
    assert f"{(run.held + run.dense) / 1e9:.1f} GB computed" in run.lines()[0]


def test_a_start_that_compiles_torch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "empty"))
    run = probe_ready(SyntheticCase("tiny-attention", 1, SyntheticWeights()), requested())
    assert run.as_details()["ready_torch_bytecode"] is False
    assert f"{run.torch:.2f} (compiled from source, Python kept no bytecode of it); of the load" in run.lines()[1]


def test_a_computed_model_is_written_as_a_pack_and_ready_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "home"))
    pack = tmp_path / "pack"
    words = ["--synthetic", "tiny-hyper", "--layers", "2"]
    assert main(["bench", "pack", *words, "--to", str(pack), *OPTIONS]) == 0
    computed, written = open_synthetic("tiny-hyper", 2), open_model(str(pack))
    for layer, expert in ((0, 0), (1, 63)):
        one, other = (model.reader.read_expert(layer, expert) for model in (computed, written))
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    for name, weight in computed.dense().items():
        other_weight = written.dense()[name]
        if isinstance(weight, (Matrix, torch.Tensor)):
            assert isinstance(other_weight, (Matrix, torch.Tensor))
            torch.testing.assert_close(plain_weight(weight), plain_weight(other_weight), rtol=0, atol=1e-2)
    read = computed.reader.dense_bytes + 2 * 64 * computed.reader.layout.blob_bytes
    computed.close()
    written.close()
    capsys.readouterr()
    assert main(["bench", "ready", str(pack), "--runs", "2", *OPTIONS]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ready in ") and line.endswith(" GB read") for line in lines) == 2
    record = json.loads(last)
    assert set(record["figures"]) == {"ready_s", "imports_s", "load_s", "load_over_drive"}
    assert record["figures"]["load_s"]["runs"] == 2
    assert record["machine"]["ready_read_gb"] == pytest.approx(read / 1e9, abs=0.01)


def test_a_profile_is_written_and_drawn_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "home"))
    words = ["bench", "decode", "--synthetic", "tiny-hyper", "--layers", "2", *OPTIONS, *SMALL]
    assert main([*words, "--arm", "skewed", "--profile", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "timeline of 8 rounds" in text
    events = json.loads((tmp_path / "tiny-hyper-decode.trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names.count("round") == 8
    assert names.count("experts") == 16
    assert {"linear", "hyper_mix", "router"} <= set(names)
    assert "timeline of a prompt of 512 tokens" in text
    events = json.loads((tmp_path / "tiny-hyper-prompt.trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert (names.count("chunk"), names.count("experts")) == (1, 2)
    for part in ("decode", "prompt"):
        drawn = (tmp_path / f"tiny-hyper-{part}.png").exists()
        assert drawn == (f"\ndrawn: tiny-hyper-{part}.png" in text)
        assert drawn != ("\nnot drawn: a picture needs matplotlib" in text)


def test_spans_of_a_card_follow_one_another(tmp_path: Path) -> None:
    timeline = Timeline()
    assert timeline.chain([("a", 0.001), ("b", 0.002), ("a", 0.003)], 5.0, "card") == pytest.approx(5.006)
    assert timeline.totals() == pytest.approx({"a": 0.004, "b": 0.002})
    timeline.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(one["name"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"] == [
        ("a", 0, 1000), ("b", 1000, 2000), ("a", 3000, 3000)
    ]  # fmt: skip


def test_the_bound_adds_what_the_issue_says() -> None:
    read = RoundBytes(dense=4e9, hits=1e9, misses=0.3e9, num_layers=48)
    assert round_seconds(Ceilings(ram=80e9), read) == pytest.approx(5.3 / 80)
    card = Ceilings(ram=60e9, vram=4e12, link=50e9, launch_seconds=1e-6, num_launches=500)
    expected = 4 / 4000 + max(1 / 4000, 0.3 / 110) + 48 * 3.6e-6 + 500e-6
    assert round_seconds(card, read) == pytest.approx(expected)
    inside = RoundBytes(dense=4e9, hits=1.3e9, misses=0, num_layers=48)
    assert round_seconds(card, inside) == pytest.approx(5.3 / 4000 + 500e-6)


def test_runs_are_kept_by_their_key(tmp_path: Path) -> None:
    kept = KeptRuns(tmp_path, {"commit": "a"})
    kept.add("one", {"rate0": 1.5})
    kept.add("one", {"rate0": 2.5})
    kept.add("two", {"rate0": 3.5})
    assert kept.read("one") == [{"rate0": 1.5}, {"rate0": 2.5}]
    assert KeptRuns(tmp_path, {"commit": "b"}).read("one") == []
    kept.forget("one")
    assert kept.read("one") == []
    assert kept.read("two") == [{"rate0": 3.5}]


def test_figures_of_another_commit_stay_and_say_so(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    facts = {"cores": 1, "skewed": {"rows": 3}}
    Record("strata bench", facts, {"a": Figure(1, "s"), "b": Figure(2, "s")}, commit="old").merge_into(path)
    Record("strata bench", {"cores": 2}, {"b": Figure(3, "s")}, commit="new").merge_into(path)
    table = json.loads(path.read_text())
    assert table["machine"] == {"cores": 2, "skewed": {"rows": 3}}
    assert table["commit"] == "new"
    assert table["figures"]["a"]["commit"] == "old"
    assert (table["figures"]["b"]["value"], "commit" in table["figures"]["b"]) == (3, False)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no benchmark record"):
        Record("strata bench", {}, {}).merge_into(path)


def test_names_that_are_not_known_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--arm 'deep' is not known"):
        find_arms(["deep"])
    assert [arm.name for arm in find_arms([])] == ["skewed", "independent", "uniform"]
    for words, line in (
        (["pack"], "bench pack needs --synthetic"),
        (["pack", "--synthetic", "tiny-hyper"], "bench pack needs --to"),
        (["prompt", "--synthetic", "tiny-hyper"], "--synthetic means nothing for bench prompt"),
        (["decode", "--synthetic", "nothing"], "no synthetic shape 'nothing'"),
        (["decode", "--synthetic", "tiny-hyper", "--dense", "q4"], "--dense 'q4' is not known"),
        (["checkpoint", "--synthetic", "tiny-hyper"], "bench checkpoint needs --to"),
    ):
        assert main(["bench", *words]) == 2
        assert line in capsys.readouterr().err


def test_a_record_is_named_by_shape_and_cap() -> None:
    case = SyntheticCase("tiny-hyper", None, SyntheticWeights())
    assert results_name(case, requested(), on_card=False) == "tiny-hyper-cpugib"
    assert results_name(case, requested(vram_gib=24), on_card=True) == "tiny-hyper-24gib"
    assert results_name(case, requested(), on_card=True) == "tiny-hyper-allgib"


def test_a_computed_model_has_no_file_to_map() -> None:
    model = open_synthetic("tiny-hyper", 1)
    with pytest.raises(ConfigError, match="no file to map"):
        Runtime.open(model, requested(mmap_experts=True))
    model.close()


def test_experts_outside_ram_are_computed_anew() -> None:
    """A RAM budget: what is in no tier comes from its recipe in the round, and the answer is the same."""
    model = open_synthetic("tiny-attention", 2)
    found = []
    for options in ({}, {"resident_budget_gib": 0.001, "expert_cache": 10}):
        runtime = Runtime.open(model, requested(**options))
        session = Session(runtime)
        found.append(session.read_prompt(token_list(runtime.vocabulary, 12, "measured")))
        misses = runtime.statistics().experts.misses_file
        runtime.close()
    model.close()
    assert misses > 0
    assert (found[0] == found[1]).all()


def test_a_card_counts_the_same_picks_at_a_made_up_position() -> None:
    model = open_synthetic("tiny-hyper", 2)
    device = EmulatedDevice()
    found = []
    for card in (None, device):
        runtime = Runtime.open(model, requested(max_context=512, expert_cache=20, vram_reserve_mib=0), device=card)
        if runtime.rounds is not None:
            runtime.rounds.limit_ms = 60_000
        session = Session(runtime)
        session.pretend(100)
        picks = []
        for token in token_list(runtime.vocabulary, 3, "measured"):
            before = runtime.count_picks()
            session.round([token])
            session.commit(1, decoded=True)
            picks.append(runtime.count_picks() - before)
        assert [one.sum(1).tolist() for one in picks] == [[4, 4]] * 3
        found.append(np.stack(picks))
        assert (runtime.num_launches > 0) == (card is not None)
        runtime.close()
    assert np.array_equal(found[0], found[1])
    runtime = Runtime.open(model, requested(max_context=512, expert_cache=8, resident_budget_gib=0.0005), device=device)
    with pytest.raises(ConfigError, match="neither in VRAM nor in RAM"):
        check_experts(runtime)
    runtime.close()
    model.close()
    device.close()


@pytest.mark.parametrize(("shape", "layers", "context"), [("tiny-hyper", 4, 4096), ("tiny-attention", 3, 20000)])
def test_a_card_keeps_what_was_planned_for_rounds(shape: str, layers: int, context: int) -> None:
    model = open_synthetic(shape, layers)
    device = EmulatedDevice()
    asked = requested(max_context=context, expert_cache=20, vram_reserve_mib=0)
    runtime = Runtime.open(model, asked, device=device)
    assert runtime.rounds is not None
    planned = runtime.plan.vram["round buffers"]
    assert runtime.rounds.buffer_bytes <= planned <= 1.2 * runtime.rounds.buffer_bytes
    assert runtime.memory_use().card is None
    runtime.close()
    model.close()
    device.close()


def test_what_was_taken_is_said_beside_the_plan() -> None:
    card = CardUse(most=31 << 30, slots=26 << 30, planned=30 << 30, total=33 << 30, cap=32 << 30)
    use = MemoryUse(card, 60 << 30, 61 << 30, 70 << 30, locked=48 << 30, lock_seconds=6.0, lock_path=2)
    vram = "VRAM at most 31.00 GiB (26.00 GiB of expert slots), 30.00 GiB planned, cap 32.00 GiB"
    assert use.lines() == [
        f"{vram}; the card has 33.00 GiB less free than before",
        "RAM 60.00 GiB now, at most 61.00 GiB, 70.00 GiB planned for the model, headroom included",
        "page-locked 48.00 GiB in 6.00 s (8.0 GiB/s), path 2",
    ]
    assert use.as_details()["lock_gib_per_s"] == 8.0
    assert use.as_details()["vram_most_gib"] == 31.0
    nothing = MemoryUse(None, None, None, 1 << 30, locked=0, lock_seconds=0.0, lock_path=0)
    assert nothing.lines() == []
    assert nothing.lock_rate == 0
