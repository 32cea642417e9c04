"""Goal: a client that is measured pays for what it does, not for what another work's client needs.

Method: a fresh interpreter loads the driver, and its modules are looked at.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def test_a_driver_starts_without_kernels() -> None:
    code = "import sys, bench.drivers.commitmq_driver; print([n for n in sys.modules if n in ('commitmq.kernels',)])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
