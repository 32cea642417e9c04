"""The control block: two mapped pages of positions. Every process of a node reads them; one process writes each word.

Layout: 1024 signed 8-byte words in host byte order (they never leave the machine, and are created at each start).

    word 0         magic and layout version
    words 1..63    positions and flags of the node, one named word each (:class:`Word`)
    words 64..191  16 dispatcher slots of 8 words (:class:`DispatcherWord`)
    words 192..703 64 worker slots of 8 words (:class:`WorkerWord`)

Why single words: a load or store through ``memoryview.cast('q')`` is one aligned 8-byte machine access, so no reader
can see half a value. ``struct.pack_into`` must not be used here: it zeroes its target first, and readers saw the zero.

Why no locks: every word has one writing process (:mod:`commitmq.ownership`). Positions only grow while a node runs.
This order must hold: ``min <= dispatched[consume_queue] <= reput <= visible <= committed <= written <= allocated``.
Only with the transient store pool is ``committed`` a word of its own; without it written bytes are committed.

Why no barriers: x86 keeps a process's stores in order. arm64 need not: a process that reads a position there may see it
a moment before the bytes it stands for, unless the writer made a system call in between. A sync is such a call, so the
bytes below FLUSHED are there. So a process that reads the log up to WRITTEN checks size, magic and physical offset of
each record. Reput, the source of all others' records, looks again later at bytes that are no record yet.

A wake-up (see :mod:`commitmq.workers.runtime.doorbell`) only says "look again": it may be lost, so every loop also polls. A
role has its slot by :func:`role_slot`.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from pathlib import Path

from commitmq.errors import StoreError

PAGE_BYTES = 8192
MAGIC = 0x434D_5100_0000_0002
DISPATCHER_SLOTS = 16
WORKER_SLOTS = 64
_SLOT_WORDS = 8
_DISPATCHER_BASE = 64
_WORKER_BASE = 192


class Word(IntEnum):
    """Node-wide words. Which process writes one is in :data:`commitmq.ownership.WORDS`."""

    MAGIC = 0  # of this layout; stored when the page is created
    EPOCH = 1  # counts starts of the node
    WRITTEN = 2  # end of the last complete record in the log
    WRITTEN_TIMESTAMP = 3  # store timestamp (ms) of that record, stored before WRITTEN
    FLUSHED = 4  # everything below is on the device
    FLUSH_ERRNO = 5  # errno of a failed fdatasync; never cleared while the node runs
    ALLOCATED = 6  # end of the last segment file that exists in full
    DISK_FLAGS = 7  # bits of DiskFlag
    REPUT = 8  # everything below was pushed to the dispatchers; published just before the push
    MIN_OFFSET = 9  # smallest physical offset that may still be read
    REDISPATCH_FROM = 10  # where built-in dispatchers start when their own position is newer or unknown
    FLUSH_WANTED = 11  # highest end offset a sender waits for with ack=flushed
    WRITER_GENERATION = 12  # counts the writer's starts, so that others notice a restart
    TOPICS_VERSION = 13  # grows with every change of topics.json
    RECOVERED_END = 14  # end of the log that recovery found
    CRC_FROM = 15  # every record from here on has a __CRC32#; -1 when records may have none
    SUBSCRIPTIONS_VERSION = 16  # grows with every change of run/subscriptions.json
    SEGMENT_WANTED = 17  # base of the segment that an append waits for; 0 for none so far
    POOL_BUFFERS = 18  # buffers of the transient store pool; 0: none, and the next two words are unused
    COMMITTED = 19  # end of the bytes in the log's files, a record's boundary
    COMMITTED_TIMESTAMP = 20  # no newer than the store timestamp (ms) of the last record below COMMITTED
    WRITER_SYNC = 21  # state of the writer's own fdatasync: a WriterSync, or the negative errno of a failure
    WRITER_SYNCED = 22  # everything below is on the device too; flush makes it FLUSHED
    WRITER_SYNCED_TIMESTAMP = 23  # store timestamp (ms) of the last record below it, stored after it
    FLUSHING = 24  # end of the range of a sync under way; 0 while none is, or its outcome is in another word
    PRODUCERS_KNOWN = 25  # a snapshot of the idempotent producers up to here is on the device, independent of the log
    PRODUCERS_WANTED = 26  # the log will begin here as soon as PRODUCERS_KNOWN has reached it
    MOVERS_WANTED = 27  # bits of the movers that have, or had, messages (see semantics.movers)
    GROUP_RESETS = 28  # grows when an offset of a group that shares queues is reset
    GROUP_READS = 29  # grows when what a group may read changes: its consumeEnable, or its entry of forbiddenTable
    WRITER_TOPICS = 30  # the writer knows and applies every change of topics up to this TOPICS_VERSION
    MEMORY_TOPICS = 31  # the same for the process of memory topics
    GENERATION = 32  # of the store: grows whenever the log ended earlier than before (commitmq/cut_history)


class WriterSync(IntEnum):
    """Whether the writer is in an fdatasync of its own."""

    IDLE = 0
    SYNCING = 1


class DiskFlag(IntEnum):
    """Why sends are refused although the writer works."""

    NO_SEGMENT = 1  # the next segment could not be allocated
    DISK_FULL = 16  # use of the disk is above disk.warning_ratio (RocketMQ's running flag of the same value)


class DispatcherWord(IntEnum):
    """Words of one dispatcher slot; that dispatcher writes them all."""

    DISPATCHED = 0  # everything below is in its files (and may be shown to readers)
    DURABLE = 1  # everything below survives a power cut
    TIMESTAMP = 2  # store timestamp (ms) of the newest record dispatched
    DURABLE_TIMESTAMP = 3  # the same for DURABLE: checkpoint.logicsMsgTimestamp confirms it
    FLAGS = 4  # bits of DispatcherFlag
    DEATHS = 5  # how often it died in the batch behind DISPATCHED; counted before the batch, taken back after it
    SUSPECT_END = 6  # end of that batch
    TOPICS = 7  # the queues of all topics deleted up to this TOPICS_VERSION are removed


class DispatcherFlag(IntEnum):
    """Why a dispatcher has stopped."""

    DISK_FULL = 1
    PARKED = 2  # it died too often on one record, and waits for an operator
    STORE_ERROR = 4


class WorkerWord(IntEnum):
    """Words of one worker slot."""

    PID = 0  # the worker
    HEARTBEAT_MS = 1  # the worker: CLOCK_MONOTONIC in ms at its last loop
    STATE = 2  # the worker: WorkerState
    ASLEEP = 3  # the worker: 0 awake, 1 asleep, 2 napping (see workers.runtime.doorbell)
    RESTARTS = 4  # supervisor
    RELEASED = 5  # the worker: it has no segment mapped that ends at or below this offset of the log
    AWAITED_UNTIL_MS = 6  # a reader: until when (CLOCK_MONOTONIC, ms) a pull waits for messages of the log
    REFUSED = 7  # the worker: requests that it refused by a rate of [flow], since the node's start


class WorkerState(IntEnum):
    """Life of a worker, in order."""

    ABSENT = 0
    STARTING = 1
    READY = 2
    DRAINING = 3
    STOPPED = 4


class ControlBlock:
    """The mapped pages. Positions are bytes of the CommitLog unless a word says otherwise."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map ``path``; with ``create`` create it, zeroed. Raises StoreError when it is no control block."""
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError as error:
            raise StoreError("no control block: the node is not running", path=path) from error
        try:
            if create:
                os.ftruncate(fd, PAGE_BYTES)
            elif os.fstat(fd).st_size != PAGE_BYTES:
                raise StoreError("not a control block: it must be 8192 bytes", path=path)
            self._map = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")
        if create:
            self._words[Word.MAGIC] = MAGIC
        elif self._words[Word.MAGIC] != MAGIC:
            raise StoreError("the control block was made by another version", path=path)

    def get(self, word: int) -> int:
        return self._words[word]

    def put(self, word: int, value: int) -> None:
        """Store one node-wide word; only its owning process may."""
        self._words[word] = value

    def dispatcher(self, slot: int, word: int) -> int:
        """One word of dispatcher ``slot`` (0..15; slot 0 is the ConsumeQueue dispatcher)."""
        return self._words[_DISPATCHER_BASE + slot * _SLOT_WORDS + word]

    def put_dispatcher(self, slot: int, word: int, value: int) -> None:
        """Store one word of dispatcher ``slot``."""
        self._words[_DISPATCHER_BASE + slot * _SLOT_WORDS + word] = value

    def worker(self, slot: int, word: int) -> int:
        """One word of worker ``slot`` (0..63)."""
        return self._words[_WORKER_BASE + slot * _SLOT_WORDS + word]

    def put_worker(self, slot: int, word: int, value: int) -> None:
        """Store one word of worker ``slot``."""
        self._words[_WORKER_BASE + slot * _SLOT_WORDS + word] = value

    def committed(self) -> int:
        """End of the bytes in the log's files: committed with the transient store pool, written without it."""
        return self._words[Word.COMMITTED if self._words[Word.POOL_BUFFERS] else Word.WRITTEN]

    def visible(self, sync_flush: bool) -> int:
        """End of the range that a consumer may see: flushed in synchronous mode, committed in asynchronous mode."""
        return self._words[Word.FLUSHED] if sync_flush else self.committed()

    def close(self) -> None:
        """Unmap. The object must not be used afterwards."""
        self._words.release()
        self._map.close()


# One slot of the control block per role. Dispatchers other than the ConsumeQueue's have DISPATCHER_BASE plus their
# dispatcher slot. Plugins' workers follow from WORKER_BASE on; the supervisor assigns their slots.
DISPATCHER_BASE = 30
WORKER_BASE = 46
ROLE_SLOTS = {
    "supervisor": 0,
    "recovery": 1,
    "coordinator": 2,
    "dispatcher-consume_queue": 3,
    "reput": 4,
    "flush": 5,
    "allocate": 6,
    "writer": 7,
    "cleanup": 8,
    "discovery": 9,
    "schedule": 10,
    "timer": 11,
    "transaction": 12,
    "pop": 13,
    "reader-0": 14,  # reader-i is 14 + i: up to 16 readers have the slots 14..29 for themselves
    "dispatcher-index": DISPATCHER_BASE + 1,
    "dispatcher-memory": DISPATCHER_BASE + 2,
}


def role_slot(role: str) -> int:
    """Worker slot of ``role`` in the control block."""
    if role.startswith("reader-"):
        return ROLE_SLOTS["reader-0"] + int(role.removeprefix("reader-"))
    return ROLE_SLOTS[role]
