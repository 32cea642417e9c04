"""CommitMQ as another checkout of the project has it, with the client and the driver of that checkout (``--before``)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Final

from bench.system import BenchError, Durability, Server
from bench.systems.commitmq import CommitMQ, CommitMQServer
from bench.workloads import BEFORE

VARIABLE: Final = "COMMITMQ_BENCH_BEFORE"
"""The environment's name for the folder of the checkout, which has its environment in ``.venv``."""

_SETTINGS_OF: Final = "import json; from bench.systems.commitmq import CommitMQ"


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

    def node_settings(self, durability: Durability) -> dict[str, str]:
        """As that checkout's own comparison sets its node. Raises BenchError."""
        program = f"{_SETTINGS_OF}; print(json.dumps(CommitMQ().settings({durability!r})))"
        said = subprocess.run([*_python(), "-c", program], capture_output=True, text=True, check=False)
        try:
            found: dict[str, str] = json.loads(said.stdout)
        except ValueError:
            raise BenchError(f"{_folder()} does not tell its settings: {said.stderr[-1000:]}") from None
        return {name: value for name, value in found.items() if not name.startswith("Producer(")}

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        return _Server(folder, {**self.node_settings(durability), **hints}, _python()).launch()


class _Server(CommitMQServer):
    start = ("start",)  # not each state of the project has --verbose


def _python() -> list[str]:
    """The checkout's interpreter; nothing of this checkout is found, neither its node nor its drivers."""
    return ["/usr/bin/env", f"PYTHONPATH={_folder() / 'scripts'}", str(_folder() / ".venv" / "bin" / "python")]


def _folder() -> Path:
    return Path(os.environ[VARIABLE])
