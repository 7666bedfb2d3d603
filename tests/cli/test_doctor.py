"""``strata doctor``: what it finds here, and what it says of machines that lack something."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from strata.cli.app import main
from strata.engine.diagnosis import Finding, diagnose
from strata.kernels.cpu import library
from strata.kernels.cuda.compile import compile_kernels, list_kernels, list_units
from strata.memory.limits import MemoryLimit
from strata.memory.probe import Gpu, Machine
from strata.memory.surroundings import Surroundings, try_lock, view_surroundings
from tests.kernels.fake_cuda import FakeCard, FakeCuda

GIB = 1 << 30
MACHINE = Machine("A processor", 8, 32 * GIB, 20 * GIB, "free RAM", None, (), ())
AROUND = Surroundings((), None, 8, None, "madvise", 1, 20 * GIB, 20 * GIB, "")


def find(machine: Machine = MACHINE, around: Surroundings = AROUND, **tools: str) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in diagnose(machine, surroundings=lambda _: around, which=lambda name: tools.get(name)):
        found.setdefault(finding.topic, []).append(finding)
    return found


def test_this_machine_runs_strata(capsys: pytest.CaptureFixture[str], session_home: Path) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert str(session_home) in out
    assert "-ffp-contract=off" in out
    assert out.endswith("Strata runs here\n")
    assert main(["doctor", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["runs"]
    assert {"RAM", "GPU", "page-locking", "memory lock", "instruction set"} <= {
        one["topic"] for one in table["findings"]
    }


def test_what_is_missing_is_named_with_its_packages() -> None:
    findings = find()["tools"]
    assert all(finding.state == "note" for finding in findings)
    assert "Debian: g++, Fedora: gcc-c++, Arch: gcc" in findings[0].hint
    assert find(make="/usr/bin/make")["tools"][1] == Finding("tools", "make: make")


def test_a_lock_limit_is_a_note_with_the_way_out() -> None:
    tight = dataclasses.replace(AROUND, locked_limit=8 << 20, lockable=8 << 20, lock_refusal="Cannot allocate memory")
    found = find(around=tight)
    lock = found["memory lock"][0]
    assert lock.state == "note"
    assert "8.0 MiB of 20.00 GiB" in lock.text
    assert "ulimit -l unlimited" in lock.hint
    assert "where the limit allows it" in found["page-locking"][0].text
    free = dataclasses.replace(AROUND, locked_limit=8 << 20)
    assert "does not bind this user" in find(around=free)["memory lock"][0].text


def test_limits_of_containers_and_huge_pages_are_shown() -> None:
    limited = dataclasses.replace(
        AROUND,
        memory_limits=(MemoryLimit("cgroup memory.max", 8 * GIB, GIB),),
        cpu_quota=2.5,
        huge_pages="never",
        nodes=2,
    )
    found = find(around=limited)
    assert found["limit"][0].text == "cgroup memory.max: 1.00 GiB of 8.00 GiB used"
    assert "grants 2.5 of them, 2 memory nodes" in found["processor"][0].text
    assert "madvise" in found["huge pages"][0].hint


CARD = Gpu("Some card", 24 * GIB, 23 * GIB, "600.1")
WITH_CARD = dataclasses.replace(MACHINE, gpus=(CARD,))


def test_a_card_is_shown_with_what_cuda_says_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    fake = FakeCuda(cards=[FakeCard(timeout=1)]).install(monkeypatch)
    found = find(WITH_CARD)
    assert "23.00 GiB of 24.00 GiB free, driver 600.1" in found["GPU"][0].text
    cuda = found["CUDA"][0]
    assert cuda.state == "ok"
    assert all(word in cuda.text for word in ("cuda:0 is Fake 9000, sm_90, 12", "CUDA 13.0", "nvrtc 13.0"))
    assert "2 s" in cuda.hint
    assert "path 1" in found["page-locking"][0].text
    count = len(list_units(list_kernels()))
    assert f"0 of {count} files and parts of files are compiled for sm_90" in found["GPU kernels"][0].text
    compile_kernels(["nothing"], 90, (13, 0))
    assert f"1 of {count} files" in find(WITH_CARD)["GPU kernels"][0].text
    assert len(fake.compiled) == 1


def test_the_room_for_page_locking_is_that_of_the_adapter_that_has_least() -> None:
    two = dataclasses.replace(WITH_CARD, pin_rooms=(40 * GIB, 30 * GIB))
    assert "below the 30.00 GiB" in find(two)["page-locking"][0].text
    assert "least of 2 adapters" in find(two)["page-locking"][0].text
    assert "budget" not in find(WITH_CARD)["page-locking"][0].text


def test_a_card_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(driver_version=12080).install(monkeypatch)
    cuda = find(WITH_CARD)["CUDA"][0]
    assert (cuda.state, "CUDA 12.8" in cuda.text, "580" in cuda.hint) == ("note", True, True)
    fake.driver_version, fake.has_compiler = 13000, False
    assert "run-time compiler is missing" in find(WITH_CARD)["CUDA"][0].text
    fake.has_compiler, fake.cards[0].architecture = True, (6, 1)
    assert "sm_61, Strata needs sm_75" in find(WITH_CARD)["CUDA"][0].text
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert "strata-moe[cuda]" in find(WITH_CARD)["CUDA"][0].hint


def test_no_ram_prevents_running() -> None:
    assert find(dataclasses.replace(MACHINE, ram_available=100 << 20))["RAM"][0].state == "bad"


def test_a_library_that_was_not_built_prevents_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "_PATH", tmp_path / "libstrata_cpu.so")
    library.library.cache_clear()
    try:
        assert main(["doctor"]) == 1
    finally:
        library.library.cache_clear()
    out = capsys.readouterr().out
    assert re.search(r"X native library +.*is not built\n +run `make build`", out)
    assert "1 of these (X) keep Strata from running" in out


def test_a_home_that_cannot_be_written_prevents_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "file"))
    assert find()["STRATA_HOME"][0].state == "bad"


def test_surroundings_are_read_below_a_root(tmp_path: Path) -> None:
    for name in ("node0", "node1", "nodes_online"):
        (tmp_path / "sys/devices/system/node" / name).mkdir(parents=True)
    (tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    (tmp_path / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always madvise [never]\n")
    around = view_surroundings(1 << 20, tmp_path)
    assert (around.nodes, around.huge_pages, around.memory_limits) == (2, "never", ())


def test_a_trial_lock_takes_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    lockable, _ = try_lock(1 << 30)
    assert 0 <= lockable <= 1 << 30
    assert resident() - before < 16 << 20
    assert try_lock(0) == (0, "")


def test_rates_are_kept_only_where_they_would_be_used(session_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = session_home / "calibration"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rates-of-another-machine.json").write_text("{}")
    main(["doctor"])
    assert "not measured; 'strata plan --measure'" in capsys.readouterr().out
