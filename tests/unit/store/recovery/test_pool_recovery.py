"""Goal: what a killed node had in its transient store pool only is in the log after the next start, once and whole; nothing
that is not this store's, not whole, or not where the log ends ever gets there; a takeover that is killed is simply done again.

Method: a real log and a real pool, filled by the real appender (which maps the pool's buffers, as the writer does); a part
of it is copied to the files as the flush process would; then one thing is changed, and the recovery runs.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from commitmq import failpoints
from commitmq.errors import SegmentSizeError, StoreError
from commitmq.format.constants import Host
from commitmq.format.file_names import segment_name
from commitmq.format.message_id import pack_host
from commitmq.log import get_log
from commitmq.store import shared_memory
from commitmq.store.layout import StoreLayout
from commitmq.store.log import transient_pool
from commitmq.store.log.append import CommitLogAppender
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.transient_pool import PoolNote, TransientPool, pool_folder
from commitmq.store.recovery.store_recovery import Recovered, recover, take_over

SEGMENT = 16_384
HOST = pack_host(Host("127.0.0.1", 0))
BUFFERS = 4


class Store:
    """A log of ``committed`` messages, and a pool with all of them up to ``written``; bodies are ``m0``, ``m1`` …"""

    def __init__(self, root: Path, shared: Path) -> None:
        self.layout = StoreLayout(root / "store")
        self.shared = shared
        for folder in (self.layout.commit_log, self.layout.own, self.layout.config, self.layout.consume_queue):
            folder.mkdir(parents=True)
        self.bodies: list[bytes] = []
        self.ends: list[int] = [0]
        self.make(0)

    def make(self, end: int) -> None:
        transient_pool.make(
            self.layout, str(self.shared), buffers=BUFFERS, segment_bytes=SEGMENT, properties_crc=True, committed=end
        )
        self.folder = pool_folder(self.layout)
        self.pool = TransientPool(self.folder)
        self.appender = CommitLogAppender(
            end,
            segment_bytes=SEGMENT,
            open_segment=self._open,
            close_segment=lambda _buffer: None,
            store_host=HOST,
            max_message_bytes=4_000,
            properties_crc=True,
            clock=lambda: 1_700_000_000_000,
        )

    def _open(self, base: int) -> mmap.mmap | None:
        path = self.layout.commit_log / segment_name(base)
        if not path.exists():
            path.write_bytes(bytes(SEGMENT))
        return self.pool.take(base)

    def send(self, count: int, size: int = 1_000) -> None:
        for _ in range(count):
            body = b"m%d " % len(self.bodies) + b"x" * size
            record = self.appender.encode(
                b"T", 0, body, b"KEYS\x01k\x02", sys_flag=0, flag=0, born_timestamp=1, born_host=HOST
            )
            self.appender.append_record(record, len(self.bodies), len(HOST))
            self.bodies.append(body)
            self.ends.append(self.appender.position)

    def copy(self, start: int, end: int) -> None:
        """Bytes of the pool to the files, as a commit does it."""
        for base, buffer in self.pool.in_use():
            low, high = max(start, base), min(end, base + SEGMENT)
            if low < high:
                with (self.layout.commit_log / segment_name(base)).open("r+b") as file:
                    file.seek(low - base)
                    file.write(buffer[low - base : high - base])

    def commit(self, messages: int) -> None:
        """The first ``messages`` of what was sent."""
        end = self.ends[messages]
        self.copy(self.pool.committed, end)
        before = self.pool.committed
        self.pool.set_committed(end)
        for base, buffer in self.pool.in_use():
            if base < end:
                transient_pool.zero(buffer, max(0, before - base), min(SEGMENT, end - base))
            if base + SEGMENT <= end:
                self.pool.give_back(base)

    def crash(self) -> None:
        self.appender.close()
        self.pool.close()

    def recover(self) -> Recovered:
        return recover(
            self.layout,
            segment_bytes=SEGMENT,
            consume_queue_bytes=1_000,
            batch_queue_bytes=460,
            clean=False,
            log=get_log("test"),
            previous=1,
        )

    def stored(self) -> list[bytes]:
        log = CommitLog(self.layout.commit_log, SEGMENT)
        try:
            return [bytes(record.body) for record in log.iter_records()]
        finally:
            log.close()

    def cut(self) -> list[str]:
        folder = self.layout.own / "cut"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def note(self, **changes: object) -> None:
        note = PoolNote.load(self.layout)
        assert note is not None
        changed = dataclasses.asdict(dataclasses.replace(note, **changes))  # type: ignore[arg-type]
        transient_pool.note_path(self.layout).write_bytes(orjson.dumps(changed))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    shared = tmp_path / "shm"
    shared.mkdir()
    made = Store(tmp_path, shared)
    yield made
    made.crash()


@pytest.mark.parametrize(("sent", "committed"), [(0, 0), (5, 0), (5, 2), (5, 5), (40, 0), (40, 3), (40, 33), (40, 40)])
def test_everything_in_the_pool_is_in_the_log_afterwards(store: Store, sent: int, committed: int) -> None:
    store.send(sent)
    store.commit(committed)
    store.crash()
    found = store.recover()
    assert store.stored() == store.bodies
    assert found.end == store.ends[-1]
    assert found.records == sent
    assert not store.folder.exists()
    assert PoolNote.load(store.layout) is None
    assert store.cut() == []


@pytest.mark.parametrize("bytes_there", [0, 8, 100, 1_000, 1_150, 3_000, 20_000])
@pytest.mark.parametrize("head_missing", [True, False])
def test_a_commit_that_was_killed_is_finished(store: Store, bytes_there: int, head_missing: bool) -> None:
    """The file has any part of the range, with or without its first 8 bytes; ``COMMITTED`` has not moved."""
    store.send(25)
    store.commit(2)
    start = store.ends[2]
    store.copy(start + (8 if head_missing else 0), min(start + bytes_there, store.ends[-1]))
    store.crash()
    store.recover()
    assert store.stored() == store.bodies
    assert store.cut() == []


def test_a_pool_whose_zeroing_was_killed_is_no_different(store: Store) -> None:
    store.send(10)
    store.copy(0, store.ends[6])
    store.pool.set_committed(store.ends[6])
    transient_pool.zero(store.pool.in_use()[0][1], 0, store.ends[4] + 77)
    store.crash()
    store.recover()
    assert store.stored() == store.bodies


def test_a_segment_file_that_is_missing_is_made(store: Store) -> None:
    store.send(40)
    store.commit(3)
    last = max(base for base, _ in store.pool.in_use())
    (store.layout.commit_log / segment_name(last)).unlink()
    store.crash()
    store.recover()
    assert store.stored() == store.bodies


def test_what_a_killed_writer_did_not_complete_is_left_out(store: Store) -> None:
    store.send(4)
    base, buffer = store.pool.in_use()[0]
    at = store.ends[-1] - base
    buffer[at + 8 : at + 300] = b"\x07" * 292  # its first 8 bytes come last
    store.crash()
    store.recover()
    assert store.stored() == store.bodies
    assert store.cut() == [], "nobody was told of it"


def test_a_damaged_record_ends_it_and_is_kept(store: Store) -> None:
    store.send(6)
    _, buffer = store.pool.in_use()[0]
    buffer[store.ends[4] + 200 : store.ends[4] + 201] = b"?"
    store.crash()
    store.recover()
    assert store.stored() == store.bodies[:4]
    copy = next(name for name in store.cut() if name.endswith(".pool"))
    assert store.bodies[5] in (store.layout.own / "cut" / copy).read_bytes(), "a person can still find it"


def test_nothing_is_written_over_what_another_program_stored(store: Store) -> None:
    """RocketMQ knows no pool: it cuts the log at its end and goes on there."""
    store.send(6)
    store.commit(3)
    path = store.layout.commit_log / segment_name(0)
    with path.open("r+b") as file:
        file.seek(store.ends[3])
        file.write(bytes.fromhex("0000009f aabbccdd"))
    before = path.read_bytes()
    store.crash()
    assert take_over(store.layout, SEGMENT, get_log("test")) == 0
    assert path.read_bytes() == before
    assert store.cut()
    assert not store.folder.exists()


def test_a_log_that_does_not_reach_the_pool_is_left_as_it_is(store: Store) -> None:
    store.send(9)
    store.commit(5)
    path = store.layout.commit_log / segment_name(0)
    data = path.read_bytes()
    path.write_bytes(data[: store.ends[2]].ljust(SEGMENT, b"\0"))
    store.crash()
    store.recover()
    assert store.stored() == store.bodies[:2]
    assert store.cut()


@pytest.mark.parametrize("failpoint", ["recovery.before_takeover", "recovery.after_takeover", "pool.inside_remove"])
def test_a_takeover_that_was_killed_is_done_again(
    store: Store, failpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.send(30)
    store.commit(1)
    store.crash()

    def die(name: str) -> None:
        if name == failpoint:
            raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(failpoints, "ACTIVE", True)
        dying.setattr(failpoints, "hit", die)
        with pytest.raises(KeyboardInterrupt):
            take_over(store.layout, SEGMENT, get_log("test"))
    store.recover()
    assert store.stored() == store.bodies
    assert not store.folder.exists()
    assert PoolNote.load(store.layout) is None
    assert store.cut() == []


# ---------------------------------------------------------------- whose it is


def test_of_an_earlier_run_of_the_machine_nothing_is_believed(store: Store) -> None:
    store.send(5)
    store.commit(2)
    store.note(boot="another")
    store.crash()
    store.recover()
    assert store.stored() == store.bodies[:2]
    assert not store.folder.exists()


def test_a_copy_of_a_store_leaves_the_original_its_pool(store: Store, tmp_path: Path) -> None:
    store.send(5)
    store.commit(2)
    store.crash()
    copy = tmp_path / "copy"
    shutil.copytree(store.layout.root, copy)
    assert take_over(StoreLayout(copy), SEGMENT, get_log("test")) == 0
    assert PoolNote.load(StoreLayout(copy)) is None
    store.recover()
    assert store.stored() == store.bodies


def test_a_store_that_was_moved_keeps_its_pool(store: Store, tmp_path: Path) -> None:
    store.send(5)
    store.commit(2)
    store.crash()
    store.layout.root.rename(tmp_path / "moved")
    store.layout = StoreLayout(tmp_path / "moved")
    store.recover()
    assert store.stored() == store.bodies
    assert not store.folder.exists()


def test_a_pool_in_the_place_of_ours_is_not_touched(store: Store) -> None:
    store.send(5)
    store.commit(2)
    (store.folder / "owner").write_bytes(orjson.dumps({"id": "somebody else"}))
    store.crash()
    store.recover()
    assert store.stored() == store.bodies[:2]
    assert (store.folder / "buffer-0").exists()


def test_a_pool_open_to_others_is_refused_until_a_person_looks(store: Store) -> None:
    store.send(5)
    store.crash()
    store.folder.chmod(0o755)
    with pytest.raises(StoreError, match="not a folder that only this account can use"):
        store.recover()
    store.folder.chmod(0o700)
    store.recover()
    assert store.stored() == store.bodies


def test_a_pool_that_was_deleted_does_not_keep_the_store_closed(store: Store) -> None:
    store.send(5)
    store.commit(2)
    store.crash()
    shutil.rmtree(store.folder)
    store.recover()
    assert store.stored() == store.bodies[:2]


@pytest.mark.parametrize("broken", ["head", "buffer-1"])
def test_a_pool_that_cannot_be_read_is_refused_and_stays(store: Store, broken: str) -> None:
    store.send(5)
    store.crash()
    path = store.folder / broken
    path.write_bytes(b"?" * path.stat().st_size if broken == "head" else b"")
    with pytest.raises(StoreError):
        store.recover()
    assert (store.folder / "buffer-0").exists()
    shutil.rmtree(store.folder)
    store.recover()  # what the message says can be done


def test_another_segment_size_is_refused_and_changes_nothing(store: Store) -> None:
    store.send(5)
    store.crash()
    with pytest.raises(SegmentSizeError):
        take_over(store.layout, 2 * SEGMENT, get_log("test"))
    store.recover()
    assert store.stored() == store.bodies


def test_a_note_that_cannot_be_understood_is_refused(store: Store) -> None:
    transient_pool.note_path(store.layout).write_bytes(b"{}")
    with pytest.raises(StoreError, match="remove it"):
        store.recover()


# ---------------------------------------------------------------- buffers


def test_buffers_go_round_and_are_zero_each_time(store: Store) -> None:
    """Many times more than the pool holds goes through it; whatever is taken is zero behind the position."""
    looked_at = 0
    for _ in range(30):
        store.send(8)
        store.commit(len(store.bodies))
        for base, buffer in store.pool.in_use():
            looked_at += 1
            assert not any(buffer[: store.appender.position - base])
            assert not any(buffer[store.appender.position - base :])
    assert looked_at >= 30
    assert store.appender.position > 3 * BUFFERS * SEGMENT
    store.crash()
    store.recover()
    assert store.stored() == store.bodies


def test_a_full_pool_gives_no_buffer_until_one_is_committed(store: Store) -> None:
    for base in range(0, BUFFERS * SEGMENT, SEGMENT):
        assert store.pool.take(base) is not None
    assert store.pool.take(BUFFERS * SEGMENT) is None
    assert store.pool.take(SEGMENT) is store.pool.find(SEGMENT), "what it has it keeps"
    store.pool.give_back(0)
    assert store.pool.take(BUFFERS * SEGMENT) is not None
    other = TransientPool(store.folder)
    assert [base for base, _ in other.in_use()] == list(range(SEGMENT, (BUFFERS + 1) * SEGMENT, SEGMENT))
    other.close()


def test_records_of_a_former_segment_are_never_taken_for_new_ones(store: Store) -> None:
    """Zeroing is the first guard. Without it, equal records at equal places still name another offset of the log."""
    store.send(13)
    assert len(store.pool.in_use()) == 1
    stale = bytes(store.pool.in_use()[0][1])
    store.send(3)
    store.commit(16)
    base, buffer = store.pool.in_use()[0]
    buffer[:] = stale  # as if neither buffer had ever been zeroed
    store.crash()
    assert base == SEGMENT
    store.recover()
    assert store.stored() == store.bodies


def test_a_restarted_writer_clears_away_what_was_not_published(store: Store) -> None:
    store.send(20)
    assert len(store.pool.in_use()) == 2
    store.pool.zero_from(store.ends[5])
    store.crash()
    store.recover()
    assert store.stored() == store.bodies[:5]


def test_memory_that_is_not_there_is_not_promised(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.crash()
    transient_pool.remove(store.layout)
    monkeypatch.setattr(transient_pool, "available_bytes", lambda: BUFFERS * SEGMENT - 1)
    with pytest.raises(StoreError, match=f"takes {BUFFERS * SEGMENT + 4096} bytes of memory"):
        store.make(0)
    monkeypatch.setattr(transient_pool, "available_bytes", shared_memory.available_bytes)
    monkeypatch.setattr(os, "posix_fallocate", _no_space)
    with pytest.raises(StoreError, match="cannot make the transient store pool"):
        store.make(0)
    assert not store.folder.exists()
    assert PoolNote.load(store.layout) is None
    shared_memory.release(store.layout)
    store.shared.rmdir()
    with pytest.raises(StoreError, match=r"memory\.folder"):
        store.make(0)


def _no_space(_fd: int, _offset: int, _size: int) -> None:
    raise OSError(28, os.strerror(28))


def test_every_buffer_is_allocated_in_full(store: Store) -> None:
    for number in range(BUFFERS):
        assert os.stat(store.folder / f"buffer-{number}").st_blocks * 512 >= SEGMENT
