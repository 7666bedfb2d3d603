"""``strata doctor``: what this machine has, what limits it, what is missing and how to get it, one finding a line.

Lives in ``engine`` because findings come from memory, kernels, the environment and STRATA_HOME alike. It loads no model
and takes no memory. A finding that is ``bad`` prevents running; one that is ``note`` costs something and says what.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

from strata import version
from strata.config import Requested
from strata.engine.rates import kept_rates
from strata.errors import StrataError
from strata.kernels.cpu import library, pool
from strata.kernels.cpu.build_info import build_info
from strata.memory.planner import MIB, format_bytes
from strata.memory.probe import Machine
from strata.memory.surroundings import Surroundings, view_surroundings
from strata.paths import find_home

__all__ = ["Finding", "diagnose"]

State = Literal["ok", "note", "bad"]
LEAST_PYTHON = (3, 11)
LEAST_DISK = 1 << 30
LEAST_RAM = 1 << 30
NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "fastapi", "uvicorn")
FOR_CARDS = ("cuda-bindings", "nvidia-cuda-nvrtc")
FLAGS = ("-ffp-contract=off", "-fno-fast-math")  # without them the compiler may change sums, and so tokens
TOOLS = (
    ("C++ compiler", ("g++", "clang++", "c++"), "Debian: g++, Fedora: gcc-c++, Arch: gcc"),
    ("make", ("make",), "make on Debian, Fedora and Arch"),
)


@dataclass(frozen=True)
class Finding:
    """One line. ``hint`` is the way out or what it means."""

    topic: str
    text: str
    state: State = "ok"
    hint: str = ""


def diagnose(
    machine: Machine,
    *,
    surroundings: Callable[[int], Surroundings] = view_surroundings,
    which: Callable[[str], str | None] = shutil.which,
) -> list[Finding]:
    """All findings, topic by topic. Never raises for what it finds."""
    around = surroundings(max(0, machine.ram_available))
    return [
        *_find_versions(),
        *_find_processor(machine, around),
        *_find_memory(machine, around),
        *_find_locking(machine, around),
        *_find_cards(machine),
        *_find_library(),
        *_find_home(),
        *_find_tools(which),
    ]


def _find_versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST_PYTHON:
        hint = "Debian: python3, Fedora: python3, Arch: python, 3.11 or newer"
        yield Finding("version", f"Python {python}", "bad", hint)
    else:
        yield Finding("version", f"{version.describe()}, Python {python}")
    found, missing = [], []
    for name in (*NEEDED, *FOR_CARDS):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing += [name] if name in NEEDED else []  # what a card needs is said beside the card
    yield Finding("packages", ", ".join(found))
    if missing:
        hint = "run 'make build', or pip install strata-moe"
        return (yield Finding("packages", f"missing: {', '.join(missing)}", "bad", hint))
    try:
        import_module("torch")
    except (ImportError, OSError) as error:
        yield Finding("packages", f"torch cannot be loaded: {' '.join(str(error).split())}", "bad", "install it again")


def _find_processor(machine: Machine, around: Surroundings) -> Iterator[Finding]:
    quota = "" if around.cpu_quota is None else f", a control group grants {around.cpu_quota:g} of them"
    nodes = "1 memory node" if around.nodes == 1 else f"{around.nodes} memory nodes (NUMA)"
    yield Finding("processor", f"{machine.cpu_name}, {around.usable_cpus} usable processors{quota}, {nodes}")
    yield Finding("threads", f"{pool.default_threads(quota=around.cpu_quota)} (--threads auto: one a physical core)")


def _find_memory(machine: Machine, around: Surroundings) -> Iterator[Finding]:
    text = f"{format_bytes(machine.ram_total)}, {format_bytes(machine.ram_available)} may be taken ({machine.ram_rule})"
    if machine.ram_available < LEAST_RAM:
        yield Finding("RAM", text, "bad", "close other programs, or raise the limit that is named")
    else:
        yield Finding("RAM", text)
    for limit in around.memory_limits:
        text = f"{limit.name}: {format_bytes(limit.used)} of {format_bytes(limit.limit)} used"
        yield Finding("limit", text, "note", "the plan stays within it; --ram-gib N replaces it")
    if around.huge_pages in ("always", "madvise"):
        yield Finding("huge pages", f"{around.huge_pages}: expert copies ask for them")
    elif around.huge_pages:
        hint = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root"
        yield Finding(
            "huge pages", f"{around.huge_pages}: copies lie in small pages, which lock more slowly", "note", hint
        )


def _find_locking(machine: Machine, around: Surroundings) -> Iterator[Finding]:
    limit = "none" if around.locked_limit is None else format_bytes(around.locked_limit)
    all_of_it = around.lockable >= around.asked // MIB * MIB
    where = f"{format_bytes(around.lockable)} of {format_bytes(around.asked)} of free RAM can be locked"
    text = f"{where}, RLIMIT_MEMLOCK {limit}" + (
        ", which does not bind this user" if all_of_it and limit != "none" else ""
    )
    if all_of_it:
        yield Finding("memory lock", text)
    else:
        hint = "'ulimit -l unlimited', or a line 'NAME - memlock unlimited' in /etc/security/limits.conf"
        yield Finding("memory lock", f"{text}: {around.lock_refusal}", "note", f"a copy may be swapped out; {hint}")
    if machine.gpus:
        text = "of what a card reads, path 1 is tried first, then 2 and 3; the log says which was taken"
        if machine.pin_rooms:
            smallest = "" if len(machine.pin_rooms) == 1 else f", the least of {len(machine.pin_rooms)} adapters"
            room = format_bytes(min(machine.pin_rooms))
            text += f"; auto stops below the {room} that the shared-memory budget leaves{smallest}"
    else:
        rest = "locked in RAM" if all_of_it else "locked in RAM where the limit allows it"
        text = f"none: no device here reads RAM by itself, the expert copy is ordinary memory, {rest}"
    yield Finding("page-locking", text)


def _find_cards(machine: Machine) -> Iterator[Finding]:
    for gpu in machine.gpus:
        text = (
            f"{gpu.name}, {format_bytes(gpu.memory_free)} of {format_bytes(gpu.memory_total)} free, driver {gpu.driver}"
        )
        yield Finding("GPU", text)
    if not machine.gpus:
        return (yield Finding("GPU", "no NVIDIA card or no driver: experts are computed in RAM by the CPU"))
    yield from _find_cuda()


def _find_cuda() -> Iterator[Finding]:
    """What CUDA itself says of the cards, and the compiled kernels; each thing that is missing with its way out."""
    from strata.kernels.cuda import compile as compiling
    from strata.kernels.cuda.cuda_device import check_card
    from strata.kernels.cuda.driver import load_nvrtc, read_cards

    idle = "the CPU computes until then"
    try:
        cards = read_cards()
        compiler = compiling.compiler_version(load_nvrtc())
    except StrataError as error:
        return (yield Finding("CUDA", error.message, "note", f"{error.hint}; {idle}"))
    for card in cards:
        served = ".".join(map(str, card.cuda))
        text = (
            f"cuda:{card.index} is {card.name}, sm_{card.architecture}, {card.multiprocessors} multiprocessors; "
            f"the driver serves CUDA {served}, {compiler}"
        )
        try:
            check_card(card.index)
        except StrataError as error:
            yield Finding("CUDA", f"{text}: {error.message}", "note", f"{error.hint}; {idle}")
            continue
        screen = "its driver ends what runs longer than about 2 s; rounds end within 1 s" if card.display else ""
        yield Finding("CUDA", text, "ok", screen)
        try:
            kept, all_of_them = compiling.count_kept(card.architecture, card.cuda, find_home())
        except StrataError as error:
            yield Finding("GPU kernels", error.message, "bad", error.hint)
            continue
        rest = "" if kept == all_of_them else "; the others are compiled at the first start, some seconds each"
        yield Finding(
            "GPU kernels",
            f"{kept} of {all_of_them} files and parts of files are compiled for sm_{card.architecture}{rest}",
        )


def _find_library() -> Iterator[Finding]:
    try:
        levels, level = library.available_isa_levels(), library.isa()
        built = build_info()
    except StrataError as error:
        hint = error.hint or "run 'make build'"
        return (yield Finding("native library", error.message, "bad", hint))
    forced = "" if level == levels[-1] else f"; {level} is in force (STRATA_ISA)"
    yield Finding(
        "instruction set", f"{levels[-1]} is the best of {', '.join(levels)}{forced}", "note" if forced else "ok"
    )
    lacking = [flag for flag in FLAGS if flag not in built.flags]
    if lacking:
        text = f"built without {' '.join(lacking)}"
        return (yield Finding("native library", text, "bad", "run 'make build' with the project's own flags"))
    yield Finding("native library", f"{built.compiler}, {' '.join(FLAGS)}")


def _find_home() -> Iterator[Finding]:
    try:
        home = find_home()
    except StrataError as error:
        return (yield Finding("STRATA_HOME", error.message, "bad", error.hint))
    there = next(path for path in (home.root, *home.root.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{home.root}, {format_bytes(free)} of disk free"
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield Finding("STRATA_HOME", f"{text}, not writable", "bad", "set STRATA_HOME to a folder that you can write")
    elif free < LEAST_DISK:
        yield Finding("STRATA_HOME", text, "note", "models are packed there: free some space or set STRATA_HOME")
    else:
        yield Finding("STRATA_HOME", text if home.root.exists() else f"{text}, made when it is needed")
    yield Finding("models", _name_models(home.models))
    try:
        measured = kept_rates(Requested()) is not None
    except StrataError:  # without the native library, which has a finding of its own
        measured = False
    known = "rates of this machine are kept" if measured else "not measured; 'strata plan --measure' does it in seconds"
    yield Finding("calibration", known)


def _name_models(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*") if path.is_dir())
    return ", ".join(names) if names else "none in STRATA_HOME; the built-in one is always there"


def _find_tools(which: Callable[[str], str | None]) -> Iterator[Finding]:
    for what, names, packages in TOOLS:
        found = next((name for name in names if which(name)), None)
        if found:
            yield Finding("tools", f"{what}: {found}")
        else:
            yield Finding("tools", f"no {what}", "note", f"needed to build, not to run: {packages}")
