"""The mailbox's self-test: whether card and CPU see what the other writes while a launch runs, and how long that takes.

Lives in ``engine`` beside ``device_rounds``, which asks before it records a round. The real conductor answers, in the
memory that rounds use: each exchange carries numbers of its own there and back, so that data that arrives after the
word that announces it is seen too. It decides nothing about rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strata.errors import EngineError
from strata.kernels.cuda.program import Launch, Machine, Program

if TYPE_CHECKING:
    from strata.kernels.cpu.conductor import Conductor
    from strata.kernels.cuda.expert_step import RoundMemory
    from strata.kernels.cuda.mailbox import Mailbox

__all__ = ["PROBE_LIMIT_MS", "MailboxCheck", "check_mailbox", "probe_launches"]

PROBE_LIMIT_MS = 500  # of one try; a thread that sleeps on a busy machine is woken in less
TRIES = 3
_THREADS = 256


@dataclass(frozen=True)
class MailboxCheck:
    """``microseconds``: median of an exchange there and back, by the card's clock; None where it did not work, and then
    ``reason`` says why."""

    microseconds: float | None
    reason: str = ""


def probe_launches(
    program: Program, mailbox: Mailbox, memory: RoundMemory, exchanges: int, hidden: int
) -> list[Launch]:
    """``exchanges`` probes of ``hidden`` numbers each. Times come where a round's logits do."""
    for exchange in range(exchanges):
        program.launch(
            "round.probe", (1,), _THREADS, mailbox.device("box"), memory.state, exchange,
            mailbox.device("x"), mailbox.device("out"), hidden, mailbox.device("logits"),
        )  # fmt: skip
    return program.take()


def check_mailbox(
    machine: Machine,
    launches: list[Launch],
    mailbox: Mailbox,
    conductor: Conductor,
    begin: Callable[[], None],
    exchanges: int,
) -> MailboxCheck:
    """Runs ``launches``, a round of ``exchanges`` probes, up to ``TRIES`` times. ``begin`` writes its inputs.

    A try that has no answer is repeated, for the CPU may have been busy; an answer that is not what was sent is not.
    """
    runnable = machine.prepare(launches)
    times = mailbox.logits.view(np.int32).reshape(-1)[:exchanges]  # nanoseconds, where the probes write them
    for _ in range(TRIES):
        times[:] = -1
        begin()
        conductor.begin()
        try:
            runnable.run()
            machine.synchronize()
        finally:
            died = _has_died(conductor)
        if not died and bool((times >= 0).all()):
            return MailboxCheck(statistics.median(times.tolist()) / 1000)
        if not died and not mailbox.box.aborted:
            return MailboxCheck(None, "what came back is not what was sent")
    return MailboxCheck(None, f"{TRIES} times no answer within {PROBE_LIMIT_MS} ms")


def _has_died(conductor: Conductor) -> bool:
    """Ends the try. A thread that died in it is started again by the next."""
    try:
        conductor.end()
    except EngineError:
        return True
    return False
