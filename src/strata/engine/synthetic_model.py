"""Opens a model whose weights are computed (``checkpoint.synthetic_reader``) as any other model is opened.

Lives in ``engine`` beside ``models.py`` because here a family, a reader and the user's folders meet. What is learned
about such a model (its profile) is kept in STRATA_HOME/profiles; its weights are nowhere. It must not know model names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from strata.checkpoint.computed_pack import write_computed_pack
from strata.checkpoint.synthetic_reader import Scaling, SyntheticReader, SyntheticWeights
from strata.engine.models import OpenModel, open_model
from strata.models import find
from strata.models.synthetic_shapes import gain_of, is_router, synthetic_config, synthetic_map
from strata.paths import find_home
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.pipeline import TextPipeline
from strata.text.tokenizer_files import tokenizer_files

__all__ = ["GENERATION", "WIDE_SHAPE", "open_synthetic", "open_wide", "write_synthetic_pack"]

WIDE_SHAPE = "wide-hyper"
GENERATION = 1  # of how weights are computed; rises with every change, so that no profile of others is taken


def open_synthetic(
    shape: str, num_layers: int | None = None, weights: SyntheticWeights = SyntheticWeights()
) -> OpenModel:
    """The model of a shape; nothing is computed before it is asked for. Raises ``ConfigError``."""
    raw = synthetic_config(shape, num_layers)
    family = find(raw)
    config = family.read_config(raw)
    name = f"synthetic-{shape}-{config.num_layers}"
    table = json.dumps([raw, asdict(weights), GENERATION], sort_keys=True)
    folder = _folder(f"{name}-{weights.routing}-{hashlib.sha256(table.encode()).hexdigest()[:12]}")
    files = [path.name for path in tokenizer_files(folder)]
    scaling = Scaling(gain_of, is_router)
    reader = SyntheticReader(folder, raw, config.family, synthetic_map(raw), config.top_k, scaling, weights, files)
    return OpenModel(name, reader, family, config, TextPipeline.from_directory(folder), random=True)


def write_synthetic_pack(shape: str, num_layers: int | None, weights: SyntheticWeights, destination: Path) -> Path:
    """The shape's model as a pack in files; returns its folder. Raises ``ConfigError`` or ``CheckpointError``."""
    model = open_synthetic(shape, num_layers, weights)
    try:
        assert isinstance(model.reader, SyntheticReader)
        return write_computed_pack(model.reader, model.family.weight_map(model.config), destination)
    finally:
        model.close()


@contextlib.contextmanager
def open_wide() -> Iterator[OpenModel]:
    """The small model of a released model's width, read from files that are removed at the end: a mapped file is one of
    the places that its experts are read from. Raises ``CheckpointError``."""
    with tempfile.TemporaryDirectory(prefix="strata-wide-") as folder:
        model = open_model(str(write_synthetic_pack(WIDE_SHAPE, None, SyntheticWeights(), Path(folder) / WIDE_SHAPE)))
        try:
            yield model
        finally:
            model.close()


def _folder(name: str) -> Path:
    """The model's folder, with the byte tokenizer in it: texts are not what such a model is for."""
    home = find_home()
    folder = home.make(home.profiles / name)
    if not (folder / "tokenizer.json").exists():
        byte_tokenizer(folder)
    return folder
