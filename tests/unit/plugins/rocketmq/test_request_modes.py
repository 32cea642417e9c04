"""Goal: the modes of groups outlive the server in RocketMQ's file, and a damaged or full table is said so.

Method: the table on a temporary file, with RocketMQ's own text.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commitmq_plugins.rocketmq.broker import assignment
from commitmq_plugins.rocketmq.broker.assignment import ModeTable
from commitmq_plugins.rocketmq.remoting.bodies import SetMessageRequestModeRequestBody as Mode
from commitmq_plugins.rocketmq.remoting.frame import BodyError


def test_a_mode_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "config" / "messageRequestMode.json"
    table = ModeTable(path)
    assert not table.pops("g")
    assert table.put(Mode("T", "g", "POP", 2))
    again = ModeTable(path)
    assert again.get("T", "g") == Mode("T", "g", "POP", 2)
    assert [again.pops(group) for group in ("g", "h")] == [True, False]
    assert again.put(Mode("T", "g", "PULL", 0))
    assert [one.pops("g") for one in (again, ModeTable(path))] == [False, False]


def test_rocketmqs_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "messageRequestMode.json"
    mode = {"consumerGroup": "g", "mode": "POP", "popShareQueueNum": 0, "topic": "T"}
    path.write_text(json.dumps({"messageRequestModeMap": {"T": {"g": mode}}}))
    assert ModeTable(path).to_json() == {"messageRequestModeMap": {"T": {"g": mode}}}
    path.write_text("[1]")
    with pytest.raises(BodyError):
        ModeTable(path)


def test_their_number_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "_MOST", 1)
    table = ModeTable(tmp_path / "modes.json")
    assert table.put(Mode("T", "g", "POP", 0))
    assert not table.put(Mode("T", "h", "POP", 0))
    assert table.put(Mode("T", "g", "PULL", 0)), "a change of one that is there"
