"""The facade: answers, ends, turns, cancellation, limits, refusals."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from strata.engine.cancellation import Cancellation
from strata.engine.engine import Engine
from strata.errors import CheckpointError, ConfigError, EngineError, MemoryPlanError, RequestError
from tests.engine.conftest import load


def test_generate_is_the_same_every_time(engine: Engine) -> None:
    first = "".join(engine.generate("def add(a, b):", max_tokens=24, ignore_eos=True))
    assert first
    assert first == "".join(engine.generate("def add(a, b):", max_tokens=24, ignore_eos=True))


def test_seeded_sampling_repeats_and_seeds_differ(engine: Engine) -> None:
    def sample(seed: int) -> str:
        return "".join(engine.generate("x", temperature=1.0, seed=seed, max_tokens=32, ignore_eos=True))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_length_and_usage(engine: Engine) -> None:
    request = engine.plain_request("hello", engine.sampling({"max_tokens": 5, "ignore_eos": True}))
    pieces = list(engine.submit(request))
    assert [piece.finish for piece in pieces] == [None] * 4 + ["length"]
    assert engine.last_usage is not None
    assert (engine.last_usage.prompt_tokens, engine.last_usage.completion_tokens) == (5, 5)
    statistics = engine.statistics()
    assert (statistics.requests, statistics.completion_tokens, statistics.running) == (1, 5, 0)


def test_a_prompt_that_goes_on_is_not_read_again(engine: Engine) -> None:
    params = engine.sampling({"max_tokens": 6, "ignore_eos": True})
    first = engine.plain_request("a first turn", params)
    tokens = [piece.choice.token for piece in engine.submit(first) if piece.choice]
    longer = [*first.ids, *tokens, 65, 66, 67]
    again = [piece.choice.token for piece in engine.submit(engine.plain_request(longer, params)) if piece.choice]
    assert engine.last_usage is not None
    assert engine.last_usage.cached_tokens == len(first.ids) + 5
    list(engine.submit(engine.plain_request("something else", params)))
    fresh = [piece.choice.token for piece in engine.submit(engine.plain_request(longer, params)) if piece.choice]
    assert engine.last_usage.cached_tokens == 0
    assert again == fresh


@pytest.mark.parametrize(("extra", "fits"), [(-1, True), (0, True), (1, False)])
def test_prompts_around_the_context(engine: Engine, extra: int, fits: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ids = [65] * (engine.max_context + extra)
    params = engine.sampling({"ignore_eos": True})
    if fits:
        pieces = list(engine.submit(engine.plain_request(ids, params)))
        assert pieces[-1].finish == "length"
        assert len(pieces) == 1 - extra
        told = "the context of 512 positions is full; raise --max-context, the model allows 1,024"
        assert [record.message for record in caplog.records if "is full" in record.message] == [told]
    else:
        with pytest.raises(RequestError, match="513 tokens, the context holds 512") as caught:
            engine.plain_request(ids, params)
        assert caught.value.http_status == 400
        assert caught.value.hint == "shorten the prompt or raise --max-context, the model allows 1,024"


def test_the_models_whole_context_leaves_nothing_to_raise(
    packs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with load(packs["default"], max_context=1024) as engine:
        with pytest.raises(RequestError) as caught:
            engine.plain_request([65] * 1025, engine.sampling())
        assert caught.value.hint == "shorten the prompt"
        for asked, lines in ((1, []), (2, ["the context of 1,024 positions is full"])):
            caplog.clear()
            list(
                engine.submit(
                    engine.plain_request([65] * 1024, engine.sampling({"max_tokens": asked, "ignore_eos": True}))
                )
            )
            assert [record.message for record in caplog.records if "is full" in record.message] == lines


def test_cancelling_during_prompt_and_answer(engine: Engine) -> None:
    params = engine.sampling({"max_tokens": 50, "ignore_eos": True})
    cancellation = Cancellation()
    cancellation.cancel()
    assert [
        piece.finish for piece in engine.submit(engine.plain_request("x" * 300, params), cancellation=cancellation)
    ] == ["cancelled"]
    cancellation = Cancellation()
    pieces = []
    for piece in engine.submit(engine.plain_request("x", params), cancellation=cancellation):
        pieces.append(piece)
        if len(pieces) == 3:
            cancellation.cancel()
    assert pieces[-1].finish == "cancelled"
    assert len(pieces) == 4
    assert "".join(engine.generate("x", max_tokens=3, ignore_eos=True)) is not None
    assert engine.statistics().cancelled == 2


def test_requests_wait_their_turn_and_equal_solo_runs(engine: Engine) -> None:
    def run(length: int) -> list[int]:
        request = engine.plain_request([70 + length] * length, engine.sampling({"max_tokens": 8, "ignore_eos": True}))
        return [piece.choice.token for piece in engine.submit(request) if piece.choice]

    solo = [run(length) for length in range(1, 9)]
    together: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda n=n: together.update({n: run(n)})) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[n] for n in range(1, 9)] == solo


def test_an_abandoned_answer_does_not_block_the_next(engine: Engine) -> None:
    request = engine.plain_request("x", engine.sampling({"max_tokens": 50, "ignore_eos": True}))
    pieces = engine.submit(request)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert "".join(engine.generate("y", max_tokens=2, ignore_eos=True)) is not None


def test_closing_in_the_middle_of_an_answer(packs: dict[str, Path]) -> None:
    engine = load(packs["default"])
    pieces = engine.submit(engine.plain_request("x", engine.sampling({"max_tokens": 50, "ignore_eos": True})))
    next(pieces)
    engine.close()
    with pytest.raises(EngineError, match="closed in the middle"):
        next(pieces)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        next(engine.submit(engine.plain_request("x", engine.sampling())))


def test_logits_that_are_not_finite_end_the_request(engine: Engine) -> None:
    weight = next(value for name, value in engine.model.dense().items() if name.endswith("norm.weight"))
    assert isinstance(weight, torch.Tensor)
    kept = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        list(engine.generate("x", max_tokens=40))
    weight.copy_(kept)
    assert "".join(engine.generate("x", max_tokens=3, ignore_eos=True)) is not None
    assert engine.statistics().failed == 1


@pytest.mark.parametrize("ids", [[-1], [5000]])
def test_ids_outside_the_vocabulary(engine: Engine, ids: list[int]) -> None:
    with pytest.raises(RequestError, match="not in the vocabulary of 272"):
        engine.plain_request(ids, engine.sampling())


def test_a_checkpoint_is_packed_once_and_opened_from_there(checkpoint: Path, home: Path) -> None:
    with load(checkpoint) as engine:
        text = "".join(engine.generate("x", max_tokens=4, ignore_eos=True))
    made = [path for path in (home / "models").iterdir() if path.name.startswith(checkpoint.name)]
    assert len(made) == 1
    with load(checkpoint) as engine:
        assert text == "".join(engine.generate("x", max_tokens=4, ignore_eos=True))
    with load(Path(made[0].name)) as engine:
        assert text == "".join(engine.generate("x", max_tokens=4, ignore_eos=True))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device": "cuda"}, ConfigError, "use --device cpu"),
        ({"max_context": 4096}, ConfigError, "4,096 is more than the 1,024 positions"),
        ({"ram_gib": 0.001}, MemoryPlanError, "too few"),
        ({"vram_gib": 0.00001}, MemoryPlanError, "too few"),
        ({"vram_gib": 0.02, "expert_cache": 100000}, MemoryPlanError, "expert"),
    ],
)
def test_refusals_name_numbers_and_the_way_out(
    packs: dict[str, Path], options: dict[str, object], error: type[Exception], words: str
) -> None:
    if "expert_cache" in options:
        options = {**options, "vram_gib": 0.0015}
    with pytest.raises(error) as caught:
        load(packs["default"], **options).close()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_model_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model"):
        load(tmp_path / "absent")


def test_a_bias_for_no_token_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="logit_bias names token 5000, the vocabulary has 272 ids"):
        engine.plain_request("x", engine.sampling({"logit_bias": {5000: 1.0}}))
