"""Goal: a coordinator without room refuses what depends on its files, says so once however often it tries, and goes on.

Method: its service without a process. Failpoints make the writes of one file fail for a while; turns with and without work
follow each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.control import ControlBlock
from commitmq.coordination.service import Service
from commitmq.errors import DiskFullError
from commitmq.store.layout import StoreLayout
from small_disk import Told, room


class Coordinator:
    def __init__(self, root: Path) -> None:
        layout = StoreLayout(root)
        layout.run.mkdir(parents=True)
        self.told, self.now_ms = Told(), 1
        control = ControlBlock(layout.control, create=True)
        self.service = Service(layout, NodeConfig(), control, 1, room(self.told))
        self.ask("topic.create", topic="t", queues=2)

    def ask(self, op: str, **fields: Any) -> Exception | None:
        """A turn with this request: why it is refused."""
        self.now_ms += 700
        self.service.mend(self.now_ms)
        answer = self.service.handle({"op": op, **fields}, self.now_ms)
        return self._end(answer.needs)

    def idle(self) -> None:
        """A turn without a request."""
        self.now_ms += 700
        self.service.mend(self.now_ms)
        self._end(None)

    def _end(self, needs: Any) -> Exception | None:
        self.service.end_turn(self.now_ms)
        fault = self.service.fault(needs)
        self.service.forget_faults()
        self.service.write_snapshots(self.now_ms)
        return fault


@pytest.mark.parametrize(
    ("place", "file", "request_"),
    [
        ("journal.append", "offsets", {"op": "offset.commit", "group": "g", "offsets": [["t", 0, 5]]}),
        ("topics.append", "topics", {"op": "topic.create", "topic": "new", "queues": 1}),
    ],
)
def test_it_says_so_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, file: str, request_: dict[str, Any]
) -> None:
    one = Coordinator(tmp_path)
    monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"{place}=errno:ENOSPC"))
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    before = one.told.times
    for _ in range(3):
        assert isinstance(one.ask(**request_), DiskFullError)
        one.idle()
        assert list(one.told.waiting) == [file]
    assert one.told.times == before + 1
    monkeypatch.setattr(failpoints, "ACTIVE", False)
    assert one.ask(**request_) is None
    assert (one.told.waiting, one.told.times) == ({}, before + 2)
