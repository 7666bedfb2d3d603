"""What the user requested: every option declared once, its value and where the value came from.

Lives on top because each room reads its own options from one frozen ``Requested``. The fields of ``Requested`` are the
only list of options: the command line, the ``STRATA_`` variables, the file keys, ``--show-config`` and
docs/reference/configuration.md are made from them, and defaults are written nowhere else. Precedence: command line
(or Python arguments), environment, the model's strata.toml, STRATA_HOME/config.toml, default.

It must not know a model, a machine or a plan: what becomes of a request is the resolved plan's business (the
``memory`` and ``engine`` rooms), which tells by ``Effect`` (config_sources.py). Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from strata.option_values import (
    ALL,
    AUTO,
    MOST_GIB,
    NONE,
    All,
    Auto,
    Parser,
    Prefill,
    choice,
    device,
    gib,
    or_word,
    parse_kv,
    parse_path,
    parse_prefill,
    parse_switch,
    parse_text,
    real,
    whole,
)

__all__ = ["BY_NAME", "GROUPS", "OPTIONS", "OTHER_VARIABLES", "Option", "Origin", "RamMode", "Requested"]

Origin: TypeAlias = Literal["command line", "argument", "environment", "model file", "home file", "default"]
Group: TypeAlias = Literal["model", "memory", "prompt", "experts", "sampling", "log"]
GROUPS: tuple[str, ...] = get_args(Group)
RamMode: TypeAlias = Literal["arena", "resident", "budget", "mapped"]

ENVIRONMENT_PREFIX = "STRATA_"
# Variables that are no options: read before any configuration exists, or by the build and the tests alone.
OTHER_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "STRATA_HOME": "Folder of models, compiled kernels, profiles, calibration, logs and config.toml.",
        "STRATA_ISA": "Instruction set of the native library, not the best one: scalar, avx2, avxvnni, avx512.",
        "STRATA_NATIVE": "File of another native library; set by make test-sanitize to the one with checks.",
        "STRATA_TESTS_REQUIRE": "Hardware marker whose tests must run; set by make test-gpu and make test-cpu512.",
    }
)


@dataclass(frozen=True)
class Option:
    """One option as data. ``name`` is the field and file key; ``flag`` is empty for environment-only options."""

    name: str
    parse: Parser
    help: str
    group: Group
    flag: str
    metavar: str
    default: object

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def spelling(self) -> str:
        """How a user writes it: the flag, else the variable."""
        return self.flag or self.variable

    @property
    def is_switch(self) -> bool:
        return self.parse is parse_switch


def option(
    default: object,
    parse: Parser,
    group: Group,
    help: str,
    *,
    metavar: str = "",
    flag: str = "",
    variable_only: bool = False,
) -> Any:
    """A field of ``Requested``. The flag is made from the field's name unless given or ``variable_only``."""
    return field(
        default=default,
        metadata={
            "parse": parse,
            "group": group,
            "help": " ".join(help.split()),
            "metavar": metavar,
            "flag": flag,
            "variable_only": variable_only,
        },
    )


@dataclass(frozen=True)
class Requested:
    """The configuration as asked for. Frozen; ``origins`` says where each value came from."""

    model: str | None = option(
        None, parse_text, "model", "A pack, a checkpoint folder, or a name in STRATA_HOME/models.", metavar="MODEL"
    )
    device: str = option(
        "auto",
        device,
        "model",
        "Where the model runs; auto takes the first CUDA device, else the CPU.",
        metavar="auto|cpu|cuda[:i]",
    )
    threads: int | Auto = option(
        AUTO,
        or_word(whole(1, 256), AUTO),
        "model",
        "Worker threads of the CPU kernels; auto is one a physical core, less one where a card leaves no other free.",
        metavar="auto|N",
    )
    max_context: int | Auto = option(
        AUTO,
        or_word(whole(1), AUTO),
        "model",
        "Positions that a conversation may hold; auto is the model's own context, at most 8,192.",
        metavar="auto|N",
    )
    kv: int = option(16, parse_kv, "model", "Bits of the key/value cache: 16 (BF16) or 32 (FP32).", metavar="16|32")

    vram_gib: float | None = option(
        None,
        gib(above=True),
        "memory",
        """Device memory that may be used; default is what is free. Without a GPU, RAM stands in for so much of it;
        default is none.""",
        metavar="GIB",
    )
    vram_reserve_mib: int = option(
        700,
        whole(0, MOST_GIB << 10),
        "memory",
        "Device memory that an automatic expert cache leaves free.",
        metavar="MIB",
    )
    ram_gib: float | None = option(
        None,
        gib(above=True),
        "memory",
        """RAM that a model may use, in place of what the system says is free; the process itself, about 0.25 GiB, is
        beside it, and no headroom is left of it by default.""",
        metavar="GIB",
    )
    expert_cache: int | Auto = option(
        AUTO,
        or_word(whole(0), AUTO),
        "memory",
        "Experts held in device memory; auto fills what the plan leaves.",
        metavar="auto|N",
    )
    resident_experts: bool = option(
        False,
        parse_switch,
        "memory",
        "RAM holds the experts that the device cache does not hold, plus copies of slots that prompts borrow.",
    )
    resident_budget_gib: float | None = option(
        None,
        gib(above=True),
        "memory",
        "RAM holds the hottest N GiB of those experts, the file serves the rest.",
        metavar="GIB",
    )
    mmap_experts: bool = option(
        False, parse_switch, "memory", "RAM holds no expert of its own; every miss is read from the mapped file."
    )
    resident_headroom_gib: float = option(
        4.0,
        gib(),
        "memory",
        """Free RAM that is left; unless it is set, at most a quarter of what may be taken, and nothing of what
        --ram-gib grants.""",
        metavar="GIB",
        variable_only=True,
    )
    complement_pin_gib: float | Auto | All = option(
        AUTO,
        or_word(gib(), AUTO, ALL),
        "memory",
        "Page-locks at most N GiB of the resident copy; all: until the driver refuses; 0: nothing.",
        metavar="auto|all|GIB",
        variable_only=True,
    )
    arena_pin_gib: float | Auto | Literal["none"] = option(
        AUTO,
        or_word(gib(), AUTO, NONE),
        "memory",
        "Page-locks at most N GiB of the arena; 0: all of it; auto: below the adapter's budget; none: nothing.",
        metavar="auto|none|GIB",
        variable_only=True,
    )
    pin_margin_gib: float = option(
        4.0,
        gib(),
        "memory",
        "Left free of the adapter's shared-memory budget when page-locking.",
        metavar="GIB",
        variable_only=True,
    )
    pin_by_need: bool = option(
        False,
        parse_switch,
        "memory",
        "Page-locks only ranges that are not expected in device memory.",
        variable_only=True,
    )
    partial_pin: bool = option(
        False, parse_switch, "memory", "Page-locks the hottest prefix of a RAM budget.", variable_only=True
    )
    prefer_slices: bool | Auto = option(
        AUTO,
        or_word(parse_switch, AUTO),
        "memory",
        "Page-locks slice by slice (path 2) without trying the one allocation (1), or tries that first (0); auto: "
        "slices first for 4 GiB and more on a card, on Linux.",
        metavar="auto|0|1",
        variable_only=True,
    )
    test_complement_refuse: bool = option(
        False, parse_switch, "memory", "Takes the one page-locked allocation (path 1) as refused.", variable_only=True
    )

    prefill: Prefill = option(
        Prefill(),
        parse_prefill,
        "prompt",
        "Rows of a prompt chunk: auto is 512 on the CPU, on a card up to 16,384; auto:N at most N; N, there by 32s.",
        metavar="auto[:N]|N",
    )
    prefill_borrow: bool = option(
        True,
        parse_switch,
        "prompt",
        "A prompt borrows its ring and buffers from the expert cache; without, they stay reserved.",
    )
    prefill_ring: int | Auto = option(
        AUTO,
        or_word(whole(2), AUTO),
        "prompt",
        "Slots of the ring that streams experts into a prompt.",
        metavar="auto|N",
        variable_only=True,
    )
    stager_threads: int | Auto = option(
        AUTO,
        or_word(whole(1, 256), AUTO),
        "prompt",
        "Threads that copy experts which are not page-locked.",
        metavar="auto|N",
        variable_only=True,
    )
    stager_ring: int | Auto = option(
        AUTO,
        or_word(whole(2), AUTO),
        "prompt",
        "Page-locked buffers of those threads.",
        metavar="auto|N",
        variable_only=True,
    )
    stage_resident: bool | Auto = option(
        AUTO,
        or_word(parse_switch, AUTO),
        "prompt",
        "Sizes ring and stager for copies from RAM (1) or from files (0) whatever the source.",
        metavar="auto|0|1",
        variable_only=True,
    )
    prefill_cpu_share: float | Auto = option(
        AUTO,
        or_word(real(0, 1), AUTO),
        "prompt",
        """Share of a prompt's experts outside device memory that the CPU computes in RAM, the rarest; 0, and auto in
        this version: the device computes all of them.""",
        metavar="auto|F",
        variable_only=True,
    )

    pcie_frac: float | Auto = option(
        AUTO,
        or_word(real(0, 1), AUTO),
        "experts",
        "Share of a round's misses that the device reads by itself.",
        metavar="auto|F",
    )
    pcie_balance: bool = option(
        True,
        parse_switch,
        "experts",
        """That share counts the misses that only the CPU can compute, so that both end together; 0: a fixed share of
        the page-locked ones.""",
        variable_only=True,
    )
    mailbox: Literal["auto", "off"] = option(
        AUTO,
        choice("auto", "off"),
        "experts",
        """How a card's rounds reach the CPU: auto tests the mailbox in shared memory at the start and falls back where
        it does not work; off: the host hands over the CPU's part of each layer between two graphs, slower.""",
        metavar="auto|off",
        variable_only=True,
    )
    iq_mt_min: int | Auto = option(
        AUTO,
        or_word(whole(0), AUTO),
        "experts",
        "Accepted for other engines' settings: all threads compute experts of every format from one row on.",
        metavar="auto|N",
        variable_only=True,
    )
    adapt_every: int = option(
        16, whole(0), "experts", "Rounds between two looks at which experts deserve a slot; 0 keeps them.", metavar="N"
    )
    adapt_swaps: int = option(8, whole(0), "experts", "Swaps at most at each of those looks.", metavar="N")

    temperature: float = option(0.0, real(0), "sampling", "0 takes the likeliest token every time.", metavar="T")
    top_k: int = option(0, whole(0), "sampling", "Samples among the K likeliest tokens; 0 is all.", metavar="K")
    top_p: float = option(
        1.0,
        real(0, 1, above=True),
        "sampling",
        "Samples among the likeliest tokens of total probability P.",
        metavar="P",
    )
    min_p: float = option(
        0.0, real(0, 1), "sampling", "Leaves out tokens less likely than P times the likeliest.", metavar="P"
    )
    repetition_penalty: float = option(
        1.0, real(0, above=True), "sampling", "Divides the logits of tokens seen before; 1 is off.", metavar="F"
    )
    presence_penalty: float = option(
        0.0, real(-2, 2), "sampling", "Subtracted from the logits of tokens generated before.", metavar="F"
    )
    frequency_penalty: float = option(
        0.0, real(-2, 2), "sampling", "Subtracted once for each time a token was generated before.", metavar="F"
    )
    seed: int | None = option(
        None,
        whole(0, 2**63 - 1),
        "sampling",
        "Equal seeds give equal tokens; default is a new one each time.",
        metavar="N",
    )
    max_tokens: int = option(256, whole(1), "sampling", "Tokens generated at most.", metavar="N")

    log_level: str = option(
        "info",
        choice("error", "warning", "info", "debug"),
        "log",
        "Messages shown on standard error.",
        metavar="error|warning|info|debug",
    )
    log_file: Path | None = option(
        None, parse_path, "log", "Messages are also written to this file, at level debug.", metavar="FILE"
    )

    origins: Mapping[str, Origin] = field(default_factory=lambda: MappingProxyType({}), repr=False, compare=False)

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, "default")

    @property
    def ram_mode(self) -> RamMode:
        """The mode of the RAM tier that the options ask for; a plan may run a lower one and says so."""
        if self.mmap_experts:
            return "mapped"
        if self.resident_budget_gib is not None:
            return "budget"
        return "resident" if self.resident_experts else "arena"


def read_options() -> tuple[Option, ...]:
    found = []
    for one in dataclasses.fields(Requested):
        if "parse" not in one.metadata:
            continue
        data = dict(one.metadata)
        variable_only = data.pop("variable_only")
        if not (variable_only or data["flag"]):
            data["flag"] = "--" + one.name.replace("_", "-")
        found.append(Option(name=one.name, default=one.default, **data))
    return tuple(found)


OPTIONS: tuple[Option, ...] = read_options()
BY_NAME: Mapping[str, Option] = MappingProxyType({one.name: one for one in OPTIONS})
