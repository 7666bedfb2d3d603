"""Writes the smallest honest tokenizer: one token a byte, plus the control tokens of our families.

The built-in random models use it, and tests do: every text has ids, every byte sequence is a sequence of tokens.
It must not know which model will use it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata.text.family_template import FAMILY_TEMPLATE
from strata.text.token_bytes import byte_alphabet
from strata.text.tokenizer import Tokenizer

__all__ = ["FAMILY_TOKENS", "byte_tokenizer"]

FAMILY_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<think>": False,
    "</think>": False,
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
}
"""Control tokens by name, in id order from 256 on -> whether decoding hides them."""


def byte_tokenizer(directory: str | Path, *, more_tokens: Sequence[str] = ()) -> Tokenizer:
    """Write a byte-level tokenizer with the family's chat template to ``directory`` and return it.

    Ids 0..255 are the bytes, 256..264 ``FAMILY_TOKENS``, then ``more_tokens`` (shown when decoded): ``vocab_size``
    is 265 + their number. EOS: ``<|im_end|>`` and ``<|endoftext|>``. No BOS. Writes ``tokenizer.json``,
    ``tokenizer_config.json``, ``chat_template.jinja``, and ``generation_config.json`` unless there is one.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    added = {**FAMILY_TOKENS, **dict.fromkeys(more_tokens, False)}
    ids = {token: 256 + index for index, token in enumerate(added)}
    _write(folder / "tokenizer.json", _spec(added, ids))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 1 << 30,
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(FAMILY_TEMPLATE, encoding="utf-8")
    generation = folder / "generation_config.json"
    if not generation.exists():
        _write(generation, {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]})
    return Tokenizer.from_directory(folder)


def _spec(added: dict[str, bool], ids: dict[str, int]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": ids[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for token, special in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {char: byte for byte, char in sorted(byte_alphabet().items())},
            "merges": [],
        },
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
