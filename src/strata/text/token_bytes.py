"""Which bytes a token stands for: the inverse of a tokenizer's alphabet, token by token.

Text is decoded here by bytes, not by asking the tokenizers library for strings: a token can hold a third of a
character, and only bytes can be joined without loss. Two alphabets are read, those of byte-level BPE and of
SentencePiece with byte fallback; others are refused by name. It must not know about sequences or streams.

Source: the byte alphabet of byte-level BPE as GPT-2 published it (printable bytes stand for themselves, the others
for code points from 256 on); byte fallback as SentencePiece writes it (``<0x0A>``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from strata.errors import CheckpointError

__all__ = ["ByteAlphabet", "byte_alphabet", "most_bytes"]

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def byte_alphabet() -> dict[int, str]:
    """Byte -> the character that stands for it in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update({byte: chr(256 + index) for index, byte in enumerate(hidden)})
    return alphabet


class ByteAlphabet:
    """Maps a token's string to its bytes, for the decoder that ``tokenizer.json`` names.

    ``strips_space`` says that the decoder drops one space at the very start of a text, as SentencePiece models do.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        """``spec`` is the parsed ``tokenizer.json``; raises CheckpointError for a decoder that is not read."""
        stages = _stages(spec.get("decoder"))
        kinds = [str(stage.get("type")) for stage in stages]
        self.strips_space = False
        self._convert: Callable[[str], bytes]
        if kinds == ["ByteLevel"]:
            self._byte_of = {char: byte for byte, char in byte_alphabet().items()}
            self._convert = self._byte_level
            return
        self._replacements: list[tuple[str, str]] = []
        self._falls_back = False
        for stage, kind in zip(stages, kinds, strict=True):
            self._add_stage(stage, kind)
        if not stages:
            _refuse("no decoder")
        self._convert = self._pieces

    def bytes_of(self, token: str) -> bytes:
        """The bytes of a token of the model's vocabulary (an added token's bytes are its own UTF-8)."""
        return self._convert(token)

    def _add_stage(self, stage: dict[str, Any], kind: str) -> None:
        if kind == "Replace" and "String" in stage.get("pattern", {}):
            self._replacements.append((stage["pattern"]["String"], stage["content"]))
        elif kind == "Metaspace":
            self._replacements.append((stage.get("replacement", _SPACE_MARK), " "))
            scheme = stage.get("prepend_scheme", "always" if stage.get("add_prefix_space", True) else "never")
            self.strips_space = scheme != "never"
        elif kind == "ByteFallback":
            self._falls_back = True
        elif kind == "Strip" and stage.get("content") == " " and stage.get("start") == 1 and stage.get("stop") == 0:
            self.strips_space = True
        elif kind != "Fuse":
            _refuse(f"decoder {json.dumps(stage)[:80]}")

    def _byte_level(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:
            return token.encode("utf-8", "replace")

    def _pieces(self, token: str) -> bytes:
        if self._falls_back and (match := _FALLBACK.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")


# How many bytes of a text can become one by these: U+2126 (3 bytes) is U+03A9 (2), U+FF21 (3) is A, U+1D400 (4) too.
_NORMAL_FORMS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4}
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")


def most_bytes(spec: dict[str, Any]) -> int | None:
    """The most bytes of a text that one token can stand for; None where the tokenizer of ``spec``, the parsed
    ``tokenizer.json``, may leave text out or write any length of it as one token."""
    vocabulary = spec["model"].get("vocab")
    if spec["model"].get("type", "BPE") != "BPE" or not isinstance(vocabulary, dict):
        return None
    added = spec.get("added_tokens") or []
    if any(item.get("lstrip") or item.get("rstrip") for item in added):
        return None  # they take the white space beside them
    by_bytes = set(byte_alphabet().values()) <= vocabulary.keys()
    fallback = spec["model"].get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not (by_bytes or fallback):
        return None
    factor = 1
    for stage in _flat(spec.get("normalizer"), "normalizers"):
        if stage.get("type") in _NORMAL_FORMS:
            factor *= _NORMAL_FORMS[stage["type"]]
        elif stage.get("type") == "Replace" and "String" in stage.get("pattern", {}):
            old, new = stage["pattern"]["String"], stage.get("content", "")
            if len(new.encode()) < len(old.encode()):
                return None
        elif stage.get("type") != "Prepend":
            return None
    for stage in _flat(spec.get("pre_tokenizer"), "pretokenizers"):
        if stage.get("type") not in _KEEPING or stage.get("behavior") == "Removed":
            return None
    longest = max((len(item["content"].encode("utf-8", "replace")) for item in added), default=1)
    alphabet = byte_alphabet().values() if by_bytes else ()
    for token in vocabulary:
        size = len(token.encode("utf-8", "replace"))
        if size > longest:
            longest = max(longest, len(token) if set(token) <= set(alphabet) else size)
    return factor * longest


def _flat(stage: Any, inner: str) -> list[dict[str, Any]]:
    if not isinstance(stage, dict):
        return []
    if stage.get("type") == "Sequence":
        return [one for part in stage.get(inner, []) for one in _flat(part, inner)]
    return [stage]


def _stages(decoder: Any) -> list[dict[str, Any]]:
    """The decoder as a flat list of stages."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [stage for inner in decoder.get("decoders", []) for stage in _stages(inner)]
    return [decoder]


def _refuse(what: str) -> None:
    raise CheckpointError(
        f"tokenizer.json: {what} is not read",
        "byte-level BPE and SentencePiece with byte fallback are; use a checkpoint with one of those tokenizers",
    )
