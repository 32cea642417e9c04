"""Appends runs of messages for a mover: a process that takes messages from one queue of the log to another.

A mover appends through the writer, as a client does, over ipc. Its runs keep what only the node may set: born hosts,
transaction bits, numbers of tries. A writer that dies leaves the fate of a run open. Then :class:`WriterLost` is raised, and
the mover looks into the log for what it has appended (:mod:`commitmq.workers.runtime.moved_before`). A writer that lives
is waited for without a limit: its supervisor ends it when it hangs, and an appended run must never be sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import orjson
import zmq

from commitmq.control import DispatcherWord, Word, WorkerState, WorkerWord
from commitmq.protocol import wire
from commitmq.store.log.run_check import CheckedRun
from commitmq.workers.runtime import coordinator_line
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.slots import role_slot

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
class Put:
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
    ) -> list[Put]:
        """Append ``runs``, and wait for the ack of each, as a producer's sends have it. Raises WriterLost.

        ``meanwhile`` is called once the writer has them.
        """
        socket = self._connected()
        asked: dict[int, int] = {}
        puts = [Put()] * len(runs)
        most = self._context.config.network.max_frame_bytes
        for index, one in enumerate(runs):
            if len(one.run.data) > most:  # the writer's socket would end the connection, and nothing be answered
                sentence = f"the run has {len(one.run.data)} bytes, network.max_frame_bytes allows {most}"
                puts[index] = Put("FRAME_TOO_LARGE", sentence)
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
            self._socket = coordinator_line.connect(self._context, "writer")
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


def _judged(answer: dict[str, Any]) -> Put:
    stored = Put(queue_offset=answer.get("queue_offset", -1), parts=answer.get("parts", ()))
    if answer.get("ok"):
        return stored
    code, outcome = str(answer.get("code")), answer.get("outcome")
    if outcome == "stored" or (outcome == "unknown" and code == "FLUSH_DISK_TIMEOUT"):
        return stored  # it is in the log; a position is written down only when it is durable
    may_help = "retry_after_ms" in answer or code in ("SYSTEM_BUSY", "SYSTEM_ERROR", "SERVICE_NOT_AVAILABLE")
    return Put(code, str(answer.get("error")), may_help, outcome == "unknown")
