"""The operation ``send_back``: a copy of a message that a consumer could not handle goes to its group's retry topic, through
a delay level, or to its dead letters (spec 12.4).

The consumer names the message by its place, and the copy is made from the log: a client can neither forge nor lose a part
of it. The rules are in :mod:`commitmq.semantics.retry`. A try that does not fit becomes a dead letter, and a message of which
not even that fits is set aside (:mod:`commitmq.semantics.fitting`): a group is never held up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from commitmq.errors import CommitMQError, CorruptRecordError, InvalidMessageError, OffsetOutOfRangeError
from commitmq.format.constants import WAITING_TOPICS, Host, SysFlag
from commitmq.format.record import Record, encode_record
from commitmq.semantics import delay
from commitmq.semantics.fitting import first_that_fits
from commitmq.semantics.retry import (
    DEFAULT_MAX_RETRIES,
    TO_DEAD_LETTERS,
    SentBack,
    copies,
    dead_letter_topic,
    is_last_try,
    retry_topic,
)
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError
from commitmq.store.metadata.topic_name import validate_group
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.writer.log_record import read_record
from commitmq.workers.writer.put_rules import Placed, PutRules
from commitmq.workers.writer.send_checks import Refusal, integer

_MOST: Final = 1 << 62
_MOST_RETRIES_TOLD: Final = (1 << 31) - 2  # one more is stored, as a Java int
_MAX_RETRIES: Final = 1 << 30


class NoCopyError(CommitMQError):
    """No copy of ``record`` fits, not even as a dead letter of ``group``: the message is to be set aside."""

    def __init__(self, record: Record, group: str, why: str) -> None:
        super().__init__(why)
        self.record, self.group = record, group


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that is to be stored. ``topic`` and ``queue_id``: where the group will read it."""

    placed: Placed
    topic: str
    queue_id: int
    dead: bool
    born_host_bytes: int
    source: Record
    group: str


class SendBacks:
    """Makes the copies. ``rules`` says where a delayed one waits."""

    def __init__(self, context: WorkerContext, topics: TopicViews, rules: PutRules) -> None:
        config = context.config
        self._context = context
        self._topics = topics
        self._rules = rules
        self._host = Host(config.network.store_host, config.network.store_port)
        self._turn = 0

    def copy_of(self, header: dict[str, Any]) -> Copy:
        """The copy that a request asks for, as it fits: the try may have become a dead letter. Raises Refusal, NoCopyError."""
        group = header.get("group")
        if type(group) is not str:
            raise Refusal("INVALID_PARAMETER", "group must be a string")
        try:
            validate_group(group)
        except InvalidMessageError as error:
            raise Refusal("INVALID_PARAMETER", str(error)) from error
        level = integer(header, "delay_level", 0, TO_DEAD_LETTERS, delay.MAX_LEVEL)
        if header.get("delay_ms") is not None:
            level = delay.level_at_least(integer(header, "delay_ms", 0, 0, _MOST))
        most = DEFAULT_MAX_RETRIES
        if header.get("max_retries") is not None:
            most = integer(header, "max_retries", 0, 0, _MAX_RETRIES)
        record = self._record(header)
        dead = is_last_try(record, level, most)
        queue = self._queue_of(dead_letter_topic(group) if dead else retry_topic(group), group)
        retries = integer(header, "reconsume_times", 0, 0, _MOST_RETRIES_TOLD)
        tries = copies(record, group, queue, delay_level=level, max_retries=most, retries=retries)
        try:
            made, placed = first_that_fits(tries, self._placed, (InvalidMessageError, MessageIllegalError))
        except (InvalidMessageError, MessageIllegalError) as error:
            raise NoCopyError(record, group, f"no copy fits: {error}") from error
        if made.dead and not dead:
            self._queue_of(made.record.topic, group)
        born_host_bytes = 20 if ":" in record.born_host.ip else 8
        return Copy(placed, made.record.topic, made.record.queue_id, made.dead, born_host_bytes, record, group)

    def _placed(self, made: SentBack) -> Placed:
        """Where the copy is stored. Raises InvalidMessageError, MessageIllegalError when it breaks a limit there."""
        data = np.frombuffer(encode_record(replace(made.record, store_host=self._host), buckets=None), np.uint8)
        run = CheckedRun(data, np.array([len(data)], np.int64), 1, moved=True)
        return self._rules.place_copy(run, made.record.topic, made.record.queue_id, delayed=not made.dead)

    def _record(self, header: dict[str, Any]) -> Record:
        """The record that the request names. Raises Refusal."""
        topic = header.get("topic")
        queue = integer(header, "queue", -1, 0, 1 << 30)
        number = integer(header, "queue_offset", -1, 0, _MOST)
        place = integer(header, "physical_offset", -1, 0, _MOST)
        try:
            record = read_record(self._context, place)
        except (OSError, OffsetOutOfRangeError, CorruptRecordError) as error:
            raise Refusal("MESSAGE_ILLEGAL", f"there is no message at {place} of the log: {error}") from error
        if (record.topic, record.queue_id, record.queue_offset) != (topic, queue, number):
            raise Refusal("MESSAGE_ILLEGAL", f"the message at {place} of the log is not {topic}/{queue}@{number}")
        if record.topic in WAITING_TOPICS:
            raise Refusal(
                "MESSAGE_ILLEGAL", f"the message at {place} of the log waits in {record.topic}; no group has it"
            )
        if record.sys_flag & SysFlag.INNER_BATCH:
            raise Refusal("MESSAGE_ILLEGAL", "a message of an inner batch cannot be sent back alone")
        return record

    def _queue_of(self, topic: str, group: str) -> int:
        """A queue of the retry or dead-letter topic, each in its turn. Raises Refusal."""
        view = self._topics.get(topic)
        if view is None:
            raise Refusal(
                "TOPIC_NOT_EXIST", f"there is no topic {topic!r}: group.retry_topics makes those of the group {group!r}"
            )
        if not view.is_writable:
            raise Refusal("NO_PERMISSION", f"topic {topic!r} is not writable")
        self._turn += 1
        return self._turn % max(1, view.write_queues)
