"""The words that a checkpoint's chat template and the parsers of its answers treat as structure.

They are found in a template's source by their form, and are often no tokens of the vocabulary: a template that looks
for ``</think>`` in a message would split a user's words there (decision 0121). It must not know what a message is.
"""

from __future__ import annotations

import re

from strata.text.parsers.reasoning import ReasoningParser
from strata.text.parsers.tagged_calls import TAGS
from strata.text.parsers.tool_blocks import ToolBlockParser

__all__ = ["structure_words"]

# <think>, </tool_call>, <|user|>, <function=, <parameter=name>, <<SYS>>, [INST], [/INST]
_WORD = re.compile(r"<<?[/|]?[A-Za-z_][\w.:|-]*>{1,2}|</?[A-Za-z_]\w*=(?:[\w.-]+>)?|\[/?[A-Z][A-Z_]+\]")


def structure_words(templates: str) -> frozenset[str]:
    """Those of the parsers, and every word of the form of a tag in the source of ``templates``."""
    return frozenset({*ReasoningParser.markers, *ToolBlockParser.markers, *TAGS, *_WORD.findall(templates)})
