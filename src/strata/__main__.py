"""``python -m strata``: hands over to the console entry, and imports nothing heavy itself."""

from __future__ import annotations

from strata.console import run

if __name__ == "__main__":
    run()
