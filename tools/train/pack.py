"""Turns the text into tokens that a training machine reads: one command.

    python tools/train/pack.py --text DIR --tokenizer DIR --out DIR

Writes ``code-{0,1}.u16.xz`` and ``chat.u16.xz`` (streams of documents, each closed by the end token),
``heldout.u16.xz`` and ``meta.json``: counts, bytes of the held-out text, word pieces for retrieval lines, and the
evaluation prompts. Every id is below 65,536. Knows the tokenizer and the chat template's form, not the model.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import random
import re
import textwrap
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from corpus import chat_examples
from tokenizer import CONTROL, MARKS, read_records
from tokenizers import Tokenizer

PROMPTS = 100
_PROMPT_TOKENS = 384  # a prompt and its completion stay well inside the context


class Encoder:
    """Text to ids. Plain text never becomes a control token; only ``chat`` writes those."""

    def __init__(self, folder: Path) -> None:
        data = json.loads((folder / "tokenizer.json").read_text())
        self.special = {t["content"]: t["id"] for t in data["added_tokens"]}
        assert set(self.special) == {*CONTROL, *MARKS}
        data["added_tokens"] = []
        self._plain = Tokenizer.from_str(json.dumps(data))

    def many(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self._plain.encode_batch(texts, add_special_tokens=False)]

    def one(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decoded(self, many: list[list[int]]) -> list[str]:
        """Texts of ids; control tokens say nothing."""
        texts: list[str] = self._plain.decode_batch(many)
        return texts

    def message(self, role: str, content_ids: list[int]) -> list[int]:
        start, end = self.special["<|im_start|>"], self.special["<|im_end|>"]
        return [start, *self.one(role), *self.one("\n"), *content_ids, end, *self.one("\n")]


def encode_streams(encoder: Encoder, text: Path) -> tuple[np.ndarray, np.ndarray]:
    """(code ids, chat ids) of the training text."""
    end = encoder.special["<|endoftext|>"]
    code, chat = [], []
    for half in (0, 1):
        records = list(read_records(text / f"text-train-{half}.jsonl.xz"))
        documents = [str(r["t"]) for r in records if r["k"] == "code"]
        for ids in encoder.many(documents):
            code.append(np.array([*ids, end], dtype=np.uint16))
        chats: list[Any] = [r["m"] for r in records if r["k"] == "chat"]
        contents = iter(encoder.many([content for c in chats for _, content in c]))
        for c in chats:
            ids = [i for role, _ in c for i in encoder.message(role, next(contents))]
            chat.append(np.array([*ids[:-1], end], dtype=np.uint16))
    return np.concatenate(code), np.concatenate(chat)


def retrieval_words(encoder: Encoder) -> list[tuple[list[int], list[int]]]:
    """(ids of a word, ids of the word after an underscore) of a few hundred common words of the vocabulary."""
    vocabulary = encoder._plain.get_vocab()
    words = sorted(w[1:] for w in vocabulary if re.fullmatch(r"Ġ[a-z]{4,8}", w))
    return [(encoder.one(w), encoder.one("_" + w)) for w in words if len(encoder.one(w)) <= 2]


def completion_prompts(records: list[dict[str, Any]], encoder: Encoder, rng: random.Random) -> list[dict[str, Any]]:
    """``def`` line and docstring of held-out functions, dedented: at most three from a file, ten tokens or more."""
    found = []
    for record in records:
        if re.search(r"(^|/)(tests?|testing)/", record["f"]):
            continue
        here = [chat[0][1] for chat in chat_examples(record["t"])]
        rng.shuffle(here)
        for prompt in here[:3]:
            if prompt.startswith("def ") and 10 <= len(encoder.one(prompt)) <= _PROMPT_TOKENS // 2:
                found.append({"package": record["p"], "text": prompt})
    rng.shuffle(found)
    return found[:PROMPTS]


def evaluation(text: Path, encoder: Encoder) -> tuple[np.ndarray, dict[str, Any]]:
    """(held-out ids, facts about them and the prompts)."""
    rng = random.Random(99)
    records: list[Any] = list(read_records(text / "text-heldout.jsonl.xz"))
    rng.shuffle(records)
    end = encoder.special["<|endoftext|>"]
    ids = [i for e in encoder.many([r["t"] for r in records]) for i in [*e, end]]
    completions = completion_prompts(records, encoder, rng)
    for prompt in completions:
        prompt["ids"] = encoder.one(prompt["text"] + "\n")
        asked = encoder.message("user", encoder.one(prompt["text"]))
        prompt["chat_ids"] = [*asked, encoder.special["<|im_start|>"], *encoder.one("assistant"), *encoder.one("\n")]
    facts = {"heldout_bytes": sum(len(r["t"].encode()) for r in records), "completions": completions}
    return np.array(ids, dtype=np.uint16), facts


def parses(text: str) -> bool:
    """Whether a completed function is valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return False
    return True


def _write(job: tuple[Path, np.ndarray]) -> None:
    path, ids = job
    path.write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(args.tokenizer)
    code, chat = encode_streams(encoder, args.text)
    heldout, facts = evaluation(args.text, encoder)
    pieces = {
        name: encoder.one(t)
        for name, t in {
            "open": '["',
            "set": '"] = "',
            "is": '"] == "',
            "close": '"\n',
            "assert": "assert",
            "newline": "\n",
        }.items()
    }
    tables = [[encoder.one(t), encoder.one(" " + t)] for t in ("TABLE", "config", "settings", "options", "names")]
    meta = facts | {
        "code_tokens": len(code),
        "chat_tokens": len(chat),
        "heldout_tokens": len(heldout),
        "special": encoder.special,
        "retrieval": {"words": retrieval_words(encoder), "pieces": pieces, "tables": tables},
    }
    (args.out / "meta.json").write_text(json.dumps(meta, separators=(",", ":")))
    half = len(code) // 2
    jobs = [("code-0", code[:half]), ("code-1", code[half:]), ("chat", chat), ("heldout", heldout)]
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(_write, [(args.out / f"{name}.u16.xz", ids) for name, ids in jobs]))
    print(json.dumps({k: v for k, v in meta.items() if isinstance(v, int)}))


if __name__ == "__main__":
    main()
