"""Appends runs of messages for a mover: a process that takes messages from one queue of the log to another.

A mover appends through the writer, as a client does, over ipc. Its runs keep what only the node may set: born hosts,
transaction bits, numbers of tries. A writer that dies leaves the outcome of a run open. Then :class:`WriterLost` is
raised, and the mover looks into the log for what it has appended (:class:`MovedBefore`). A writer that lives
is waited for without a limit: its supervisor ends it when it hangs, and an appended run must never be sent again.

An exception belongs to the process or to a message; one that belongs to a message takes no other message along.

To the process belong the files, the memory, the writer, the coordinator and the supervisor (:data:`OF_THE_PROCESS`);
such an exception goes up. Every other one that comes while records are made from records belongs to one of these:
:func:`isolated` finds it by halving, hands it to ``set_aside``, and continues with the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import orjson
import zmq

from commitmq.control import DispatcherWord, Word, WorkerState, WorkerWord, role_slot
from commitmq.errors import CorruptRecordError, ProtocolError, StoreError
from commitmq.files.disk_space import StoppedWithoutRoom
from commitmq.format.constants import (
    BODY_CRC_OFFSET,
    BORN_HOST_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    CRC_PROPERTY_PREFIX,
    FLAG_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    RECONSUME_TIMES_OFFSET,
)
from commitmq.format.record import parts_of
from commitmq.protocol import wire
from commitmq.protocol.channel import new_routing_id
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker, boundary_before
from commitmq.store.log.run_check import CheckedRun
from commitmq.workers.runtime.context import RestartWanted, Socket, SupervisorGone, WorkerContext


def connect(context: WorkerContext, role: str) -> Socket:
    """A DEALER to ``role``. It sends only while that process listens, and drops what was not sent when it is closed."""
    found = context.zmq.socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, 0)
    found.setsockopt(zmq.IMMEDIATE, 1)
    found.setsockopt(zmq.ROUTING_ID, new_routing_id())
    found.connect(context.layout.ipc(role))
    return found


_PATIENCE_S: Final = 2.0
_SILENT_S: Final = 0.5
_AWAY: Final = "the coordinator does not answer"


class CoordinatorLine:
    """The connection of a mover to the coordinator: a few requests at a time, and a wait for their answers.

    A process's connection to another process of its node, over ipc.

    It connects with the first request.
    """

    def __init__(self, context: WorkerContext, *, patience_s: float = _PATIENCE_S) -> None:
        """``patience_s``: how long to wait for the answers to one call."""
        self._context = context
        self._patience_s = patience_s
        self._socket: zmq.Socket[bytes] | None = None
        self._number = 0
        self._silent_until = 0.0
        """A coordinator that did not answer is not waited for again before: other clients wait in the meantime."""

    def ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers, refusals among them. Raises ProtocolError SERVICE_NOT_AVAILABLE when one does not come in time."""
        if time.monotonic() < self._silent_until:
            raise ProtocolError("SERVICE_NOT_AVAILABLE", _AWAY, retry_after_ms=500)
        socket = self._connected()
        numbers: dict[int, int] = {}
        answers: list[dict[str, Any]] = [{}] * len(requests)
        deadline = time.monotonic() + self._patience_s
        try:
            for index, request in enumerate(requests):
                self._number += 1
                numbers[self._number] = index
                while not socket.poll(50, zmq.POLLOUT):
                    self._look(deadline)
                socket.send(wire.pack({**request, "id": self._number}), zmq.NOBLOCK)
            while numbers:
                if not socket.poll(50):
                    self._look(deadline)
                    continue
                answer = orjson.loads(socket.recv())
                index = numbers.pop(answer.get("id"), -1)
                if index >= 0:
                    answers[index] = answer
        except BaseException:
            self.close()
            raise
        return answers

    def one(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises ProtocolError for a refusal too."""
        (answer,) = self.ask([request])
        if not answer.get("ok"):
            raise wire.refusal(answer)
        return answer

    def _look(self, deadline: float) -> None:
        self._context.heartbeat()
        if time.monotonic() >= deadline:
            self._silent_until = time.monotonic() + _SILENT_S
            raise ProtocolError("SERVICE_NOT_AVAILABLE", _AWAY, retry_after_ms=500)

    def _connected(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            self._socket = connect(self._context, "coordinator")
        return self._socket

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None


_LOOK_MS: Final = 50
_WRITER_SLOT: Final = role_slot("writer")
_R = TypeVar("_R")


class WriterLost(Exception):
    """The writer died, or the node stops: whether the runs of the last call are stored is open."""


@dataclass(frozen=True, slots=True)
class MovedRun:
    """A run for one queue. ``born_v6``: the layout of its born hosts. ``places``: where in the log its messages come from;
    empty where nobody asks.
    """

    topic: str
    queue_id: int
    run: CheckedRun
    born_v6: bool
    places: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PutMessageResult:
    """The writer's answer to one run. ``code`` is empty for a stored one; ``retry`` says that waiting may help,
    ``is_open`` that nobody knows whether it is stored. ``queue_offset`` is that of the first record; ``parts`` are
    ``[count, physical offset of the first]``, one for each segment.
    """

    code: str = ""
    sentence: str = ""
    retry: bool = False
    is_open: bool = False
    queue_offset: int = -1
    parts: Sequence[Sequence[int]] = ()

    def places(self, run: CheckedRun) -> list[tuple[int, int]]:
        """``(queue offset, physical offset)`` of each record of ``run``, which is stored; empty when they are not known."""
        sizes = np.diff(run.ends, prepend=np.int64(0)).tolist()
        found: list[tuple[int, int]] = []
        for count, at in self.parts:
            for size in sizes[len(found) : len(found) + count]:
                found.append((self.queue_offset + len(found), at))
                at += size
        return found


class RunMover:
    """The connection to the writer."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._generation = -1
        self._next = 0

    @property
    def writer_lives(self) -> bool:
        """Whether the writer serves; its log then is recovered, and the word ``written`` is its end."""
        return self._context.control.worker(_WRITER_SLOT, WorkerWord.STATE) == WorkerState.READY

    def wait_for_writer(self) -> bool:
        """Wait until the writer serves. False when this process shall stop first."""
        while not self._context.stopping:
            if self.writer_lives:
                return True
            self._context.wait(_LOOK_MS)
        return False

    def wait_until_dispatched(self, end: int) -> None:
        """Wait until the ConsumeQueues have every record below ``end``, or this process shall stop. Raises WriterLost.

        After a start the queues may be behind the log. A mover that looks for what it moved before must see all of its source.
        """
        while self._context.control.dispatcher(0, DispatcherWord.DISPATCHED) < end and not self._context.stopping:
            if not self.writer_lives:
                raise WriterLost
            self._context.wait(_LOOK_MS)

    def put(
        self, runs: Sequence[MovedRun], ack: str = "flushed", meanwhile: Callable[[], None] | None = None
    ) -> list[PutMessageResult]:
        """Append ``runs``, and wait for the ack of each, as a producer's sends have it. Raises WriterLost.
        ``meanwhile`` is called once the writer has them.
        """
        socket = self._connected()
        asked: dict[int, int] = {}
        puts = [PutMessageResult()] * len(runs)
        most = self._context.config.network.max_frame_bytes
        for index, one in enumerate(runs):
            if len(one.run.data) > most:  # the writer's socket would end the connection, and nothing be answered
                sentence = f"the run has {len(one.run.data)} bytes, network.max_frame_bytes allows {most}"
                puts[index] = PutMessageResult("FRAME_TOO_LARGE", sentence)
                continue
            self._next += 1
            asked[self._next] = index
            header = {
                "op": "append",
                "id": self._next,
                "topic": one.topic,
                "queue": one.queue_id,
                "count": one.run.count,
                "ack": ack,
                "moved": 6 if one.born_v6 else 4,
            }
            self._patiently(partial(socket.send_multipart, [wire.pack(header), one.run.data.tobytes()]))
        if meanwhile is not None:
            meanwhile()
        is_open = False
        while asked:
            answer = orjson.loads(self._patiently(socket.recv))
            identity = answer.get("id")
            if identity in asked:
                index = asked.pop(identity)
                puts[index] = _judged(answer)
                is_open |= puts[index].is_open
        if is_open:
            raise WriterLost
        return puts

    def _patiently(self, work: Callable[[], _R]) -> _R:
        """``work`` of the socket, which gives up after _LOOK_MS each, until it is done. Raises WriterLost."""
        while True:
            try:
                return work()
            except zmq.Again:
                self._context.wait(0)
                self._check_writer()

    def _connected(self) -> zmq.Socket[bytes]:
        generation = self._context.control.get(Word.WRITER_GENERATION)
        if self._socket is None or generation != self._generation:
            self.close()
            self._generation = generation
            self._socket = connect(self._context, "writer")
            self._socket.setsockopt(zmq.SNDTIMEO, _LOOK_MS)
            self._socket.setsockopt(zmq.RCVTIMEO, _LOOK_MS)
        return self._socket

    def _check_writer(self) -> None:
        """Raise WriterLost unless the writer that was asked still serves."""
        if self._context.control.get(Word.WRITER_GENERATION) != self._generation or not self.writer_lives:
            self.close()
            raise WriterLost

    def close(self) -> None:
        """Drop the connection, and what was not sent yet."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None


def _judged(answer: dict[str, Any]) -> PutMessageResult:
    stored = PutMessageResult(queue_offset=answer.get("queue_offset", -1), parts=answer.get("parts", ()))
    if answer.get("ok"):
        return stored
    code, outcome = str(answer.get("code")), answer.get("outcome")
    if outcome == "stored" or (outcome == "unknown" and code == "FLUSH_DISK_TIMEOUT"):
        return stored  # it is in the log; a position is written down only when it is durable
    may_help = "retry_after_ms" in answer or code in ("SYSTEM_BUSY", "SYSTEM_ERROR", "SERVICE_NOT_AVAILABLE")
    return PutMessageResult(code, str(answer.get("error")), may_help, outcome == "unknown")


OF_THE_PROCESS: Final = (
    OSError,
    MemoryError,
    StoreError,
    ProtocolError,
    WriterLost,
    SupervisorGone,
    RestartWanted,
    StoppedWithoutRoom,
)

_T = TypeVar("_T")


def is_of_message(error: Exception) -> bool:
    """Whether ``error``, raised while a record was made from a record, belongs to that message."""
    return isinstance(error, CorruptRecordError) or not isinstance(error, OF_THE_PROCESS)


def isolated(
    items: Sequence[_T], work: Callable[[Sequence[_T]], Iterable[_R]], set_aside: Callable[[_T, Exception], object]
) -> list[_R]:
    """What ``work`` makes of ``items``. An item on which it fails is passed to ``set_aside``; the order of the others
    stays.

    ``work`` may be called several times with the same item, so it changes nothing. Each bad item costs as many calls as
    the number of ``items`` can be halved, twice. Raises what belongs to the process.
    """
    if not items:
        return []
    try:
        return list(work(items))
    except Exception as error:
        if not is_of_message(error):
            raise
        if len(items) == 1:
            set_aside(items[0], error)
            return []
    middle = len(items) // 2
    return [
        *isolated(items[:middle], work, set_aside),
        *isolated(items[middle:], work, set_aside),
    ]


Key = tuple[bytes, bytes]
MakeKey = Callable[["bytes | memoryview"], Key]
Wanted = Callable[[DispatchBatch], "np.ndarray[Any, np.dtype[np.bool_]]"]
"""Which records of a batch may be this mover's."""


def key_of(record: bytes | memoryview) -> Key:
    data = bytes(record)
    born, store, _, _, properties, size = parts_of(data)
    tries = RECONSUME_TIMES_OFFSET + born + store
    pairs = data[properties : properties + size].split(b"\x02")
    # (RocketMQ's decoder drops empty values, so a copy lacks them.)
    valued = [one for one in pairs if one[-1:] not in (b"", b"\x01")]
    text = b"\x02".join(sorted(one for one in valued if not one.startswith(CRC_PROPERTY_PREFIX)))
    kept = (
        data[BODY_CRC_OFFSET:QUEUE_ID_OFFSET]
        + data[FLAG_OFFSET:QUEUE_OFFSET_OFFSET]
        + data[BORN_TIMESTAMP_OFFSET:BORN_HOST_OFFSET]
        + data[tries : tries + 4]
    )
    return kept, text


def _made(make: MakeKey, record: bytes | memoryview) -> Key | None:
    """The key of a record; None for one that can have none, which was not moved then."""
    try:
        return make(record)
    except Exception as error:
        if not is_of_message(error):
            raise
        return None


class MovedBefore:
    """What a mover has appended already, found in the log itself: so a message is moved once, whatever died in between.

    A mover writes down from time to time how far it is: a position in its source queue, and a position in the log
    before which everything that it appended belongs to messages before the first one. After a death it reads the log
    from there on and keeps a key of each message that came from it. A message of the source whose key is there is
    skipped, once for each time.

    A key is what a move leaves as it is: body CRC, flag, born time, number of tries, and all properties but
    ``__CRC32#``. RocketMQ writes the properties of a copy in another order than ours, so the order does not count.

    The keys of what lies in a part of the log, each with how often it is there.

    ``copy_key`` is the key of a moved copy, as ``source_key`` is of its source: a mover whose copies have more
    properties than their sources gives its own.
    """

    def __init__(self, copy_key: MakeKey = key_of, source_key: MakeKey = key_of) -> None:
        self._copy_key, self._source_key = copy_key, source_key
        self._keys: Counter[Key] = Counter()

    def __len__(self) -> int:
        return self._keys.total()

    def scan(self, log: CommitLog, start: int, end: int, wanted: Wanted, beat: Callable[[], None]) -> None:
        """Read the log from ``start``, or from the beginning of the segment if no record begins there, to its ``end``.
        ``beat`` is called now and then. Raises CorruptRecordError.
        """
        self._keys.clear()
        walker = LogWalker(log, max_rows=65_536, max_bytes=16 << 20)
        at = boundary_before(log, start, end)
        while at < end:
            batch = walker.walk(at, end)
            for row in np.flatnonzero(wanted(batch)).tolist():
                if (key := _made(self._copy_key, batch.record(row))) is not None:
                    self._keys[key] += 1
            at = batch.end
            beat()
        walker.release()

    def pass_over(self, record: bytes | memoryview) -> bool:
        """Whether the message of ``record`` was moved already. A second call tells of a second copy."""
        key = _made(self._source_key, record)
        if key is None or not self._keys.get(key):
            return False
        self._keys[key] -= 1
        return True

    def forget(self) -> None:
        """The source is behind everything that was moved before."""
        self._keys.clear()
