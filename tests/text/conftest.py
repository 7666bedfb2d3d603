"""Tiny tokenizers of the kinds that checkpoints carry, made by the tokenizers library itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again, for the 12345th time.",
    "def main():\n    print('hello, world')\n    return 0\n",
    "Größe, naïve, 東京の天気は晴れです。 今日はいい天気ですね。 Привет, мир!",
    "emoji 😀😁🎉👩‍👩‍👧 and more text, more text, more text",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_checkpoint(directory: Path, library: Library, settings: dict[str, Any], /, **more: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    library.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name, value in more.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return directory


def byte_level_library() -> Library:
    """Byte-level BPE with NFC and a split pattern of the kind our families use."""
    library = Library(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.add_tokens(
        [AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    return library


def sentencepiece_library() -> Library:
    """BPE with byte fallback and a marked leading space, as Llama-2 and its kin ship it."""
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *byte_pieces], show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    # The byte pieces are ordinary pieces in published files, not added tokens.
    spec = json.loads(library.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return Library.from_str(json.dumps(spec))


@pytest.fixture(scope="session")
def bytes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def byte_tok(bytes_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(bytes_dir)


@pytest.fixture(scope="session")
def bpe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("bpe"),
        byte_level_library(),
        {"eos_token": "<|im_end|>", "chat_template": CHATML + "{# <think></think><tool_call></tool_call> #}"},
        generation_config={"eos_token_id": [420, 422], "temperature": 0.6, "top_k": 20, "do_sample": True},
    )


@pytest.fixture(scope="session")
def bpe_tok(bpe_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(bpe_dir)


@pytest.fixture(scope="session")
def spm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = sentencepiece_library()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return write_checkpoint(tmp_path_factory.mktemp("spm"), library, config)


@pytest.fixture(scope="session")
def spm_tok(spm_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(spm_dir)


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[..., Tokenizer]:
    """Write a checkpoint folder from a library tokenizer and open it."""
    counter = iter(range(100))

    def make(library: Library, settings: dict[str, Any] | None = None, /, **more: Any) -> Tokenizer:
        directory = tmp_path / f"checkpoint{next(counter)}"
        return Tokenizer.from_directory(write_checkpoint(directory, library, settings or {}, **more))

    return make


@pytest.fixture
def new_byte_level() -> Callable[[], Library]:
    return byte_level_library


@pytest.fixture
def new_sentencepiece() -> Callable[[], Library]:
    return sentencepiece_library
