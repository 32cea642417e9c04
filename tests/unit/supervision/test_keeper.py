"""Goal: a node whose supervisor was killed comes back also when the disk is full meanwhile; every other end is passed on.

Method: the real keeper in a process of its own, over supervisors that are shells which end as the test wants it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commitmq.supervision import keeper
from commitmq.supervision.exit_codes import CliExit

PROGRAM = """
import os, sys
from commitmq.supervision import keeper

ends = sys.argv[2].split(",")
keeper.FIRST_PAUSE_S = 0.01
keeper._start = lambda *_: os.posix_spawn("/bin/sh", ["sh", "-c", ends.pop(0)], {}, setsigmask=[])
code = keeper.main([sys.argv[1], "-1", "-1", "background"])
print(code, len(ends))
"""


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
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), ends]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{int(code)} 0\n", done.stderr


def test_the_keeper_has_the_numbers_of_the_command() -> None:
    assert (keeper.UNCLEAN_STOP, keeper.NO_ROOM) == (CliExit.UNCLEAN_STOP, CliExit.NO_ROOM)
