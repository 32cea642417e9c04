"""Goal: sends are counted for each request, right and soon, and cost hardly more than a note.

Method: a table in a folder of the test's own; the counts beside what a loop would count.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from commitmq.counting import CountReader, CountTable
from commitmq.workers.writer.send_answers import PendingAck
from commitmq.workers.writer.send_requests import SendCounts


def counted(path: Path) -> dict[tuple[str, ...], list[int]]:
    reader = CountReader(path)
    found = {(one.name.removeprefix("commitmq_"), *one.labels.values()): values for _, one, values in reader.rows()}
    reader.close()
    return found


class Sends:
    """Requests of the test: each stores what its header says."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "writer.counts"
        self.counts = SendCounts(CountTable(self.path, 1_000))
        self.take = self.counts.timed_send(self._send)

    def _send(self, identity: bytes | int, header: dict[str, Any], frames: Any) -> bytes | PendingAck:
        if "error" in header:
            raise header["error"]
        self.counts.last = header["topic"], header["count"], header["size"]
        return PendingAck(1, 0, b"", 1, 0, {}) if header.get("flushed") else b"done"


def test_what_was_noted_is_counted_when_no_more_comes(tmp_path: Path) -> None:
    sends = Sends(tmp_path)
    for number in range(20):
        sends.take(1, {"op": "send", "topic": "a", "count": 1, "size": 100 + number}, [])
        sends.counts.settle(0)
    sends.take(1, {"op": "append", "topic": "b", "count": 10, "size": 50_000}, [])
    sends.take(1, {"op": "append", "topic": "b", "count": 3, "size": 300, "moved": 4}, [])
    ack = sends.take(1, {"op": "send", "topic": "a", "count": 1, "size": 9, "flushed": True}, [])
    assert isinstance(ack, PendingAck)
    sends.counts.settle(1)
    assert ("messages_in_total", "a", "client") not in counted(sends.path)
    sends.counts.settle(1)
    found = counted(sends.path)
    assert found["messages_in_total", "a", "client"] == [21]
    assert found["bytes_in_total", "a", "client"] == [sum(range(100, 120)) + 9]
    assert (found["messages_in_total", "b", "client"], found["messages_in_total", "b", "node"]) == ([10], [3])
    assert found["message_size_bytes", "b"][:4] == [1, 5_000, 0, 0], "a run counts once, with its mean"
    assert found["append_messages",][:2] == [23, 34]
    assert (found["append_duration_seconds", "single"][0], found["append_duration_seconds", "run"][0]) == (21, 2)
    assert (found["send_duration_seconds", "memory"][0], found["send_duration_seconds", "flushed"][0]) == (22, 0)
    assert found["sends_waiting",] == [1]
    assert ack.began_ns > 0
    sends.counts.acked(ack.began_ns)
    sends.counts.settle(0)
    sends.counts.settle(0)
    found = counted(sends.path)
    assert (found["send_duration_seconds", "flushed"][0], found["sends_waiting",]) == (1, [0])


def test_a_stream_is_counted_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sends = Sends(tmp_path)
    for _ in range(600):
        sends.take(1, {"op": "send", "topic": "a", "count": 1, "size": 100}, [])
        sends.counts.settle(0)
    assert counted(sends.path)["messages_in_total", "a", "client"][0] >= 200, "many notes are counted at once"
    now = [time.monotonic_ns()]
    monkeypatch.setattr("commitmq.workers.writer.send_requests.monotonic_ns", lambda: now[0])
    before = 0
    for _ in range(20):
        now[0] += 100_000_000
        sends.take(1, {"op": "send", "topic": "slow", "count": 1, "size": 100}, [])
        sends.counts.settle(0)
    before = counted(sends.path)["messages_in_total", "slow", "client"][0]
    assert before >= 15, "a thin stream is counted after a quarter of a second"


def test_refusals_are_counted_by_their_code(tmp_path: Path) -> None:
    sends = Sends(tmp_path)
    error = ValueError("no")
    error.code = "MESSAGE_ILLEGAL"  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            sends.take(1, {"op": "send", "error": error}, [])
    assert counted(sends.path)["sends_refused_total", "MESSAGE_ILLEGAL"] == [2]


@pytest.mark.parametrize("kind", ["single", "run"])
def test_the_cost_of_a_note_is_small(tmp_path: Path, kind: str) -> None:
    """Processor time for each request; a single send takes some 40 us in the writer."""
    sends = Sends(tmp_path)
    header = {"op": "send", "topic": "a", "count": 1 if kind == "single" else 500, "size": 100_000}
    best = []
    for _ in range(7):
        began = time.process_time_ns()
        for _ in range(4_000):
            sends.take(1, header, [])
            sends.counts.settle(0)
        best.append((time.process_time_ns() - began) / 4_000)
    assert min(best) < 6_000, f"{min(best):.0f} ns for each request"
