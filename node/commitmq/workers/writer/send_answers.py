"""The answers to sends: to a message that was just stored, and to one of an idempotent producer that was stored before.

An answer that promises a flush is a :class:`PendingAck`; the writer's loop sends it when the flush is done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commitmq.control import Word
from commitmq.format.message_id import offset_message_id
from commitmq.protocol import wire
from commitmq.store.log.append import Appended, CommitLogAppender
from commitmq.store.producers import StoredRecord
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.writer.local_sockets import Peer
from commitmq.workers.writer.producers import ProducerStateManager, SequenceFields

_FLUSHED = int(Word.FLUSHED)  # a plain int for speed, see workers.writer.process
_COMMIT_PATIENCE_MS = 500


@dataclass(slots=True)
class PendingAck:
    """An answer that is sent once ``end`` is flushed. ``fields``: those that it has even without the flush."""

    identity: Peer
    end: int
    answer: bytes
    request_id: int
    deadline_ms: int
    fields: dict[str, Any]
    began_ns: int = 0
    """When the writer read the request; 0 where nothing is counted."""


class SendAnswers:
    """Makes the answers. ``producers``: the table of idempotent producers, where there is one."""

    def __init__(
        self, context: WorkerContext, appender: CommitLogAppender, producers: ProducerStateManager | None
    ) -> None:
        self._context = context
        self._control = context.control
        self._appender = appender
        self._producers = producers
        network = context.config.network
        self._message_id_prefix = offset_message_id(network.store_host, network.store_port, 0)[:-16]
        self._timeout_ms = context.config.commit_log.sync_flush_timeout_ms

    def acknowledged(
        self,
        identity: Peer,
        header: dict[str, Any],
        topic: str,
        queue_id: int,
        queue_offset: int,
        count: int,
        done: Appended,
        ack: str,
        where: Mapping[str, Any] | None = None,
    ) -> bytes | PendingAck:
        """The answer to a send that was just stored at ``done``. ``where``: more fields, of a message that waits."""
        physical = done.parts[0].physical_offset
        fields: dict[str, Any] = {
            "queue": queue_id,
            "queue_offset": queue_offset,
            "physical_offset": physical,
            "msg_id": f"{self._message_id_prefix}{physical:016X}",
            "store_timestamp": done.store_timestamp,
        }
        if header["op"] == "batch":
            fields["count"] = count
        elif header["op"] == "append":
            fields["count"] = count
            fields["end_offset"] = done.end
            fields["parts"] = [[part.count, part.physical_offset] for part in done.parts]
        if where:
            fields.update(where)
        answer = wire.ok(header["id"], status="PUT_OK", ack=ack, **fields)
        if ack == "memory":
            return answer
        return PendingAck(identity, done.end, answer, header["id"], monotonic_ms() + self._timeout_ms, fields)

    def repeated(
        self,
        identity: Peer,
        header: dict[str, Any],
        topic: str,
        queue_id: int,
        sender: SequenceFields,
        count: int,
        before: int,
        rest: tuple[int, Appended] | None,
        ack: str,
    ) -> bytes | PendingAck:
        """The answer to a send with ``before`` messages that were stored earlier. ``rest`` is the part stored now."""
        assert self._producers is not None
        self._wait_until_readable(self._producers.table.end(sender.producer_id, topic, queue_id))
        stored, end = self._producers.find(sender, topic, queue_id, before)
        first = stored[0]
        fields: dict[str, Any] = {
            "queue": queue_id,
            "queue_offset": first[0],
            "physical_offset": first[1],
            "msg_id": self._message_id(first),
            "store_timestamp": first[2],
            "duplicate": rest is None,
            "stored_before": stored,
        }
        if header["op"] == "append":
            fields["count"] = count
            fields["end_offset"] = end
            fields["parts"] = []
            if rest is not None:
                number, done = rest
                fields["parts"] = [[part.count, part.physical_offset] for part in done.parts]
                msg_id = f"{self._message_id_prefix}{done.physical_offset:016X}"
                fields["rest"] = {"queue_offset": number, "msg_id": msg_id, "store_timestamp": done.store_timestamp}
        answer = wire.ok(header["id"], status="PUT_OK", ack=ack, **fields)
        if ack == "memory" or (rest is None and self._control.get(_FLUSHED) >= end):
            return answer
        # Answers wait in log order. This answer's place is behind everything stored so far.
        position = self._appender.position
        return PendingAck(identity, position, answer, header["id"], monotonic_ms() + self._timeout_ms, fields)

    def _wait_until_readable(self, end: int) -> None:
        """Wait until the log can be read up to ``end``. A recent message may be only in the transient store pool, where
        it cannot be looked up. Repetitions are rare, so have flush commit it and wait for that, but not for long: the
        message is known to be stored in any case.
        """
        control = self._control
        if control.committed() >= end:
            return
        control.put(Word.FLUSH_WANTED, max(end, control.get(Word.FLUSH_WANTED)))
        deadline = monotonic_ms() + _COMMIT_PATIENCE_MS
        while control.committed() < end and monotonic_ms() < deadline:
            self._context.heartbeat()
            time.sleep(0.001)

    def _message_id(self, stored: StoredRecord) -> str:
        return f"{self._message_id_prefix}{stored[1]:016X}" if stored[1] >= 0 else ""
