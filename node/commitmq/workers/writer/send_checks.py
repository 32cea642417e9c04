"""The checks of a send before anything is encoded: its topic and queue, its fields, and whether the node takes messages now.

All of them come before the first byte is stored, so a refused request has ``outcome`` not_stored.
"""

from __future__ import annotations

from typing import Any

from commitmq.control import DiskFlag, DispatcherWord, Word
from commitmq.errors import InvalidMessageError
from commitmq.format.constants import LMQ_PREFIX
from commitmq.format.unique_ids import UniqueIds
from commitmq.kernels.codes import SECTOR_BYTES
from commitmq.store.log.run_check import FORBIDDEN_PROPERTIES
from commitmq.store.metadata.topic_config import is_nodes_own, is_send_forbidden, validate_topic
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.topic_view import TopicView, TopicViews
from commitmq.workers.writer.local_sockets import Frames

# Plain ints for speed, see workers.writer.process.
_DISK_FLAGS, _FLUSH_ERRNO = int(Word.DISK_FLAGS), int(Word.FLUSH_ERRNO)
_DISPATCHER_FLAGS = int(DispatcherWord.FLAGS)
FORBIDDEN = frozenset(FORBIDDEN_PROPERTIES)
_ZEROS = "\0" * SECTOR_BYTES
_ACKS = ("flushed", "memory")
_MOST_PLAIN = 10_000

WRONG_ENDPOINT = "WRONG_ENDPOINT"  # another process stores the topic; ``endpoint`` in the answer names it


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


class SendChecks:
    """The checks against the topic table and the state of the node. A request without a queue gets one here."""

    def __init__(self, context: WorkerContext, topics: TopicViews) -> None:
        self._control = context.control
        self._config = context.config
        self._lmq_enabled = context.config.consume_queue.enable_lmq
        self._topics = topics
        self._unique_ids = UniqueIds()
        self._next_queue: dict[str, int] = {}
        self._plain: dict[str, TopicView] = {}
        """By name, views that were found to take every plain send; a topic that changes gets another view."""

    def checked(self, header: dict[str, Any], frames: Frames) -> tuple[str, int, str]:
        """Topic, queue and ack of a request. Raises Refusal."""
        ack = self._ack(header, frames)
        name = header.get("topic")
        if type(name) is not str:
            raise Refusal("INVALID_PARAMETER", "topic must be a string")
        topic = self._topics.get(name)
        if topic is None or self._plain.get(name) is not topic or header["op"] == "batch":
            self._check_topic(header, name, topic)
        self._refuse_when_unwritable()
        if topic is None:  # one of the node's own
            return name, integer(header, "queue", -1, 0, 1 << 20), ack
        return name, self._queue_of(header, name, topic), ack

    def _check_topic(self, header: dict[str, Any], name: str, topic: TopicView | None) -> None:
        """Refuse what the topic does not take, and remember one that takes every plain send. Raises Refusal."""
        if self.is_lmq(name):
            raise Refusal(
                "NO_PERMISSION", f"{name!r} is an LMQ: messages of other topics name it, nothing is sent to it"
            )
        is_own = is_own_topic(header)
        if topic is None:
            if is_own:
                return
            try:
                validate_topic(name)
            except InvalidMessageError as error:
                raise Refusal("INVALID_PARAMETER", str(error)) from error
            raise Refusal("TOPIC_NOT_EXIST", f"there is no topic {name!r}")
        if is_send_forbidden(name) and not is_own:
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
        if not (topic.is_batch or is_own):
            if len(self._plain) >= _MOST_PLAIN:
                self._plain.clear()
            self._plain[name] = topic

    def checked_ack(self, header: dict[str, Any], frames: Frames) -> str:
        """The ack of a request that names no queue to store in; the node takes messages now. Raises Refusal."""
        ack = self._ack(header, frames)
        self._refuse_when_unwritable()
        return ack

    def _ack(self, header: dict[str, Any], frames: Frames) -> str:
        if len(frames) != 2:
            raise Refusal(
                "BAD_HEADER", f"{header['op']} takes the header and one payload frame, not {len(frames)} frames"
            )
        ack = header.get("ack", "flushed")
        if ack not in _ACKS:
            raise Refusal("INVALID_PARAMETER", f"ack must be one of {', '.join(_ACKS)}, not {ack!r}")
        return str(ack)

    def _queue_of(self, header: dict[str, Any], name: str, topic: TopicView) -> int:
        queue_id = header.get("queue", -1)
        if type(queue_id) is int and 0 <= queue_id < topic.write_queues:
            return queue_id
        queue_id = integer(header, "queue", -1, -1, 1 << 20)
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

    def is_lmq(self, name: str) -> bool:
        """True when ``name`` is a light message queue (LMQ) on this node, and so no topic."""
        return self._lmq_enabled and name.startswith(LMQ_PREFIX)

    def may_be_made(self, header: dict[str, Any], name: str) -> bool:
        """Whether the coordinator is to be asked for the topic ``name``, which the table does not have."""
        return not (self.is_lmq(name) or is_own_topic(header))

    def forget_topic(self, topic: str) -> None:
        """Begin again with the first queue when a topic of this name is created again."""
        self._next_queue.pop(topic, None)
        self._plain.pop(topic, None)

    def _check_place(self, name: str, topic: TopicView) -> None:
        """Refuse a topic that another process stores."""
        if topic.is_memory:
            raise Refusal(
                WRONG_ENDPOINT, f"topic {name!r} is kept in memory: send to the memory endpoint", endpoint="memory"
            )

    def _refuse_when_unwritable(self) -> None:
        """Refuse while the disk, the ConsumeQueues or the flush process take nothing."""
        control = self._control
        flags = control.get(_DISK_FLAGS)
        if not (flags or control.dispatcher(0, _DISPATCHER_FLAGS) or control.get(_FLUSH_ERRNO)):
            return
        retry = self._config.disk.check_interval_ms
        if flags & DiskFlag.DISK_FULL:
            raise Refusal(
                "SERVICE_NOT_AVAILABLE", "the disk is fuller than disk.warning_ratio allows; reads work", retry
            )
        if control.dispatcher(0, DispatcherWord.FLAGS):
            raise Refusal(
                "SERVICE_NOT_AVAILABLE", "ConsumeQueues cannot be written (disk full or failing); reads work", retry
            )
        if control.get(Word.FLUSH_ERRNO):
            raise Refusal(
                "SERVICE_NOT_AVAILABLE", "a flush failed; the store is read-only until the node is started again"
            )

    def encoded_properties(self, properties: Any, forbidden: frozenset[str] = FORBIDDEN) -> bytes:
        """The properties as the record has them; ``forbidden`` are those that only the node sets. Raises Refusal."""
        if properties is None:
            properties = {}
        if type(properties) is not dict:
            raise Refusal("INVALID_PARAMETER", "properties must be an object of strings")
        pieces = []
        for name, value in properties.items():
            if type(value) is not str:
                raise Refusal("INVALID_PARAMETER", f"property {name!r} must be a string")
            if name in forbidden:
                raise Refusal("MESSAGE_ILLEGAL", f"only the node may set the property {name!r}")
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


def is_own_topic(header: dict[str, Any]) -> bool:
    """Whether a mover appends to a topic of the node. It need not be in the table: RocketMQ makes its own ones itself."""
    name = header.get("topic")
    return "moved" in header and header["op"] == "append" and type(name) is str and is_nodes_own(name)


def integer(header: dict[str, Any], key: str, default: int, low: int, high: int) -> int:
    """The integer ``key`` of a header. Raises Refusal for another value than one of ``low`` to ``high``."""
    value = header.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise Refusal("INVALID_PARAMETER", f"{key} must be an integer from {low} to {high}")
    return value


def unnumbered() -> Refusal:
    """The refusal of a message of an idempotent producer that the node would copy."""
    return Refusal(
        "MESSAGE_ILLEGAL",
        "a delayed message, or one of a transaction, cannot come from an idempotent producer: its copy is no repetition",
    )
