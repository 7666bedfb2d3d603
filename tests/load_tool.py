"""Loads a script of tools/ as a module: tools is no package, because setup.py and a bare Python run it too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def load_tool(name: str) -> ModuleType:
    """A fresh module each time, so that a test may replace its constants."""
    if str(TOOLS) not in sys.path:
        sys.path.insert(0, str(TOOLS))
    return load_script(TOOLS / f"{name}.py")


def load_script(path: Path) -> ModuleType:
    """A script of any folder, the same way."""
    spec = importlib.util.spec_from_file_location(f"strata_tool_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
