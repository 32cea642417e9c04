"""Goal: positions survive in RocketMQ's shape; one consumer has the file; a damaged file is never taken for an empty one.

Method: files as RocketMQ writes them and as we do, read back; a failing disk between the steps of a replace; locks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from commitmq.client.receiving import position_file
from commitmq.client.receiving.position_file import PositionFile, SavedOffsets, check_member, parsed, written
from commitmq.errors import DiskFullError, StoreError

ROCKETMQ = """{
\t"offsetTable":{{
\t\t\t"brokerName":"broker-a",
\t\t\t"queueId":3,
\t\t\t"topic":"TopicA"
\t\t}:17,{
\t\t\t"topic":"%RETRY%g","brokerName":"broker-a",
\t\t\t"queueId":0
\t\t}:0
\t}
}"""


def test_a_file_of_rocketmq_is_read() -> None:
    found = parsed(ROCKETMQ, Path("x"))
    assert found.offsets == {("TopicA", 3): 17, ("%RETRY%g", 0): 0}
    assert found.incarnations == {}


@pytest.mark.parametrize("offsets", [{}, {("t", 0): 5}, {("t", 0): 5, ("u", 10): 1 << 62}])
def test_what_was_written_is_read(offsets: dict[tuple[str, int], int]) -> None:
    made = SavedOffsets(offsets, {"t": 7})
    text = written(made, "b")
    assert parsed(text, Path("x")) == made
    assert '"offsetTable":{' in text


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"offsetTable":{"t":5}}',
        ROCKETMQ[:-10],
        '{"offsetTable":{{"brokerName":"b"}:1}}',
        ROCKETMQ.replace("3", "x"),
    ],
)
def test_a_damaged_file_is_refused(text: str) -> None:
    with pytest.raises(StoreError, match="start="):
        parsed(text, Path("x"))


def test_one_consumer_has_the_file(tmp_path: Path) -> None:
    first = PositionFile(tmp_path, "m", "g")
    with pytest.raises(StoreError, match="member=") as refused:
        PositionFile(tmp_path, "m", "g")
    assert refused.value.path == tmp_path / "m" / "g"
    PositionFile(tmp_path, "m", "other").close()
    PositionFile(tmp_path, "n", "g").close()
    first.close()
    first.close()
    PositionFile(tmp_path, "m", "g").close()


@pytest.mark.parametrize("step", ["fdatasync", "replace"])
def test_a_replace_that_fails_keeps_the_old_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    file = PositionFile(tmp_path, "m", "g")
    old, new = SavedOffsets({("t", 0): 1}), SavedOffsets({("t", 0): 2})
    file.store(old, "b")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(DiskFullError, match="positions_folder="):
        file.store(new, "b")
    monkeypatch.undo()
    assert file.load() == old
    file.store(new, "b")
    assert file.load() == new
    file.close()


def test_the_backup_of_rocketmq_is_taken_when_the_file_is_missing_or_empty(tmp_path: Path) -> None:
    file = PositionFile(tmp_path, "m", "g")
    file.path.with_name("offsets.json.bak").write_text(ROCKETMQ)
    assert file.load().offsets["TopicA", 3] == 17
    file.path.write_text("")
    assert file.load().offsets["TopicA", 3] == 17
    file.path.write_text(json.dumps({"offsetTable": {}}))
    assert file.load().offsets == {}
    file.close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "a\0"])
def test_a_member_names_a_folder(name: str) -> None:
    with pytest.raises(ValueError, match="folder"):
        check_member(name)


def test_the_default_folder_needs_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert position_file.default_folder() == tmp_path / ".commitmq" / "positions"
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    found = position_file.default_folder()
    assert found.parts[-2:] == (f"commitmq-{os.getuid()}", "positions")
    assert (found.parent.stat().st_mode & 0o077) == 0
