"""Goal: the lines come from the newest on, each once, over all files, in any number of looks, while the log is written.

Method: logs of several files written by AuditLog itself; looks that end anywhere and go on; junk and long pieces between.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest

from commitmq.log import get_log
from commitmq.security.audit import Actor, AuditLimits, AuditLog, Event, older_files
from commitmq.security.audit_trail import Backwards, TrailPosition


def written(folder: Path, count: int, max_file_bytes: int = 4_000) -> AuditLog:
    limits = AuditLimits(max_file_bytes=max_file_bytes, max_files=100)
    log = AuditLog(folder, "writer", get_log("test"), limits, syncs_at_once=True)
    for number in range(count):
        log.write(Event(Actor("ann"), "send", f"Topic:{number}", reason="r" * (number % 90)))
    return log


def numbers(look: Backwards) -> list[int]:
    with contextlib.closing(look):
        return [int(one["n"]) for one in look]


def test_all_lines_the_newest_first(tmp_path: Path) -> None:
    log = written(tmp_path, 100)
    assert len(older_files(log.path)) > 2
    assert numbers(Backwards(log.path)) == list(range(100, 0, -1))


@pytest.mark.parametrize("step", [1, 7, 33, 1_000])
def test_looks_go_on_where_the_one_before_ended(tmp_path: Path, step: int) -> None:
    log = written(tmp_path, 100)
    found: list[int] = []
    place: TrailPosition | None = None
    while True:
        with contextlib.closing(Backwards(log.path, place)) as look:
            log.write(Event(Actor("bob"), "send", "Topic:now"))  # while it is open
            some = [int(one["n"]) for one in itertools.islice(look, step)]
            place = look.place
        if not some:
            break
        found += some
        log.write(Event(Actor("bob"), "send", "Topic:new"))  # and files turn over meanwhile
    assert found == list(range(found[0], 0, -1))
    assert found[0] in (100, 101)


def test_junk_and_an_open_end_are_passed_over(tmp_path: Path) -> None:
    log = written(tmp_path, 5, max_file_bytes=1 << 20)
    data = log.path.read_bytes()
    lines = data.splitlines(keepends=True)
    junk = b"x" * 200_000 + b"\n"
    log.path.write_bytes(
        b"torn\n" + lines[0] + junk + b"".join(lines[1:3]) + b"{x\n" + b"".join(lines[3:]) + b'{"n": 6'
    )
    assert numbers(Backwards(log.path)) == [5, 4, 3, 2, 1]


def test_nothing_is_there(tmp_path: Path) -> None:
    look = Backwards(tmp_path / "none" / "writer.jsonl")
    assert (numbers(look), look.place) == ([], TrailPosition(0, 0))
    empty = tmp_path / "writer.jsonl"
    empty.touch()
    assert numbers(Backwards(empty)) == []
