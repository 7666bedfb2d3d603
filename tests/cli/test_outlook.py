"""``strata demo``'s outlook: 'yes' is said only where no expert is read from the file."""

from __future__ import annotations

import pytest

import strata.memory.probe
from strata.cli.demo import print_outlook
from strata.config import Requested
from strata.memory.probe import Machine

GIB = 1 << 30


def test_an_outlook_says_yes_only_where_all_experts_are_in_ram(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine("", 8, 32 * GIB, 32 * GIB, "free RAM", None, (), ())
    monkeypatch.setattr(strata.memory.probe, "probe_machine", lambda: machine)
    print_outlook(Requested())
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert ": yes, all experts in RAM; " in lines["qwen3-30b"]
    # 63.3 GiB of experts, about 32 - 4 (headroom) - 5 (dense, KV) GiB of room.
    assert ": slowly, from the file: 3" in lines["flash-next"]
    assert " % of the experts fit in RAM; " in lines["flash-next"]
    assert "yes" not in lines["flash-next"] + lines["qwen3-235b"]
