"""Options: the list is frozen, precedence holds, values that do not parse are errors, and what is printed is true."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.config import BY_NAME, OPTIONS, Requested
from strata.config_sources import Effect, format_configuration, resolve, resolve_here, unknown_variables
from strata.errors import ConfigError
from strata.option_values import Prefill, format_value

# A knob costs something: adding one means adding it here, with the reason in the commit.
FROZEN = {
    "model": "--model",
    "device": "--device",
    "threads": "--threads",
    "max_context": "--max-context",
    "kv": "--kv",
    "vram_gib": "--vram-gib",
    "vram_reserve_mib": "--vram-reserve-mib",
    "ram_gib": "--ram-gib",
    "expert_cache": "--expert-cache",
    "resident_experts": "--resident-experts",
    "resident_budget_gib": "--resident-budget-gib",
    "mmap_experts": "--mmap-experts",
    "resident_headroom_gib": "STRATA_RESIDENT_HEADROOM_GIB",
    "complement_pin_gib": "STRATA_COMPLEMENT_PIN_GIB",
    "arena_pin_gib": "STRATA_ARENA_PIN_GIB",
    "pin_margin_gib": "STRATA_PIN_MARGIN_GIB",
    "pin_by_need": "STRATA_PIN_BY_NEED",
    "partial_pin": "STRATA_PARTIAL_PIN",
    "prefer_slices": "STRATA_PREFER_SLICES",
    "test_complement_refuse": "STRATA_TEST_COMPLEMENT_REFUSE",
    "prefill": "--prefill",
    "prefill_borrow": "--prefill-borrow",
    "prefill_ring": "STRATA_PREFILL_RING",
    "stager_threads": "STRATA_STAGER_THREADS",
    "stager_ring": "STRATA_STAGER_RING",
    "stage_resident": "STRATA_STAGE_RESIDENT",
    "prefill_cpu_share": "STRATA_PREFILL_CPU_SHARE",
    "pcie_frac": "--pcie-frac",
    "pcie_balance": "STRATA_PCIE_BALANCE",
    "mailbox": "STRATA_MAILBOX",
    "iq_mt_min": "STRATA_IQ_MT_MIN",
    "adapt_every": "--adapt-every",
    "adapt_swaps": "--adapt-swaps",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "seed": "--seed",
    "max_tokens": "--max-tokens",
    "log_level": "--log-level",
    "log_file": "--log-file",
}

# For each option a text that must be taken and texts that must not.
SAMPLES: dict[str, tuple[str, list[str]]] = {
    "model": ("some/pack", ["", " "]),
    "device": ("cuda:1", ["gpu", "cuda:", "cuda:x", ""]),
    "threads": ("3", ["0", "-1", "two", "1.5", ""]),
    "max_context": ("40960", ["0", "64k", ""]),
    "kv": ("32", ["int8", "8", ""]),
    "vram_gib": ("24", ["0", "-3", "nan", "inf", "24G", ""]),
    "vram_reserve_mib": ("0", ["-1", "1.5", "x"]),
    "ram_gib": ("0.5", ["0", "nan", ""]),
    "expert_cache": ("0", ["-1", "half", ""]),
    "resident_experts": ("1", ["2", "", "si"]),
    "resident_budget_gib": ("8", ["0", "", "all"]),
    "mmap_experts": ("on", ["", "maybe"]),
    "resident_headroom_gib": ("0", ["-1", "", "auto"]),
    "complement_pin_gib": ("all", ["none", "-1", "", "8GiB"]),
    "arena_pin_gib": ("none", ["all", "-1", ""]),
    "pin_margin_gib": ("4", ["-1", "x"]),
    "pin_by_need": ("1", ["2", ""]),
    "partial_pin": ("1", ["10"]),
    "prefer_slices": ("1", ["2", ""]),
    "test_complement_refuse": ("1", ["refuse"]),
    "prefill": ("auto:32768", ["auto:", "auto:0", "0", "-5", "auto:x", "", "8192.0"]),
    "prefill_borrow": ("0", ["never"]),
    "prefill_ring": ("96", ["1", "0", ""]),
    "stager_threads": ("8", ["0", "1000", ""]),
    "stager_ring": ("16", ["1", ""]),
    "stage_resident": ("0", ["2", ""]),
    "prefill_cpu_share": ("0.25", ["1.1", "-0.1", "nan", "25%", ""]),
    "pcie_frac": ("0.5", ["1.1", "-0.1", "nan", ""]),
    "pcie_balance": ("0", ["2", "auto", ""]),
    "mailbox": ("off", ["on", "0", ""]),
    "iq_mt_min": ("4", ["-1", "1.5", ""]),
    "adapt_every": ("0", ["-1", "auto"]),
    "adapt_swaps": ("4", ["-1", ""]),
    "temperature": ("0.7", ["-1", "hot", "inf"]),
    "top_k": ("40", ["-1", "1.5"]),
    "top_p": ("0.9", ["0", "1.5"]),
    "min_p": ("0.05", ["-1", "2"]),
    "repetition_penalty": ("1.1", ["0", "-1"]),
    "presence_penalty": ("-2", ["3"]),
    "frequency_penalty": ("2", ["-2.5"]),
    "seed": ("9223372036854775807", ["-1", "9223372036854775808", "x"]),
    "max_tokens": ("1", ["0", ""]),
    "log_level": ("debug", ["loud", ""]),
    "log_file": ("strata.log", ["", " "]),
}


def test_the_list_of_options_is_frozen() -> None:
    assert {one.name: one.spelling for one in OPTIONS} == FROZEN


def test_every_option_has_samples() -> None:
    assert set(SAMPLES) == set(FROZEN)


@pytest.mark.parametrize("name", SAMPLES)
def test_values(name: str) -> None:
    good, bad = SAMPLES[name]
    variable = BY_NAME[name].variable
    by_environment = resolve(environment={variable: good})
    by_command_line = resolve(command_line={name: good})
    assert by_environment == by_command_line
    assert by_environment.origin(name) == "environment"
    assert by_command_line.origin(name) == "command line"
    if good != format_value(BY_NAME[name].default):
        assert getattr(by_environment, name) != BY_NAME[name].default
    for text in bad:
        with pytest.raises(ConfigError) as caught:
            resolve(environment={variable: text})
        assert variable in caught.value.message, "the message names what was set"
        assert repr(text) in caught.value.message
        assert caught.value.hint


def test_defaults_pass_their_own_parsers() -> None:
    for one in OPTIONS:
        if one.default is not None:
            assert one.parse(format_value(one.default)) == one.default, one.name


def value_strategy(name: str) -> st.SearchStrategy[Any]:
    gib = st.floats(0.001, 1e6, allow_nan=False)
    return {
        "vram_gib": gib,
        "prefill": st.builds(Prefill, st.integers(1, 10**6), st.booleans()),
        "threads": st.just("auto") | st.integers(1, 256),
        "complement_pin_gib": st.sampled_from(["auto", "all"]) | gib,
        "stage_resident": st.just("auto") | st.booleans(),
        "temperature": st.floats(0, 100),
        "seed": st.integers(0, 2**63 - 1),
        "log_file": st.text("abc./", min_size=1).map(Path),
    }[name]


@pytest.mark.parametrize(
    "name",
    ["vram_gib", "prefill", "threads", "complement_pin_gib", "stage_resident", "temperature", "seed", "log_file"],
)
@given(data=st.data())
def test_text_and_value_are_one(name: str, data: st.DataObject) -> None:
    value = data.draw(value_strategy(name))
    assert getattr(resolve(command_line={name: format_value(value)}), name) == value
    assert getattr(resolve(arguments={name: value}), name) == value


def test_precedence(tmp_path: Path) -> None:
    model_file, home_file = tmp_path / "strata.toml", tmp_path / "config.toml"
    model_file.write_text("vram_gib = 12\nthreads = 2\n")
    home_file.write_text('vram_gib = 8\nthreads = 1\nkv = 32\nexpert_cache = "auto"\n')
    requested = resolve(
        command_line={"vram_gib": "24", "threads": None},
        environment={"STRATA_VRAM_GIB": "16", "STRATA_MAX_CONTEXT": "4096", "HOME": "x"},
        model_file=model_file,
        home_file=home_file,
    )
    found = {name: (getattr(requested, name), requested.origin(name)) for name in FROZEN}
    assert found["vram_gib"] == (24.0, "command line")
    assert found["max_context"] == (4096, "environment")
    assert found["threads"] == (2, "model file")
    assert found["kv"] == (32, "home file")
    assert found["ram_gib"] == (None, "default")


def test_a_bad_value_below_a_good_one_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match="STRATA_VRAM_GIB"):
        resolve(command_line={"vram_gib": "24"}, environment={"STRATA_VRAM_GIB": "lots"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vram_gigs = 3", "did you mean vram_gib"),
        ("max-context = 3", "did you mean max_context"),
        ("context = 3", "did you mean max_context"),
        ("vram = 3", "did you mean vram_"),
        ("vram_gib = ", "cannot be read as TOML"),
        ("[memory]\nvram_gib = 3", "'memory' is no option"),
        ("vram_gib = [1, 2]", "holds a list"),
        ("threads = 1.5", "--threads: '1.5'"),
        ("kv = true", "--kv: 'true'"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(home_file=path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_contradictions_name_both_and_their_origins() -> None:
    with pytest.raises(ConfigError, match=r"--mmap-experts \(environment\) and --resident-experts \(command line\)"):
        resolve(command_line={"resident_experts": True}, environment={"STRATA_MMAP_EXPERTS": "1"})
    with pytest.raises(ConfigError, match="--resident-budget-gib"):
        resolve(command_line={"mmap_experts": True, "resident_budget_gib": "3"})


def test_modes() -> None:
    assert Requested().ram_mode == "arena"
    assert resolve(arguments={"resident_experts": True}).ram_mode == "resident"
    assert resolve(arguments={"resident_experts": True, "resident_budget_gib": 4}).ram_mode == "budget"
    assert resolve(arguments={"mmap_experts": True}).ram_mode == "mapped"


def test_unknown_names() -> None:
    lines = unknown_variables({"STRATA_VRAM_GIG": "3", "STRATA_VRAM_GIB": "3", "STRATA_HOME": "x", "PATH": "y"})
    assert lines == ["STRATA_VRAM_GIG is set but no option reads it; did you mean STRATA_VRAM_GIB?"]
    with pytest.raises(ConfigError, match="did you mean threads"):
        resolve(arguments={"thread": 3})


def test_requested_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Requested().kv = 32  # type: ignore[misc]
    with pytest.raises(TypeError):
        resolve(arguments={"kv": 32}).origins["kv"] = "default"  # type: ignore[index]


def test_base_supplies_the_rest() -> None:
    first = resolve(environment={"STRATA_KV": "32"})
    second = resolve(arguments={"threads": 2}, base=first)
    assert (second.kv, second.origin("kv")) == (32, "environment")
    assert (second.threads, second.origin("threads")) == (2, "argument")


def test_printed_configuration() -> None:
    requested = resolve(command_line={"prefill": "auto:32768"}, environment={"STRATA_PIN_BY_NEED": "1"})
    text = format_configuration(requested, [Effect("pin_by_need", in_force=False, why="the device needs no pins")])
    lines = text.splitlines()
    assert len(lines) == len(OPTIONS)
    by_name = {line.split()[0]: line for line in lines}
    assert by_name["--prefill"].split() == ["--prefill", "auto:32768", "command", "line", "in", "force"]
    assert by_name["STRATA_PIN_BY_NEED"].endswith("environment   refused: the device needs no pins")
    with pytest.raises(AssertionError, match="no option"):
        format_configuration(requested, [Effect("pin_by_ned", in_force=True)])


def test_a_model_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        if path.name == "strata.toml":
            raise PermissionError(13, "Permission denied", str(path))
        return False

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(
        ConfigError, match=r"strata\.toml cannot be looked for: Permission denied .*right to enter"
    ) as caught:
        resolve_here(arguments={"model": str(tmp_path)})
    assert str(tmp_path) in caught.value.hint


def test_threads_are_bounded_where_the_option_is_read() -> None:
    with pytest.raises(ConfigError, match=r"--threads: '257'.*1 to 256"):
        resolve(command_line={"threads": "257"})


SIZES = [name for name in FROZEN if name.endswith("_gib")]
REALS = [*SIZES, "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
REALS += ["pcie_frac", "prefill_cpu_share"]
SWITCHES = {name for name in FROZEN if BY_NAME[name].is_switch} | {"stage_resident", "prefer_slices"}


@pytest.mark.parametrize("name", SIZES)
@given(size=st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(10**400), 10**400))
def test_a_size_can_be_counted_in_bytes_or_is_refused(name: str, size: float) -> None:
    """Whatever is taken, its bytes are a number that memory is planned with."""
    for given_as in ({"arguments": {name: size}}, {"environment": {BY_NAME[name].variable: str(size)}}):
        try:
            taken = getattr(resolve(**given_as), name)  # type: ignore[arg-type]
        except ConfigError as error:
            assert "1048576" in error.hint
        else:
            assert 0 <= int(taken * 2**30) <= 2**50


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize(
    "text", ["1_0", "0_1", "\u0661", "\uff11", "1,5", "0x1", "1e", ".", "e5", "1 0", "infinity", "1f", "\u00bd"]
)
def test_numbers_are_plain(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match="a number"):
        resolve(environment={BY_NAME[name].variable: text})


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("1.", 1.0), (".5", 0.5), ("+2.5e-1", 0.25), (" 1E+1 ", 10.0)])
def test_plain_numbers(text: str, value: float) -> None:
    assert resolve(command_line={"ram_gib": text}).ram_gib == value


@given(st.floats(0, 2**20, exclude_min=True))
def test_what_python_writes_of_a_number_is_plain(value: float) -> None:
    assert resolve(arguments={"ram_gib": value}).ram_gib == value


@pytest.mark.parametrize("name", sorted(set(FROZEN) - SWITCHES))
@pytest.mark.parametrize("value", [True, False])
def test_booleans_are_no_values_but_of_switches(name: str, value: bool) -> None:
    with pytest.raises(ConfigError, match=rf"{BY_NAME[name].spelling}: '{str(value).lower()}' .* cannot be taken"):
        resolve(arguments={name: value})


@pytest.mark.parametrize("name", sorted(SWITCHES - {"mmap_experts"}))
def test_switches_take_booleans(name: str) -> None:
    assert getattr(resolve(arguments={name: True}), name) is True
    assert getattr(resolve(arguments={name: False}), name) is False


@pytest.mark.parametrize("name", ["threads", "max_context", "top_k", "seed", "vram_reserve_mib", "ram_gib", "prefill"])
def test_numbers_of_thousands_of_digits(name: str, tmp_path: Path) -> None:
    for value in ("9" * 5000, int("9" * 4000) ** 2):
        with pytest.raises(ConfigError, match=r"give .*number") as caught:
            resolve(arguments={name: value})
        assert "Exceeds the limit" not in str(caught.value)
    path = tmp_path / "config.toml"
    path.write_text(f"{name} = {'9' * 5000}\n")
    with pytest.raises(ConfigError):
        resolve(home_file=path)
