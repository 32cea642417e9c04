"""Goal: the log of a node keeps its size, and no line is lost or cut by that, whoever writes at the time.

Method: real processes write numbered lines to one file while another one rotates it without a pause; and a table of folders
as deaths between two steps leave them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commitmq.supervision.supervisor import rotate

_WRITER = """
import sys
from pathlib import Path
from commitmq import log
log.follow(Path(sys.argv[1]))
log.configure("INFO", "json")
one = log.get_log(sys.argv[2])
for number in range(int(sys.argv[3])):
    one.info("line", number=number)
"""
_LINES = 3_000


def started_writer(path: Path, name: str, lines: int) -> subprocess.Popen[bytes]:
    with path.open("ab") as file:
        return subprocess.Popen([sys.executable, "-c", _WRITER, str(path), name, str(lines)], stderr=file, stdout=file)


def test_no_line_is_lost_or_cut_while_the_file_changes_its_name(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    writers = [started_writer(path, f"writer-{number}", _LINES) for number in range(3)]
    rotations = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists() and path.stat().st_size > 4_096:
            rotate(path, 10_000)
            rotations += 1
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert rotations > 3, "the writers ended before the file was rotated"
    files = sorted(tmp_path.glob("node.log.*"), key=lambda file: -int(file.suffix[1:]))
    lines = [json.loads(line) for file in (*files, path) if file.exists() for line in file.read_text().splitlines()]
    for number in range(3):
        own = [line["number"] for line in lines if line["process"] == f"writer-{number}"]
        assert sorted(own) == list(range(_LINES))
    assert len(lines) == 3 * _LINES


def test_the_oldest_goes_and_its_space_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    held = []
    for number in range(6):
        path.write_text(f"{number}")
        held.append(os.open(path, os.O_RDONLY))
        rotate(path, 3)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"node.log.1": "5", "node.log.2": "4"}
    assert [os.fstat(fd).st_size for fd in held] == [0, 0, 0, 0, 1, 1]
    for fd in held:
        os.close(fd)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"": "n", ".1": "a", ".2": "b"}, {".1": "n", ".2": "a", ".3": "b"}),
        ({"": "n", ".2": "b"}, {".1": "n", ".2": "b"}),
        ({"": "n", ".1": "a", ".3": "c"}, {".1": "n", ".2": "a", ".3": "c"}),
        ({"": "n", ".1": "a", ".2": "b", ".3": "c"}, {".1": "n", ".2": "a", ".3": "b"}),
        ({"": "n", ".7": "h", ".9": "j"}, {".1": "n"}),
        ({"": "n", ".new": "x", ".01x": "y"}, {".1": "n", ".new": "x", ".01x": "y"}),
    ],
)
def test_a_rotation_closes_what_a_death_left_open(
    tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    for end, text in before.items():
        (tmp_path / f"node.log{end}").write_text(text)
    rotate(tmp_path / "node.log", 4)
    assert {file.name.removeprefix("node.log"): file.read_text() for file in tmp_path.iterdir()} == after


def test_a_process_whose_standard_error_is_no_log_follows_nothing(tmp_path: Path) -> None:
    program = _WRITER + "\nassert not log.is_followed()"
    path = tmp_path / "node.log"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path), "p", "2"], capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["number"] for line in ended.stderr.splitlines()] == [0, 1]
    assert not path.exists()
