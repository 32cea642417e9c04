"""Goal: a dispatcher that is behind takes what waits in large batches, and one that keeps up takes each batch as it comes.

Method: the host of a dispatcher that notes its batches; reput's batches have one record each, and come one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.format.record import Record
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.workers.dispatcher.dispatch_host import DispatcherHost
from log_builder import HOST, SEGMENT_BYTES, build_log

COUNT = 300


class Host(DispatcherHost):
    """Without a process; ``reput`` is how far the log has been handed out, ``batches`` what the dispatcher was given."""

    def __init__(self, log: CommitLog) -> None:
        self.log, self.position, self.reput = log, 0, 0
        self.batches: list[tuple[int, int, int]] = []
        self.topics = SimpleNamespace(check=lambda _: None, to_forget=[], forget_due=lambda _: None)  # type: ignore[assignment]
        self.deaths = SimpleNamespace(number=0)  # type: ignore[assignment]
        self.context = SimpleNamespace(heartbeat=lambda: None)  # type: ignore[assignment]
        self._walker = LogWalker(log, max_rows=4_096, max_bytes=1 << 20)

    def check_min(self) -> None:
        pass

    def limit(self) -> int:
        return self.reput

    def _dispatch(self, batch: DispatchBatch) -> None:
        self.batches.append((batch.start, batch.end, len(batch)))
        self.position = batch.end


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    build_log(tmp_path, [Record("t", queue_offset=n, body=b"x", born_host=HOST, store_host=HOST) for n in range(COUNT)])
    return CommitLog(tmp_path, SEGMENT_BYTES)


@pytest.fixture
def frames(log: CommitLog) -> Sequence[tuple[int, list[Any]]]:
    walker = LogWalker(log, max_rows=1, max_bytes=1 << 20)
    end = sum([*log.iter_spans()][-1])
    found: list[tuple[int, list[Any]]] = []
    at = 0
    while at < end:
        batch = walker.walk(at, end)
        found.append((batch.end, [bytes(frame) for frame in batch.to_frames()]))
        at = batch.end
    return found


def test_what_waits_is_taken_in_large_batches(log: CommitLog, frames: Sequence[tuple[int, list[Any]]]) -> None:
    host = Host(log)
    host.reput = frames[-1][0]
    for _, one in frames:
        host.take(one)
    assert sum(count for _, _, count in host.batches) == COUNT
    assert all(before[1] == after[0] for before, after in zip(host.batches, host.batches[1:], strict=False))
    assert len(host.batches) <= frames[-1][0] // SEGMENT_BYTES + 2, "a batch lies in one segment"


def test_who_keeps_up_takes_each_batch_as_it_comes(log: CommitLog, frames: Sequence[tuple[int, list[Any]]]) -> None:
    host = Host(log)
    for number, (_, one) in enumerate(frames):
        host.reput = frames[min(number + 3, len(frames) - 1)][0]  # a few wait all the while
        host.take(one)
    assert [count for _, _, count in host.batches if count] == [1] * COUNT


def test_a_large_batch_is_taken_as_it_is(log: CommitLog, frames: Sequence[tuple[int, list[Any]]]) -> None:
    host = Host(log)
    host._walker = LogWalker(log, max_rows=8, max_bytes=1 << 20)
    host.reput = frames[-1][0]
    large = LogWalker(log, max_rows=4, max_bytes=1 << 20).walk(0, host.reput)
    host.take([bytes(frame) for frame in large.to_frames()])
    assert host.batches == [(0, large.end, 4)]
