"""Strata runs Mixture-of-Experts models larger than the graphics card's memory on one PC.

The public names are found on first use, so that ``import strata`` loads neither torch nor anything else heavy.
"""

from __future__ import annotations

from strata.version import VERSION as __version__

TYPE_CHECKING = False  # that of ``typing`` would be most of this import, which comes before Ctrl-C is looked after
if TYPE_CHECKING:
    from strata.config import Requested as Requested
    from strata.engine.engine import Engine as Engine
    from strata.errors import StrataError as StrataError

__all__ = ["Engine", "Requested", "StrataError", "__version__"]

_HOMES = {"Engine": "strata.engine.engine", "Requested": "strata.config", "StrataError": "strata.errors"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'strata' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    return value
