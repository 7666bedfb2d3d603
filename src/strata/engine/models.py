"""From a model's name to an open pack; ``locate.py`` finds the folder.

Lives in ``engine`` because only here a family, a reader and the user's folders meet. A Hugging Face checkpoint is
packed once into STRATA_HOME and opened from there. The built-in model is the small trained one that ships as package
data; ``built-in-random`` is made once in STRATA_HOME, and is what an installation without that data falls back on.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from strata.checkpoint.pack_reader import PackReader
from strata.engine.locate import BUILT_IN_NAME, SMALL_NAME, locate, shipped_pack
from strata.errors import CheckpointError
from strata.models import find
from strata.models.known_shapes import BUILT_IN_SHAPE
from strata.paths import find_home
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.pipeline import TextPipeline
from strata.text.tokenizer_files import TOKENIZER_FILES, tokenizer_files

if TYPE_CHECKING:
    from strata.checkpoint.pack_reader import DenseWeight
    from strata.checkpoint.pack_writer import Progress
    from strata.models.family import Family, FamilyConfig, Weights

__all__ = ["BUILT_IN_NAME", "SMALL_NAME", "OpenModel", "find_pack", "open_model", "shipped_pack"]

logger = logging.getLogger(__name__)

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
            self._dense.update(self.reader.load_dense(_told(on_progress)))
        return self._dense

    def dense_elsewhere(
        self, place: Callable[[DenseWeight], DenseWeight], on_progress: Progress | None = None
    ) -> Weights:
        """The same, each given to ``place`` as soon as it is read: in RAM only a few of them exist at a time."""
        return self.reader.load_dense(_told(on_progress), place)

    @property
    def unread_file(self) -> Path | None:
        """The file that dense weights will be read from; None where they are here already, or computed."""
        return None if self._dense else self.reader.dense_file

    def close(self) -> None:
        self._dense.clear()
        self.reader.close()


def _told(on_progress: Progress | None) -> Callable[[int, int], None] | None:
    return (lambda done, total: on_progress("dense weights", done, total)) if on_progress else None


def open_model(name: str | None, *, on_progress: Progress | None = None) -> OpenModel:
    """Opens what ``name`` says, see ``locate``. Raises ``CheckpointError`` in one line for what is not read."""
    place = locate(name)
    if place.path is None:
        return open_random()
    return _open(_pack_once(place.path, on_progress) if place.is_checkpoint else place.path, place.name)


def find_pack(name: str) -> Path:
    """The folder of the pack that ``name`` says, see ``locate``. Raises ``CheckpointError``, for a checkpoint too."""
    place = locate(name)
    if place.is_checkpoint:
        raise CheckpointError(f"{name} is a checkpoint already", "strata export takes a pack")
    return place.path or _built_in()


def open_random() -> OpenModel:
    """The model of random weights from a fixed seed: for tests, and where the trained one was not installed."""
    return _open(_built_in(), "the built-in random model", random=True)


def _open(path: Path, name: str, *, random: bool = False) -> OpenModel:
    reader = PackReader(path, find)
    try:
        family = find(reader.config)
        listed = {name: reader.read_tokenizer_file(name) for name in reader.manifest.tokenizer_files}
        text = TextPipeline.from_directory(reader.folder, listed)
        return OpenModel(name, reader, family, family.read_config(reader.config), text, random)
    except BaseException:
        reader.close()
        raise


def _built_in() -> Path:
    """The built-in random model's folder; made at the first call, from a seed, in about a second."""
    home = find_home()
    path = home.models / BUILT_IN_NAME
    if not path.exists():
        from strata.checkpoint.random_model import write_random_pack

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
    named = [source / name for name in TOKENIZER_FILES if not name.endswith(".json")]
    templates = sorted((source / "additional_chat_templates").glob("*.jinja"))
    text_files = [file for file in named if file.is_file()] + templates
    for file in sorted(source.glob("*.json")) + sorted(source.glob("*.safetensors")) + text_files:
        status = file.stat()
        stamp.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    stamp.update(str(source).encode())
    path = home.models / f"{source.name}-{stamp.hexdigest()[:12]}"
    if not path.exists():
        from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint

        TextPipeline.from_directory(source)  # before minutes of packing: a tokenizer that is not read ends it here
        home.make(home.models)
        logger.info("packing %s once into STRATA_HOME/models/%s", source, path.name)
        pack_checkpoint(source, path, find, PackOptions(), on_progress)
    return path
