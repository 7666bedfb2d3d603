"""Kept answers: what counts as good, what is written and learned, and that the stepwise model is the whole one."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.small_sizes import SMALL

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

import sample
from answers import Answer, Answers, read_answers, write_answers
from functions import Lexicon
from model import Config, TrainModel
from pack import Encoder
from sample import Ask, asks, is_good, write
from stepwise import Stepwise
from subject import Subject

SPECIAL = {"<|endoftext|>": 1, "<|im_start|>": 2, "<|im_end|>": 3}
SHIPPED = Path(__file__).parents[2] / "src" / "strata" / "data" / "small"
TEXT = 'def area(self, wide=3):\n    """Says how large."""'
GOOD = "    return wide * self.deep"


@pytest.fixture(scope="module")
def model() -> TrainModel:
    """A model whose every weight matters."""
    torch.set_num_threads(1)
    found = TrainModel(Config(**SMALL | {"delta_value_heads": 4, "delta_key_heads": 2}))
    found.initialise(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if "norm" in name or name.endswith("conv1d.weight"):
                p.add_(torch.empty(p.shape).normal_(0.0, 0.2, generator=generator))
            elif not name.endswith(("A_log", "dt_bias")):
                p.mul_(3.0)
    return found


@pytest.fixture
def words() -> Lexicon:
    vocabulary = {p: i for i, p in enumerate(("Ċ", "Ġ", "def", *"0123456789"), 4)}
    return Lexicon(vocabulary, SPECIAL)


@torch.no_grad()
def test_step_by_step_is_the_whole_forward_and_texts_may_leave(model: TrainModel) -> None:
    ids = torch.randint(0, 250, (5, 128), generator=torch.Generator().manual_seed(5))
    ids[0, 60] = ids[3, 7] = 250  # an end token: n-grams restart there
    whole = model.logits(model.hidden(ids, torch.tensor([0]))[0])
    steps, rows = Stepwise(model, 5, 128), torch.arange(5)
    for place in range(128):
        if place == 70:
            rows = torch.tensor([0, 2, 4])
            steps.keep(rows)
        found = model.logits(steps.streams(ids[rows])).squeeze(1)
        expected = whole[rows, place]
        assert float((found - expected).abs().max() / expected.abs().max()) < 2e-4


def plain(model: TrainModel, prompt: list[int], most: int, stops: list[int]) -> list[int]:
    """The greedy continuation, each token by a whole forward of one text."""
    ids = list(prompt)
    while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or ids[-1] not in stops):
        padded = ids + [0] * (-len(ids) % 64)
        x, _ = model.hidden(torch.tensor([padded]), torch.tensor([0]))
        ids.append(int(model.logits(x)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def test_greedy_answers_of_many_prompts_are_those_of_each_alone(model: TrainModel) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(250) for _ in range(rng.randrange(2, 30))] for _ in range(9)]
    alone = [plain(model, prompt, 24, []) for prompt in prompts]
    stops = [said[4] for said in alone[:6]]  # most of them end early, at different places, so that texts leave
    alone = [plain(model, prompt, 24, stops) for prompt in prompts]
    found, computed = write(model, prompts, 24, stops, 0.0, torch.Generator(), math.inf)
    assert found == alone
    assert len({len(said) for said in alone}) > 2
    assert computed < len(prompts) * (max(map(len, prompts)) + 23)


def test_sampled_answers_differ_and_a_deadline_ends_them(model: TrainModel) -> None:
    prompts = [[5, 6, 7]] * 6
    found, _ = write(model, prompts, 16, [], 0.7, torch.Generator().manual_seed(1), math.inf)
    again, _ = write(model, prompts, 16, [], 0.7, torch.Generator().manual_seed(1), math.inf)
    assert found == again
    assert len({tuple(said) for said in found}) > 1
    assert all(len(said) == 16 for said in found)
    cut, _ = write(model, prompts, 16, [], 0.7, torch.Generator().manual_seed(1), time.perf_counter())
    assert all(len(said) < 16 for said in cut)


@pytest.mark.parametrize(
    ("chat", "said", "good"),
    [
        (True, f"def area(self, wide=3):\n{GOOD}", True),
        (True, f"def volume(self, wide=3):\n{GOOD}", False),
        (True, f"def area(self, wide=4):\n{GOOD}", False),
        (True, f"def area(self, wide=3):\n{GOOD}\n\nprint(3)", False),
        (True, f"async def area(self, wide=3):\n{GOOD}", False),
        (True, "def area(self, wide=3):\n    return (wide", False),
        (True, "def area(self, wide=3):\n    pass", False),
        (True, "def area(self, wide=3):\n    wide += 1\n    wide += 1", False),
        (True, "def area(self, wide=3):\n    a = wide\n    a.b()\n    a = wide\n    a.b()", False),
        (True, "def area(self, wide=3):\n    a = wide\n    a.b()\n    a = wide", True),
        (True, "def area(self, wide=3):\n    return self.one(a=wide, a=wide)", False),
        (True, "", False),
        (False, f"{GOOD}\n", True),
        (False, "", False),
        (False, f"{GOOD}\nx = 3\n", False),
        (False, "    if wide:\n", False),
    ],
)
def test_what_is_good(chat: bool, said: str, good: bool) -> None:
    assert is_good(Ask(TEXT, [], chat), said) == good


def test_a_file_gives_back_what_was_kept(tmp_path: Path) -> None:
    kept = [Answer([4, 5], [6, 3], True), Answer([8000], [7, 8, 1], False)]
    write_answers(tmp_path / "answers.npz", kept)
    assert read_answers(tmp_path / "answers.npz") == kept
    write_answers(tmp_path / "none.npz", [])
    assert read_answers(tmp_path / "none.npz") == []


def test_of_a_document_the_answer_and_its_end_are_learned(words: Lexicon) -> None:
    chat, completion = Answer([2, 9, 3], [10, 11, 3], True), Answer([9, 4], [12, 1], False)
    drawn = [Answers([chat, completion], words).document(random.Random(seed)) for seed in range(200)]
    assert {tuple(ids) for ids, _ in drawn} == {(2, 9, 3, 10, 11, 3, 1), (9, 4, 12, 1)}
    for ids, learned in drawn:
        assert learned == ([False] * 3 + [True] * 3 + [False] if len(ids) == 7 else [False] * 2 + [True] * 2)
    assert 60 < sum(len(ids) == 7 for ids, _ in drawn) < 140
    easy = Answers([completion], words)
    assert {tuple(easy.document(random.Random(seed))[0]) for seed in range(20)} == {(9, 4, 12, 1)}
    with pytest.raises(ValueError, match="no answer"):
        Answers([], words)


@pytest.mark.parametrize("share", ["1/3", "1/2", "0.6", "0", "1"])
def test_every_function_is_asked_for_in_both_forms_once(share: str) -> None:
    pairs: list[Any] = [(Ask(f"{n}", [0] * (n % 7), True), Ask(f"{n}", [0] * (n % 7), False)) for n in range(50)]
    cut = list(sample.batches(pairs, 8, random.Random(1), Fraction(share)))
    assert all(len({ask.chat for ask in batch}) == 1 and len(batch) <= 8 for batch in cut)
    assert sorted((ask.text, ask.chat) for batch in cut for ask in batch) == sorted(
        (ask.text, ask.chat) for pair in pairs for ask in pair
    )
    first = [ask for batch in cut for ask in batch][:50]
    assert len({ask.text for ask in first}) == 50
    assert sum(not ask.chat for ask in first) == -(-50 * Fraction(share) // 1)
    if share == "1/3":
        assert cut == list(sample.batches(pairs, 8, random.Random(1))), "the default"


def test_prompts_are_what_the_engine_writes_for_a_function() -> None:
    """In both forms, from a stream as pack.py writes it: a question with words before it, two in a conversation."""
    encoder = Encoder(SHIPPED)
    vocabulary = json.loads((SHIPPED / "tokenizer.json").read_text())["model"]["vocab"]
    words = Lexicon(vocabulary, encoder.special)
    other = 'async def _get2(  x, *, y: "str" = \'a\') -> None:\n    """\n    Gets   it.\n\n    """'
    answers = [text.split("\n")[0] + f"\n{GOOD}" for text in (TEXT, other)]
    said = [("user", f"Write this function.\n\n{TEXT}"), ("assistant", answers[0]),
            ("user", other), ("assistant", answers[1])]  # fmt: skip
    stream = [i for role, text in said for i in encoder.message(role, encoder.one(text))][:-1]
    stream = [*stream, words.end]
    pairs = asks(np.array(stream * 2, dtype=np.uint16), words, encoder)
    assert [(chat.text, plain.text) for chat, plain in pairs] == [(TEXT, TEXT), (other, other)]
    with Subject(SHIPPED) as subject:
        text = subject.opened.text
        for chat, completion in pairs:
            assert chat.ids == list(text.chat([{"role": "user", "content": chat.text}]).ids)
            assert completion.ids == list(text.tokenizer.encode(completion.text + "\n"))
