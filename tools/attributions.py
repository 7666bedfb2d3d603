"""Writes NOTICE's list of the packages whose text trained the small model that ships with Strata.

Lives in tools beside ``licences``, which calls it for ``make generate``. The list is tools/train/corpus.json's, which
the text's own builder wrote: name, version, licence as the package's metadata say it, bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tools" / "train" / "corpus.json"
MARKS = ("--- text of the small trained model (generated) ---", "--- end of text ---")


def read_corpus() -> dict[str, Any]:
    corpus: dict[str, Any] = json.loads(CORPUS.read_text(encoding="utf-8"))
    return corpus


def render_section(corpus: dict[str, Any]) -> str:
    """The part between the marks, both included."""
    lines = [
        MARKS[0],
        "The weights in src/strata/data/small were trained on, or measured with, Python code of these packages. None",
        "of their files is part of Strata; a few prompts and token sequences of the measured ones are in tests/data.",
        *(
            f"{one['name']} {one['version']}: {one['licence']}{' (measured only)' if one.get('held_out') else ''}"
            for one in corpus["sources"]
        ),
        MARKS[1],
    ]
    return "\n".join(lines) + "\n"


def render_notice(old: str, corpus: dict[str, Any]) -> str:
    """The old text with this part replaced, or added at the end."""
    section = render_section(corpus)
    if MARKS[0] in old:
        before, rest = old.split(MARKS[0], 1)
        return before + section + rest.split(MARKS[1] + "\n", 1)[1]
    return f"{old.rstrip()}\n\n{section}"
