"""Cuts the log behind its end, so that a cut that is killed anywhere can be repeated.

It copies the bytes and writes that down (:mod:`commitmq.store.recovery.cut_record`) before it zeroes them. It zeroes
before it removes later segments, the last one first and each durably, so that no segment can be missing between two
others.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from commitmq import failpoints
from commitmq.errors import DiskFullError
from commitmq.files import disk
from commitmq.files.holes import nonzero_chunks
from commitmq.files.no_space import is_no_space
from commitmq.files.unshare import unshare
from commitmq.files.write_all import write_all
from commitmq.format.file_names import segment_name
from commitmq.log import Log
from commitmq.store.layout import StoreLayout
from commitmq.store.recovery import cut_record
from commitmq.store.recovery.cut_judge import Behind
from commitmq.store.recovery.cut_record import Cut
from commitmq.store.recovery.scan import ScanEnd


def cut_tail(
    layout: StoreLayout, found: ScanEnd, segment_bytes: int, bases: list[int], behind: Behind, allowed: bool, log: Log
) -> Cut | None:
    """Zero the bytes behind the end in its segment, remove later segments; returns the cut, None if nothing was cut.

    The order is: all copies, the line in the journal, the log.
    """
    paths = {base: layout.commit_log / segment_name(base) for base in bases if base + segment_bytes > found.end}
    cut = None
    if behind.bytes or allowed:
        try:
            cut = _write_down(layout, found, paths, behind, allowed)
        except OSError as error:
            if not is_no_space(error):
                raise
            raise DiskFullError(
                f"the disk has no space for a copy of the {behind.bytes} bytes that are to be cut from the log's end, so "
                f"nothing was cut. Free some: `commitmq store expire {layout.root} --keep-bytes N` deletes the oldest "
                "segments without a node",
                path=cut_record.cut_folder(layout),
            ) from error
        if failpoints.ACTIVE:
            failpoints.hit("recovery.before_cut")
    for base, path in sorted(paths.items(), reverse=True):
        _zero_tail(path, max(0, found.end - base))
        if base >= found.end:
            if failpoints.ACTIVE:
                failpoints.hit("recovery.before_remove")
            disk.unlink(path, "segment")
            disk.sync_folder(layout.commit_log)
            log.info("removed a segment that holds no records", segment=str(path))
    if cut is None:
        # The last line of an interrupted cut was never written: the log no longer has any of the cut bytes.
        begun = cut_record.unfinished(layout, "recovery", found.end)
        if begun is not None:
            cut_record.mark_done(layout, begun.id)
        return None
    cut_record.mark_done(layout, cut.id)
    log.warning("cut the end of the log", what=cut_record.sentence(layout, cut))
    return replace(cut, done=True)


def _write_down(layout: StoreLayout, found: ScanEnd, paths: dict[int, Path], behind: Behind, allowed: bool) -> Cut:
    """Copy the bytes behind the end, and record the cut, durably; an interrupted cut at this place is continued."""
    fds: dict[int, int] = {}
    try:
        for base, path in sorted(paths.items()):
            fds[base] = disk.open_file(path, os.O_RDONLY, "segment")
        spans = [(fd, base, max(0, found.end - base), os.fstat(fd).st_size) for base, fd in fds.items()]
        begun = cut_record.unfinished(layout, "recovery", found.end)
        if begun is not None and begun.parts and cut_record.still_kept(layout, begun, spans):
            return begun
        number = cut_record.new_id(layout)
        parts = []
        for fd, base, start, stop in spans:
            part = cut_record.keep(layout, number, fd, base, start, stop)
            if part is not None:
                parts.append(replace(part, records=behind.records.get(base, 0)))
    finally:
        for fd in fds.values():
            os.close(fd)
    reason = found.torn or ("promised messages are missing" if allowed else "stale bytes")
    cut = Cut(number, time.time_ns() // 1_000_000, "recovery", reason, found.end, tuple(parts), allowed)
    cut_record.append(layout, cut)
    return cut


def _zero_tail(path: Path, start: int) -> None:
    """Zero a segment from ``start`` on, durably; in this store only, not in a snapshot that has a link to it."""
    unshare(path, keep=start)
    with disk.opened(path, os.O_RDWR, "segment") as fd:
        zeroed = False
        for position, chunk in nonzero_chunks(fd, start, os.fstat(fd).st_size):
            write_all(fd, bytes(len(chunk)), position, place="recovery.cut")
            zeroed = True
        if zeroed:
            disk.sync(fd, "segment")
