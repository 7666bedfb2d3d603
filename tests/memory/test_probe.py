"""What the probe makes of machines written down as files: limits of both control-group versions, and none."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.memory.probe import Gpu, probe_machine

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


@pytest.mark.parametrize("asked", [GIB, 32 * GIB])
def test_ram_gib_replaces_the_claim(tmp_path: Path, asked: int) -> None:
    machine = probe_machine(ram_bytes=asked, root=write(tmp_path, {}), gpus=no_gpus)
    assert (machine.ram_available, machine.ram_rule) == (asked, "--ram-gib")


def test_this_machine_is_finite() -> None:
    machine = probe_machine()
    assert 0 < machine.ram_available <= machine.ram_total < 1 << 50
    assert machine.num_cpus >= 1
