"""A runtime over a pack, opened and closed for one test. Imports nothing but the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strata.config_sources import resolve_here
from strata.engine.devices import RoundDevice
from strata.engine.models import open_model
from strata.engine.runtime import Runtime

__all__ = ["open_runtime"]


@contextmanager
def open_runtime(pack: Path, card: RoundDevice | None = None, **options: Any) -> Iterator[Runtime]:
    """``options`` as arguments; a ``card`` given stays the caller's."""
    opened = open_model(str(pack))
    try:
        runtime = Runtime.open(opened, resolve_here(arguments={"model": str(pack), **options}), device=card)
        try:
            yield runtime
        finally:
            runtime.close()
    finally:
        opened.close()
