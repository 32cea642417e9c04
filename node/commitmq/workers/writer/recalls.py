"""The operation ``recall``: a cancellation of a message that waits for its time (spec 12.2, 18; remoting 3.8).

It is a timer message itself, which is due in the slot of the other one. The client names that one by its place in the log,
or by RocketMQ's recall handle. The rules are in :mod:`commitmq.semantics.recall`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from commitmq.errors import CorruptRecordError, InvalidMessageError, OffsetOutOfRangeError
from commitmq.format.constants import Host, Property
from commitmq.format.message_id import unpack_host
from commitmq.format.record import Record, encode_record
from commitmq.network.router import Router
from commitmq.security.audit import Event
from commitmq.semantics.recall import CANCEL_MARGIN_MS, RecallHandle, recall_handle, recall_record
from commitmq.semantics.timer import TIMER_TOPIC, TimerRefusedError, TimerRules, timer_request
from commitmq.store.log.run_check import CheckedRun
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.writer.local_sockets import Peer
from commitmq.workers.writer.log_record import read_record
from commitmq.workers.writer.put_rules import Placed, PutRules
from commitmq.workers.writer.send_checks import Refusal, integer

LATE_RECALL: Final = "the cancellation was stored too late to be sure: the message may be delivered all the same"

_MOST: Final = 1 << 62
_STORED_IN_MS: Final = 50
_DEFAULT_GROUP: Final = "DEFAULT_PRODUCER"


@dataclass(frozen=True, slots=True)
class Recall:
    """A cancellation that is to be stored. ``slot_ms``: the slot of the message that it cancels."""

    placed: Placed
    topic: str
    slot_ms: int

    @property
    def is_late(self) -> bool:
        """Whether the timer may have opened the slot without it, when it was just stored."""
        return time.time_ns() // 1_000_000 > self.slot_ms - CANCEL_MARGIN_MS + _STORED_IN_MS


class Recalls:
    """Makes the cancellations."""

    def __init__(self, context: WorkerContext, rules: PutRules, port: Router | None = None) -> None:
        """``port``: knows who asks, for the audit log."""
        config = context.config
        self._context, self._port = context, port
        self._rules = rules
        self._timer = config.timer
        self._host = Host(config.network.store_host, config.network.store_port)

    def recall_of(self, identity: Peer, header: dict[str, Any], born_host: bytes) -> Recall:
        """The cancellation that a request of ``identity`` asks for; one ``by_person`` is audited. Raises Refusal."""
        if not self._timer.enable:
            raise Refusal("WHEEL_TIMER_NOT_ENABLE", "this node delivers no messages at a time (timer.enable is false)")
        handle = self._handle(header)
        now_ms = time.time_ns() // 1_000_000
        rules = TimerRules(max_delay_s=self._timer.max_delay_ms // 1000 + 1)
        group = header.get("group", _DEFAULT_GROUP)
        try:
            record = recall_record(handle, str(group), now_ms, unpack_host(born_host), rules)
            timed = timer_request(record, now_ms, rules, fresh=True)
        except TimerRefusedError as error:
            raise Refusal(error.code, str(error)) from error
        slot_ms = handle.deliver_ms - 1
        if timed is None or slot_ms - now_ms < CANCEL_MARGIN_MS:
            raise Refusal(
                "ILLEGAL_OPERATION", "the message cannot be cancelled: it is due in less than 0.5 s, or was due"
            )
        data = np.frombuffer(
            encode_record(replace(timed, store_host=self._host), buckets=None, empty_values=True), np.uint8
        )
        if header.get("by_person") is True and self._port is not None and isinstance(identity, bytes):
            about = {"unique_id": handle.unique_key, "due_ms": handle.deliver_ms}
            actor, resource = self._port.actor(identity, header), f"Topic:{handle.topic}"
            self._context.audit.change(Event(actor, "recall", resource, request=header["id"], after=about))
        run = CheckedRun(data, np.array([len(data)], np.int64), 1, moved=True)
        return Recall(self._rules.place_copy(run, TIMER_TOPIC, 0, delayed=False), handle.topic, slot_ms)

    def _handle(self, header: dict[str, Any]) -> RecallHandle:
        text = header.get("handle")
        if text is not None:
            try:
                return _of_topic(RecallHandle.decode(str(text)), header)
            except InvalidMessageError as error:
                raise Refusal("INVALID_PARAMETER", str(error)) from error
        place = integer(header, "physical_offset", -1, 0, _MOST)
        try:
            record = read_record(self._context, place)
        except (OSError, OffsetOutOfRangeError, CorruptRecordError) as error:
            raise Refusal("MESSAGE_ILLEGAL", f"there is no message at {place} of the log: {error}") from error
        handle = _checked(record, header.get("unique_id"), place, self._context.config.network.broker_name)
        return _of_topic(handle, header)


def _of_topic(handle: RecallHandle, header: dict[str, Any]) -> RecallHandle:
    """Raises Refusal for a message of another topic than the request's, whose rights were looked at."""
    if handle.topic != header.get("topic"):
        raise Refusal("INVALID_PARAMETER", f"the message belongs to another topic than {header.get('topic')!r:.300}")
    return handle


def _checked(record: Record, unique_id: object, place: int, broker: str) -> RecallHandle:
    """The handle of ``record``. Raises Refusal when it is no message that waits for its time, or another one."""
    try:
        handle = recall_handle(record, broker) if record.topic == TIMER_TOPIC else None
    except ValueError:
        handle = None
    if handle is None or handle.unique_key != unique_id or Property.TIMER_DELETE_KEY in record.properties:
        raise Refusal("MESSAGE_ILLEGAL", f"the message at {place} of the log is none that waits for its time")
    return handle
