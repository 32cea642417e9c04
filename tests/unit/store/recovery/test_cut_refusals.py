"""Goal: a recovery cuts what a crash left unfinished, and nothing else: what somebody was told is stored, or what nothing
explains, it refuses to cut, as often as it is asked, until a person names the place.

Method: small logs built byte by byte (see test_log_recovery), clean and crashed, ours and RocketMQ's; one thing lost at a
time: a record, a segment, the sidecar, the queues. The whole folder is compared before and after each refusal.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from test_log_recovery import OWNER, Store

from commitmq import failpoints
from commitmq.errors import CutRefusedError, DiskFullError, StoreError
from commitmq.format.file_names import segment_name
from commitmq.format.record import Record, encode_record
from commitmq.store.layout import StoreLayout
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.recovery import cut_record
from commitmq.store.recovery.sidecar import Sidecar
from log_builder import SEGMENT_BYTES, message
from rebooted import after_a_reboot


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def everything(layout: StoreLayout) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(layout.root.rglob("*")) if path.is_file()}


def refused(store: Store, *, times: int = 3, clean: bool = False, previous: int | None = OWNER) -> CutRefusedError:
    """Recover again and again: each time the same refusal, and not a byte of the folder is another."""
    store.recover_folders()
    before = everything(store.layout)
    sentences = set()
    for _ in range(times):
        with pytest.raises(CutRefusedError) as caught:
            store.recover(clean=clean, previous=previous)
        assert everything(store.layout) == before
        sentences.add(str(caught.value))
    assert len(sentences) == 1
    assert f"--allow-cut {caught.value.end}`" in sentences.pop()
    return caught.value


def stop_in_order(store: Store) -> None:
    """Let the sidecar say what it says after a clean stop."""
    last = store.records[-1]
    store.sidecar = Sidecar(store.end, last.store_timestamp, store.end, -1, SEGMENT_BYTES, OWNER)
    store.checkpoint = dataclasses.replace(store.checkpoint, physic_msg_timestamp=last.store_timestamp)
    store.save()


def last_written(store: Store) -> Path:
    last = store.records[-1].physical_offset
    return store.layout.commit_log / segment_name(last - last % SEGMENT_BYTES)


def zeroed(store: Store) -> None:
    last_written(store).write_bytes(bytes(SEGMENT_BYTES))


def deleted(store: Store) -> None:
    last_written(store).unlink()


def all_deleted(store: Store) -> None:
    for path in store.layout.commit_log.iterdir():
        path.unlink()


@pytest.mark.parametrize("loss", [zeroed, deleted, all_deleted])
@pytest.mark.parametrize("without", ["nothing", "sidecar"])
def test_a_clean_store_that_lost_its_end_is_refused_for_ever(
    store: Store, loss: Callable[[Store], None], without: str
) -> None:
    stop_in_order(store)
    loss(store)
    if without == "sidecar":
        store.layout.sidecar.unlink()
    first = refused(store, clean=True, previous=None)
    last: int = store.records[-1].physical_offset
    assert first.end == (0 if loss is all_deleted else last - last % SEGMENT_BYTES)
    for other in (first.end + 1, store.end):
        with pytest.raises(CutRefusedError, match=f"--allow-cut {other} does not allow this one"):
            store.recover(clean=True, previous=None, allowed_end=other)
    found = store.recover(clean=True, previous=None, allowed_end=first.end)
    assert (found.end, found.allowed) == (first.end, True)
    (cut,) = cut_record.load(store.layout)
    assert (cut.allowed, cut.done, cut.log_end) == (True, True, first.end)


def test_the_queues_of_a_clean_stop_bear_witness(store: Store) -> None:
    """RocketMQ's store: no sidecar, and a checkpoint that knows of no flush."""
    folder = store.layout.consume_queue / "topic" / "0"
    folder.mkdir(parents=True)
    queue = ConsumeQueue(folder, 1000)
    units = b"".join(struct.pack(">qiq", one.physical_offset, one.total_size, 0) for one in store.records)
    assert queue.append_units(0, units) == len(store.records)
    queue.flush()
    store.layout.sidecar.unlink()
    store.layout.checkpoint.unlink()
    zeroed(store)
    assert "ConsumeQueues lead to records" in str(refused(store, clean=True, previous=None))


@pytest.mark.parametrize("previous", [None, 0, OWNER + 1], ids=["clean", "RocketMQ's crash", "another node's crash"])
def test_whole_records_behind_the_end_are_not_cut_in_a_store_that_is_not_provably_ours(
    store: Store, previous: int | None
) -> None:
    store.layout.sidecar.unlink()
    store.checkpoint.physic_msg_timestamp = 1_005
    store.checkpoint.save(store.layout.checkpoint)
    store.overwrite(store.records[-3], b"?", at=100)
    found = refused(store, clean=previous is None, previous=previous)
    assert (found.end, found.records, found.segments) == (store.records[-3].physical_offset, 2, 1)
    allowed = store.recover(clean=previous is None, previous=previous, allowed_end=found.end)
    assert allowed.cut is not None
    assert (allowed.cut.records, allowed.cut.done) == (2, True)
    kept = (cut_record.cut_folder(store.layout) / allowed.cut.parts[0].copy).read_bytes()
    assert encode_record(store.records[-1]) in kept


@pytest.mark.parametrize("previous", [None, 0], ids=["clean", "RocketMQ's crash"])
def test_a_record_without_crc_is_as_good_as_any_unless_the_crash_was_ours(store: Store, previous: int | None) -> None:
    """A sidecar that says every record has one: of another version, which wrote it without having recovered, or foreign."""
    store.sidecar.flushed = store.sidecar.queues_durable = store.sidecar.crc_from = 0
    store.save()
    found = store.recover(clean=previous is None, previous=previous)
    assert (found.end, found.records, found.cut) == (store.end, 30, None)
    assert found.crc_from == store.end


def test_a_store_whose_first_record_is_none_is_not_emptied(store: Store) -> None:
    store.layout.sidecar.unlink()
    store.layout.checkpoint.unlink()
    for record in store.records:
        lost = b"?" if record.physical_offset < SEGMENT_BYTES else bytes(record.total_size)
        store.overwrite(record, lost, at=4 if len(lost) == 1 else 0)
    found = refused(store, previous=0)
    assert (found.end, found.records) == (0, 0)
    assert found.cut_bytes > 0


@pytest.mark.parametrize("rebooted", [False, True])
@pytest.mark.parametrize("victim", [24, -2], ids=["records in later segments", "records in the same"])
def test_whole_records_behind_the_sidecar_are_cut_only_when_the_power_may_have_gone(
    tmp_path: Path, rebooted: bool, victim: int
) -> None:
    store = Store(tmp_path / "store", messages=40)
    store.sidecar.flushed = store.sidecar.queues_durable = store.records[22].physical_offset
    store.save()
    torn = store.records[victim]
    store.overwrite(torn, b"?", at=100)
    later = {one.physical_offset // SEGMENT_BYTES for one in store.records[victim:]}
    if not rebooted:
        assert refused(store).end == torn.physical_offset
    after_a_reboot(store.layout)
    found = store.recover()
    assert found.cut is not None
    assert (found.end, len(found.cut.parts)) == (torn.physical_offset, len(later))
    assert found.cut.records == len(store.records[victim:]) - 1
    again = store.recover()
    assert (again.end, again.cut) == (found.end, None)


def test_an_append_that_a_kill_interrupted_is_cut_with_the_whole_records_in_it(store: Store) -> None:
    """The first 8 bytes of a run are stored last: zeros there, and whole records behind, are a run that nobody was told of."""
    store.overwrite(store.records[-4], bytes(8), at=0)
    found = store.recover()
    assert found.end == store.records[-4].physical_offset
    assert found.cut is not None
    assert found.cut.records == 3


def test_what_rocketmq_left_behind_an_earlier_end_is_no_loss(tmp_path: Path) -> None:
    """It does not zero what it cuts, so older records may lie behind the end of a log that was written to since."""
    stores = (Store(tmp_path / f"store-{count}", messages=count) for count in range(20, 40))
    store = next(one for one in stores if one.end % SEGMENT_BYTES < SEGMENT_BYTES // 2)
    base = store.end - store.end % SEGMENT_BYTES
    stale = dataclasses.replace(message(50), store_timestamp=900, physical_offset=store.end + 64)
    path = store.layout.commit_log / segment_name(base)
    data = bytearray(path.read_bytes())
    encoded = encode_record(stale)
    at = store.end + 64 - base
    data[at - 64 : at + len(encoded)] = b"garbage!" * 8 + encoded
    path.write_bytes(data)
    store.layout.sidecar.unlink()
    found = store.recover(previous=0)
    assert found.end == store.end
    assert found.cut is not None
    assert found.cut.records == 0


def test_a_checkpoint_tells_of_a_flush_that_the_log_does_not_have(store: Store) -> None:
    store.layout.sidecar.unlink()
    store.checkpoint.physic_msg_timestamp = store.records[-1].store_timestamp
    store.checkpoint.save(store.layout.checkpoint)
    for record in store.records[-2:]:
        store.overwrite(record, bytes(record.total_size), at=0)
    assert "the checkpoint says" in str(refused(store, previous=0))


# ---------------------------------------------------------------- how it cuts


def torn_over_segments(tmp_path: Path) -> tuple[Store, Record]:
    store = Store(tmp_path / "store", messages=40)
    store.sidecar.flushed = store.sidecar.queues_durable = store.records[22].physical_offset
    store.save()
    after_a_reboot(store.layout)
    store.overwrite(store.records[24], b"?", at=100)
    return store, store.records[24]


@pytest.mark.parametrize(
    "point",
    [
        "cut.write",
        "disk.open.cut:after",
        "disk.sync.cut:before",
        "disk.sync.cut:after",
        "cut.journal",
        "disk.open.cut_journal:before",
        "disk.open.cut_journal:after",
        "disk.sync.cut_journal:before",
        "disk.sync.cut_journal:after",
        "recovery.before_cut",
        "recovery.cut",
        "recovery.before_remove",
        "recovery.write_anew",
        "recovery.before_sync",
    ],
)
@pytest.mark.parametrize("turn", [1, 2])
def test_a_cut_that_fails_anywhere_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, turn: int
) -> None:
    store, torn = torn_over_segments(tmp_path)
    whole = {path.name: path.read_bytes() for path in store.layout.commit_log.iterdir()}
    monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"{point}=errno:EIO@{turn}"))
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    try:
        store.recover()
    except OSError as error:
        assert error.errno == errno.EIO
    monkeypatch.undo()
    found = store.recover()
    assert found.end == torn.physical_offset
    cuts = cut_record.load(store.layout)
    assert [cut.done for cut in cuts] == [True], "one cut, however often it was begun"
    assert cuts[0].records == len(store.records[24:]) - 1
    for part in cuts[0].parts:
        assert cut_record.copy_is_whole(store.layout, part)
        copy = (cut_record.cut_folder(store.layout) / part.copy).read_bytes()
        assert copy == whole[segment_name(part.segment)][part.start : part.start + part.size]


def test_a_full_disk_leaves_the_tail_and_says_how_to_get_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = torn_over_segments(tmp_path)
    before = {path.name: path.read_bytes() for path in store.layout.commit_log.iterdir()}
    monkeypatch.setattr(failpoints, "_points", failpoints.parse("cut.write=errno:ENOSPC"))
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    with pytest.raises(DiskFullError, match="commitmq store expire"):
        store.recover()
    assert {path.name: path.read_bytes() for path in store.layout.commit_log.iterdir()} == before


def test_after_a_crash_all_that_is_not_known_durable_is_written_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that nobody heard fail left clean pages: each byte must be written again, before the first sync of the log."""
    calls: list[tuple[str, int, int, int]] = []
    real_pwrite, real_sync = os.pwrite, os.fdatasync

    def place(fd: int) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return int(name.name) if name.parent == store.layout.commit_log else -1

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if place(fd) >= 0:
            calls.append(("write", place(fd) + at, len(data), place(fd)))
        return real_pwrite(fd, data, at)

    def fdatasync(fd: int) -> None:
        if place(fd) >= 0:
            calls.append(("sync", 0, 0, place(fd)))
        real_sync(fd)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    store.recover()
    first_sync = next(at for at, call in enumerate(calls) if call[0] == "sync")
    written = sorted((start, start + size) for kind, start, size, _ in calls[:first_sync] if kind == "write")
    at = store.known
    for start, stop in written:
        assert start <= at, f"[{at}, {start}) was not written"
        at = max(at, stop)
    assert at >= store.end
    calls.clear()
    store.recover(clean=True, previous=None)
    assert not [call for call in calls if call[0] == "write"], "a clean stop has synced all"


def test_a_minimum_behind_a_log_that_lost_its_end_stays_until_it_is_decided(store: Store) -> None:
    stop_in_order(store)
    minimum = store.layout.own / "min_offset"
    minimum.write_bytes(b"%020d\n" % (2 * SEGMENT_BYTES))
    for base in (0, SEGMENT_BYTES):
        (store.layout.commit_log / segment_name(base)).unlink()
    last_written(store).rename(store.layout.commit_log / segment_name(0))
    before = minimum.read_bytes()
    with pytest.raises(StoreError):
        store.recover(clean=True, previous=None)
    assert minimum.read_bytes() == before
