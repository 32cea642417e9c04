"""Goal: the writer is told of a flush exactly when a sender waits for it, also for one that began to wait meanwhile.

Method: a real log file and control block; what a sender waits for is written before, during and after fdatasync.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, Word
from commitmq.store.layout import StoreLayout, segment_name
from commitmq.workers import flush


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlBlock]:
    block = ControlBlock(tmp_path / "block", create=True)
    yield block
    block.close()


@pytest.fixture
def flusher(tmp_path: Path, control: ControlBlock) -> Iterator[flush.LogFlusher]:
    layout = StoreLayout(tmp_path / "store")
    layout.commit_log.mkdir(parents=True)
    layout.own.mkdir(parents=True, exist_ok=True)
    (layout.commit_log / segment_name(0)).write_bytes(bytes(4096))
    context: Any = SimpleNamespace(control=control, layout=layout, log=None, config=NodeConfig())
    made = flush.LogFlusher(context)
    yield made
    made.close()


def write(control: ControlBlock, end: int) -> None:
    for word in (Word.WRITTEN, Word.COMMITTED):
        control.put(word, end)


def during_sync(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    sync = os.fdatasync

    def synced(fd: int) -> None:
        sync(fd)
        work()

    monkeypatch.setattr(os, "fdatasync", synced)


def test_nobody_waits(flusher: flush.LogFlusher, control: ControlBlock) -> None:
    write(control, 100)
    assert flusher.flush()
    assert control.get(Word.FLUSHED) == 100
    assert not flusher.answers_somebody


def test_who_waits_is_answered_once(flusher: flush.LogFlusher, control: ControlBlock) -> None:
    write(control, 100)
    control.put(Word.FLUSH_WANTED, 100)
    assert flusher.flush()
    assert flusher.answers_somebody
    write(control, 200)
    assert flusher.flush()
    assert not flusher.answers_somebody


def test_who_begins_to_wait_while_the_device_is_busy(
    flusher: flush.LogFlusher, control: ControlBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(control, 100)
    during_sync(monkeypatch, lambda: control.put(Word.FLUSH_WANTED, 100))
    assert flusher.flush()
    assert flusher.answers_somebody


def test_who_waits_for_more_than_was_reached_is_told_of_that_too(
    flusher: flush.LogFlusher, control: ControlBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of two that wait, one for what is reached, the word holds the other's end only.
    write(control, 100)
    during_sync(monkeypatch, lambda: (write(control, 200), control.put(Word.FLUSH_WANTED, 200)))
    assert flusher.flush()
    assert control.get(Word.FLUSHED) == 100
    assert flusher.answers_somebody


def test_the_look_follows_the_store(
    flusher: flush.LogFlusher, control: ControlBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender whose wait begins just before the new position can be seen must not be missed."""
    write(control, 100)
    put = control.put

    def late(word: int, value: int) -> None:
        if word == Word.FLUSHED:
            put(Word.FLUSH_WANTED, 100)
        put(word, value)

    monkeypatch.setattr(control, "put", late)
    assert flusher.flush()
    assert flusher.answers_somebody
