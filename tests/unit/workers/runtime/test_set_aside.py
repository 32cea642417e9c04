"""Goal: what is set aside is counted and listed once, whatever dies, and the list has bounds; a full disk ends nothing.

Method: the list of one process in a folder, written and read again; a log of a few records.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from commitmq.files import atomic_file
from commitmq.files.disk_space import DiskRoom
from commitmq.format.record import Record
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.workers.runtime import set_aside as module
from commitmq.workers.runtime.set_aside import MOST_KEPT, SetAside, listed
from log_builder import HOST, SEGMENT_BYTES, build_log


class Process:
    """A process of ``role`` on the store ``root``."""

    def __init__(self, root: Path, role: str = "pop") -> None:
        self.told: dict[str, Any] = {}
        self.layout = StoreLayout(root)
        self.layout.own.mkdir(parents=True, exist_ok=True)
        log = get_log("test")
        room = DiskRoom(log, lambda **info: self.told.update(info), lambda _: False)
        context: Any = SimpleNamespace(
            layout=self.layout, role=role, log=log, counts=None, room=room, tell=lambda **info: self.told.update(info)
        )
        self.aside = SetAside(context)


def test_a_message_that_is_met_again_after_a_death_is_listed_once(tmp_path: Path) -> None:
    first = Process(tmp_path)
    for offset in (7, 8, 7):
        first.aside.note("too large", topic="orders", queue=0, queue_offset=offset, group="g")
    first.aside.note("too large", topic="orders", queue=0, queue_offset=7, group="of another")
    first.aside.write_down(at_once=True)
    second = Process(tmp_path)
    assert second.told == {"set_aside": 3}
    second.aside.note("too large", topic="orders", queue=0, queue_offset=8, group="g")
    assert second.aside.count == 3
    found = listed(second.layout.set_aside)
    assert [(one["process"], one["group"], one["queue_offset"]) for one in found] == [
        ("pop", "g", 7), ("pop", "g", 8), ("pop", "of another", 7),
    ]  # fmt: skip


def test_the_topic_of_a_name_that_is_made_anew_has_other_messages(tmp_path: Path) -> None:
    process = Process(tmp_path)
    for received in (1_000, 1_000, 2_000):
        process.aside.note("too large", topic="orders", queue=0, queue_offset=7, group="g", received=received)
    assert process.aside.count == 2


def test_the_list_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WRITE_MS", 1 << 40)
    process = Process(tmp_path)
    for place in range(MOST_KEPT + 5):
        process.aside.note("too large", physical_offset=place)
    process.aside.write_down(at_once=True)
    assert process.aside.count == process.told["set_aside"] == MOST_KEPT + 5
    assert [one["physical_offset"] for one in listed(process.layout.set_aside)] == list(range(5, MOST_KEPT + 5))


def test_one_group_pushes_no_other_out_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WRITE_MS", 1 << 40)
    process = Process(tmp_path)
    process.aside.note("too large", topic="orders", queue_offset=1, group="g")
    for offset in range(MOST_KEPT + 5):
        process.aside.note("invented", topic="orders", queue_offset=offset, group="liar")
    process.aside.write_down(at_once=True)
    found = listed(process.layout.set_aside)
    assert (found[0]["group"], len(found)) == ("g", MOST_KEPT)


def test_a_message_is_named_by_its_place_in_the_log(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    records = build_log(folder, [Record("t", 3, 9, properties={"UNIQ_KEY": "AB"}, born_host=HOST, store_host=HOST)])
    process = Process(tmp_path, "timer")
    log = CommitLog(folder, SEGMENT_BYTES, 4)
    process.aside.at(log, "why", records[0].physical_offset)
    process.aside.at(log, "no record is there", 2_000)
    process.aside.at(log, "it has expired", 1 << 40)
    one, *others = listed(process.layout.set_aside)
    assert (one["topic"], one["queue"], one["queue_offset"], one["unique_key"]) == ("t", 3, 9, "AB")
    process.aside.write_down(at_once=True)
    _, *others = listed(process.layout.set_aside)
    assert [(other["why"], other["physical_offset"], "topic" in other) for other in others] == [
        ("no record is there", 2_000, False), ("it has expired", 1 << 40, False),
    ]  # fmt: skip


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_list_that_cannot_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    process = Process(tmp_path)

    def replace(*_: object, **__: object) -> None:
        raise OSError(code, "the disk")

    with monkeypatch.context() as patched:
        patched.setattr(atomic_file, "replace", replace)
        process.aside.note("too large", physical_offset=1)
        assert ("set_aside" in process.told.get("no_room", {})) is (code == errno.ENOSPC)
        assert listed(process.layout.set_aside) == []
    process.aside.write_down(at_once=True)
    assert len(listed(process.layout.set_aside)) == 1
    assert not process.told.get("no_room")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"count": 3}', b'{"count": "x", "messages": [1]}'])
def test_a_damaged_list_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    process = Process(tmp_path)
    process.layout.set_aside.mkdir()
    (process.layout.set_aside / "pop.json").write_bytes(content)
    again = Process(tmp_path)
    assert (again.aside.count, listed(process.layout.set_aside)) == (0, [])


@pytest.mark.parametrize("value", [None, -1.5, 1 << 64, 1e300, "x", [], {}, [1], True])
@pytest.mark.parametrize("name", ["count", "at", "why", "topic", "queue_offset", "physical_offset"])
def test_a_file_of_another_shape_ends_nothing(tmp_path: Path, name: str, value: Any) -> None:
    """What a process tells is JSON with 64 bits."""
    entry: dict[str, Any] = {"at": 1, "why": "too large", "topic": "orders", "queue_offset": 3, "physical_offset": 50}
    content = {"count": 1, "messages": [entry]}
    (content if name == "count" else entry)[name] = value
    path = tmp_path / "commitmq" / "set_aside" / "pop.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
    module.lower(path.parent, 20)
    path.write_text(json.dumps(content))
    process = Process(tmp_path)
    process.aside.note("too large", physical_offset=90)
    assert orjson.dumps(process.told)
    assert listed(path.parent)[-1]["physical_offset"] == 90
