"""Rows of functions: what they hold, what of them is learned, and that processes share a batch without loss."""

from __future__ import annotations

import json
import lzma
import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

import functions
from answers import Answer, write_answers
from data import Batches, read_mix, turns
from functions import ChatPairs, CodeFunctions, Lexicon, stutter
from model import Config, TrainModel

SPECIAL = {"<|endoftext|>": 1, "<|im_start|>": 2, "<|im_end|>": 3}
PIECES = r"\n+|(?<=\n) +| ?[a-z_]+|[0-9]| ?[^\sa-z_0-9]|\s"

QUESTION = 'def area(self, wide):\n    """Says how\n    large it is."""'
BODY = "    if wide > 3:\n        return 4\n    for row in self:\n        wide += row\n    return wide"
CODE = '''import this

class Shape:
    def area(
        self, wide
    ):
        """Says how."""
        if wide > 3:
            return 4

        return wide

    size = 3

def last(one):
    return one.two.three(one) + one.four(one) + one
'''


class Words:
    """A vocabulary that grows with what is written in it, in the manner of the trained tokenizer."""

    def __init__(self) -> None:
        self.vocabulary: dict[str, int] = {}
        self.texts = {i: t for t, i in SPECIAL.items()}
        for piece in ("\n", "\n\n", *(" " * n for n in range(1, 24)), *"0123456789", "def"):
            self.encode(piece if piece.strip() else f"\n{piece}")
        self.encode("\n".join((QUESTION, BODY, CODE)))

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in re.findall(PIECES, text):
            name = piece.replace("\n", "Ċ").replace(" ", "Ġ")
            ids.append(self.vocabulary.setdefault(name, len(self.vocabulary) + 10))
            self.texts[ids[-1]] = piece
        assert "".join(self.texts[i] for i in ids) == text
        return ids

    def body(self, text: str) -> list[int]:
        """As it is after a newline, where an indentation is one piece."""
        return self.encode(f"\n{text}")[1:]

    def decode(self, ids: Any) -> str:
        return "".join(self.texts[int(i)] for i in ids)

    @property
    def lexicon(self) -> Lexicon:
        return Lexicon(self.vocabulary, SPECIAL)

    def message(self, role: str, content: str) -> list[int]:
        return [2, *self.encode(f"{role}\n{content}"), 3, *self.encode("\n")]

    def chats(self) -> np.ndarray:
        """One conversation with a system line and a request in words, and one of two exchanges."""
        answer = f"def area(self, wide):\n{BODY}"
        turn = self.message("user", QUESTION) + self.message("assistant", answer)
        asked = self.message("user", f"Fill in the body.\n\n{QUESTION}")
        first = [*self.message("system", "You help."), *asked, *self.message("assistant", answer)]
        return np.array([*first[:-1], 1, *turn, *turn[:-1], 1], dtype=np.uint16)


@pytest.fixture(scope="module")
def words() -> Words:
    return Words()


@pytest.fixture
def folder(words: Words, tmp_path: Path) -> Path:
    streams = {"code-0": np.array([*words.encode(CODE), 1] * 20), "chat": np.concatenate([words.chats()] * 9)}
    for name, ids in streams.items():
        (tmp_path / f"{name}.u16.xz").write_bytes(lzma.compress(ids.astype("<u2").tobytes()))
    pieces = {"open": '["', "set": '"] = "', "is": '"] == "', "close": '"\n', "assert": "assert", "newline": "\n"}
    encoded = {name: words.encode(text) for name, text in pieces.items()}
    names = [[words.encode(f"w{i}"), words.encode(f"_w{i}")] for i in range(10)]
    tables = [[words.encode("names"), words.encode(" names")]]
    facts = {"words": names, "pieces": encoded, "tables": tables}
    (tmp_path / "meta.json").write_text(json.dumps({"special": SPECIAL, "retrieval": facts}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words.vocabulary}}))
    return tmp_path


def runs(learned: list[bool]) -> list[tuple[int, int]]:
    """(begin, end) of each stretch that is not learned."""
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(learned), 1) if a != b), len(learned)]
    return [(a, b) for a, b in pairwise(edges) if not learned[a]]


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 10**6))
def test_what_a_stutter_learns_is_the_true_body_and_copies_stand_behind_their_original(seed: int) -> None:
    words = Words()
    lexicon = words.lexicon
    lines = lexicon.lines(words.body(BODY.replace("3", "x").replace("4", "y") + "\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "DEEPER", 0.0)
        ids, learned = stutter(lines, random.Random(seed), lexicon)
    assert [i for i, known in zip(ids, learned, strict=True) if known] == [i for line in lines for i in line]
    for begin, end in runs(learned):
        copies = ids[begin:end]
        periods = [p for p in range(1, begin + 1) if ids[begin - p : end - p] == copies and (end - begin) % p == 0]
        assert periods, words.decode(copies)


def test_copies_may_count_up_or_go_deeper(words: Words) -> None:
    lexicon = words.lexicon
    lines = lexicon.lines(words.body("    if wide > 3:\n        return wide\n"))
    texts = [words.decode(stutter(lines, random.Random(seed), lexicon)[0]) for seed in range(3000)]
    assert any("    if wide > 3:\n    if wide > 4:\n    if wide > 5:\n" in t for t in texts)
    assert any("    if wide > 3:\n        if wide > 3:\n            if wide > 3:\n" in t for t in texts)


@pytest.mark.parametrize(
    ("text", "balanced"),
    [
        ("f(a, b)", True),
        ("f(a", False),
        ("a)", False),
        ("(]", False),
        ("[(x)]{}", True),
        ("'a' + \"b\"", True),
        ("'a", False),
    ],
)
def test_brackets_and_quotes_of_a_piece(text: str, balanced: bool) -> None:
    words = Words()
    ids = words.encode(text)
    assert words.lexicon.is_balanced(ids) is balanced


def test_copies_leave_no_bracket_open(words: Words) -> None:
    body = words.body("    one = two(\n        three(one),\n        [wide],\n    )\n    return one\n")
    lexicon = words.lexicon  # of all pieces that the body has
    lines = lexicon.lines(body)
    copied = set()
    for seed in range(3000):
        ids, learned = stutter(lines, random.Random(seed), lexicon)
        copied |= {words.decode(ids[begin:end]) for begin, end in runs(learned)}
    assert [text for text in copied if text.count("(") != text.count(")")] == []
    assert any("two(" in text for text in copied), "a whole statement of several lines may be copied"


def test_a_function_of_a_pair_is_its_prompt_and_learns_its_body_and_end(words: Words) -> None:
    pairs = ChatPairs(words.chats(), words.lexicon)
    for seed in range(8):  # with and without a request in words, first and second exchanges
        ids, learned = pairs.function(random.Random(seed), 0.0)
        assert words.decode(ids) == f"{QUESTION}\n{BODY}\n<|endoftext|>"
        assert words.decode(i for i, known in zip(ids, learned, strict=True) if known) == f"{BODY}\n<|endoftext|>"


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_a_conversation_learns_what_the_assistant_says(words: Words, chance: float) -> None:
    pairs = ChatPairs(words.chats(), words.lexicon)
    seen = set()
    for seed in range(20):
        ids, learned = pairs.conversation(random.Random(seed), chance)
        if not chance:
            seen.add(tuple(ids))
        known = words.decode(i for i, k in zip(ids, learned, strict=True) if k)
        assert known in (f"def area(self, wide):\n{BODY}<|im_end|>" * n for n in (1, 2))
    if not chance:
        whole = words.decode(words.chats())
        assert {words.decode(ids) for ids in seen} == {t + "<|endoftext|>" for t in whole.split("<|endoftext|>")[:-1]}


def test_functions_of_the_code_are_dedented_and_whole(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "SHORTEST", 5)
    found = CodeFunctions(np.array([*words.encode(CODE), 1] * 2, dtype=np.uint16), words.lexicon)
    texts = {words.decode(found.function(random.Random(seed), 0.0)[0]) for seed in range(30)}
    method = (
        'def area(\n    self, wide\n):\n    """Says how."""\n    if wide > 3:\n        return 4\n\n    return wide\n'
    )
    plain = "def last(one):\n    return one.two.three(one) + one.four(one) + one\n"
    assert texts == {method + "<|endoftext|>", plain + "<|endoftext|>"}


def test_long_bodies_are_left_out(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "SHORTEST", 5)
    size = len(words.body(BODY))
    assert len(ChatPairs(words.chats(), words.lexicon, size).bounds) == 2
    assert len(ChatPairs(words.chats(), words.lexicon, size - 1).bounds) == 0
    last = CODE.rpartition("\n    ")[2]
    code = np.array([*words.encode(CODE), 1] * 2, dtype=np.uint16)
    found = CodeFunctions(code, words.lexicon, len(words.body(f"    {last}")))
    texts = {words.decode(found.function(random.Random(seed), 0.0)[0]) for seed in range(30)}
    assert texts == {f"def last(one):\n    {last}<|endoftext|>"}


def test_turns_are_first_learned_tokens_and_ends() -> None:
    ids = np.array([[5, 5, 6, 7, 7, 8, 1, 5, 1, 9]])
    learned = np.array([[0, 0, 1, 1, 0, 1, 1, 0, 0, 1]], dtype=bool)
    assert turns(ids, learned, [1, 3]).astype(int).tolist() == [[0, 0, 1, 0, 0, 1, 1, 0, 0, 1]]


def test_turns_weigh_more_and_the_mean_stays_one(folder: Path) -> None:
    mix = read_mix("code=1,chat=2,functions=2,retrieval=1", 6)
    plain, heavy = (Batches(folder, mix, 64, 7, group(0, 1), 0.5, turn=turn).batch(3) for turn in (1.0, 4.0))
    assert torch.equal(plain.windows, heavy.windows)
    assert plain.weights is not None
    assert heavy.weights is not None
    one, four = heavy.weights[0, 0], heavy.weights.max()  # code counts one each
    assert float(four / one) == pytest.approx(4.0)
    assert torch.equal(plain.weights > 0, heavy.weights > 0)
    assert float(heavy.weights[:, 1:-1].mean()) == pytest.approx(1.0)
    ends = torch.isin(heavy.windows, torch.tensor([1, 3])) & (heavy.weights > 0)
    assert bool((heavy.weights[1:][ends[1:]] == four).all())


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"))


@pytest.mark.parametrize("stutter_share", [0.0, 0.5])
def test_processes_make_the_rows_of_one_batch_between_them(folder: Path, stutter_share: float) -> None:
    mix = read_mix("code=2,chat=1,functions=3,retrieval=2", 8)
    alone = Batches(folder, mix, 64, 7, group(0, 1), stutter_share)
    shares = [Batches(folder, mix, 64, 7, group(rank, 4), stutter_share) for rank in range(4)]
    for step in (0, 1, 5):
        batch, parts = alone.batch(step), [b.batch(step) for b in shares]
        assert batch.windows.shape == (8, 66)
        rows = {tuple(row.tolist()) for row in batch.windows}
        assert {tuple(row.tolist()) for part in parts for row in part.windows} == rows
        assert all(len(part.windows) == 2 for part in parts)
        for part in (batch, *parts):
            assert part.weights is not None
            assert float(part.weights[:, 1:-1].mean()) == pytest.approx(1.0)
            assert len(part.weights.unique()) <= 2
    assert torch.equal(alone.batch(1).windows, Batches(folder, mix, 64, 7, group(0, 1), stutter_share).batch(1).windows)


def test_rows_of_kept_answers_are_learned_where_they_answer(folder: Path, tmp_path: Path) -> None:
    kept = [Answer([2, 9, 9, 3], [10, 11, 12, 3], True), Answer([9, 4], [12, 13, 1], False)]
    write_answers(tmp_path / "answers.npz", kept)
    mix = read_mix("code=2,answers=6", 8)
    batch = Batches(folder, mix, 64, 7, group(0, 1), answers=tmp_path / "answers.npz").batch(0)
    assert batch.weights is not None
    assert (batch.weights[:2] > 0).all()
    ids, learned = batch.windows[2:], batch.weights[2:] > 0
    assert len(ids) == 6
    assert set(ids[learned].tolist()) == {1, 3, 10, 11, 12, 13}
    assert set(ids[~learned].tolist()) == {1, 2, 3, 4, 9}
    shares = [Batches(folder, mix, 64, 7, group(rank, 4), answers=tmp_path / "answers.npz") for rank in range(4)]
    rows = [tuple(row.tolist()) for part in shares for row in part.batch(0).windows]
    assert sorted(rows) == sorted(tuple(row.tolist()) for row in batch.windows)
    short = Batches(folder, mix, 64, 7, group(0, 1), longest=3, answers=tmp_path / "answers.npz").batch(0)
    assert short.weights is not None
    assert set(short.windows[2:][short.weights[2:] > 0].tolist()) == {1, 12, 13}, "longer answers are left out"
    with pytest.raises(ValueError, match="--answers"):
        Batches(folder, mix, 64, 7, group(0, 1))


def test_the_first_parts_batches_have_no_weights(folder: Path) -> None:
    mix = read_mix(None, 16)
    assert mix == {"code": 12, "chat": 3, "functions": 0, "retrieval": 1, "answers": 0}
    assert Batches(folder, mix, 64, 7, group(0, 1)).batch(0).weights is None


@pytest.mark.parametrize("text", ["code=8", "code=8,prose=8", "code=8,chat=x"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--mix"):
        read_mix(text, 16)


def test_what_weighs_nothing_teaches_nothing() -> None:
    sizes: dict[str, Any] = {"vocabulary": 64, "hidden": 32, "layers": 4, "heads": 2, "head_width": 16, "kv_heads": 1,
                             "delta_key_heads": 1, "delta_value_heads": 2, "delta_width": 16, "experts": 4,
                             "expert_width": 16, "shared_width": 16, "rank": 8, "ple_width": 32, "ngram_base": 64,
                             "index_width": 16, "index_budget": 32, "context": 64, "eos": (1, 3)}  # fmt: skip
    model = TrainModel(Config(**sizes))
    model.initialise(1)
    window = torch.randint(4, 64, (2, 66), generator=torch.Generator().manual_seed(3))
    weights = torch.ones(2, 66)
    weights[0, 10:40] = 0.0
    weights /= weights[:, 1:-1].mean()
    out = model(window, torch.arange(0, 64, 16), 0.3, weights)
    with torch.no_grad():
        x, _ = model.hidden(window[:, :-2], torch.arange(0, 64, 16))
        nats = model.cross_entropy(x, window[:, 1:-1], False)
    kept = torch.cat([nats[0, :9], nats[0, 39:], nats[1]])  # target t stands in row t - 1
    assert float(out.main) == pytest.approx(float(kept.mean()), rel=1e-5)
