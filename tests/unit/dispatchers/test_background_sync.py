"""Goal: a slow sync of the ConsumeQueues holds up nobody, and says that what it covers is durable only when it has ended.

Method: the ConsumeQueue dispatcher on a small log, with an fdatasync that waits until the test lets it go (or fails).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commitmq.config import load
from commitmq.files import disk
from commitmq.log import get_log
from commitmq.plugin.hookspecs import DispatcherView
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq_dispatchers.consume_queue import ConsumeQueueDispatcher
from queue_store import QueueStore

SEGMENT_BYTES = 1 << 20
FILE_BYTES = 2_000
WAIT_S = 10.0


class Node:
    """A log of 30 messages of two topics, of which a dispatcher has taken none."""

    def __init__(self, folder: Path) -> None:
        self.store = QueueStore(folder, SEGMENT_BYTES, FILE_BYTES)
        self.ends = []
        for number in range(30):
            self.store.put(f"t{number % 2}", 0, b"x", timestamp=1_000 + number, dispatch=False)
            self.ends.append(self.store.end)
        self.log = CommitLog(self.store.layout.commit_log, SEGMENT_BYTES)
        self.dispatcher = ConsumeQueueDispatcher()
        config = load(None, [f"commit_log.segment_bytes={SEGMENT_BYTES}", f"consume_queue.file_bytes={FILE_BYTES}"])
        self.dispatcher.open(
            DispatcherView(self.store.layout, config, get_log("test"), self.log, 0, dict, lambda _: None)
        )
        self._taken = 0

    def take(self, count: int) -> int:
        """Dispatch the next ``count`` messages; returns where they end."""
        end = self.ends[self._taken + count - 1]
        start = self.ends[self._taken - 1] if self._taken else 0
        self.dispatcher.dispatch(LogWalker(self.log, max_rows=100, max_bytes=1 << 20).walk(start, end))
        self._taken += count
        return end

    def settled(self) -> tuple[int, int]:
        """What is durable when the sync under way has ended."""
        deadline = time.monotonic() + WAIT_S
        durable = self.dispatcher.flush(thorough=False)
        while self.dispatcher.is_flushing:
            assert time.monotonic() < deadline, "the sync does not end"
            time.sleep(0.001)
            durable = self.dispatcher.flush(thorough=False)
        return durable


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


class Device:
    """An fdatasync that begins when it is called and ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.fails = False
        self.threads: set[int] = set()

    def fdatasync(self, real: Callable[[int], None], fd: int) -> None:
        self.threads.add(threading.get_ident())
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        if self.fails:
            raise OSError(5, "Input/output error")
        real(fd)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    slow, real = Device(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: slow.fdatasync(real, fd))
    return slow


def test_dispatching_goes_on_and_is_not_called_durable(node: Node, device: Device) -> None:
    first = node.take(10)
    assert node.dispatcher.flush(thorough=False) == (0, 0)
    assert device.begun.wait(WAIT_S)
    second = node.take(10)
    assert node.dispatcher.flush(thorough=False) == (0, 0)
    assert node.dispatcher.is_flushing
    device.may_end.set()
    assert node.settled() == (first, 1_009), "what came during the sync is not covered by it"
    assert device.threads
    assert threading.get_ident() not in device.threads
    assert node.dispatcher.flush(thorough=False)[0] in (first, second)
    assert node.settled() == (second, 1_019)


def test_a_thorough_flush_waits_and_leaves_nothing(node: Node, device: Device) -> None:
    node.take(10)
    node.dispatcher.flush(thorough=False)
    assert device.begun.wait(WAIT_S)
    last = node.take(20)
    threading.Timer(0.05, device.may_end.set).start()
    assert node.dispatcher.flush(thorough=True) == (last, 1_029)
    assert not node.dispatcher.is_flushing


def test_after_a_failed_sync_nothing_more_is_called_durable(node: Node, device: Device) -> None:
    first = node.take(10)
    device.may_end.set()
    assert node.settled() in ((0, 0), (first, 1_009))
    assert node.settled() == (first, 1_009)
    device.fails = True
    node.take(10)
    assert node.settled() == (first, 1_009)
    device.fails = False
    node.take(10)
    assert node.settled() == (first, 1_009)
    assert node.dispatcher.flush(thorough=True) == (first, 1_009)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("no room")])
def test_whatever_ends_a_sync_it_is_not_called_durable(
    node: Node, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def failing(_: int) -> None:
        raise error

    node.take(10)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", failing)
        assert node.settled() == (0, 0)
    assert node.dispatcher.flush(thorough=True) == (0, 0)


@pytest.mark.parametrize("what", ["queue", "folder"])
@pytest.mark.parametrize("thorough", [False, True])
def test_a_moment_without_descriptors_is_no_failed_sync(
    node: Node, monkeypatch: pytest.MonkeyPatch, what: str, thorough: bool
) -> None:
    """For good that would keep the durable position, and with it expiry, where it is."""
    first = node.take(10)
    real: Any = os.dup if what == "queue" and not thorough else disk.open_file

    def refused(path: object, *arguments: object) -> int:
        if what == "queue" or (len(arguments) > 1 and arguments[1] == what):
            raise OSError(errno.EMFILE, "Too many open files")
        return int(real(path, *arguments))

    with monkeypatch.context() as patched:
        patched.setattr(*((os, "dup") if real is os.dup else (disk, "open_file")), refused)
        if what == "queue" and thorough:
            node.dispatcher._fds.close()
        for _ in range(3):
            assert node.dispatcher.flush(thorough=thorough) == (0, 0)
            assert not node.dispatcher.is_flushing
    assert node.settled() == (first, 1_009)


def test_without_a_thread_the_loop_syncs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    first = node.take(10)
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert node.settled() == (first, 1_009)


@pytest.mark.parametrize("deed", ["forget", "truncate", "expire", "close"])
def test_files_that_go_during_the_sync_do_no_harm(node: Node, device: Device, deed: str) -> None:
    first = node.take(10)
    node.dispatcher.flush(thorough=False)
    assert device.begun.wait(WAIT_S)
    if deed in ("truncate", "close"):  # which wait for it
        threading.Timer(0.05, device.may_end.set).start()
    if deed == "forget":
        node.dispatcher.forget("t0")
        device.may_end.set()
        assert node.settled() == (first, 1_009)
        assert not (node.store.layout.root / "consumequeue" / "t0").exists()
    elif deed == "truncate":
        node.dispatcher.truncate(node.ends[4])
        assert node.dispatcher.flush(thorough=True)[0] == node.ends[4], "what the sync covered was cut"
    elif deed == "expire":
        node.dispatcher.expire(first)
        device.may_end.set()
        assert node.settled() == (first, 1_009)
    else:
        node.dispatcher.close()
        assert device.may_end.is_set(), "it waited for the sync, whose descriptors are its own"


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("gone", ["topic", "file"])
def test_only_a_queue_that_lives_must_have_the_files_it_is_to_sync(node: Node, gone: str, thorough: bool) -> None:
    """A deleted topic's queues need no sync; a file that is missing without that was not synced."""
    first = node.take(10)
    node.dispatcher._fds.close()
    if gone == "topic":
        node.dispatcher.forget("t0")
    else:
        next((node.store.layout.consume_queue / "t0" / "0").iterdir()).unlink()
    node.dispatcher.flush(thorough=thorough)
    assert node.settled() == ((first, 1_009) if gone == "topic" else (0, 0))
    node.take(10)
    assert (node.settled()[0] == 0) is (gone == "file")
