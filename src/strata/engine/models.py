"""From a model's name to an open pack: a path, a name in STRATA_HOME, or nothing for the built-in model.

Lives in ``engine`` because only here a family, a reader and the user's folders meet. A Hugging Face checkpoint is
packed once into STRATA_HOME and opened from there. The built-in model is the small trained one that ships as package
data; ``built-in-random`` is made once in STRATA_HOME, and is what an installation without that data falls back on.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import strata
from strata.checkpoint.pack_reader import PackReader
from strata.checkpoint.pack_writer import PackOptions, Progress, pack_checkpoint
from strata.checkpoint.random_model import write_random_pack
from strata.checkpoint.recognise import MANIFEST_FILE, Kind, recognise
from strata.errors import CheckpointError
from strata.models import find
from strata.models.known_shapes import BUILT_IN_SHAPE
from strata.paths import find_home
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.pipeline import TextPipeline
from strata.text.tokenizer_files import tokenizer_files

if TYPE_CHECKING:
    from strata.checkpoint.pack_reader import DenseWeight
    from strata.models.family import Family, FamilyConfig, Weights

__all__ = ["BUILT_IN_NAME", "SMALL_NAME", "OpenModel", "open_model", "shipped_pack"]

logger = logging.getLogger(__name__)

SMALL_NAME = "small"
BUILT_IN_NAME = "built-in-random"
BUILT_IN_SEED = 20


@dataclass(frozen=True, eq=False)
class OpenModel:
    """An open pack with the family that reads it and its text side. Owns the reader: ``close`` once."""

    name: str
    reader: PackReader
    family: Family
    config: FamilyConfig
    text: TextPipeline
    random: bool = False
    _dense: dict[str, DenseWeight] = field(default_factory=dict)

    def dense(self, on_progress: Progress | None = None) -> Weights:
        """The dense weights by canonical name, read and checked at the first call and shared after it."""
        if not self._dense:
            tell = (lambda done, total: on_progress("dense weights", done, total)) if on_progress else None
            self._dense.update(self.reader.load_dense(tell))
        return self._dense

    def close(self) -> None:
        self.reader.close()


def open_model(name: str | None, *, on_progress: Progress | None = None) -> OpenModel:
    """Opens what ``name`` says; None is the built-in model. A path goes before a built-in name, and that before a name
    in STRATA_HOME. Raises ``CheckpointError`` in one line for what is not read."""
    shipped = shipped_pack()
    if name is None:
        return open_random() if shipped is None else _open(shipped, "the built-in model")
    path = Path(name).expanduser()
    if not path.exists():
        if name == BUILT_IN_NAME:
            return open_random()
        if name == SMALL_NAME and shipped is not None:
            return _open(shipped, "the built-in model")
        kept = find_home().models / name
        if not kept.exists():
            there = sorted(entry.name for entry in find_home().models.glob("*") if entry.is_dir())
            known = f"STRATA_HOME has {', '.join(there)}" if there else "STRATA_HOME has no model yet"
            raise CheckpointError(
                f"no model '{name}': no such path, and no model of that name",
                f"give a pack or a checkpoint folder; {known}",
            )
        path = kept
    found = recognise(path)
    if found.kind is Kind.SAFETENSORS:
        return _open(_pack_once(path, on_progress), path.resolve().name)
    if found.kind is not Kind.PACK:
        raise found.refuse()
    return _open(path, path.resolve().name)


def open_random() -> OpenModel:
    """The model of random weights from a fixed seed: for tests, and where the trained one was not installed."""
    return _open(_built_in(), "the built-in random model", random=True)


def shipped_pack() -> Path | None:
    """The small trained model's folder in the package's own data; None where it was not installed."""
    folder = Path(strata.__file__).parent / "data" / SMALL_NAME
    return folder if (folder / MANIFEST_FILE).is_file() else None


def _open(path: Path, name: str, *, random: bool = False) -> OpenModel:
    reader = PackReader(path)
    try:
        family = find(reader.config)
        text = TextPipeline.from_directory(reader.folder)
        return OpenModel(name, reader, family, family.read_config(reader.config), text, random)
    except BaseException:
        reader.close()
        raise


def _built_in() -> Path:
    """The built-in random model's folder; made at the first call, from a seed, in about a second."""
    home = find_home()
    path = home.models / BUILT_IN_NAME
    if not path.exists():
        home.make(home.models)
        with tempfile.TemporaryDirectory() as folder:
            byte_tokenizer(folder)
            write_random_pack(
                path, BUILT_IN_SHAPE, find, seed=BUILT_IN_SEED, tokenizer_files=tuple(tokenizer_files(Path(folder)))
            )
        logger.info("made the built-in model: random weights from seed %d; it says nothing sensible", BUILT_IN_SEED)
    return path


def _pack_once(source: Path, on_progress: Progress | None) -> Path:
    """The pack of a checkpoint folder in STRATA_HOME, made when there is none of these very files."""
    home = find_home()
    source = source.resolve()
    stamp = hashlib.sha256()
    for file in sorted(source.glob("*.json")) + sorted(source.glob("*.safetensors")):
        status = file.stat()
        stamp.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    stamp.update(str(source).encode())
    path = home.models / f"{source.name}-{stamp.hexdigest()[:12]}"
    if not path.exists():
        home.make(home.models)
        logger.info("packing %s once into STRATA_HOME/models/%s", source, path.name)
        pack_checkpoint(source, path, find, PackOptions(), on_progress)
    return path
