"""Measures a pack on held-out functions that no figure of the evaluation is taken from: what versions are chosen by.

    python tools/train/others.py --pack PACK --tokens TOKENS

Undecorated functions with docstring and body, none of the evaluation's names, no tests, at most two a file, in a fixed
random order; judged exactly as evaluate.py judges its hundred. Prints one JSON line for each form. Knows no trainer.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from data import load_stream
from evaluate import ask, complete
from measure import repeats
from subject import Subject

from strata.text.tokenizer import Tokenizer

__all__ = ["other_functions"]

SEED = 4242
A_FILE = 2
LEAST, MOST = 30, 752  # characters of a prompt


def other_functions(tokens: Path, tokenizer: Tokenizer) -> list[str]:
    """Signature and docstring of each."""
    meta = json.loads((tokens / "meta.json").read_text())
    taken = {prompt["text"].split("(")[0] for prompt in meta["completions"]}
    stream = load_stream(tokens, "heldout")
    ends = np.flatnonzero(stream == meta["special"]["<|endoftext|>"]).tolist()
    rng = random.Random(SEED)
    files = [stream[a + 1 : b].tolist() for a, b in zip([-1, *ends[:-1]], ends, strict=True)]
    rng.shuffle(files)
    found = []
    for ids in files:
        here = [p for p in _prompts(tokenizer.decode(ids)) if p.split("(")[0] not in taken]
        rng.shuffle(here)
        found += here[:A_FILE]
    rng.shuffle(found)
    return found


def _prompts(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 2:
            continue
        if not ast.get_docstring(node):
            continue
        prompt = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        if prompt.startswith("def ") and not prompt.startswith("def test") and LEAST <= len(prompt) <= MOST:
            yield prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="folder written by pack.py")
    parser.add_argument("--count", type=int, help="how many functions (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the native operations have threads of their own; torch's would fight them
    with Subject(args.pack) as subject:
        tokenizer = subject.opened.text.tokenizer
        end = json.loads((args.tokens / "meta.json").read_text())["special"]["<|endoftext|>"]
        prompts = other_functions(args.tokens, tokenizer)[: args.count]
        answers = [ask(subject, prompt)[2:] for prompt in prompts]
        ended, code, good = sum(e for e, _ in answers), sum(c for _, c in answers), sum(e and c for e, c in answers)
        print(json.dumps({"chats": len(prompts), "end": ended, "code": code, "good": good}), flush=True)
        done = [complete(subject, tokenizer.encode(prompt + "\n"), prompt, end) for prompt in prompts]
        parsed, loops = sum(ok for _, _, ok in done), sum(repeats(ids) for ids, _, _ in done)
        print(json.dumps({"completions": len(prompts), "parse": parsed, "loop": loops}))


if __name__ == "__main__":
    main()
