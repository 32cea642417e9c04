"""Goal: the writer is told of a flush exactly when a sender waits for it, also for one that began to wait meanwhile.

Method: a real log file and control block; what a sender waits for is written before, during and after fdatasync.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.config import NodeConfig, load
from commitmq.control import ControlBlock, Word, WorkerWord, WriterSync, role_slot
from commitmq.format.file_names import segment_name
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.workers import flush
from commitmq.workers.writer.writer_sync import InlineFsync
from queue_store import QueueStore
from small_disk import room

SEGMENT = 1 << 16
CONFIG = load(None, [f"commit_log.segment_bytes={SEGMENT}"])


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
    made = flush.LogFlusher(context_of(layout, control, NodeConfig()))
    yield made
    made.close()


def context_of(layout: StoreLayout, control: ControlBlock, config: NodeConfig) -> Any:
    return SimpleNamespace(
        room=room(),
        control=control,
        layout=layout,
        log=get_log("flush"),
        config=config,
        heartbeat=lambda: None,
        slot=0,
        params={},
        counts=None,
    )


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
    assert not flusher.answers_sender


def test_who_waits_is_answered_once(flusher: flush.LogFlusher, control: ControlBlock) -> None:
    write(control, 100)
    control.put(Word.FLUSH_WANTED, 100)
    assert flusher.flush()
    assert flusher.answers_sender
    write(control, 200)
    assert flusher.flush()
    assert not flusher.answers_sender


def test_who_begins_to_wait_while_the_device_is_busy(
    flusher: flush.LogFlusher, control: ControlBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(control, 100)
    during_sync(monkeypatch, lambda: control.put(Word.FLUSH_WANTED, 100))
    assert flusher.flush()
    assert flusher.answers_sender


def test_who_waits_for_more_than_was_reached_is_told_of_that_too(
    flusher: flush.LogFlusher, control: ControlBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of two that wait, one for what is reached, the word holds the other's end only.
    write(control, 100)
    during_sync(monkeypatch, lambda: (write(control, 200), control.put(Word.FLUSH_WANTED, 200)))  # type: ignore[func-returns-value]
    assert flusher.flush()
    assert control.get(Word.FLUSHED) == 100
    assert flusher.answers_sender


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
    assert flusher.answers_sender


class Device:
    """The calls that reach it, in order, and a fault of the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self._pwrite, self._fdatasync = os.pwrite, os.fdatasync
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def pwrite(self, fd: int, data: bytes, position: int) -> int:
        self.calls.append(("write", position, position + len(data)))
        return self._pwrite(fd, data, position)

    def fdatasync(self, fd: int) -> None:
        self.calls.append(("sync", 0, 0))
        self._fdatasync(fd)


@pytest.fixture
def store(tmp_path: Path, control: ControlBlock) -> QueueStore:
    """A log of ten records, of which nothing is known to be flushed."""
    made = QueueStore(tmp_path / "records", SEGMENT, 2_000)
    for number in range(10):
        made.put("orders", 0, b"x" * 100, timestamp=1_000 + number, dispatch=False)
    made.layout.own.mkdir(parents=True, exist_ok=True)
    write(control, made.end)
    return made


def flusher_of(store: QueueStore, control: ControlBlock) -> flush.LogFlusher:
    return flush.LogFlusher(context_of(store.layout, control, CONFIG))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_segment_that_cannot_be_opened_for_a_moment_is_no_failed_sync(
    store: QueueStore, control: ControlBlock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    flusher = flusher_of(store, control)

    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        assert not flusher.flush()
        assert not flusher.failed
        assert flusher.is_late, "the loop must not spin"
        assert control.get(Word.FLUSHED) == 0
    assert flusher.flush()
    assert control.get(Word.FLUSHED) == store.end
    flusher.close()


def test_a_segment_that_is_gone_fails_for_good(store: QueueStore, control: ControlBlock) -> None:
    (store.layout.commit_log / segment_name(0)).unlink()
    flusher = flusher_of(store, control)
    assert not flusher.flush()
    assert control.get(Word.FLUSH_ERRNO) == errno.ENOENT


def test_a_successor_writes_again_what_a_killed_sync_was_to_cover(
    store: QueueStore, control: ControlBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = flusher_of(store, control)
    with monkeypatch.context() as patched:

        def die(_fd: int) -> None:
            raise SystemExit

        patched.setattr(os, "fdatasync", die)
        with pytest.raises(SystemExit):
            killed.flush()
    killed.close()
    assert control.get(Word.FLUSHING) == store.end
    before = (store.layout.commit_log / segment_name(0)).read_bytes()
    device = Device(monkeypatch)
    flusher = flusher_of(store, control)
    assert flusher.flush()
    assert device.calls == [("write", 0, store.end), ("sync", 0, 0)]
    assert (store.layout.commit_log / segment_name(0)).read_bytes() == before
    assert (control.get(Word.FLUSHED), control.get(Word.FLUSHING)) == (store.end, 0)
    device.calls.clear()
    write(control, store.end)
    flusher.flush()
    assert not [call for call in device.calls if call[0] == "write"], "once is enough"
    flusher.close()


def test_what_the_kernel_gave_up_is_not_called_durable(store: QueueStore, control: ControlBlock) -> None:
    """Some file systems drop pages that they could not write: then the file reads as the device has it."""
    path = store.layout.commit_log / segment_name(0)
    data = bytearray(path.read_bytes())
    data[512:1024] = bytes(512)
    path.write_bytes(bytes(data))
    control.put(Word.FLUSHING, store.end)
    flusher = flusher_of(store, control)
    assert not flusher.flush()
    assert control.get(Word.FLUSH_ERRNO) == errno.EIO
    assert control.get(Word.FLUSHED) == 0
    assert store.layout.flush_failed.exists()
    flusher.close()


def test_a_writer_that_died_in_its_own_sync_leaves_the_same_doubt(
    store: QueueStore, control: ControlBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.put(Word.WRITER_SYNC, WriterSync.SYNCING)
    control.put_worker(role_slot("writer"), WorkerWord.PID, 0)  # no process has that number
    device = Device(monkeypatch)
    flusher = flusher_of(store, control)
    assert flusher.flush()
    assert device.calls[0] == ("write", 0, store.end)
    # A writer that follows knows no more than that.
    control.put(Word.FLUSHED, 0)
    device.calls.clear()
    InlineFsync(context_of(store.layout, control, CONFIG), pooled=False)
    assert device.calls == [("write", 0, store.end)]
    assert control.get(Word.WRITER_SYNC) == WriterSync.IDLE
    flusher.close()
