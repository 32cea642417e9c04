"""Processes of a program that has CommitMQ without the extra ``node``: as in an environment of ``pip install commitmq`` alone.

A module that Python loads by itself when it starts takes away what the extra brings, before anything else is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from commitmq.extras import NODE_MODULES
from nodes import environment

HIDDEN = (*NODE_MODULES, "rich")


def hide_node(folder: Path) -> dict[str, str]:
    """Environment variables for such processes; ``folder``, which is made, holds what hides the modules."""
    folder.mkdir(exist_ok=True)
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in HIDDEN), ""]
    (folder / "sitecustomize.py").write_text("\n".join(lines), encoding="ascii")
    variables = environment()
    return {**variables, "PYTHONPATH": os.pathsep.join([str(folder), variables["PYTHONPATH"]])}


def python(
    variables: dict[str, str], *arguments: str, stdin: str = "", timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS``; output and exit code are in the result."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=variables,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
