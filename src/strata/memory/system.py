"""Chooses the file of this operating system; everybody else imports ``system`` from here.

Lives here so that no other module asks which system it runs on. The files offer the same names.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    from strata.memory import windows as system
else:
    from strata.memory import linux as system

__all__ = ["system"]
