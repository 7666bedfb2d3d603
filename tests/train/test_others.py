"""Which held-out functions versions are chosen by: none that a figure is taken from, few of a file, always the same."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import numpy as np

from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

from others import A_FILE, other_functions

END = 300
GOOD = 'def {name}(wide, high=3):\n    """How large an area of these sides is."""\n    return wide * high\n\n\n'
BAD = (
    "def bare(wide):\n    return wide\n\n\n"  # no docstring
    '@cache\ndef decorated(wide):\n    """How large an area of these sides is."""\n    return wide\n\n\n'
    'def empty(wide):\n    """How large an area of these sides is."""\n\n\n'  # no body
    'def test_it(wide):\n    """How large an area of these sides is."""\n    return wide\n\n\n'
    'async def later(wide):\n    """How large an area of these sides is."""\n    return wide\n\n\n'
    'def long(wide):\n    """' + "How large it is. " * 60 + '"""\n    return wide\n\n\n'
    'def taken(wide):\n    """How large an area of these sides is."""\n    return wide\n'
)


def test_functions_are_others_than_the_evaluations_and_few_of_a_file(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    inside = 'class Area:\n    def method(self):\n        """How large an area of these sides is."""\n        pass\n'
    many = "".join(GOOD.format(name=f"many{n}") for n in range(9))
    files = [many, BAD, inside, "def broken(:\n", GOOD.format(name="alone")]
    ids = [i for text in files for i in (*tokenizer.encode(text), END)]
    (tmp_path / "heldout.u16.xz").write_bytes(lzma.compress(np.array(ids, dtype="<u2").tobytes()))
    meta = {"completions": [{"text": 'def taken(other):\n    """..."""'}], "special": {"<|endoftext|>": END}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    found = other_functions(tmp_path, tokenizer)
    names = sorted(prompt.split("(")[0].removeprefix("def ") for prompt in found)
    assert names[:1] == ["alone"]
    assert [name for name in names if name.startswith("many")] == names[1:-1]
    assert len(names) == 1 + A_FILE + 1
    assert names[-1] == "method"
    alone = next(prompt for prompt in found if prompt.startswith("def alone"))
    assert alone == 'def alone(wide, high=3):\n    """How large an area of these sides is."""'
    assert found == other_functions(tmp_path, tokenizer)
