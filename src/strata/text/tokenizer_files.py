"""What a checkpoint's folder says about its tokenizer, read once and checked.

Gathers ``tokenizer.json``, ``tokenizer_config.json``, the chat templates in each place that publishers put them,
and every id that ends an answer (``generation_config.json``, ``config.json``, the tokenizer's own EOS token: published
sets are often incomplete, so the union counts). It must not know how text is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.errors import CheckpointError
from strata.files import read_regular

__all__ = ["TOKENIZER_FILES", "TokenizerFiles", "tokenizer_files"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Names a pack copies from the checkpoint when they exist; ``tokenizer.json`` must."""

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def tokenizer_files(directory: Path) -> list[Path]:
    """The files of ``directory`` that make its tokenizer whole, in a fixed order; a pack copies exactly these."""
    directory = Path(directory)
    _require_tokenizer_json(directory)
    found = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    return found + sorted((directory / "additional_chat_templates").glob("*.jinja"))


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a checkpoint's tokenizer files.

    ``spec`` is ``tokenizer.json`` as text, ``chat_templates`` maps a name ("default", "tool_use") to its source,
    ``eos_ids`` holds the ids named by the model's own configuration, ``sampling_defaults`` what
    ``generation_config.json`` recommends (empty when it says ``do_sample: false``).
    """

    directory: Path
    spec: str
    config: Mapping[str, Any]
    chat_templates: Mapping[str, str]
    eos_ids: tuple[int, ...]
    bos_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float | int]

    @classmethod
    def read(cls, directory: Path, contents: Mapping[str, bytes] | None = None) -> TokenizerFiles:
        """Read ``directory``; raises CheckpointError naming the file that is absent or damaged.

        ``contents``: all of its files by name, where they were read and checked already (a pack's): no other is."""
        directory = Path(directory)
        if contents is None:
            _require_tokenizer_json(directory)
            templates = sorted((directory / "additional_chat_templates").glob("*.jinja"))
            files = _Files(directory, None)
        elif "tokenizer.json" in contents:
            files, templates = _Files(directory, contents), []
        else:
            raise CheckpointError(f"{directory}: lists no tokenizer.json", "make the pack again with strata pack")
        spec = files.text("tokenizer.json")
        assert spec is not None
        config = files.object("tokenizer_config.json")
        special = files.object("special_tokens_map.json")
        generation = files.object("generation_config.json")
        model = files.object("config.json")
        text_model = model.get("text_config")
        sources = [(directory / "generation_config.json", generation), (directory / "config.json", model)]
        if isinstance(text_model, dict):
            sources.append((directory / "config.json", text_model))
        return cls(
            directory=directory,
            spec=spec,
            config={**special, **config},
            chat_templates=_chat_templates(files, templates, config),
            eos_ids=_ids(sources, "eos_token_id"),
            bos_ids=_ids(sources, "bos_token_id"),
            sampling_defaults=_sampling_defaults(generation),
        )

    def token_of(self, role: str) -> str | None:
        """The string of ``eos_token``, ``bos_token``, ...: written plainly or as an object with ``content``."""
        value = self.config.get(role)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) and value else None

    def named_tokens(self) -> dict[str, str]:
        """Every ``*_token`` string of the configuration: the names that templates may use."""
        names = [key for key in self.config if key.endswith("_token")]
        return {name: token for name in names if (token := self.token_of(name)) is not None}


def _require_tokenizer_json(directory: Path) -> Path:
    path = directory / "tokenizer.json"
    if path.exists():
        return path
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such folder", "name the folder that holds tokenizer.json")
    older = [
        name
        for name in ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
        if (directory / name).is_file()
    ]
    if older:
        raise CheckpointError(
            f"{directory}: holds {older[0]} but no tokenizer.json, the one tokenizer format that is read",
            "with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes tokenizer.json",
        )
    raise CheckpointError(f"{directory}: no tokenizer.json", "copy it from the model's repository")


@dataclass(frozen=True)
class _Files:
    """Texts by file name: of ``contents``, or of the folder where that is None."""

    directory: Path
    contents: Mapping[str, bytes] | None

    def text(self, name: str) -> str | None:
        """None where there is no such file."""
        path = self.directory / name
        try:
            if self.contents is not None:
                data = self.contents.get(name)
            else:
                data = read_regular(path) if path.is_file() else None
            return None if data is None else data.decode().replace("\r\n", "\n").replace("\r", "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}", "copy the file again") from error

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object, or {} where the file does not exist."""
        path, text = self.directory / name, self.text(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: is not readable JSON: {error}", "copy the file again") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: holds a {type(value).__name__}, not a JSON object", "copy the file again")
        return value


def _ids(sources: list[tuple[Path, dict[str, Any]]], key: str) -> tuple[int, ...]:
    found: set[int] = set()
    for path, source in sources:
        value = source.get(key)
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise CheckpointError(f"{path}: {key} is {item!r}, not a token id", "correct the file")
            found.add(item)
    return tuple(sorted(found))


def _chat_templates(files: _Files, additional: list[Path], config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. A file of its own wins over the configuration: that is where newer publishers write."""
    templates: dict[str, str] = {}
    for value in (config.get("chat_template"), files.object("chat_template.json").get("chat_template")):
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, dict):
            templates.update({str(name): str(source) for name, source in value.items()})
        elif isinstance(value, list):
            templates.update({str(item["name"]): str(item["template"]) for item in value if isinstance(item, dict)})
    own = files.text("chat_template.jinja")
    if own is not None:
        templates["default"] = own
    for path in additional:
        source = files.text(f"{path.parent.name}/{path.name}")
        if source is not None:
            templates[path.stem] = source
    return templates


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float | int]:
    if generation.get("do_sample") is False:
        return {}
    values = {key: generation.get(key) for key in _SAMPLING_KEYS}
    return {
        key: value for key, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
