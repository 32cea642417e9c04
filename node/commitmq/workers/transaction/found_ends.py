"""Finds in the log what became of half messages that no op message names: so a committed message is appended once.

The op message of an end comes up to some seconds after the committed message. A process that dies in between leaves the
committed message as the only trace. It names the place of its half message. One that was ended by an earlier place, before
it went back to the half topic, is found by what the records share (:func:`commitmq.workers.transaction.ledger.key_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from commitmq.format.constants import PREPARED_OFFSET_OFFSET, Property, SysFlag
from commitmq.format.record import Record, decode_record
from commitmq.semantics.transaction import DISCARD_TOPIC, integer
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.workers.transaction.ledger import Key, key_of


@dataclass(slots=True)
class FoundEnds:
    """Queue offsets of half messages."""

    committed: set[int] = field(default_factory=set)
    discarded: set[int] = field(default_factory=set)


def find_superseded(halves: Sequence[Record]) -> set[int]:
    """Which of ``halves``, in queue order, were put back: a later one is the same message, checked once more."""
    found: set[int] = set()
    open_at: dict[tuple[Key, int], list[int]] = {}
    for half in halves:
        key, times = key_of(half), check_times(half)
        former = open_at.get((key, times - 1))
        if times and former:
            found.add(former.pop(0))
        open_at.setdefault((key, times), []).append(half.queue_offset)
    return found


def find_ends(log: CommitLog, halves: Sequence[Record], end: int, beat: Callable[[], None]) -> FoundEnds:
    """What became of ``halves``. The log is read up to ``end``. ``beat`` is called now and then.

    Raises CorruptRecordError.
    """
    found = FoundEnds()
    if not halves:
        return found
    by_place = {half.physical_offset: half for half in halves}
    by_key = {key_of(half): half for half in halves if check_times(half)}
    by_times: dict[tuple[Key, int], list[int]] = {}
    for one in halves:
        by_times.setdefault((key_of(one), check_times(one)), []).append(one.queue_offset)
    walker = LogWalker(log, max_rows=65_536, max_bytes=16 << 20)
    at = min(by_place)
    while at < end:
        batch = walker.walk(at, end)
        discards = batch.topics.index(DISCARD_TOPIC) if DISCARD_TOPIC in batch.topics else -1
        flags = batch.rows["sys_flag"] & int(SysFlag.TRANSACTION_MASK)
        for row in np.flatnonzero(flags == int(SysFlag.TRANSACTION_COMMIT)).tolist():
            half = by_place.get(_prepared_offset(batch, row))
            if half is None and not by_key:
                continue
            record = decode_record(batch.record(row))
            key = key_of(record)
            if half is None or key_of(half) != key:
                half = by_key.get(key)
            if half is not None and record.prepared_transaction_offset <= half.physical_offset:
                found.committed.add(half.queue_offset)
        if discards >= 0:
            for row in np.flatnonzero(batch.rows["topic"] == discards).tolist():
                record = decode_record(batch.record(row))
                found.discarded.update(by_times.get((key_of(record), check_times(record)), ()))
        at = batch.end
        beat()
    walker.release()
    return found


def check_times(half: Record) -> int:
    """How often ``half`` was checked before it was stored."""
    return max(0, integer(half.properties.get(Property.TRANSACTION_CHECK_TIMES, "0")))


def _prepared_offset(batch: DispatchBatch, row: int) -> int:
    flags = int(batch.rows["sys_flag"][row])
    hosts = sum(20 if flags & wide else 8 for wide in (SysFlag.BORN_HOST_V6, SysFlag.STORE_HOST_V6))
    at = PREPARED_OFFSET_OFFSET + hosts
    return int.from_bytes(batch.record(row)[at : at + 8], "big", signed=True)
