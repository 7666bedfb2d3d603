"""Text to token ids and back, for one checkpoint.

A thin layer over the tokenizers library that adds what a server of untrusted text needs: control tokens typed by a
user stay text, no prompt begins with two BOS tokens, every id that can end an answer is known, and ids are decoded by
bytes. It must not know about models, engines or HTTP.

Legend: a *control token* is an added token that the library calls special, or that the chat template writes; a
*hidden* token is a special one, which decoding leaves out.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from strata.errors import CheckpointError, RequestError, lacks_memory
from strata.text.control_text import ControlText, ControlToken, Segment
from strata.text.family_template import FAMILY_TEMPLATE
from strata.text.structure import structure_words
from strata.text.token_bytes import ByteAlphabet, most_bytes
from strata.text.tokenizer_files import TokenizerFiles

__all__ = ["Tokenizer"]

# Characters from which on the library is asked in a way that lets other threads of Python run meanwhile; it costs some
# 0.1 ms. Also the ids that are looked through in one step.
_STRIDE = 1 << 14


class Tokenizer:
    """The tokenizer of one checkpoint. Immutable once built; safe to share between threads.

    ``vocab_size`` is the largest id plus one (a model's logits are often padded beyond it), ``eos_ids`` every id
    that ends an answer, ascending, ``bos_id`` the BOS token if there is one, ``adds_bos`` whether plain prompts
    begin with it.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        spec = _parse(files)
        self._library = _load(files.spec, files.directory)
        self._alphabet = ByteAlphabet(spec)
        self.strips_space = self._alphabet.strips_space
        self._added: dict[int, dict[str, Any]] = {item["id"]: item for item in spec.get("added_tokens") or []}
        self.vocab_size = max((*_vocabulary_ids(spec), *self._added), default=-1) + 1
        self.control_ids: Mapping[str, int] = self._control_ids()
        self._forbidden = frozenset(self.control_ids.values())
        self.hidden_ids = frozenset(id_ for id_, item in self._added.items() if item.get("special"))
        controls = [item for item in self._added.values() if item["content"] in self.control_ids]
        self.control_text = ControlText(
            (
                ControlToken(
                    item["content"], bool(item.get("special")), bool(item.get("lstrip")), bool(item.get("rstrip"))
                )
                for item in controls
            ),
            structure_words(self._templates()),
        )
        self._most_bytes = most_bytes(spec)
        self.bos_id = self._id_of_role("bos_token")
        self.eos_ids = self._eos_ids()
        self.adds_bos = self._adds_bos()
        self._bytes: dict[int, bytes] = {}
        # Whether a text can be encoded in pieces: not where each piece would get a leading space of its own.
        self._divisible = b"".join(map(self.token_bytes, self._encode_full("a"))) == b"a"
        self._plain: dict[bool, tuple[Library, dict[int, int]]] = {}
        self._plain_lock = threading.Lock()

    @classmethod
    def from_directory(cls, path: str | Path, contents: Mapping[str, bytes] | None = None) -> Tokenizer:
        """Read the tokenizer of a folder; raises CheckpointError naming file and fault. ``contents``: see
        ``TokenizerFiles.read``."""
        return cls(TokenizerFiles.read(Path(path), contents))

    # Encoding

    def encode(self, text: str, *, bos: bool = True, markers: bool = False) -> list[int]:
        """Ids of ``text``.

        ``bos`` puts the BOS token first where this tokenizer's prompts begin with one, never twice.
        ``markers`` lets control tokens in ``text`` count as such; without it no id of the result is one of them.
        Raises RequestError for text that is not Unicode (a lone surrogate).
        """
        return self.encode_segments([Segment(text, markers)], bos=bos)

    def encode_segments(self, segments: Sequence[Segment], *, bos: bool = False) -> list[int]:
        """Ids of a prompt whose parts differ in trust, as a chat template renders it. ``bos`` as in ``encode``."""
        ids: list[int] = []
        for segment in segments:
            check_text(segment.text)
            first = not ids
            if segment.markers:
                ids += self._encode_full(segment.text)
            else:
                ids += self._encode_text(segment.text, first=first)
        if bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """No fewer tokens than these can hold ``text``, by its length alone; 0 where this tokenizer sets no bound."""
        return 0 if self._most_bytes is None else -(-len(text.encode("utf-8", "replace")) // self._most_bytes)

    def _encode_full(self, text: str) -> list[int]:
        return _ids(self._library, text)

    def _holds_control(self, ids: list[int]) -> bool:
        return not all(self._forbidden.isdisjoint(ids[at : at + _STRIDE]) for at in range(0, len(ids), _STRIDE))

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        """Ids of untrusted text, ``first`` in its prompt. Control tokens in it are encoded in two pieces; a tokenizer
        that would put a space between them is asked without its control tokens. The result is checked in any case,
        since normalising (full-width brackets, say) can make a control token out of other characters."""
        if self._divisible or (first and not self.control_text.found_in(text)):
            ids = [id_ for piece in self.control_text.pieces(text) for id_ in self._encode_full(piece)]
            if not self._holds_control(ids):
                return ids
        library, renamed = self._plain_library(first=first)
        ids = [renamed.get(id_, id_) for id_ in _ids(library, text)]
        if self._holds_control(ids):
            # A vocabulary that holds control tokens as ordinary pieces too.
            pieces = [_ids(library, piece) for piece in self.control_text.pieces(text)]
            ids = [renamed.get(id_, id_) for piece in pieces for id_ in piece]
        if self._holds_control(ids):
            raise RequestError("the text cannot be written without a control token of this model", "reword it")
        return ids

    def _plain_library(self, *, first: bool) -> tuple[Library, dict[int, int]]:
        """The same tokenizer without its control tokens, and a map of ids that moved by leaving them out. For text
        that is not ``first`` one that adds no leading space.

        Built when it is first needed: it costs as much as loading the tokenizer did.
        """
        with self._plain_lock:
            if first not in self._plain:
                self._plain[first] = self._build_plain(first=first)
            return self._plain[first]

    def _build_plain(self, *, first: bool) -> tuple[Library, dict[int, int]]:
        spec = _parse(self.files)
        spec["added_tokens"] = [item for item in self._added.values() if item["content"] not in self.control_ids]
        spec["post_processor"] = None
        pre_tokenizer = spec.get("pre_tokenizer")
        # What each piece after a control token gets by "always" it gets here too; "first" means this text's first.
        if not first and isinstance(pre_tokenizer, dict) and pre_tokenizer.get("prepend_scheme") == "first":
            spec["pre_tokenizer"] = {**pre_tokenizer, "prepend_scheme": "never"}
        library = _load(json.dumps(spec, ensure_ascii=False), self.files.directory)
        real = {item["content"]: item["id"] for item in spec["added_tokens"]}
        moved = {id_: real[token.content] for id_, token in library.get_added_tokens_decoder().items()}
        return library, moved

    # Decoding

    def decode(self, ids: Iterable[int], *, show_hidden: bool = False) -> str:
        """The text of a whole sequence. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary nothing."""
        data = b"".join(self.token_bytes(id_) for id_ in ids if show_hidden or id_ not in self.hidden_ids)
        if self.strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id that the vocabulary does not hold."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def _read_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            content: str = self._added[token_id]["content"]
            return content.encode("utf-8", "replace")
        token = self._library.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else self._alphabet.bytes_of(token)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its string, or None."""
        return self._library.token_to_id(token)

    # What the files say

    def _control_ids(self) -> dict[str, int]:
        """Special tokens, and the other added tokens that a template writes (``<think>``, ``<tool_call>``).

        The rest of the added tokens is ordinary text that a publisher wanted whole (runs of spaces, HTML tags).
        """
        templates = self._templates()
        return {
            item["content"]: id_
            for id_, item in self._added.items()
            if item["content"] and (item.get("special") or (item["content"].strip() and item["content"] in templates))
        }

    def _templates(self) -> str:
        return "\0".join(self.files.chat_templates.values()) or FAMILY_TEMPLATE

    def _id_of_role(self, role: str) -> int | None:
        token = self.files.token_of(role)
        if token is None:
            return None
        id_ = self.token_id(token)
        if id_ is None:
            raise CheckpointError(
                f"{self.files.directory}: {role} is {token!r}, which tokenizer.json does not hold",
                "copy tokenizer.json and tokenizer_config.json from the same revision",
            )
        return id_

    def _eos_ids(self) -> tuple[int, ...]:
        own = self._id_of_role("eos_token")
        return tuple(sorted({*self.files.eos_ids, *([] if own is None else [own])}))

    def _adds_bos(self) -> bool:
        """The configuration's word where it has one, else what the library itself does to a plain text."""
        if self.bos_id is None:
            return False
        said = self.files.config.get("add_bos_token")
        if isinstance(said, bool):
            return said
        return self._library.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]


def check_text(text: str) -> None:
    """Raise RequestError for a string that UTF-8 cannot hold: JSON lets clients send half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            "send whole Unicode characters",
        ) from error


def _parse(files: TokenizerFiles) -> dict[str, Any]:
    path = files.directory / "tokenizer.json"
    try:
        spec = json.loads(files.spec)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not readable JSON: {error}", "copy the file again") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise CheckpointError(f"{path}: holds no tokenizer", "copy the file again")
    return spec


def _load(spec: str, directory: Path) -> Library:
    try:
        library = Library.from_str(spec)
    except Exception as error:  # the library raises bare Exception, nothing narrower
        if lacks_memory(error):
            raise
        raise CheckpointError(f"{directory / 'tokenizer.json'}: {error}", "copy the file again") from error
    # A stored limit or padding would change prompts unsaid.
    library.no_truncation()
    library.no_padding()
    return library


def _ids(library: Library, text: str) -> list[int]:
    """``encode`` keeps every other thread waiting until it has ended, a batch does not (tokenizers 0.23)."""
    if len(text) < _STRIDE:
        return library.encode(text, add_special_tokens=False).ids
    return library.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _vocabulary_ids(spec: dict[str, Any]) -> Iterable[int]:
    """Ids of the model's own vocabulary: a mapping to ids, or a list in id order."""
    vocabulary = spec["model"].get("vocab") or {}
    return vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
