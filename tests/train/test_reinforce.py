"""Learning from good and bad answers: what an answer is worth, that text alone decides its log-probabilities, that the
step makes what is good likelier, and the command's files, seeds and refusals."""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.small_sizes import SMALL

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

import reinforce
from card import words_of_rounds
from checkpoint import config_of, export
from curve import joined
from measure import Measures
from model import Config, TrainModel
from pack import Encoder, retrieval_words
from reinforce import Policy, Reinforcer, pieces
from rounds import Answering, Judge, Limits, Prompts, Text, advantages, is_hollow, rate_good, summary
from sample import Ask, write
from stepwise import Stepwise
from train import TINY

SHIPPED = Path(__file__).parents[2] / "src" / "strata" / "data" / "small"
FUNCTION = 'def area{}(self, wide=3):\n    """Says how large."""'
BODY = "    return wide * self.deep"


@pytest.fixture
def model() -> TrainModel:
    """A model whose every weight matters."""
    torch.set_num_threads(1)
    found = TrainModel(Config(**SMALL))
    found.initialise(3)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if not name.endswith(("A_log", "dt_bias", "conv1d.weight")) and "norm" not in name:
                p.mul_(3.0)
    return found


def text(asked: Sequence[int], said: Sequence[int], good: bool = False, advantage: float = 0.0) -> Text:
    return Text(Ask("", list(asked), True), list(said), True, good, advantage)


def test_an_answer_is_worth_how_much_better_it_is_than_the_others_of_its_prompt() -> None:
    found = advantages(np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=np.float64))
    assert found[0] == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)])
    assert not found[1:3].any()
    assert found[3].tolist() == [1, 1, -1, -1]
    texts = [text([1, 2], [3], good) for good in (True, False, True, True)]
    rate_good(texts, 2)
    assert [t.advantage for t in texts] == [1, -1, 0, 0]


def test_pieces_hold_every_text_once_in_few_even_parts_of_like_length() -> None:
    texts = [text([1] * (2 + n * 7 % 120), [2] * 5) for n in range(50)]
    assert [sorted(map(len, texts))] == [[len(t) for t in piece] for piece in pieces(texts, 50 * 128)]
    found = list(pieces(texts, 2000))
    assert [len(t) for piece in found for t in piece] == sorted(map(len, texts))
    assert all(len(piece) * 128 <= 2000 or max(map(len, piece)) <= 65 for piece in found)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert [len(piece) for piece in pieces(texts, 1)] == [1] * 50


def test_log_probabilities_are_of_the_text_alone_and_of_what_sampled_it(model: TrainModel) -> None:
    """Neither the texts beside it nor the padding change a text's; step by step they are the same."""
    prompts = [[5, 6, 7], list(range(20, 90)), [250, 9, 9, 4]]
    found, _ = write(model, prompts, 24, [11, 12, 13], 0.8, torch.Generator().manual_seed(2), math.inf)
    texts = [text(prompt, said) for prompt, said in zip(prompts, found, strict=True)]
    policy = Policy(model, 0.8, 0.2)
    with torch.no_grad():
        together = policy.log_probabilities(texts).split([len(t.said) for t in texts])
        for one, part in zip(texts, together, strict=True):
            assert torch.allclose(policy.log_probabilities([one]), part, atol=2e-4)
            ids, steps = torch.tensor([[*one.ask.ids, *one.said]]), Stepwise(model, 1, len(one))
            logits = [model.logits(steps.streams(ids))[0, 0] for _ in range(len(one) - 1)]
            each = [(row / 0.8).log_softmax(-1)[i] for row, i in zip(logits[-len(one.said) :], one.said, strict=True)]
            assert torch.allclose(torch.stack(each), part, atol=2e-4)
    assert len({len(t.said) for t in texts}) > 1 or len(texts[0].said) == 24


def test_of_the_same_weights_the_ratio_is_one_and_the_loss_is_the_worth(model: TrainModel) -> None:
    texts = [text([4, 5, 6], [7, 8, 9], True, 2.0), text([4, 5, 6], [3], False, -1.0)]
    policy = Policy(model, 0.8, 0.2)
    with torch.no_grad():
        for one in texts:
            one.before = policy.log_probabilities([one])
        loss, draft, figures = policy.losses(texts)
        assert float(loss) == pytest.approx(-(3 * 2.0 - 1.0), abs=1e-3)
        assert float(draft) > 0
        assert float(figures.abs().sum()) < 1e-3
        assert float(policy.losses(texts[1:])[1]) == 0, "a bad answer teaches no drafts"
        texts[0].before -= math.log(1.5)  # much likelier than it was, and good: the ratio is held at 1.2
        loss, _, figures = policy.losses(texts)
    assert float(loss) == pytest.approx(-(3 * 2.0 * 1.2 - 1.0), abs=2e-3)
    assert figures[:2].tolist() == pytest.approx([1.5, 3.0], abs=2e-3)


def test_drafts_of_good_answers_are_those_of_the_trainers_forward(model: TrainModel) -> None:
    one, policy = text([4, 5, 6, 7], [8, 9, 10, 11, 12], True, 1.0), Policy(model, 1.0, 0.2)
    window = torch.zeros(1, 66, dtype=torch.long)
    window[0, :9] = torch.arange(4, 13)
    weights = torch.zeros(1, 66)
    weights[0, 4:9] = 64.0
    with torch.no_grad():
        one.before = policy.log_probabilities([one])
        out = model(window, torch.tensor([0, 16]), 0.3, weights)
        assert float(policy.losses([one])[1]) == pytest.approx(float(out.draft), rel=1e-4)
        assert float(-one.before.sum()) == pytest.approx(float(out.main), rel=1e-4)


def test_steps_make_what_is_good_likelier() -> None:
    """Toy reward: the first id is small. Of untrained answers half have it, after a few rounds nearly all."""
    torch.set_num_threads(1)
    fresh = TrainModel(Config(**SMALL))
    fresh.initialise(3)
    policy, generator = Policy(fresh, 1.0, 0.2), torch.Generator().manual_seed(4)
    optimiser, shares = torch.optim.AdamW(fresh.parameters(), lr=2e-2), []
    prompts = [[5 + n, 6, 7] for n in range(4) for _ in range(8)]
    for _ in range(8):
        found, _ = write(fresh, prompts, 1, [], 1.0, generator, math.inf)
        texts = [text(prompt, said, said[0] < 128) for prompt, said in zip(prompts, found, strict=True)]
        rate_good(texts, 8)
        shares.append(sum(t.good for t in texts) / len(texts))
        with torch.no_grad():
            for one, part in zip(texts, policy.log_probabilities(texts).split(1), strict=True):
                one.before = part
        for _ in range(2):
            optimiser.zero_grad()
            (policy.losses(texts)[0] / len(texts)).backward()
            optimiser.step()
    assert shares[0] < 0.65
    assert sum(shares[-3:]) > 2.7, shares


def test_a_text_may_be_greedy_beside_sampled_ones(model: TrainModel) -> None:
    prompts, generator = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7]], torch.Generator()
    alone, _ = write(model, prompts, 12, [], 0.0, generator, math.inf)
    mixed, _ = write(model, prompts, 12, [], [0.0, 0.0, 5.0], generator.manual_seed(1), math.inf)
    assert mixed[:2] == alone[:2]
    assert mixed[2] != alone[2]


def pairs(count: int) -> list[tuple[Ask, Ask]]:
    return [(Ask(f"{n}", [1] * (n + 1), True), Ask(f"{n}", [1] * n, False)) for n in range(count)]


def test_functions_are_drawn_in_turn_and_those_kept_aside_never() -> None:
    prompts = Prompts(pairs(30), 24, 4, 2 / 3, 5)
    assert len(prompts) == 20
    assert len({ask.text for ask in prompts.kept}) == 4
    assert sum(ask.chat for ask in prompts.kept) == 4
    drawn = [*prompts.draw(12), *prompts.draw(8)]
    assert len({ask.text for ask in drawn}) == 20
    assert not {ask.text for ask in drawn} & {ask.text for ask in prompts.kept}
    assert sum(ask.chat for ask in prompts.draw(300)) == 200
    assert all(len(ask.ids) <= 24 for ask in drawn)
    assert prompts.kept == Prompts(pairs(30), 24, 4, 2 / 3, 5).kept
    with pytest.raises(ValueError, match="keep fewer"):
        Prompts(pairs(3), 24, 3, 0.5, 5)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(SHIPPED)


@pytest.mark.parametrize("processes", [0, 2])
def test_answers_are_judged_by_form_and_limit(encoder: Encoder, processes: int) -> None:
    words: Any = argparse.Namespace(stop=encoder.special["<|im_end|>"], end=encoder.special["<|endoftext|>"])
    holder: Any = argparse.Namespace(lm_head=argparse.Namespace(weight=torch.zeros(1)))
    asked = FUNCTION.format("")
    whole, body = encoder.one(f"def area(self, wide=3):\n{BODY}"), encoder.one(f"{BODY}\n")
    chat, plain = Ask(asked, [1], True), Ask(asked, [1], False)
    cases = [
        (chat, [*whole, words.stop], True, True),
        (chat, [*whole, words.end], False, False),  # another end than a chat's
        (chat, whole, False, False),
        (chat, [*whole[:-1], *encoder.one("("), words.stop], True, False),
        (plain, [*body, words.end], True, True),
        (plain, [*whole, words.end], True, False),
        (plain, [], False, False),
    ]
    with Judge(processes) as judge:
        answering = Answering(holder, encoder, words, judge, Limits(30, 20), 1)
        texts = answering.judged([ask for ask, *_ in cases], [said for _, said, *_ in cases])
    assert [(t.ended, t.good) for t in texts] == [(ended, good) for *_, ended, good in cases]
    assert summary(texts) == {
        "chats_good": 25.0, "chats_end": 50.0, "chats_ids": round(sum(len(c[1]) for c in cases[:4]) / 4, 1),
        "completions_good": 33.33, "completions_end": 66.67,
        "completions_ids": round(sum(len(c[1]) for c in cases[4:]) / 3, 1),
    }  # fmt: skip


def test_a_hollow_answer_says_much_less_than_the_text() -> None:
    chat, plain, long = Ask("", [1], True, 10, 30), Ask("", [1], False, 0, 30), Ask("", [1], False, 0, 300)
    assert [is_hollow(chat, [7] * n) for n in (16, 17)] == [True, False]
    assert [is_hollow(plain, [7] * n) for n in (6, 7)] == [True, False]
    assert [is_hollow(long, [7] * n) for n in (10, 11)] == [True, False]
    assert not is_hollow(Ask("", [1], True), [7])


def tokens_folder(folder: Path, encoder: Encoder) -> Path:
    """As pack.py writes it, of a few functions."""
    folder.mkdir()
    end = encoder.special["<|endoftext|>"]
    asked = [FUNCTION.format(n) for n in range(12)]
    chat = []
    for number, question in enumerate(asked):
        said = [("user", question), ("assistant", f"def area{number}(self, wide=3):\n{BODY}")]
        chat += [i for role, what in said for i in encoder.message(role, encoder.one(what))][:-1]
        chat.append(end)
    code = [i for question in asked for i in encoder.one(f"{question}\n{BODY}\n\n\nx = [1, 2]\n")] * 4 + [end]
    for name, ids in (("code-0", code), ("chat", chat), ("heldout", code)):
        (folder / f"{name}.u16.xz").write_bytes(lzma.compress(np.array(ids, dtype="<u2").tobytes(), preset=0))
    said = {"open": '["', "set": '"] = "', "is": '"] == "', "close": '"\n', "assert": "assert", "newline": "\n"}
    meta = {
        "heldout_bytes": 4 * len(code), "completions": [], "special": encoder.special,
        "retrieval": {"words": retrieval_words(encoder), "pieces": {n: encoder.one(t) for n, t in said.items()},
                      "tables": [[encoder.one("TABLE"), encoder.one(" TABLE")]]},
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "tokenizer.json").write_bytes((SHIPPED / "tokenizer.json").read_bytes())
    return folder


def options(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> argparse.Namespace:
    paths = [f"--{name}={folder / name}" for name in ("tokens", "weights", "state", "out")]
    given = ("--seconds=100", "--rounds=2", "--texts=16", "--tries=4", "--steps=2", "--aside=2", "--judges=0",
             "--rows=3", "--mix=code=1,chat=1,retrieval=1", "--length=128", "--chat-limit=6", "--completion-limit=5",
             "--eval-windows=1", "--cpu")  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["reinforce.py", *paths, *given, *more])
    found = reinforce.arguments()
    found.tiny = True  # a rehearsal of train.py's
    return found


@pytest.fixture
def folder(tmp_path: Path, encoder: Encoder) -> Path:
    torch.set_num_threads(1)
    tokens = tokens_folder(tmp_path / "tokens", encoder)
    config = config_of(json.loads((tokens / "meta.json").read_text()))
    tiny = TrainModel(Config(**{**config.to_dict(), "eos": config.eos, **TINY}))
    tiny.initialise(2)
    export(tiny, tmp_path / "weights")
    (tmp_path / "weights" / "figures.json").write_text('{"step": 3}')
    return tmp_path


def evens(self: Answering, batch: Sequence[Ask], said: Sequence[list[int]]) -> list[Text]:
    return [Text(ask, ids, True, ids[0] % 2 == 0) for ask, ids in zip(batch, said, strict=True)]


def timeless(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if "seconds" not in k and k != "rate"} for e in entries]


def test_a_run_writes_its_files_and_one_seed_gives_one_first_round(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answering, "judged", evens)
    monkeypatch.setattr(Measures, "retrieval", lambda self: {})  # seconds, and nothing to remember
    args = options(monkeypatch, folder)
    first = Reinforcer(args, Judge(0))
    first.run()
    first.finish()
    rounds = [json.loads(line) for line in (folder / "out" / "rounds.jsonl").read_text().splitlines()]
    assert [e["round"] for e in rounds] == [0, 1, "end"]
    assert {"greedy", "chats_good", "completions_ids", "log_probability", "policy_norm", "ratio_off"} <= set(rounds[0])
    assert "greedy" not in rounds[1]
    assert rounds[-1]["greedy"]["chats_ids"] <= 6
    assert rounds[-1]["greedy"]["completions_ids"] <= 5
    log = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    assert [e["step"] for e in log] == [1, 2, 3, 4]
    assert log[0]["ratio_off"] < 1e-4 < log[1]["ratio_off"]
    figures = json.loads((folder / "out" / "figures.json").read_text())
    assert figures["before"] == {"step": 3}
    assert figures["reinforced"]["rounds"] == 2
    assert figures["bits_per_byte"] > 0
    assert sorted(p.name for p in (folder / "out").glob("model*")) == sorted(
        p.name for p in (folder / "weights").glob("model*")
    )
    args.state = folder / "other"
    second = Reinforcer(args, Judge(0))
    was = {name: p.clone() for name, p in second.model.named_parameters()}
    assert timeless([second.round(time.perf_counter())]) == timeless(rounds[:1])
    same = {name for name, p in second.model.named_parameters() if torch.equal(p, was[name])}
    assert same == {name for name in was if ".mlp.experts." in name}
    args.state = folder / "state"
    with pytest.raises(SystemExit, match="an empty folder"):
        Reinforcer(args, Judge(0))


def test_a_round_with_nothing_to_learn_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Reinforcer(options(monkeypatch, folder, "--measure-every=1"), Judge(0))
    before = trainer.model.lm_head.weight.clone()
    entry = trainer.round(0.0)  # no answer of an untrained model is a function
    assert entry["learned_percent"] == 0
    assert entry["greedy"]["chats_good"] == 0
    assert torch.equal(trainer.model.lm_head.weight, before)


def test_a_loss_that_is_not_finite_ends_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "judged", evens)
    trainer = Reinforcer(options(monkeypatch, folder), Judge(0))
    with torch.no_grad():
        trainer.model.mtp.fc.weight[0, 0] = math.nan
    with pytest.raises(SystemExit, match="step 1 is not finite"):
        trainer.round(0.0)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--texts=15", "a multiple"),
        ("--tries=1", "at least two tries"),
        ("--steps=0", "above zero"),
        ("--chats=1.5", "a share"),
        ("--clip=1", "below 1"),
        ("--temperature=0", "above zero"),
        ("--aside=-1", "below zero"),
        ("--rounds=0", "at least one"),
        ("--seed=1", "no meta.json in it"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        options(monkeypatch, tmp_path, option)


def test_a_measure_of_nothing_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="means nothing with --aside 0"):
        options(monkeypatch, tmp_path, "--aside=0", "--measure-every=2")


def test_a_run_without_a_step_ends_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Reinforcer(options(monkeypatch, folder, "--wall=0"), Judge(0))
    with pytest.raises(SystemExit, match="no step was taken"):
        trainer.run()
    assert not (folder / "out" / "figures.json").exists()


def test_the_card_says_what_rounds_were() -> None:
    given = {"rounds": 6, "texts": 8192, "tries": 8, "steps": 12, "experts": False}
    words = " ".join(words_of_rounds(given).split())
    assert "In each of 6 rounds it gave 8,192 answers to 1,024 functions of the training text" in words
    assert words.endswith("The routed experts stayed as they were.")
    assert "experts" not in words_of_rounds(given | {"experts": True})


def test_logs_of_parts_are_one_curve() -> None:
    found = joined([[{"step": 1, "main": 9.0}, {"step": 2, "main": 8.0}], [{"step": 1, "main": 7.0}]])
    assert [(e["step"], e["main"]) for e in found] == [(1, 9.0), (2, 8.0), (3, 7.0)]


@pytest.mark.parametrize(
    ("option", "said"), [("--aside=12", "keep fewer than 12"), ("--mix=code=1", "make them equal")]
)
def test_what_does_not_fit_the_text_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str, said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        Reinforcer(options(monkeypatch, folder, option), Judge(0))
