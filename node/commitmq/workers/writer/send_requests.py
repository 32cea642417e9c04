"""Handles one ``send``, ``append`` or ``batch`` in the writer: has it checked, appends, has the answer made.

Uses no socket, only the frames' metadata; workers.writer.process has the loop around it. The checks of topic and fields
are in :mod:`commitmq.workers.writer.send_checks`, those of the payload here. All of them come before the first byte is
stored, so a refused request has ``outcome`` not_stored. :mod:`commitmq.workers.writer.send_answers` makes the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from commitmq import failpoints
from commitmq.control import Word
from commitmq.format.constants import Property
from commitmq.format.producer_mark import mark_of
from commitmq.network.guard import Guard
from commitmq.network.router import Router
from commitmq.protocol import wire
from commitmq.semantics.retry import dead_letter_topic
from commitmq.store.log.append import Appended, CommitLogAppender
from commitmq.store.log.inner_batch import count_messages
from commitmq.store.log.run_check import SPECIAL_PROPERTIES, CheckedRun, MessageIllegalError
from commitmq.store.producers.producer_table import SequenceRefusedError
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.flow import Flow, FlowRefusedError
from commitmq.workers.runtime.set_aside import SetAside
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.writer.born_hosts import BornHosts, client_of, keeps_hosts, peer_address, user_of
from commitmq.workers.writer.busy_sends import BusySends
from commitmq.workers.writer.local_sockets import Frames, Payload, Peer
from commitmq.workers.writer.patient_append import PatientAppend
from commitmq.workers.writer.producers import Numbered, Producers, ProducersUnusableError, numbered
from commitmq.workers.writer.put_rules import PutRules
from commitmq.workers.writer.recalls import LATE_RECALL, Recalls
from commitmq.workers.writer.send_answers import PendingAck, SendAnswers
from commitmq.workers.writer.send_backs import NoCopyError, SendBacks
from commitmq.workers.writer.send_checks import FORBIDDEN, Refusal, SendChecks, integer, unnumbered
from commitmq.workers.writer.send_counts import Send, SendCounts
from commitmq.workers.writer.special_sends import FurtherQueues, SpecialSendError, batch_properties

_PERSISTED_RETRY_MS = 200
# Properties that the writer sets itself, after it has refused a client's.
_INNER = FORBIDDEN - {Property.INNER_NUM, Property.INNER_BASE}
_FURTHER = FORBIDDEN - {Property.INNER_MULTI_DISPATCH, Property.INNER_MULTI_QUEUE_OFFSET}
_SPECIAL = frozenset(SPECIAL_PROPERTIES)
_PLAIN = FORBIDDEN - _SPECIAL
_MAX_TIME_MS = 1 << 62


class SendRequests:
    """Queue offsets, peers, and the handlers of ``send``, ``append`` and ``batch``."""

    def __init__(
        self,
        context: WorkerContext,
        appender: CommitLogAppender,
        offsets: dict[tuple[str, int], int],
        checks: SendChecks,
        publish: Callable[[], None],
        producers: Producers | None = None,
        *,
        topics: TopicViews | None = None,
        local_socket: Path | None = None,
        port: Router | None = None,
    ) -> None:
        """``producers``: the table of idempotent producers; None where idempotent sends are refused. ``topics``: the topic
        table, where messages can be sent back. ``local_socket``: the path that ``hello`` tells. ``port``: where requests come.
        """
        self._answers = SendAnswers(context, appender, producers)
        self._local_socket = {} if local_socket is None else {"local_socket": str(local_socket)}
        self._checks, self._producers, self._control = checks, producers, context.control
        self._appender, self._offsets = appender, offsets
        patient = PatientAppend(context, publish)
        self.guard: Guard | None = None if port is None else port.guard
        self.busy = None if port is None else BusySends.of(context, port.gate)
        self._stored = patient.store if self.busy is None else self.busy.timed(patient.store)
        self.counts = SendCounts.of(context)
        self._context, self._config, self._vouching = context, context.config, context.vouching
        self._rules = PutRules(appender, context.config, context.layout)
        self._send_backs = None if topics is None else SendBacks(context, topics, self._rules)
        self._recalls = None if topics is None else Recalls(context, self._rules, port)
        self._aside: SetAside | None = None
        self._flow: Flow | None = None
        self._set_rates()
        context.on_settings(lambda _config: self._set_rates())
        self._born_hosts, self._further = BornHosts(), FurtherQueues(context.config, offsets)
        self._max_run_bytes = context.config.commit_log.max_run_bytes
        self._max_message_bytes = context.config.commit_log.max_message_bytes

    def _set_rates(self) -> None:
        self._flow = Flow.of_sends(self._context, self._flow)
        take: Send = self._handled if self._flow is None and self.busy is None else self._within_limits
        self._take: Send = take if self.counts is None else self.counts.timed_send(take)

    def hello(self, header: dict[str, Any], frame: zmq.Frame | Payload) -> bytes:
        """The answer to ``hello``: the values that a client needs to lay out runs."""
        host = peer_address(frame)
        network = self._config.network
        return wire.ok(
            header["id"],
            epoch=self._control.get(Word.EPOCH),
            generation=self._control.get(Word.WRITER_GENERATION),
            born_host={"ip": host or "127.0.0.1", "v6": bool(host) and ":" in str(host)},
            store_host={"ip": network.store_host, "port": network.store_port, "v6": ":" in network.store_host},
            max_message_bytes=self._max_message_bytes,
            max_run_bytes=self._max_run_bytes,
            properties_crc=self._config.commit_log.append_properties_crc,
            **self._local_socket,
        )

    def forget_topic(self, topic: str) -> None:
        """Drop the queue offsets of a deleted topic: its queues begin at 0 when it is created again."""
        for key in [key for key in self._offsets if key[0] == topic]:
            del self._offsets[key]
        self._checks.forget_topic(topic)

    def send(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Handle one ``send``, ``append`` or ``batch``. Returns the answer, or a PendingAck that waits for the flush."""
        try:
            return self._take(identity, header, frames)
        except (SpecialSendError, SequenceRefusedError) as refusal:
            return wire.error(header["id"], refusal.code, refusal.sentence, outcome="not_stored")
        except Refusal as refusal:
            return wire.error(header["id"], refusal.code, refusal.sentence, outcome="not_stored", **refusal.fields)
        except MessageIllegalError as error:
            return wire.error(header["id"], error.code, str(error), outcome="not_stored")

    def _handled(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        if header["op"] == "send":
            return self._send(identity, header, frames)
        if header["op"] == "append":
            return self._append(identity, header, frames)
        if header["op"] == "send_back":
            return self._send_back(identity, header, frames)
        if header["op"] == "recall":
            return self._recall(identity, header, frames)
        return self._send_batch(identity, header, frames)

    def _within_limits(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Handle a request of a client, if ``[flow]`` lets it pass. Raises Refusal and others."""
        if header["op"] in ("send_back", "recall") or "moved" in header:
            return self._handled(identity, header, frames)
        topic, flow = header.get("topic"), self._flow
        try:
            if self.busy is not None:
                self.busy.admit(identity)
            if flow is None or type(topic) is not str:
                return self._handled(identity, header, frames)
            client = client_of(identity, header, frames[1])
            user = user_of(self.guard, self._vouching, header, frames) if flow.bounds_users else None
            flow.admit(client, topic, user)
        except FlowRefusedError as refusal:
            raise Refusal(refusal.code, refusal.sentence, refusal.retry_after_ms) from refusal
        answer = self._handled(identity, header, frames)
        # It did not raise. So the topic is there, which bounds the names, and the count was compared with the records.
        flow.take(1 if header["op"] == "send" else header["count"], len(frames[1]), client, topic, user)
        return answer

    # ------------------------------------------------------------ send, append, batch

    def _send(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        topic, queue_id, ack = self._checks.checked(header, frames)
        properties = header.get("properties")
        further: list[str] = []
        if type(properties) is dict and Property.INNER_MULTI_DISPATCH in properties:
            further, properties = self._further.assign(topic, properties)
            encoded = self._checks.encoded_properties(properties, _FURTHER)
        else:
            encoded = self._checks.encoded_properties(properties, _PLAIN)
        flag = integer(header, "flag", 0, -(1 << 31), (1 << 31) - 1) if "flag" in header else 0
        sys_flag = integer(header, "sys_flag", 0, 0, 0x7FFF) if "sys_flag" in header else 0
        born = integer(header, "born", -1, -1, _MAX_TIME_MS) if "born" in header else -1
        if born < 0:
            born = time.time_ns() // 1_000_000
        host = self._born_hosts.of(identity, frames[1])
        sender = self._numbered(header) if "producer_id" in header else None
        if sender is not None and further:
            raise Refusal("MESSAGE_ILLEGAL", "an idempotent send cannot go to further queues")
        record = self._appender.encode(
            topic.encode(),
            queue_id,
            frames[1].buffer,
            encoded,
            sys_flag=sys_flag,
            flag=flag,
            born_timestamp=born,
            born_host=host,
            checked=True,
            mark=b"" if sender is None else mark_of(sender.mark, sender.sequence),
        )
        if further and len(record) > self._appender.max_message_bytes:
            raise Refusal(
                "MESSAGE_ILLEGAL",
                f"the record has {len(record)} bytes, commit_log.max_message_bytes allows {self._appender.max_message_bytes}"
                " for all of a message that goes to further queues",
            )
        if sender is not None:
            if properties and not _SPECIAL.isdisjoint(properties):
                raise unnumbered()
            if self._stored_before(sender, topic, queue_id, 1):
                return self._answers.repeated(identity, header, topic, queue_id, sender, 1, 1, None, ack)
            number, done = self._store_record(topic, queue_id, record, len(host))
            self._note(sender, topic, queue_id, 0, number, done)
            return self._answers.acknowledged(identity, header, topic, queue_id, number, 1, done, ack)
        if properties and not _SPECIAL.isdisjoint(properties):
            run = self._appender.check_run(record, topic.encode(), queue_id, born_v6=len(host) == 20)
            return self._store_special(identity, header, topic, queue_id, run, host, ack)
        number, done = self._store_record(topic, queue_id, record, len(host))
        if further:
            self._further.count(further)
        return self._answers.acknowledged(identity, header, topic, queue_id, number, 1, done, ack)

    def _append(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        topic, queue_id, ack = self._checks.checked(header, frames)
        size = len(frames[1])
        count = integer(header, "count", -1, -1, 1 << 31)
        moved = "moved" in header and keeps_hosts(header, "moved", frames[1])
        # A message that the log has is moved, whatever the limit is now.
        if size > self._max_run_bytes and not (moved and count == 1):
            raise Refusal(
                "FRAME_TOO_LARGE",
                f"the run has {size} bytes, this node takes {self._max_run_bytes} (commit_log.max_run_bytes)",
            )
        host = self._born_hosts.of(identity, frames[1])
        forwarded = "forwarded" in header and keeps_hosts(header, "forwarded", frames[1])
        sender = self._numbered(header) if "producer_id" in header else None
        run = self._appender.check_run(
            frames[1].buffer,
            topic.encode(),
            queue_id,
            born_v6=6 in (header.get("moved"), header.get("forwarded")) if moved or forwarded else len(host) == 20,
            moved=moved,
            forwarded=forwarded,
            mark=b"" if sender is None else sender.mark,
            sequence=0 if sender is None else sender.sequence,
        )
        if count != run.count:
            raise Refusal("MESSAGE_ILLEGAL", f"the header says {count} records, the run holds {run.count}")
        if run.special:
            if sender is not None:
                raise unnumbered()
            return self._store_special(identity, header, topic, queue_id, run, host, ack)
        if sender is not None:
            return self._append_numbered(identity, header, topic, queue_id, sender, run, host, ack)
        number, done = self._store_run(topic, queue_id, run, host)
        return self._answers.acknowledged(identity, header, topic, queue_id, number, run.count, done, ack)

    def _store_special(
        self, identity: Peer, header: dict[str, Any], topic: str, queue_id: int, run: CheckedRun, host: bytes, ack: str
    ) -> bytes | PendingAck:
        """Store messages with special properties where they wait; the answer names that place too."""
        placed = self._rules.place(run, topic, queue_id)
        number, done = self._store_run(placed.topic, placed.queue_id, placed.run, host)
        where = placed.where(topic)
        return self._answers.acknowledged(identity, header, topic, queue_id, number, run.count, done, ack, where)

    def _append_numbered(
        self,
        identity: Peer,
        header: dict[str, Any],
        topic: str,
        queue_id: int,
        sender: Numbered,
        run: CheckedRun,
        host: bytes,
        ack: str,
    ) -> bytes | PendingAck:
        """Store a run of an idempotent producer: only messages that are not stored yet are appended; the answer covers
        all.
        """
        before = self._stored_before(sender, topic, queue_id, run.count)
        if before == run.count:
            return self._answers.repeated(identity, header, topic, queue_id, sender, run.count, before, None, ack)
        rest = run.without_first(before) if before else run
        number, done = self._store_run(topic, queue_id, rest, host)
        self._note(sender, topic, queue_id, before, number, done)
        if before:
            return self._answers.repeated(
                identity, header, topic, queue_id, sender, run.count, before, (number, done), ack
            )
        return self._answers.acknowledged(identity, header, topic, queue_id, number, run.count, done, ack)

    def _send_batch(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Several messages as the body of one record, for a topic whose queues count batches (spec 2.8)."""
        topic, queue_id, ack = self._checks.checked(header, frames)
        if "producer_id" in header:
            raise Refusal("MESSAGE_ILLEGAL", f"topic {topic!r} has queue.type=BatchCQ, which takes no idempotent sends")
        body = frames[1].buffer
        # Check this before the messages inside are read: the limit bounds that work.
        if len(body) > self._appender.max_message_bytes:
            raise Refusal(
                "MESSAGE_ILLEGAL",
                f"the batch has {len(body)} bytes, commit_log.max_message_bytes allows {self._appender.max_message_bytes}",
            )
        count = count_messages(body)
        stated = integer(header, "count", -1, -1, 1 << 31)
        if stated != count:
            raise Refusal("MESSAGE_ILLEGAL", f"the header says {stated} messages, the batch holds {count}")
        properties = header.get("properties") or {}
        if type(properties) is not dict:
            raise Refusal("INVALID_PARAMETER", "properties must be an object of strings")
        for name in (Property.INNER_NUM, Property.INNER_BASE):
            if name in properties:
                raise Refusal("MESSAGE_ILLEGAL", f"only the node may set the property {name!r}")
        born = integer(header, "born", -1, -1, _MAX_TIME_MS)
        number = self._offsets.get((topic, queue_id), 0)
        host = self._born_hosts.of(identity, frames[1])
        record = self._appender.encode(
            topic.encode(),
            queue_id,
            body,
            self._checks.encoded_properties(batch_properties(properties, count, number), _INNER),
            sys_flag=0,
            flag=integer(header, "flag", 0, -(1 << 31), (1 << 31) - 1),
            born_timestamp=born if born >= 0 else time.time_ns() // 1_000_000,
            born_host=host,
            checked=True,
            inner_batch=True,
        )
        done = self._stored(lambda: self._appender.append_record(record, number, len(host)))
        self._offsets[topic, queue_id] = number + count
        if self.counts is not None:
            self.counts.last = topic, count, len(record)
        return self._answers.acknowledged(identity, header, topic, queue_id, number, count, done, ack)

    def _send_back(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Store a copy of a message that failed, for another try of its group or as a dead letter (spec 12.4)."""
        if self._send_backs is None:
            raise Refusal("UNKNOWN_OP", "messages are sent back to the writer")
        ack = self._checks.checked_ack(header, frames)
        try:
            copy = self._send_backs.copy_of(header)
            placed = copy.placed
            try:
                number, done = self._store_run(placed.topic, placed.queue_id, placed.run, bytes(copy.born_host_bytes))
            except MessageIllegalError as error:
                raise NoCopyError(copy.source, copy.group, str(error)) from error
        except NoCopyError as error:
            return self._set_aside(header, error)
        if copy.dead and self.counts is not None:
            self.counts.dead_letter(header["topic"], header["group"])
        where = {"topic": copy.topic, "dead": copy.dead, **placed.where(copy.topic)}
        return self._answers.acknowledged(identity, header, copy.topic, copy.queue_id, number, 1, done, ack, where)

    def _set_aside(self, header: dict[str, Any], error: NoCopyError) -> bytes:
        """The group goes on behind the message, which stays where it is and is listed."""
        self._aside = self._aside or SetAside(self._context)
        self._aside.message(error.record, str(error), group=error.group)
        self._aside.write_down(at_once=True)
        return wire.ok(header["id"], topic=dead_letter_topic(error.group), dead=True, set_aside=True)

    def _recall(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Store the cancellation of a message that waits for its time (spec 12.2)."""
        if self._recalls is None:
            raise Refusal("UNKNOWN_OP", "messages are recalled at the writer")
        ack = self._checks.checked_ack(header, frames)
        host = self._born_hosts.of(identity, frames[1])
        recall = self._recalls.recall_of(identity, header, host)
        placed = recall.placed
        number, done = self._store_run(placed.topic, placed.queue_id, placed.run, host)
        if recall.is_late:
            return wire.error(header["id"], "ILLEGAL_OPERATION", LATE_RECALL, outcome="unknown")
        return self._answers.acknowledged(identity, header, recall.topic, 0, number, 1, done, ack)

    # ------------------------------------------------------------ where it is stored

    def _store_record(self, topic: str, queue_id: int, record: bytearray, born_host_bytes: int) -> tuple[int, Appended]:
        """Store a record. Returns its queue offset and its place."""
        number = self._offsets.get((topic, queue_id), 0)
        done = self._stored(lambda: self._appender.append_record(record, number, born_host_bytes))
        self._offsets[topic, queue_id] = number + 1
        if self.counts is not None:
            self.counts.last = topic, 1, len(record)
        return number, done

    def _store_run(self, topic: str, queue_id: int, run: CheckedRun, host: bytes) -> tuple[int, Appended]:
        """Store a run. Returns its first queue offset and its place."""
        number = self._offsets.get((topic, queue_id), 0)
        done = self._stored(lambda: self._appender.append_run(run, number, host))
        self._offsets[topic, queue_id] = number + run.count
        if self.counts is not None:
            self.counts.last = topic, run.count, len(run.data)
        return number, done

    # ------------------------------------------------------------ idempotent producers

    def _numbered(self, header: dict[str, Any]) -> Numbered:
        if self._producers is None:
            raise Refusal("MESSAGE_ILLEGAL", "memory topics take no idempotent sends")
        if header.get("queue", -1) == -1:
            raise Refusal(
                "INVALID_PARAMETER", "an idempotent send needs its queue: sequences count messages of one queue"
            )
        try:
            return numbered(header)
        except ValueError as error:
            raise Refusal("INVALID_PARAMETER", str(error)) from error

    def _stored_before(self, sender: Numbered, topic: str, queue_id: int, count: int) -> int:
        assert self._producers is not None
        try:
            return self._producers.judge(sender, topic, queue_id, count)
        except ProducersUnusableError as error:
            raise Refusal("SERVICE_NOT_AVAILABLE", str(error), _PERSISTED_RETRY_MS) from error

    def _note(
        self, sender: Numbered, topic: str, queue_id: int, before: int, queue_offset: int, done: Appended
    ) -> None:
        assert self._producers is not None
        self._producers.note(sender, topic, queue_id, before, queue_offset, done)
        if failpoints.ACTIVE:
            failpoints.hit("writer.before_answer")
