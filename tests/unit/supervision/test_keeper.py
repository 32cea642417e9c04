"""Goal: a node whose supervisor was killed comes back also when the disk is full meanwhile; every other end is passed on.
A supervisor that fails while its node serves ends as a killed one does, so that the keeper starts the next; one that fails
before tells it, and its exit code is right. What the keeper loads costs no collections of what stays anyway, and its
children collect again.

Method: the real keeper in a process of its own, over supervisors that are shells which end as the test wants it; the real
process around a supervisor that fails; the loading of a module that makes many objects, with the collector's own counts.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commitmq.config import NodeConfig
from commitmq.supervision import keeper
from commitmq.supervision.exit_codes import CliExit
from nodes import environment

KEEPING = """
import os, sys
from pathlib import Path
from commitmq.config import NodeConfig
from commitmq.supervision import keeper

ends = sys.argv[2].split(",")
keeper.FIRST_PAUSE_S = 0.01
keeper._start = lambda *_: os.posix_spawn("/bin/sh", ["sh", "-c", ends.pop(0)], {}, setsigmask=[])
code = keeper.keep(keeper.Start(Path(sys.argv[1]), NodeConfig(), True, -1))
print(int(code), len(ends))
"""
FAILING = """
import os, sys
from pathlib import Path
from commitmq.config import NodeConfig
from commitmq.supervision import keeper

class Failing:
    def __init__(self, *_, report, **__):
        self.report = report
    def run(self):
        if sys.argv[2] == "serves":
            self.report({"event": "ready", "admin": ["tcp://here:1"], "servers": {}, "store": "s", "warnings": []})
        raise RuntimeError("what nobody thought of")
    def last_word(self, code):
        print("last word", int(code), flush=True)

keeper.Supervisor = Failing
sys.exit(keeper.supervise(keeper.Start(Path(sys.argv[1]), NodeConfig(), False, 2), 1, "life"))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", program, *arguments]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("kill -9 $$,exit 79,exit 79,exit 0", 0),
        ("exit 79", CliExit.NO_ROOM),  # the first start: somebody reads the reason
        ("kill -9 $$,exit 74", CliExit.STORE_UNUSABLE),
        ("kill -15 $$", CliExit.UNCLEAN_STOP),
    ],
)
def test_a_supervisor_that_was_killed_is_started_again_until_there_is_room(
    tmp_path: Path, ends: str, code: int
) -> None:
    (tmp_path / "commitmq").mkdir()
    done = run(KEEPING, str(tmp_path), ends)
    assert done.stdout == f"{int(code)} 0\n", done.stderr


@pytest.mark.parametrize("serves", [True, False])
def test_a_supervisor_that_fails(tmp_path: Path, serves: bool) -> None:
    done = run(FAILING, str(tmp_path), "serves" if serves else "starts")
    assert "what nobody thought of" in done.stderr
    if serves:
        assert done.returncode == -signal.SIGKILL
        assert "last word" not in done.stdout
    else:
        assert done.returncode == CliExit.CRASHED
        assert f"last word {int(CliExit.CRASHED)}" in done.stdout


def test_nothing_is_collected_while_modules_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "many_objects.py").write_text("kept = [[] for _ in range(200_000)]\n", encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(keeper, "release_library_pages", lambda: None)
    monkeypatch.setattr(keeper, "pass_interpreter_on", lambda: None)
    monkeypatch.setattr(keeper, "start_order", lambda _config: {"writer": "many_objects"})
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"):
        monkeypatch.setenv(name, "1")
    began: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began.append(info["generation"])

    config = NodeConfig()
    gc.collect()  # none is due before the collections are off
    gc.callbacks.append(note)
    try:
        keeper.load(config)
        frozen = gc.get_freeze_count()
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
        sys.modules.pop("many_objects", None)
    assert began == []
    assert frozen > 200_000
    assert gc.isenabled()
