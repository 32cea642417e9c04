"""Handles one ``send``, ``append`` or ``batch`` in the writer: checks everything, appends, builds the answer.

Uses no socket, only the frames' metadata; workers.writer.process has the loop around it. All checks come before the
first byte is stored, so a refused request has ``outcome`` not_stored.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import zmq

from commitmq import failpoints
from commitmq.control import DiskFlag, DispatcherWord, Word
from commitmq.errors import InvalidMessageError, StoreError
from commitmq.format.constants import LMQ_PREFIX, Property
from commitmq.format.message_id import offset_message_id, pack_host
from commitmq.format.producer_mark import mark_of
from commitmq.format.record import Host
from commitmq.format.unique_ids import UniqueIds
from commitmq.kernels.raw import SECTOR_BYTES
from commitmq.protocol import wire
from commitmq.store.log.append import Appended, CommitLogAppender, PoolFullError, SegmentUnavailableError
from commitmq.store.log.inner_batch import count_messages
from commitmq.store.log.run_check import FORBIDDEN_PROPERTIES, CheckedRun, MessageIllegalError
from commitmq.store.metadata.topic_name import FORBIDDEN_TOPICS, validate_topic
from commitmq.store.producers.producer_replay import StoredRecord
from commitmq.store.producers.producer_table import SequenceRefusedError
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.topic_view import TopicView, TopicViews
from commitmq.workers.writer.local_sockets import Payload
from commitmq.workers.writer.producers import Numbered, Producers, ProducersUnusableError, numbered
from commitmq.workers.writer.special_sends import FurtherQueues, SpecialSendError, batch_properties

# Plain ints for speed, see workers.writer.process.
_DISK_FLAGS, _FLUSH_ERRNO, _FLUSHED = int(Word.DISK_FLAGS), int(Word.FLUSH_ERRNO), int(Word.FLUSHED)
_DISPATCHER_FLAGS = int(DispatcherWord.FLAGS)
_PERSISTED_RETRY_MS = 200
_SEGMENT_PATIENCE_MS = 1_000
_SEGMENT_LOOK_S = 0.0005
_POOL_PATIENCE_MS = 100
_COMMIT_PATIENCE_MS = 500
_FORBIDDEN = frozenset(FORBIDDEN_PROPERTIES)
# Properties that the writer sets itself, after it has refused a client's.
_INNER = _FORBIDDEN - {Property.INNER_NUM, Property.INNER_BASE}
_FURTHER = _FORBIDDEN - {Property.INNER_MULTI_DISPATCH, Property.INNER_MULTI_QUEUE_OFFSET}
_ZEROS = "\0" * SECTOR_BYTES
_MAX_KNOWN_PEERS = 65_536
_MAX_TIME_MS = 1 << 62
_ACKS = ("flushed", "memory")

Peer: TypeAlias = bytes | int  # a ZeroMQ identity, or the number of a local connection
Frames: TypeAlias = Sequence[zmq.Frame | Payload]
WRONG_ENDPOINT = "WRONG_ENDPOINT"  # another process stores the topic; ``endpoint`` in the answer names it


@dataclass(slots=True)
class Waiting:
    """An answer that is sent once ``end`` is flushed. ``fields``: what the answer says even when the flush was missed."""

    identity: Peer
    end: int
    answer: bytes
    request_id: int
    deadline_ms: int
    fields: dict[str, Any]


class Refusal(Exception):
    """This request is refused; nothing was stored."""

    def __init__(self, code: str, sentence: str, retry_after_ms: int | None = None, *, endpoint: str = "") -> None:
        """``endpoint``: the kind of process that takes this request, when it is another one."""
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.fields: dict[str, Any] = {}
        if retry_after_ms is not None:
            self.fields["retry_after_ms"] = retry_after_ms
        if endpoint:
            self.fields["endpoint"] = endpoint


class SendRequests:
    """Queue offsets, peers, and the handlers of ``send``, ``append`` and ``batch``."""

    def __init__(
        self,
        context: WorkerContext,
        appender: CommitLogAppender,
        offsets: dict[tuple[str, int], int],
        topics: TopicViews,
        publish: Callable[[], None],
        producers: Producers | None = None,
        *,
        local_socket: Path | None = None,
    ) -> None:
        """``producers``: the table of idempotent producers; None where idempotent sends are refused. ``local_socket``:
        the path in the answer to ``hello``.
        """
        self._local_socket = {} if local_socket is None else {"local_socket": str(local_socket)}
        self._producers = producers
        self._context = context
        self._control = context.control
        self._allocate = context.ringer("allocate")
        self._appender = appender
        self._offsets = offsets
        self._topics = topics
        self._publish = publish
        self._config = context.config
        self._unique_ids = UniqueIds()
        self._peers: dict[Peer, bytes] = {}
        self._next_queue: dict[str, int] = {}
        self._lmq_enabled = context.config.consume_queue.enable_lmq
        self._further = FurtherQueues(context.config, offsets)
        network = context.config.network
        self._local_host = pack_host(Host("127.0.0.1", 0))
        self._message_id_prefix = offset_message_id(network.store_host, network.store_port, 0)[:-16]
        self._timeout_ms = context.config.commit_log.sync_flush_timeout_ms
        self._max_run_bytes = context.config.commit_log.max_run_bytes
        self._max_message_bytes = context.config.commit_log.max_message_bytes

    def hello(self, header: dict[str, Any], frame: zmq.Frame | Payload) -> bytes:
        """The answer to ``hello``: what a client must know to lay out runs."""
        host = _peer_address(frame)
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
        self._next_queue.pop(topic, None)

    def is_lmq(self, name: str) -> bool:
        """True when ``name`` is a light message queue (LMQ) on this node, and so no topic."""
        return self._lmq_enabled and name.startswith(LMQ_PREFIX)

    def send(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | Waiting:
        """Handle one ``send``, ``append`` or ``batch``. Returns the answer, or a Waiting that waits for the flush."""
        try:
            if header["op"] == "send":
                return self._send(identity, header, frames)
            if header["op"] == "append":
                return self._append(identity, header, frames)
            return self._send_batch(identity, header, frames)
        except SpecialSendError as refusal:
            return wire.error(header["id"], refusal.code, refusal.sentence, outcome="not_stored")
        except SequenceRefusedError as refusal:
            return wire.error(header["id"], refusal.code, refusal.sentence, outcome="not_stored")
        except Refusal as refusal:
            return wire.error(header["id"], refusal.code, refusal.sentence, outcome="not_stored", **refusal.fields)
        except MessageIllegalError as error:
            return wire.error(header["id"], error.code, str(error), outcome="not_stored")

    # ------------------------------------------------------------ send, append, batch

    def _send(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | Waiting:
        topic, queue_id, ack = self._checked(header, frames)
        properties = header.get("properties")
        further: list[str] = []
        if type(properties) is dict and Property.INNER_MULTI_DISPATCH in properties:
            further, properties = self._further.assign(topic, properties)
            encoded = self._encoded_properties(properties, _FURTHER)
        else:
            encoded = self._encoded_properties(properties)
        flag = _integer(header, "flag", 0, -(1 << 31), (1 << 31) - 1) if "flag" in header else 0
        sys_flag = _integer(header, "sys_flag", 0, 0, 0x7FFF) if "sys_flag" in header else 0
        born = _integer(header, "born", -1, -1, _MAX_TIME_MS) if "born" in header else -1
        if born < 0:
            born = time.time_ns() // 1_000_000
        host = self._born_host(identity, frames[1])
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
            if self._stored_before(sender, topic, queue_id, 1):
                return self._repeated(identity, header, topic, queue_id, sender, 1, 1, None, ack)
            number, done = self._store_record(topic, queue_id, record, len(host))
            self._note(sender, topic, queue_id, 0, number, done)
            return self._acknowledged(identity, header, topic, queue_id, number, 1, done, ack)
        number, done = self._store_record(topic, queue_id, record, len(host))
        if further:
            self._further.count(further)
        return self._acknowledged(identity, header, topic, queue_id, number, 1, done, ack)

    def _append(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | Waiting:
        topic, queue_id, ack = self._checked(header, frames)
        size = len(frames[1])
        if size > self._max_run_bytes:
            raise Refusal(
                "FRAME_TOO_LARGE",
                f"the run has {size} bytes, this node takes {self._max_run_bytes} (commit_log.max_run_bytes)",
            )
        count = _integer(header, "count", -1, -1, 1 << 31)
        host = self._born_host(identity, frames[1])
        sender = self._numbered(header) if "producer_id" in header else None
        run = self._appender.check_run(
            frames[1].buffer,
            topic.encode(),
            queue_id,
            born_v6=len(host) == 20,
            mark=b"" if sender is None else sender.mark,
            sequence=0 if sender is None else sender.sequence,
        )
        if count != run.count:
            raise Refusal("MESSAGE_ILLEGAL", f"the header says {count} records, the run holds {run.count}")
        if sender is not None:
            return self._append_numbered(identity, header, topic, queue_id, sender, run, host, ack)
        number, done = self._store_run(topic, queue_id, run, host)
        return self._acknowledged(identity, header, topic, queue_id, number, run.count, done, ack)

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
    ) -> bytes | Waiting:
        """Store a run of an idempotent producer: only messages that are not stored yet are appended; the answer covers
        all.
        """
        before = self._stored_before(sender, topic, queue_id, run.count)
        if before == run.count:
            return self._repeated(identity, header, topic, queue_id, sender, run.count, before, None, ack)
        rest = run.without_first(before) if before else run
        number, done = self._store_run(topic, queue_id, rest, host)
        self._note(sender, topic, queue_id, before, number, done)
        if before:
            return self._repeated(identity, header, topic, queue_id, sender, run.count, before, (number, done), ack)
        return self._acknowledged(identity, header, topic, queue_id, number, run.count, done, ack)

    def _send_batch(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | Waiting:
        """Several messages as the body of one record, for a topic whose queues count batches (spec 2.8)."""
        topic, queue_id, ack = self._checked(header, frames)
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
        stated = _integer(header, "count", -1, -1, 1 << 31)
        if stated != count:
            raise Refusal("MESSAGE_ILLEGAL", f"the header says {stated} messages, the batch holds {count}")
        properties = header.get("properties") or {}
        if type(properties) is not dict:
            raise Refusal("INVALID_PARAMETER", "properties must be an object of strings")
        for name in (Property.INNER_NUM, Property.INNER_BASE):
            if name in properties:
                raise Refusal("MESSAGE_ILLEGAL", f"property {name!r} is one that only the node may set")
        born = _integer(header, "born", -1, -1, _MAX_TIME_MS)
        number = self._offsets.get((topic, queue_id), 0)
        host = self._born_host(identity, frames[1])
        record = self._appender.encode(
            topic.encode(),
            queue_id,
            body,
            self._encoded_properties(batch_properties(properties, count, number), _INNER),
            sys_flag=0,
            flag=_integer(header, "flag", 0, -(1 << 31), (1 << 31) - 1),
            born_timestamp=born if born >= 0 else time.time_ns() // 1_000_000,
            born_host=host,
            checked=True,
            inner_batch=True,
        )
        done = self._stored(lambda: self._appender.append_record(record, number, len(host)))
        self._offsets[topic, queue_id] = number + count
        return self._acknowledged(identity, header, topic, queue_id, number, count, done, ack)

    # ------------------------------------------------------------ where it is stored

    def _check_place(self, name: str, topic: TopicView) -> None:
        """Refuse a topic that another process stores."""
        if topic.is_memory:
            raise Refusal(
                WRONG_ENDPOINT, f"topic {name!r} is kept in memory: send to the memory endpoint", endpoint="memory"
            )

    def _store_record(self, topic: str, queue_id: int, record: bytearray, born_host_bytes: int) -> tuple[int, Appended]:
        """Store a record. Returns its queue offset and its place."""
        number = self._offsets.get((topic, queue_id), 0)
        done = self._stored(lambda: self._appender.append_record(record, number, born_host_bytes))
        self._offsets[topic, queue_id] = number + 1
        return number, done

    def _store_run(self, topic: str, queue_id: int, run: CheckedRun, host: bytes) -> tuple[int, Appended]:
        """Store a run. Returns its first queue offset and its place."""
        number = self._offsets.get((topic, queue_id), 0)
        done = self._stored(lambda: self._appender.append_run(run, number, host))
        self._offsets[topic, queue_id] = number + run.count
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

    def _repeated(
        self,
        identity: Peer,
        header: dict[str, Any],
        topic: str,
        queue_id: int,
        sender: Numbered,
        count: int,
        before: int,
        rest: tuple[int, Appended] | None,
        ack: str,
    ) -> bytes | Waiting:
        """The answer to a send of which ``before`` messages were stored earlier. ``rest`` is the part stored now."""
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
        return Waiting(identity, position, answer, header["id"], monotonic_ms() + self._timeout_ms, fields)

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

    # ------------------------------------------------------------ steps

    def _checked(self, header: dict[str, Any], frames: Frames) -> tuple[str, int, str]:
        if len(frames) != 2:
            raise Refusal(
                "BAD_HEADER", f"{header['op']} takes the header and one payload frame, not {len(frames)} frames"
            )
        ack = header.get("ack", "flushed")
        if ack not in _ACKS:
            raise Refusal("INVALID_PARAMETER", f"ack must be one of {', '.join(_ACKS)}, not {ack!r}")
        name = header.get("topic")
        if type(name) is not str:
            raise Refusal("INVALID_PARAMETER", "topic must be a string")
        topic = self._topics.get(name)
        if self.is_lmq(name):
            raise Refusal(
                "NO_PERMISSION", f"{name!r} is an LMQ: messages of other topics name it, nothing is sent to it"
            )
        if topic is None:
            try:
                validate_topic(name)
            except InvalidMessageError as error:
                raise Refusal("INVALID_PARAMETER", str(error)) from error
            raise Refusal("TOPIC_NOT_EXIST", f"there is no topic {name!r}")
        if name in FORBIDDEN_TOPICS:
            raise Refusal("NO_PERMISSION", f"{name!r} is a system topic that takes no sends")
        if not topic.is_writable:
            raise Refusal("NO_PERMISSION", f"topic {name!r} is not writable")
        self._check_place(name, topic)
        if topic.is_batch != (header["op"] == "batch"):
            # RocketMQ 5.4.0 takes such a message for a batch of one. Other versions give it no ConsumeQueue unit, so it
            # could never be consumed.
            raise Refusal(
                "MESSAGE_ILLEGAL",
                f"topic {name!r} has queue.type=BatchCQ: its messages come in batches (op batch; send_batch in the client)"
                if topic.is_batch
                else f"topic {name!r} has plain queues; a batch that stays one record needs queue.type=BatchCQ",
            )
        self._refuse_when_unwritable()
        return name, self._queue_of(header, name, topic), ack

    def _queue_of(self, header: dict[str, Any], name: str, topic: TopicView) -> int:
        queue_id = _integer(header, "queue", -1, -1, 1 << 20)
        if queue_id >= max(topic.write_queues, topic.read_queues):
            raise Refusal(
                "INVALID_PARAMETER", f"queue {queue_id} of {name!r} does not exist, it has {topic.write_queues}"
            )
        if queue_id < 0:
            if header["op"] == "append":
                raise Refusal("INVALID_PARAMETER", "append needs the queue that its records name")
            number = self._next_queue.get(name, 0)
            self._next_queue[name] = number + 1
            queue_id = number % max(1, topic.write_queues)
        return queue_id

    def _refuse_when_unwritable(self) -> None:
        control = self._control
        flags = control.get(_DISK_FLAGS)
        if not (flags or control.dispatcher(0, _DISPATCHER_FLAGS) or control.get(_FLUSH_ERRNO)):
            return
        retry = self._config.disk.check_interval_ms
        if flags & DiskFlag.DISK_FULL:
            raise Refusal(
                "SERVICE_NOT_AVAILABLE", "the disk is fuller than disk.warning_ratio allows; reads go on", retry
            )
        if control.dispatcher(0, DispatcherWord.FLAGS):
            raise Refusal(
                "SERVICE_NOT_AVAILABLE", "ConsumeQueues cannot be written (disk full or failing); reads go on", retry
            )
        if control.get(Word.FLUSH_ERRNO):
            raise Refusal(
                "SERVICE_NOT_AVAILABLE", "a flush failed; the store is read-only until the node is started again"
            )

    def _stored(self, append: Callable[[], Appended]) -> Appended:
        """Append and publish. When a segment is missing, wait for it a moment, unless the disk is known to be full."""
        deadline = 0
        while True:
            try:
                if failpoints.ACTIVE:
                    failpoints.hit("writer.before_append")
                done = append()
                break
            except PoolFullError:
                deadline = deadline or monotonic_ms() + _POOL_PATIENCE_MS
                if monotonic_ms() >= deadline:
                    raise Refusal(
                        "SYSTEM_BUSY",
                        "the transient store pool is full: the disk takes less than what is sent",
                        _PERSISTED_RETRY_MS,
                    ) from None
                self._context.heartbeat()
                time.sleep(0.002)
            except SegmentUnavailableError as error:
                if self._control.get(Word.DISK_FLAGS) & DiskFlag.NO_SEGMENT:
                    raise Refusal(
                        "CREATE_MAPPED_FILE_FAILED",
                        "no space for the next segment of the log; reads go on",
                        self._config.disk.check_interval_ms,
                    ) from None
                # A run may need more segments than allocate keeps ready; with preallocate_segments = 0 it keeps none.
                self._control.put(Word.SEGMENT_WANTED, error.base)
                self._allocate.ring()
                deadline = deadline or monotonic_ms() + _SEGMENT_PATIENCE_MS
                if monotonic_ms() >= deadline:
                    raise Refusal(
                        "CREATE_MAPPED_FILE_FAILED", "the next segment is not ready yet", _PERSISTED_RETRY_MS
                    ) from None
                self._context.heartbeat()
                time.sleep(_SEGMENT_LOOK_S)
            except StoreError as error:
                raise Refusal("SYSTEM_ERROR", str(error)) from error
        if failpoints.ACTIVE:
            failpoints.hit("writer.after_append")
        self._publish()
        return done

    def _acknowledged(
        self,
        identity: Peer,
        header: dict[str, Any],
        topic: str,
        queue_id: int,
        queue_offset: int,
        count: int,
        done: Appended,
        ack: str,
    ) -> bytes | Waiting:
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
        answer = wire.ok(header["id"], status="PUT_OK", ack=ack, **fields)
        if ack == "memory":
            return answer
        return Waiting(identity, done.end, answer, header["id"], monotonic_ms() + self._timeout_ms, fields)

    def _encoded_properties(self, properties: Any, forbidden: frozenset[str] = _FORBIDDEN) -> bytes:
        if properties is None:
            properties = {}
        if type(properties) is not dict:
            raise Refusal("INVALID_PARAMETER", "properties must be an object of strings")
        pieces = []
        for name, value in properties.items():
            if type(value) is not str:
                raise Refusal("INVALID_PARAMETER", f"property {name!r} must be a string")
            if name in forbidden:
                raise Refusal("MESSAGE_ILLEGAL", f"property {name!r} is one that only the node may set")
            if not name:
                raise Refusal("MESSAGE_ILLEGAL", "a property needs a name")
            if value:  # RocketMQ's decoders drop empty values; storing one would only waste space
                pieces.append(f"{name}\x01{value}\x02")
        if "UNIQ_KEY" not in properties:
            pieces.append(f"UNIQ_KEY\x01{self._unique_ids.next()}\x02")
        text = "".join(pieces)
        if text.count("\x01") != len(pieces) or text.count("\x02") != len(pieces):
            raise Refusal(
                "MESSAGE_ILLEGAL", "names and values of properties must not hold the separators 0x01 and 0x02"
            )
        if _ZEROS in text:
            raise Refusal(
                "MESSAGE_ILLEGAL",
                f"a property's value holds {len(_ZEROS)} zero bytes in a row, as a sector does that never reached the disk",
            )
        return text.encode()

    def _born_host(self, identity: Peer, frame: zmq.Frame | Payload) -> bytes:
        host = self._peers.get(identity)
        if host is None:
            if len(self._peers) >= _MAX_KNOWN_PEERS:
                self._peers.clear()
            address = _peer_address(frame)
            try:
                host = pack_host(Host(address, 0)) if address else self._local_host
            except ValueError:
                host = self._local_host
            self._peers[identity] = host
        return host


def _peer_address(frame: zmq.Frame | Payload) -> str | None:
    """The peer's IP address from ZeroMQ; None over ipc. An IPv4 address mapped into IPv6 counts as IPv4."""
    try:
        text = str(frame.get("Peer-Address"))
        address = ipaddress.ip_address(text.partition("%")[0])
    except (zmq.ZMQError, ValueError, KeyError):
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _integer(header: dict[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = header.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise Refusal("INVALID_PARAMETER", f"{key} must be an integer from {low} to {high}")
    return value
