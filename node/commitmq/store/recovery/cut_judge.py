"""Decides whether a recovery may end the log where its scan stopped: it examines the bytes behind before any change.

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

A refusal is not stored, so the next start finds the same and refuses again. A person allows one cut by naming the
offset at which the log may end; the permission fits no other cut.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from commitmq.errors import CutRefusedError
from commitmq.files import disk
from commitmq.files.holes import nonzero_chunks
from commitmq.format.file_names import segment_name
from commitmq.kernels.compiled import find_record, scan
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.recovery.recovery_start import Begin

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
    begin: Begin,
    end: int,
    newest: int,
    first: int,
    torn: str | None,
    behind: Behind,
    allowed_end: int,
) -> bool:
    """Raise CutRefusedError unless the log, which begins at ``first``, may end at ``end``; ``newest`` is the store time
    of its last record. Returns whether it may only because a person allowed it.
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


def _objection(begin: Begin, end: int, newest: int, first: int, behind: Behind) -> str:
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
