"""Explains a damaged log to the user whose node does not start: where the damage is, its extent, and the remedies."""

from __future__ import annotations

from commitmq.errors import CorruptRecordError, StoreError
from commitmq.format.file_names import segment_name
from commitmq.offline.extents import extents
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog


def explained(error: CorruptRecordError, layout: StoreLayout, segment_bytes: int) -> CorruptRecordError:
    """``error`` with the extent of the damage in its segment, and the commands that show and repair it.

    Reads that segment; changes nothing. Returns ``error`` itself when it names no place, or when nothing is damaged
    there.
    """
    if error.path is None or error.offset is None or not error.path.name.isdecimal():
        return error
    base = int(error.path.name)
    log = CommitLog(layout.commit_log, segment_bytes)
    try:
        bases = log.segments()
        damaged = (one for one in extents(log, base, bases) if one.damage and one.end > base + (error.offset or 0))
        extent = next(damaged, None)
    except StoreError:
        return error
    finally:
        log.close()
    if extent is None:
        return error
    at, size = extent.start - base, extent.end - extent.start
    follows = "the segment ends there" if extent.end == base + segment_bytes else "a whole record follows"
    return CorruptRecordError(
        f"the log is damaged in the middle: segment {segment_name(base)} at offset {at}, {size} bytes, behind which "
        f"{follows}: {extent.damage}. Nothing was changed. Put back a copy of this segment, or let `commitmq store repair "
        f"{layout.root}` show all damage, and end the log there (--cut) or take out these bytes only (--skip)",
        path=error.path,
        offset=at,
    )
