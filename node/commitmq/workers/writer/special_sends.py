"""Sends that are more than one plain message: inner batches (spec 2.8) and messages for further queues (spec 3.10).

Used by workers.writer.send_requests, in the writer. The queue offsets assigned here (the record's own and those in the
further queues) are stored in the record's properties. So a writer that dies anywhere leaves either nothing or a record
from which the next writer continues counting; see :func:`offset_behind`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from commitmq.config import NodeConfig
from commitmq.errors import InvalidMessageError
from commitmq.format.constants import LMQ_PREFIX, MULTI_DISPATCH_SEPARATOR, RETRY_PREFIX, UNIT_BYTES, Property, SysFlag
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.store.log import multi_dispatch
from commitmq.store.log.dispatch_batch import DispatchBatch, Rows
from commitmq.store.metadata.topic_config import validate_topic

Offsets = dict[tuple[str, int], int]
"""The next queue offset by (topic or LMQ, queue)."""

LMQ_QUEUE: Final = 0
_NEVER_DISPATCHED: Final = (RETRY_PREFIX, "rmq_sys_")


class SpecialSendError(Exception):
    """The send is refused. ``code`` is for the answer."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


def batch_properties(properties: Mapping[str, Any], count: int, base: int) -> dict[str, Any]:
    """The properties of a record that holds ``count`` messages; the first one has queue offset ``base``."""
    return {**properties, Property.INNER_NUM: str(count), Property.INNER_BASE: str(base)}


class FurtherQueues:
    """Queue offsets of LMQs, as part of the writer's table."""

    def __init__(self, config: NodeConfig, offsets: Offsets) -> None:
        self._config = config.consume_queue
        self._offsets = offsets
        self._known = sum(1 for name, _ in offsets if name.startswith(LMQ_PREFIX))

    def assign(self, topic: str, properties: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """The LMQs that ``properties`` name, and the properties to store. Nothing is counted yet.

        Raises SpecialSendError.
        """
        if Property.INNER_MULTI_QUEUE_OFFSET in properties:
            sentence = f"only the node may set the property {Property.INNER_MULTI_QUEUE_OFFSET!r}"
            raise SpecialSendError("MESSAGE_ILLEGAL", sentence)
        names = self._names(topic, properties[Property.INNER_MULTI_DISPATCH])
        offsets = [str(self._offsets.get((name, LMQ_QUEUE), 0)) for name in names]
        stored = {name: value for name, value in properties.items() if name != Property.WAIT}
        stored[Property.INNER_MULTI_QUEUE_OFFSET] = MULTI_DISPATCH_SEPARATOR.join(offsets)
        return names, stored

    def count(self, names: list[str]) -> None:
        """Count a stored message in these LMQs."""
        for name in names:
            key = (name, LMQ_QUEUE)
            self._known += key not in self._offsets
            self._offsets[key] = self._offsets.get(key, 0) + 1

    def _names(self, topic: str, value: Any) -> list[str]:
        if not self._config.enable_multi_dispatch:
            raise SpecialSendError(
                "MESSAGE_ILLEGAL",
                f"property {Property.INNER_MULTI_DISPATCH!r} needs consume_queue.enable_multi_dispatch, which is off",
            )
        if topic.startswith(_NEVER_DISPATCHED) or topic == SCHEDULE_TOPIC:
            raise SpecialSendError("MESSAGE_ILLEGAL", f"messages of {topic!r} cannot go to further queues")
        if type(value) is not str:
            raise SpecialSendError("INVALID_PARAMETER", f"property {Property.INNER_MULTI_DISPATCH!r} must be a string")
        names = value.split(MULTI_DISPATCH_SEPARATOR)
        for name in names:
            if not name.startswith(LMQ_PREFIX) or name == LMQ_PREFIX:
                raise SpecialSendError("MESSAGE_ILLEGAL", f"{name!r} is no LMQ: its name must begin with {LMQ_PREFIX}")
            try:
                validate_topic(name)
            except InvalidMessageError as error:
                raise SpecialSendError("MESSAGE_ILLEGAL", str(error)) from error
        if len(set(names)) != len(names):
            raise SpecialSendError("MESSAGE_ILLEGAL", "an LMQ is named twice")
        new = sum((name, LMQ_QUEUE) not in self._offsets for name in names)
        if self._known + new > self._config.max_lmq_queues:
            raise SpecialSendError(
                "LMQ_CONSUME_QUEUE_NUM_EXCEEDED",
                f"the node has {self._known} LMQs, consume_queue.max_lmq_queues allows {self._config.max_lmq_queues}",
            )
        return names


def offset_behind(row: np.void) -> int:
    """The queue offset behind the record of ``row``. An inner batch counts for all of its messages."""
    base, count = int(row["inner_base"]), int(row["inner_num"])
    if row["sys_flag"] & SysFlag.INNER_BATCH and count > 0 and base >= 0:
        return base + count
    return int(row["queue_offset"]) + 1


def further_offsets(batch: DispatchBatch, rows: Rows) -> Iterator[tuple[tuple[str, int], int]]:
    """For each unit that ``rows`` (of ``batch``) get in a further queue: the queue, and the queue offset behind the
    unit.
    """
    if rows["multi_size"].any():
        for key, offset, units in multi_dispatch.runs(batch, rows):
            yield key, offset + len(units) // UNIT_BYTES
