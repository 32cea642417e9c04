"""Reads one record of the log that a request names."""

from __future__ import annotations

import os

from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError
from commitmq.files import disk
from commitmq.format.constants import MIN_RECORD_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.record import Record, decode_record, peek
from commitmq.workers.runtime.context import WorkerContext


def read_record(context: WorkerContext, place: int) -> Record:
    """The record at ``place``. It is read and not mapped: a mapping would keep the space of an expired segment.

    Raises OSError, OffsetOutOfRangeError, CorruptRecordError.
    """
    end = context.control.committed()
    if place >= end:
        raise OffsetOutOfRangeError(f"the log ends at {end}")
    segment_bytes = context.config.commit_log.segment_bytes
    at = place % segment_bytes
    with disk.opened(context.layout.commit_log / segment_name(place - at), os.O_RDONLY, "segment") as fd:
        head = os.pread(fd, 8, at)
        size = peek(head)[0] if len(head) == 8 else 0
        if not MIN_RECORD_BYTES <= size <= segment_bytes - at:
            raise CorruptRecordError("no record begins there")
        return decode_record(os.pread(fd, size, at))
