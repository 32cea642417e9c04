"""A real node on a store folder, driven through the ``commitmq`` command as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

# The same sizes as rocketmq.SETTINGS: the two must agree on them to open each other's files.
_SETTINGS = (
    "network.port=0",
    "commit_log.segment_bytes=131072",
    "consume_queue.file_bytes=1000",
    "index.hash_slots=200",
    "index.max_items=500",
)
_COMMAND_TIMEOUT_S = 90


def commitmq(*arguments: str) -> str:
    """Run ``commitmq ARGUMENTS``; its output. Raises AssertionError with what it said when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "commitmq.cli.main", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (
        f"commitmq {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def dump(root: Path) -> list[dict[str, Any]]:
    """Every message of the store as ``commitmq store dump`` lists it."""
    return [json.loads(line) for line in commitmq("store", "dump", str(root)).splitlines()]


class NodeProcess:
    """The node on ``root``. Leaving it as a context manager stops it, unless that was done before."""

    def __init__(self, root: Path, *settings: str) -> None:
        self.root = root
        self._settings = settings

    def __enter__(self) -> NodeProcess:
        overrides = [word for setting in (*_SETTINGS, *self._settings) for word in ("--set", setting)]
        commitmq("start", "--store", str(self.root), "--background", *overrides)
        self._processes = self._family()
        self.running = True
        return self

    def __exit__(self, *error: object) -> None:
        if self.running and error[0] is None:
            self.stop()
        elif self.running:
            self.kill()

    @property
    def address(self) -> str:
        """The admin address."""
        address: str = self._node_file()["admin"][0]
        return address

    def stop(self) -> None:
        """Stop in order; fails when the store is not left closed."""
        commitmq("stop", "--store", str(self.root))
        self.running = False

    def kill(self) -> None:
        """SIGKILL every process of the node at one moment: all are halted first, so that none sees another one go."""
        family = {process.pid: process for process in [*self._processes, *self._family()]}
        for action in (psutil.Process.suspend, psutil.Process.kill):
            for process in family.values():
                try:
                    action(process)
                except psutil.NoSuchProcess:
                    continue
        psutil.wait_procs(list(family.values()), timeout=30)
        self.running = False

    def _node_file(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.root / "run" / "node.json").read_text())
        return content

    def _family(self) -> list[psutil.Process]:
        """Keeper, supervisor and all that came from them; psutil checks start times, so no reused pid is hit."""
        known = self._node_file()
        family: dict[int, psutil.Process] = {}
        for pid in (known["keeper_pid"], known["pid"]):
            assert pid != os.getpid()
            try:
                process = psutil.Process(pid)
                family.update({one.pid: one for one in [process, *process.children(recursive=True)]})
            except psutil.NoSuchProcess:
                continue
        return list(family.values())
