"""CommitMQ as another checkout of the project has it, with the client and the driver of that checkout (``--before``)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from bench.system import Durability, Server
from bench.systems.commitmq import CommitMQ, CommitMQServer
from bench.workloads import BEFORE

VARIABLE: Final = "COMMITMQ_BENCH_BEFORE"
"""The environment's name for the folder of the checkout, which has its environment in ``.venv``."""


class Before(CommitMQ):
    """The plain rows only: a checkout from before the others has no driver for them."""

    name = BEFORE
    works = frozenset({"send", "pipeline", "batch", "read", "end_to_end", "mixed", "query", "ready", "floor"})

    @property
    def version(self) -> str:
        """The commit."""
        said = subprocess.run(
            ["git", "-C", str(_folder()), "describe", "--always"], capture_output=True, text=True, check=False
        )
        return said.stdout.strip() or "unknown"

    def missing(self) -> str | None:
        if VARIABLE not in os.environ:
            return "no other checkout is named (--before)"
        python = _folder() / ".venv" / "bin" / "python"
        return None if python.exists() else f"{python} does not exist: run scripts/test there once"

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        checkout = _folder()
        # Nothing of this checkout must be found: neither its node nor its drivers.
        python = ["/usr/bin/env", f"PYTHONPATH={checkout / 'scripts'}", str(checkout / ".venv" / "bin" / "python")]
        return CommitMQServer(folder, {**self.node_settings(durability), **hints}, python).launch()


def _folder() -> Path:
    return Path(os.environ[VARIABLE])
