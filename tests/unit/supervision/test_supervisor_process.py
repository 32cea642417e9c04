"""Goal: a supervisor that fails while its node serves ends as a killed one does, so that the keeper starts the next; one that
fails before tells it, and its exit code is right.

Method: the real process around a supervisor that fails.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commitmq.supervision.exit_codes import CliExit
from nodes import environment

PROGRAM = """
import os, sys
from commitmq.supervision import supervisor_process as process

class Failing:
    def __init__(self, *_, report, **__):
        self.report = report
    def run(self):
        if sys.argv[2] == "serves":
            self.report({"event": "ready", "admin": ["tcp://here:1"], "servers": {}, "store": "s", "warnings": []})
        raise RuntimeError("what nobody thought of")
    def last_word(self, code):
        print("last word", int(code), flush=True)

process.Supervisor = Failing
fd = os.memfd_create("config")
process.read_config = lambda fd: None
sys.exit(process.main([sys.argv[1], str(fd), "2", "foreground", "1", "life"]))
"""


@pytest.mark.parametrize("serves", [True, False])
def test_a_supervisor_that_fails(tmp_path: Path, serves: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "serves" if serves else "starts"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "what nobody thought of" in done.stderr
    if serves:
        assert done.returncode == -signal.SIGKILL
        assert "last word" not in done.stdout
    else:
        assert done.returncode == CliExit.CRASHED
        assert f"last word {int(CliExit.CRASHED)}" in done.stdout
