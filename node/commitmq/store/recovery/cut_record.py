"""``commitmq/cut``: the bytes ever cut from the log, with place and reason, so that every cut can be shown and undone.

    commitmq/cut/journal                    one line for each event; lines are only appended
    commitmq/cut/SEGMENT-START-ID           the bytes of one part: SEGMENT in 20 digits, START a position in it
    commitmq/cut/SEGMENT-START-ID.pool      the same for a transient store pool: bytes that never were in the log

A line of the journal:

    0    CRC-32 of the JSON      8 hexadecimal digits   a line that a crash tore is skipped
    8    a space
    9    JSON object
    ...  a line feed

A JSON object with ``"event": "cut"``:

    id         int       names this cut and its copies; larger than every earlier id
    time_ms    int       time of the cut, by the clock
    by         str       "recovery", "repair --cut", "repair --skip" or "pool": the program that cut
    reason     str       why the bytes are not a record, or why they could not stay
    log_end    int       where the log ends afterwards (physical offset); -1 when it does not end here
    allowed    bool      an operator was asked and allowed it
    parts      list      one for each segment, ascending:
        segment    int   physical offset at which the segment begins
        start      int   position in the segment of the first cut byte
        size       int   bytes of the copy: those of [start, start + size); zeros of the log behind that are not kept
        bytes      int   bytes in pieces that were not all zeros, without the zeros at the end of each
        records    int   complete records among them; -1 when they were not counted
        copy       str   name of the copy in this folder
        crc        int   CRC-32 of the copy

Lines with ``"event": "done"`` or ``"event": "restored"`` have only ``id`` and ``time_ms``: the log no longer has these
bytes, or has them back. A cut without ``done`` was interrupted, and the log may still have some of its bytes; the next
cut at the same place continues it (:func:`unfinished`) instead of filling the disk with copies.

This order makes the record reliable: every copy is on the device, then the line "cut", and only then is a byte of the
log changed; "done" follows when all changes are on the device.

Decides whether a recovery may end the log where its scan stopped: it examines the bytes behind before any change.

A crash leaves a torn end: an unfinished append and, after a power cut, any subset of the pages that were never synced.
Any other end of a scan is damage, missing files, or a wrong start of the scan; cutting there would destroy acknowledged
records. A recovery refuses (:class:`commitmq.errors.CutRefusedError`)

    * when the log ends below a promised position: the sidecar of this store, ConsumeQueues of a clean stop, or the
      checkpoint's time of the last flush;
    * when whole records are behind the end, unless a power cut may have left them: the store's own sidecar says that
      they were never promised, and the machine was restarted since (or a sync had failed). A kill alone leaves whole
      records only of the append it interrupted, whose first 8 bytes are still zero;
    * when later segments have data, with the same exception;
    * when not even the first record is valid, in a store that this node did not crash on.

RocketMQ does not zero cut bytes, so records behind the end that are older than the log's newest are its leftovers.

A refusal is not stored, so the next start finds the same and refuses again. An operator allows one cut by naming the
offset at which the log may end; the permission fits no other cut.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from commitmq.errors import CutRefusedError
from commitmq.files import disk
from commitmq.files.disk import sync_folder, write_all
from commitmq.files.unshare import nonzero_chunks
from commitmq.format.file_names import segment_name
from commitmq.kernels.compiled import find_record, scan
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.recovery.recovery_start import RecoveryStart

_HEAD_BYTES: Final = 8
_NO_BUDGET: Final = 1 << 62


@dataclass(slots=True)
class Behind:
    """The data behind the end of a scan. ``records``: complete ones by segment, without RocketMQ's leftovers."""

    bytes: int = 0
    segments: list[int] = field(default_factory=list)
    records: dict[int, int] = field(default_factory=dict)
    is_unfinished: bool = False
    """The bytes at the end are zero, as an unfinished append leaves them."""

    @property
    def all_records(self) -> int:
        return sum(self.records.values())


def look_behind(commit_log: CommitLog, end: int, newest: int) -> Behind:
    """The data in the log from ``end`` on; ``newest`` is the store time (ms) of the last record before. Changes nothing."""
    found = Behind()
    size = commit_log.segment_bytes
    for base in commit_log.segments():
        if base + size <= end:
            continue
        start = max(0, end - base)
        last = 0
        with disk.opened(commit_log.folder / segment_name(base), os.O_RDONLY, "segment") as fd:
            for position, chunk in nonzero_chunks(fd, start, size):
                found.bytes += len(chunk)
                last = position + len(chunk)
        if not last:
            continue
        found.segments.append(base)
        segment = np.frombuffer(commit_log.read(base, size), np.uint8)
        if base <= end:
            found.is_unfinished = not segment[start : start + _HEAD_BYTES].any()
        found.records[base] = _whole_records(segment, start, last, base, newest)
    return found


def _whole_records(segment: np.ndarray[Any, np.dtype[np.uint8]], start: int, stop: int, base: int, newest: int) -> int:
    out = np.zeros(5, np.int64)
    at, records = start, 0
    while at < stop:
        at = int(find_record(segment, at, stop, base, _NO_BUDGET, out))
        if at < 0:
            break
        scan(segment, at, segment.size, base, False, out)
        if int(out[3]) >= newest:
            records += int(out[0])
        at = int(out[1])
    return records


def judge(
    layout: StoreLayout,
    begin: RecoveryStart,
    end: int,
    newest: int,
    first: int,
    torn: str | None,
    behind: Behind,
    allowed_end: int,
) -> bool:
    """Raise CutRefusedError unless the log, which begins at ``first``, may end at ``end``; ``newest`` is the store time
    of its last record. Returns whether it may only because an operator allowed it.
    """
    reason = _objection(begin, end, newest, first, behind)
    if not reason:
        return False
    if allowed_end == end:
        return True
    where = f"the log is whole up to physical offset {end} only" + (f" ({torn})" if torn else "")
    if behind.bytes:
        counted = f"{behind.all_records} whole records" if behind.all_records else "no whole record"
        cut = f"a start would cut {behind.bytes} bytes in {len(behind.segments)} segment(s) behind it, with {counted}"
    else:
        cut = "nothing is left behind it"
    hint = ""
    if allowed_end >= 0:
        hint = f"--allow-cut {allowed_end} does not allow this one. "
    raise CutRefusedError(
        f"refused to cut the log: {reason}. {where[0].upper() + where[1:]}; {cut}. Nothing was changed. "
        f"{hint}Put the right files back; or look at the report of `commitmq store repair {layout.root}`, and take out the "
        f"damaged bytes only (--skip); or let the log end there, and lose everything behind: `commitmq start --allow-cut "
        f"{end}` (the cut bytes are kept in commitmq/cut)",
        path=layout.commit_log,
        end=end,
        cut_bytes=behind.bytes,
        segments=len(behind.segments),
        records=behind.all_records,
    )


def _objection(begin: RecoveryStart, end: int, newest: int, first: int, behind: Behind) -> str:
    if begin.contradiction:
        return begin.contradiction
    if begin.covered > end:
        return f"the last stop was clean, and ConsumeQueues lead to records up to physical offset {begin.covered}"
    if newest < begin.promised_timestamp:
        return (
            f"the checkpoint says that records stored up to {begin.promised_timestamp} (ms) were flushed, and the newest "
            + (f"one that is left was stored at {newest}" if newest else "is gone")
        )
    if begin.by_sidecar and not begin.clean:
        if begin.power_may_have_gone or not behind.bytes:
            return ""
        later = [base for base in behind.segments if base > end]
        if later:
            return f"the machine was not restarted since, and there is data in segment {segment_name(later[-1])}"
        if behind.all_records and not behind.is_unfinished:
            return "the machine was not restarted since, so this is no power cut's torn end, and whole records follow"
        return ""
    if behind.all_records:
        how = "the last stop was clean" if begin.clean else "nothing says that they were never acknowledged"
        return f"whole records lie behind its end, and {how}"
    if behind.bytes and end == first:
        return "not even its first record is whole"
    if any(base > end for base in behind.segments):
        return "there is data in later segments"
    return ""


JOURNAL: Final = "journal"
_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class CutPart:
    """The bytes cut from one segment; see the module's text."""

    segment: int
    start: int
    size: int
    bytes: int
    records: int
    copy: str
    crc: int

    @property
    def begin(self) -> int:
        """Physical offset of the first byte."""
        return self.segment + self.start

    @property
    def end(self) -> int:
        """Physical offset behind the last kept byte."""
        return self.segment + self.start + self.size


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut; see the module. ``done``: none of its bytes is in the log; ``restored``: an operator put them back."""

    id: int
    time_ms: int
    by: str
    reason: str
    log_end: int
    parts: tuple[CutPart, ...]
    allowed: bool = False
    done: bool = field(default=False, compare=False)
    restored: bool = field(default=False, compare=False)

    @property
    def bytes(self) -> int:
        """Number of cut bytes, except for pieces that were all zeros."""
        return sum(part.bytes for part in self.parts)

    @property
    def records(self) -> int:
        """Number of complete records that were cut; -1 when they were not counted everywhere."""
        return -1 if any(part.records < 0 for part in self.parts) else sum(part.records for part in self.parts)

    def to_json(self, layout: StoreLayout) -> dict[str, Any]:
        """The fields and the paths of the copies, for users and programs."""
        copies = [str(cut_folder(layout) / part.copy) for part in self.parts]
        return {**asdict(self), "bytes": self.bytes, "records": self.records, "copies": copies}


def cut_folder(layout: StoreLayout) -> Path:
    return layout.own / "cut"


def load(layout: StoreLayout) -> list[Cut]:
    """All cuts of the store, oldest first; changes nothing. Raises OSError when an existing journal cannot be read."""
    try:
        data = (cut_folder(layout) / JOURNAL).read_bytes()
    except FileNotFoundError:
        return []
    cuts: dict[int, dict[str, Any]] = {}
    for line in data.split(b"\n"):
        found = _decoded(line)
        if found is None:
            continue
        if found.get("event") == "cut":
            cuts[found["id"]] = found
        elif found.get("id") in cuts:
            cuts[found["id"]][str(found.get("event"))] = True
    return [_cut(found) for found in cuts.values()]


def unfinished(layout: StoreLayout, by: str, log_end: int) -> Cut | None:
    """The newest cut, if it was to end the log at ``log_end`` and was interrupted; see :func:`still_kept`."""
    cuts = load(layout)
    if cuts and not cuts[-1].done and (cuts[-1].by, cuts[-1].log_end) == (by, log_end):
        return cuts[-1]
    return None


def new_id(layout: StoreLayout) -> int:
    """An id for a new cut: the clock's milliseconds, or more if an earlier id is not smaller."""
    last = max((cut.id for cut in load(layout)), default=0)
    return max(last + 1, time.time_ns() // 1_000_000)


def keep(layout: StoreLayout, cut_id: int, source: int, segment: int, start: int, stop: int) -> CutPart | None:
    """Copy the nonzero bytes in [start, stop) of a segment, open as ``source``, durably; None when all of it is zero.

    ``records`` of the part is -1; use :func:`dataclasses.replace` when they were counted. Raises OSError; then an
    incomplete copy is removed.
    """
    name = f"{segment:020d}-{start}-{cut_id}"
    return keep_chunks(layout, name, segment, start, nonzero_chunks(source, start, stop))


def keep_chunks(
    layout: StoreLayout, name: str, segment: int, start: int, chunks: Iterable[tuple[int, bytes]]
) -> CutPart | None:
    """:func:`keep` for ``(position in the segment, bytes)`` pairs, ascending, from any memory."""
    path = cut_folder(layout) / name
    fd = -1
    size = kept = crc = 0
    try:
        for position, chunk in chunks:
            if fd < 0:
                make_folder(layout)
                fd = disk.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "cut", 0o600)
            gap = position - start - size
            crc = _crc_of_zeros(crc, gap)
            write_all(fd, chunk, position - start, place="cut.write")
            crc = zlib.crc32(chunk, crc)
            size = position - start + len(chunk)
            kept += len(chunk.rstrip(b"\0"))  # after the log's end a segment has zeros, which nobody lost
        if fd < 0:
            return None
        disk.sync(fd, "cut", metadata=True)
    except OSError:
        if fd >= 0:
            path.unlink(missing_ok=True)
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    sync_folder(path.parent)
    return CutPart(segment, start, size, kept, -1, name, crc)


def append(layout: StoreLayout, cut: Cut) -> None:
    """Write down a cut whose copies are on the device, durably, before a byte of the log is changed. Raises OSError."""
    found = asdict(cut)
    del found["done"], found["restored"]
    _append(layout, {"event": "cut", **found})


def mark_done(layout: StoreLayout, cut_id: int) -> None:
    """Write down, durably, that the log no longer has any byte of a cut. Raises OSError."""
    _append(layout, {"event": "done", "id": cut_id, "time_ms": time.time_ns() // 1_000_000})


def mark_restored(layout: StoreLayout, cut_id: int) -> None:
    """Write down that a cut was put back, durably. Raises OSError."""
    _append(layout, {"event": "restored", "id": cut_id, "time_ms": time.time_ns() // 1_000_000})


def copy_is_whole(layout: StoreLayout, part: CutPart) -> bool:
    """Whether the copy of ``part`` exists with every byte."""
    crc = size = 0
    try:
        with (cut_folder(layout) / part.copy).open("rb") as file:
            while data := file.read(1 << 20):
                crc = zlib.crc32(data, crc)
                size += len(data)
    except OSError:
        return False
    return (size, crc) == (part.size, part.crc)


def still_kept(layout: StoreLayout, cut: Cut, spans: Sequence[tuple[int, int, int, int]]) -> bool:
    """Whether all nonzero bytes in ``spans`` – ``(descriptor, segment, start, stop)`` – are in the copies of ``cut``:
    the bytes that an interrupted cut left in the log may then be cut without another copy.
    """
    parts = {(part.segment, part.start): part for part in cut.parts}
    for source, segment, start, stop in spans:
        part = parts.get((segment, start))
        chunks = nonzero_chunks(source, start, stop)
        if part is None:
            if next(chunks, None) is not None:
                return False
            continue
        if not copy_is_whole(layout, part):
            return False
        with (cut_folder(layout) / part.copy).open("rb") as copy:
            for position, chunk in chunks:
                copy.seek(position - start)
                kept = copy.read(len(chunk)).ljust(len(chunk), b"\0")
                found = np.frombuffer(chunk, np.uint8)
                if ((found != 0) & (found != np.frombuffer(kept, np.uint8))).any():
                    return False
    return True


def sentence(layout: StoreLayout, cut: Cut) -> str:
    """One cut in words, for the end of a start, for ``status`` and for ``store verify``."""
    begin = min((part.begin for part in cut.parts), default=cut.log_end)
    counted = "" if cut.records < 0 else f", {cut.records} whole records among them"
    segments = f" in {len(cut.parts)} segments" if len(cut.parts) > 1 else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(cut.time_ms / 1000))
    where = ", ".join(str(cut_folder(layout) / part.copy) for part in cut.parts)
    allowed = ", as was allowed" if cut.allowed else ""
    if not cut.parts:  # missing segments, or nothing but zeros
        return (
            f"{when}: {cut.by} ended the log at offset {begin}, behind which there is nothing{allowed} ({cut.reason})"
        )
    what = f"{cut.by} cut {cut.bytes} bytes{segments} from offset {begin} on{counted}{allowed}"
    return f"{when}: {what} ({cut.reason}); kept in {where}"


def make_folder(layout: StoreLayout) -> Path:
    """The folder of copies and journal, its name durable. Raises OSError."""
    folder = cut_folder(layout)
    made = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    if made:
        folder.chmod(0o700)
    # Always: the process that made it may have been killed before this.
    sync_folder(layout.own)
    return folder


def _append(layout: StoreLayout, entry: dict[str, Any]) -> None:
    path = make_folder(layout) / JOURNAL
    data = orjson.dumps(entry)
    line = b"%08x %s\n" % (zlib.crc32(data), data)
    made = not path.exists()
    with disk.opened(path, os.O_RDWR | os.O_CREAT, "cut_journal", 0o600) as fd:
        end = os.fstat(fd).st_size
        if end and os.pread(fd, 1, end - 1) != b"\n":
            line = b"\n" + line  # a crash tore the last line, which stays unchanged
        write_all(fd, line, end, place="cut.journal")
        disk.sync(fd, "cut_journal", metadata=True)
    if made:
        sync_folder(path.parent)


def _decoded(line: bytes) -> dict[str, Any] | None:
    data = line[_DIGITS + 1 :]
    try:
        if int(line[:_DIGITS], 16) != zlib.crc32(data):
            return None
        found = orjson.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("id"), int) else None


def _cut(found: dict[str, Any]) -> Cut:
    parts = tuple(
        CutPart(*(part[name] for name in ("segment", "start", "size", "bytes", "records", "copy", "crc")))
        for part in found["parts"]
    )
    return Cut(
        found["id"],
        found["time_ms"],
        found["by"],
        found["reason"],
        found["log_end"],
        parts,
        bool(found.get("allowed")),
        bool(found.get("done")),
        bool(found.get("restored")),
    )


_ZEROS: Final = bytes(1 << 16)


def _crc_of_zeros(crc: int, count: int) -> int:
    while count > 0:
        crc = zlib.crc32(_ZEROS[: min(count, len(_ZEROS))], crc)
        count -= len(_ZEROS)
    return crc
