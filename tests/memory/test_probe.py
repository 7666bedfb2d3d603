"""What the probe makes of machines written down as files: limits of both control-group versions, and none."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.config import Requested
from strata.engine.diagnosis import diagnose
from strata.engine.rates import threads_asked
from strata.kernels.cpu import pool
from strata.memory.probe import Gpu, probe_machine
from strata.memory.surroundings import view_surroundings
from strata.memory.system import system

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1000 kB\nMemAvailable:    8388608 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def no_gpus() -> tuple[Gpu, ...]:
    return ()


def test_without_limits_free_ram_counts(tmp_path: Path) -> None:
    machine = probe_machine(root=write(tmp_path, {}), gpus=no_gpus)
    assert (machine.ram_total, machine.ram_available, machine.ram_rule) == (16 * GIB, 8 * GIB, "free RAM")


def test_a_version_2_limit_of_a_parent_group_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user/app\n",
        "proc/self/mountinfo": "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/user/app/memory.max": "max\n",
        "sys/fs/cgroup/user/app/memory.current": "5\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
        "sys/fs/cgroup/user/cpu.max": "150000 100000\n",
    }
    machine = probe_machine(root=write(tmp_path, files), gpus=no_gpus)
    assert (machine.ram_total, machine.ram_available) == (4 * GIB, 3 * GIB)  # page cache can be reclaimed
    assert machine.ram_rule == "cgroup memory.max"
    assert machine.num_cpus <= 2


def test_a_version_1_limit_seen_from_inside_a_container_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
        "proc/self/mountinfo": (
            "31 20 0:27 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "32 20 0:28 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        ),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    machine = probe_machine(root=write(tmp_path, files), gpus=no_gpus)
    assert (machine.ram_total, machine.ram_available) == (2 * GIB, GIB)
    assert machine.num_cpus == 1


def test_version_1s_way_of_saying_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/\n",
        "proc/self/mountinfo": "31 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    machine = probe_machine(root=write(tmp_path, files), gpus=no_gpus)
    assert machine.ram_available == 8 * GIB


V1 = "cgroup cgroup rw,"
V2 = "cgroup2 cgroup2 rw"
# Files below a root -> the processors' worth of time that they grant.
QUOTAS: dict[str, tuple[dict[str, str], float | None]] = {
    "none": ({"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": f"30 20 0:26 / /g rw - {V2}\n"}, None),
    "the leaf's": ({"g/a/b/cpu.max": "50000 100000\n", "g/a/cpu.max": "max 100000\n"}, 0.5),
    "the parent's": ({"g/a/b/cpu.max": "max 100000\n", "g/a/cpu.max": "300000 200000\n"}, 1.5),
    "the parent's, less than the leaf's": ({"g/a/b/cpu.max": "400000 100000\n", "g/a/cpu.max": "200000 100000\n"}, 2.0),
    "the mount's": ({"g/cpu.max": "100000 100000\n"}, 1.0),
    "version 1, the grandparent's": (
        {
            "proc/self/cgroup": "7:memory:/other\n3:cpu,cpuacct:/a/b/c\n",
            "proc/self/mountinfo": f"32 20 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - {V1}cpu,cpuacct\n",
            "sys/fs/cgroup/cpu,cpuacct/a/b/c/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/a/b/c/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "25000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "10000\n",
        },
        2.5,
    ),
    "both versions, the smaller": (
        {
            "proc/self/cgroup": "3:cpu:/a\n0::/x/y\n",
            "proc/self/mountinfo": f"32 20 0:28 / /one rw - {V1}cpu\n30 20 0:26 / /one/unified rw - {V2}\n",
            "one/a/cpu.cfs_quota_us": "400000\n",
            "one/a/cpu.cfs_period_us": "100000\n",
            "one/unified/x/cpu.max": "300000 100000\n",
        },
        3.0,
    ),
    "a mount that shows no more than a neighbour": (
        {
            "proc/self/mountinfo": f"30 20 0:26 /a/bb /n rw - {V2}\n31 20 0:26 /a /g/a rw - {V2}\n",
            "n/cpu.max": "100000 100000\n",
            "g/a/cpu.max": "600000 100000\n",
        },
        6.0,
    ),
    "the mount with the most ancestors": (
        {
            "proc/self/mountinfo": f"30 20 0:26 /a/b /n rw - {V2}\n31 20 0:26 / /g rw - {V2}\n",
            "n/cpu.max": "max 100000\n",
            "g/a/cpu.max": "700000 100000\n",
        },
        7.0,
    ),
    "a namespace whose group is not below its mount": (
        {"proc/self/cgroup": "0::/../other\n", "g/cpu.max": "150000 100000\n"},
        1.5,
    ),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_smallest_cpu_quota_of_all_ancestors_counts(name: str, tmp_path: Path) -> None:
    files, expected = QUOTAS[name]
    usual = {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": f"30 20 0:26 / /g rw - {V2}\n"}
    root = write(tmp_path, {**usual, **files})
    assert system.cpu_quota(root) == expected
    assert view_surroundings(0, root).cpu_quota == expected  # what doctor says


def test_threads_doctor_and_effects_read_one_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_allowed", lambda: {cpu: (0, f"core{cpu}") for cpu in range(8)})
    monkeypatch.setattr(system, "cpu_quota", lambda root=None: 3.5)
    assert [threads_asked(Requested(), busy) for busy in (0, 1)] == [3, 2]
    assert threads_asked(Requested(threads=7)) == 7
    told = next(one.text for one in diagnose(probe_machine(gpus=no_gpus)) if one.topic == "threads")
    assert told.startswith("3 ")


def test_a_version_1_memory_limit_above_what_a_container_sees_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/docker/abc\n",
        "proc/self/mountinfo": f"31 20 0:27 /docker/abc /sys/fs/cgroup/memory rw - {V1}memory\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{6 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"cache 0\nhierarchical_memory_limit {3 * GIB}\n",
    }
    machine = probe_machine(root=write(tmp_path, files), gpus=no_gpus)
    assert (machine.ram_total, machine.ram_available) == (3 * GIB, 2 * GIB)
    assert machine.ram_rule == "cgroup hierarchical_memory_limit"


def test_a_version_1_memory_limit_of_a_parent_group_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/a/b\n",
        "proc/self/mountinfo": f"31 20 0:27 / /m rw - {V1}memory\n",
        "m/a/b/memory.limit_in_bytes": f"{6 * GIB}\n",
        "m/a/memory.limit_in_bytes": f"{2 * GIB}\n",
        "m/a/memory.usage_in_bytes": f"{GIB}\n",
    }
    machine = probe_machine(root=write(tmp_path, files), gpus=no_gpus)
    assert (machine.ram_total, machine.ram_available) == (2 * GIB, GIB)


@pytest.mark.parametrize("asked", [GIB, 32 * GIB])
def test_ram_gib_replaces_the_claim(tmp_path: Path, asked: int) -> None:
    machine = probe_machine(ram_bytes=asked, root=write(tmp_path, {}), gpus=no_gpus)
    assert (machine.ram_available, machine.ram_rule) == (asked, "--ram-gib")


def test_this_machine_is_finite() -> None:
    machine = probe_machine()
    assert 0 < machine.ram_available <= machine.ram_total < 1 << 50
    assert machine.num_cpus >= 1
