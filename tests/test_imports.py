"""What starting costs: neither the package nor its help loads torch, and help comes at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

import strata
from tests.patience import PATIENCE_S

HEAVY = ("torch", "transformers", "triton", "numpy", "fastapi", "huggingface_hub", "cuda")


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a new interpreter holds after ``code``."""
    script = f"{code}\nimport sys\nprint('\\n@' + ' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return set(result.stdout.rpartition("@")[2].split())


@pytest.mark.parametrize(
    "code",
    [
        "import strata",
        "import strata.cli.app",
        "from strata.cli.app import main; assert main(['--help']) == 0",
        "from strata.cli.app import main; assert main(['--version']) == 0",
        "import strata.config, strata.config_sources, strata.errors, strata.stats, strata.files, strata.logs",
    ],
)
def test_light(code: str) -> None:
    assert not loaded_after(code) & set(HEAVY)


def test_help_of_every_command_is_light() -> None:
    code = "from strata.cli.app import COMMANDS, main\nfor one in COMMANDS: assert main([one.name, '--help']) == 0"
    assert not loaded_after(code) & set(HEAVY)


def test_the_probe_would_see_torch() -> None:
    assert "torch" in loaded_after("import torch")


def test_public_names_are_found_on_first_use() -> None:
    assert strata.Requested().kv == 16
    assert strata.StrataError("x").exit_status == 2
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = strata.nonsense  # type: ignore[attr-defined]
