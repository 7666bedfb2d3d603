"""Opens the card that was asked for while torch is imported, which needs the processor and no card.

Lives in ``engine`` beside ``devices``, which imports torch itself; this must not. Which card is used, and whether any
can be, is said there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.kernels.cuda.early_start import EarlyStart
from strata.memory.system import system

if TYPE_CHECKING:
    from strata.config import Requested

__all__ = ["card_index", "open_card_early"]


def card_index(requested: Requested) -> int:
    """The i of ``--device cuda:i``; 0 where none is named."""
    return int(requested.device.partition(":")[2] or 0)


def open_card_early(requested: Requested) -> EarlyStart:
    """A block for the imports and the load. Nothing is opened where the process may map only so much: the imports come
    close to such a limit by themselves, and a driver maps far more."""
    is_wanted = requested.device != "cpu" and system.address_space_limit() is None
    return EarlyStart(card_index(requested) if is_wanted else None)
