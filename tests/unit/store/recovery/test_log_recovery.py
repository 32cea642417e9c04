"""Goal: a recovery begins where the sidecar says, as long as nobody else used the store, and never believes what it may not.

Method: small logs built byte by byte, a sidecar and a checkpoint beside them, and one thing changed at a time. What the
recovery read is in its result, so "begins there" is counted in bytes.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from commitmq.errors import StoreError
from commitmq.format.file_names import segment_name
from commitmq.format.record import Record, encode_record
from commitmq.log import get_log
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.queue_files import has_record_before
from commitmq.store.recovery.cut_record import cut_folder
from commitmq.store.recovery.scan import scan_to_end
from commitmq.store.recovery.sidecar import SIDECAR_BYTES, Sidecar
from commitmq.store.recovery.store_recovery import Recovered, recover
from log_builder import SEGMENT_BYTES, build_log, message
from rebooted import after_a_reboot

OWNER = 4242


class Store:
    """Thirty records in three segments; the sidecar says that all but the last ten are flushed and in the queues."""

    def __init__(self, root: Path, messages: int = 30) -> None:
        self.layout = StoreLayout(root)
        self.layout.own.mkdir(parents=True)
        self.records = build_log(self.layout.commit_log, [message(number) for number in range(messages)])
        self.end = self.records[-1].physical_offset + self.records[-1].total_size
        self.known = self.records[-10].physical_offset
        self.sidecar = Sidecar(self.known, 1_019, self.known, -1, SEGMENT_BYTES, OWNER)
        self.checkpoint = Checkpoint(1_019, 1_019, 0)
        self.save()

    def save(self) -> None:
        self.sidecar.save_with(self.layout.sidecar, self.checkpoint, self.layout.checkpoint)

    def recover_folders(self) -> None:
        """Make the folders that every start makes."""
        for folder in (self.layout.consume_queue, self.layout.config):
            folder.mkdir(exist_ok=True)

    def recover(self, *, clean: bool = False, previous: int | None = OWNER, allowed_end: int = -1) -> Recovered:
        return recover(
            self.layout,
            segment_bytes=SEGMENT_BYTES,
            consume_queue_bytes=1000,
            batch_queue_bytes=460,
            clean=clean,
            log=get_log("test"),
            previous=previous,
            allowed_end=allowed_end,
        )

    def overwrite(self, record: Record, change: bytes, at: int) -> None:
        offset = record.physical_offset + at
        path = self.layout.commit_log / segment_name(offset - offset % SEGMENT_BYTES)
        data = bytearray(path.read_bytes())
        data[offset % SEGMENT_BYTES : offset % SEGMENT_BYTES + len(change)] = change
        path.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize("clean", [True, False])
def test_it_reads_only_what_lies_behind_the_sidecar(store: Store, clean: bool) -> None:
    found = store.recover(clean=clean, previous=None if clean else OWNER)
    assert found.by_sidecar
    assert (found.end, found.records, found.scanned_bytes) == (store.end, 10, store.end - store.known)
    assert found.redispatch_from == store.known
    assert found.last_timestamp == 1_029


def test_with_nothing_behind_it_the_times_come_from_the_sidecar(store: Store) -> None:
    store.sidecar.flushed, store.sidecar.flushed_timestamp = store.end, 5_000
    store.save()
    found = store.recover()
    assert (found.records, found.scanned_bytes, found.last_timestamp, found.end) == (0, 0, 5_000, store.end)
    assert found.redispatch_from == store.known


@pytest.mark.parametrize("queues_ahead", [True, False])
def test_the_queues_place_is_not_taken_from_the_logs(store: Store, queues_ahead: bool) -> None:
    # In asynchronous mode queues may be durable further than the log, and a cut may then fall below them.
    store.sidecar.queues_durable = store.end + 100 if queues_ahead else store.records[5].physical_offset
    store.save()
    assert store.recover().redispatch_from == (store.end if queues_ahead else store.records[5].physical_offset)


def test_a_checkpoint_of_somebody_else_makes_the_sidecar_old(store: Store) -> None:
    dataclasses.replace(store.checkpoint, confirm_physical_offset=77).save(store.layout.checkpoint)
    found = store.recover()
    assert not found.by_sidecar
    assert (found.end, found.records) == (store.end, 30)


def test_an_abort_file_of_somebody_else_makes_the_sidecar_old(store: Store) -> None:
    assert not store.recover(previous=OWNER + 1).by_sidecar


@pytest.mark.parametrize("written", ["the sidecar", "both"])
def test_a_crash_between_the_two_files_leaves_a_sidecar_that_counts(store: Store, written: str) -> None:
    old = store.layout.checkpoint.read_bytes()
    store.checkpoint.physic_msg_timestamp = 1_020
    store.save()
    if written == "the sidecar":
        store.layout.checkpoint.write_bytes(old)
    assert store.recover().by_sidecar


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "torn", "another magic", "other segments"])
def test_a_sidecar_that_is_none_is_passed_over(store: Store, damage: str) -> None:
    data = bytearray(store.layout.sidecar.read_bytes())
    assert len(data) == SIDECAR_BYTES
    if damage == "other segments":
        store.sidecar.segment_bytes *= 2
        store.save()
    elif damage == "missing":
        store.layout.sidecar.unlink()
    else:
        changed: dict[str, bytes] = {
            "empty": b"",
            "short": bytes(data[:60]),
            "torn": bytes(data[:20] + b"\1" + data[21:]),
            "another magic": b"X" + bytes(data[1:]),
        }
        store.layout.sidecar.write_bytes(changed[damage])
    found = store.recover()
    assert not found.by_sidecar
    assert (found.end, found.records) == (store.end, 30)


def test_a_log_that_is_shorter_than_what_was_flushed_is_refused(store: Store) -> None:
    store.sidecar.flushed = store.end + 10 * SEGMENT_BYTES
    store.save()
    with pytest.raises(StoreError, match="must reach physical offset"):
        store.recover()
    store.layout.sidecar.unlink()
    assert store.recover().end == store.end


def test_a_log_that_lost_everything_may_have_no_segment(store: Store) -> None:
    """A power cut took all, before anything was flushed; the queues have units, and a stop removed the unused segments."""
    queue = store.layout.consume_queue / "orders" / "0" / segment_name(0)
    queue.parent.mkdir(parents=True)
    queue.write_bytes(bytes(1_000))
    for path in store.layout.commit_log.iterdir():
        path.unlink()
    with pytest.raises(StoreError, match="no CommitLog"):
        store.recover(clean=True)
    store.sidecar.flushed = store.sidecar.queues_durable = 0
    store.save()
    assert store.recover(clean=True).end == 0
    Checkpoint(9, 9, 9).save(store.layout.checkpoint)
    with pytest.raises(StoreError, match="no CommitLog"):
        store.recover(clean=True)


@pytest.mark.parametrize("other", ["older", "diverged"])
def test_a_log_of_another_moment_is_refused_and_not_cut(store: Store, other: str) -> None:
    store.sidecar.flushed = store.records[25].physical_offset + (7 if other == "diverged" else 0)
    store.save()
    if other == "older":
        for record in store.records[23:]:
            store.overwrite(record, bytes(record.total_size), at=0)
    before = [path.read_bytes() for path in sorted(store.layout.commit_log.iterdir())]
    with pytest.raises(StoreError, match="no record ends at"):
        store.recover()
    assert [path.read_bytes() for path in sorted(store.layout.commit_log.iterdir())] == before
    store.layout.sidecar.unlink()
    found = store.recover()
    assert found.end == (store.records[23].physical_offset if other == "older" else store.end)


def test_what_looks_like_a_record_in_a_body_proves_nothing(tmp_path: Path) -> None:
    whole = encode_record(message(1))
    records = build_log(tmp_path, [message(0), dataclasses.replace(message(1), body=whole * 3), message(2)])
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    ends = [record.physical_offset + record.total_size for record in records]
    assert [offset for offset in range(1, ends[-1] + 50) if has_record_before(log, offset)] == ends
    log.close()


def test_a_record_longer_than_one_piece_of_the_search_is_found(tmp_path: Path) -> None:
    size = 1 << 20
    (record,) = build_log(tmp_path, [message(0, size=200_000)], segment_bytes=size)
    log = CommitLog(tmp_path, size)
    assert has_record_before(log, record.total_size)
    assert not has_record_before(log, record.total_size + 1)
    log.close()


def test_a_record_without_crc_where_every_record_has_one_is_torn(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.sidecar.crc_from = store.known
    store.save()
    after_a_reboot(store.layout)
    found = store.recover()
    # The builder's records have no __CRC32#, so the first one behind the sidecar is not believed, and kept aside.
    assert (found.end, found.records) == (store.known, 0)
    assert found.cut_bytes > 0
    copies = [cut_folder(store.layout) / part.copy for part in found.cut.parts] if found.cut else []
    first = encode_record(store.records[20])
    assert any(first in copy.read_bytes() for copy in copies)


def test_without_a_trusted_sidecar_nothing_is_known_of_crcs(store: Store) -> None:
    store.sidecar.crc_from = 0
    store.save()
    found = store.recover(previous=OWNER + 1)
    assert (found.end, found.records) == (store.end, 30)
    assert found.crc_from == store.end, "what is written from now on has one again"


def test_a_torn_record_behind_the_sidecar_is_cut_and_one_before_it_is_not_looked_at(store: Store) -> None:
    store.overwrite(store.records[3], b"?", at=100)
    store.overwrite(store.records[28], b"?", at=100)
    after_a_reboot(store.layout)
    found = store.recover()
    assert (found.end, found.records) == (store.records[28].physical_offset, 8)
    again = store.recover()
    assert (again.end, again.cut_bytes) == (found.end, 0)


@pytest.mark.parametrize("messages", [30, 300])
def test_the_work_does_not_grow_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    """The same tail behind a short log and behind a long one: as many bytes are read, by whatever call."""
    store = Store(tmp_path / "store", messages)
    counted = count_reads(monkeypatch)
    found = store.recover()
    assert (found.end, found.records) == (store.end, 10)
    assert found.scanned_bytes <= 10 * max(one.total_size for one in store.records) + SEGMENT_BYTES
    # Nothing but the segments of the tail, and of the record before it, which is looked for in the segment before.
    assert counted["segments"] <= {
        one.physical_offset // SEGMENT_BYTES for one in [*store.records[-12:], store.records[0]]
    } | {store.end // SEGMENT_BYTES}
    assert counted["pread"] <= 2 * SEGMENT_BYTES


def count_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """``pread``: bytes read with that call; ``segments``: numbers of those that were mapped and looked at."""
    counted: dict[str, Any] = {"pread": 0, "segments": set()}
    real_pread, real_read = os.pread, CommitLog.read

    def pread(fd: int, size: int, offset: int) -> bytes:
        data = real_pread(fd, size, offset)
        counted["pread"] += len(data)
        return data

    def read(self: CommitLog, offset: int, size: int) -> memoryview:
        counted["segments"].add(offset // self.segment_bytes)
        return real_read(self, offset, size)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(CommitLog, "read", read)
    return counted


def test_what_was_never_written_of_a_segment_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are preallocated: behind the end of the log there may be a gigabyte of zeros."""
    big = 256 << 20
    layout = StoreLayout(tmp_path / "store")
    layout.own.mkdir(parents=True)
    records = build_log(layout.commit_log, [message(number) for number in range(5)], segment_bytes=1 << 16)
    end = records[-1].physical_offset + records[-1].total_size
    with open(layout.commit_log / segment_name(0), "r+b") as file:
        file.truncate(end)
        os.posix_fallocate(file.fileno(), 0, big)
        os.fsync(file.fileno())
    counted = count_reads(monkeypatch)
    found = recover(
        layout,
        segment_bytes=big,
        consume_queue_bytes=1000,
        batch_queue_bytes=460,
        clean=False,
        log=get_log("test"),
    )
    assert (found.end, found.records, found.cut_bytes) == (end, 5, 0)
    # What the kernel has read ahead of the records counts as data: some megabytes.
    assert counted["pread"] <= big // 4


def test_progress_comes_piece_by_piece_and_ends_at_the_end(store: Store) -> None:
    told: list[tuple[str, int, int]] = []
    found = recover(
        store.layout,
        segment_bytes=SEGMENT_BYTES,
        consume_queue_bytes=1000,
        batch_queue_bytes=460,
        clean=False,
        log=get_log("test"),
        previous=OWNER + 1,
        progress=lambda phase, done, total: told.append((phase, done, total)),
    )
    checked = [(done, total) for phase, done, total in told if phase == "checking the log"]
    assert len(checked) >= 3, "at least one a segment"
    assert checked == sorted(checked)
    assert checked[-1][0] == found.scanned_bytes
    assert all(done <= total for done, total in checked)
    assert [phase for phase, _, _ in told[-2:]] == ["cutting the tail", "syncing the log"]


@pytest.mark.parametrize("piece_bytes", [1, 91, 500, 4096])
def test_a_log_that_is_checked_in_pieces_ends_where_it_does_in_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Pieces end anywhere: inside a record, inside a filler; also with a torn record at the end."""
    log = CommitLog(store.layout.commit_log, SEGMENT_BYTES)
    whole = scan_to_end(log, 0)
    monkeypatch.setattr("commitmq.store.recovery.scan._SCAN_BYTES", piece_bytes)
    assert scan_to_end(log, 0) == whole
    monkeypatch.undo()
    store.overwrite(store.records[-3], b"torn", 150)
    torn = scan_to_end(log, 0)
    assert torn.torn
    monkeypatch.setattr("commitmq.store.recovery.scan._SCAN_BYTES", piece_bytes)
    assert scan_to_end(log, 0) == torn
    log.close()
