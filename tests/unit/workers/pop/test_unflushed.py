"""Goal: offsets never pass check points that a power cut could take.

Method: the words of the control block move by hand, step by step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from commitmq.control import Word
from commitmq.workers.pop.points import Unflushed


class Node:
    """The control block and the context of a process."""

    def __init__(self, *, sync_flush: bool) -> None:
        self.words = {Word.WRITTEN: 0, Word.FLUSHED: 0}
        self.waits = 0
        self.flushes_after = 1 << 30
        control = SimpleNamespace(get=self.words.__getitem__)
        config = SimpleNamespace(sync_flush=sync_flush)
        context = SimpleNamespace(control=control, config=config, wait=self.wait, stopping=False)
        self.unflushed = Unflushed(cast("Any", context))

    def wait(self, timeout_ms: float, *, nap: bool) -> None:
        self.waits += 1
        if self.waits >= self.flushes_after:
            self.words[Word.FLUSHED] = self.words[Word.WRITTEN]

    def append(self, size: int = 100) -> str:
        ack = self.unflushed.ack()
        self.words[Word.WRITTEN] += size
        if ack == "flushed":
            self.words[Word.FLUSHED] = self.words[Word.WRITTEN]
        self.unflushed.stored(ack)
        return ack


def test_a_node_that_flushes_synchronously_waits_for_the_device() -> None:
    node = Node(sync_flush=True)
    assert node.append() == "flushed"
    assert node.unflushed.is_nothing()


def test_a_commit_waits_and_the_next_append_asks_for_a_flush() -> None:
    node = Node(sync_flush=False)
    assert node.unflushed.is_nothing(), "nothing was stored"
    assert node.append() == "memory"
    assert not node.unflushed.is_nothing()
    assert node.append() == "flushed", "a commit waits"
    assert node.unflushed.is_nothing()
    assert node.append() == "memory"


def test_a_commit_may_go_when_the_flush_process_has_come_by() -> None:
    node = Node(sync_flush=False)
    node.append()
    node.words[Word.FLUSHED] = 99
    assert not node.unflushed.is_nothing()
    node.words[Word.FLUSHED] = 100
    assert node.unflushed.is_nothing()
    assert node.append() == "memory", "nobody waits any more"


@pytest.mark.parametrize("comes", [True, False])
def test_the_last_commit_waits_a_moment(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(sync_flush=False)
    clock = iter(range(0, 1_000_000, 100))
    monkeypatch.setattr("commitmq.workers.pop.points.monotonic_ms", lambda: next(clock))
    node.append()
    node.flushes_after = 3 if comes else 1 << 30
    assert node.unflushed.wait() is comes
    assert node.waits < 30
