"""From the answer to a pull to the messages in it: records are decoded, checked, and inner batches are taken apart."""

from __future__ import annotations

from commitmq.client.receiving.assignment import QueueState
from commitmq.client.receiving.part import Part, parts_of_records, parts_of_units
from commitmq.client.receiving.record_check import check_bytes, check_places
from commitmq.client.receiving.segments import SegmentMaps
from commitmq.client.receiving.settings import ConsumerSettings
from commitmq.client.selector import MessageSelector
from commitmq.client.sending.inner_batch import expand
from commitmq.client.sending.light_queue import is_light, renumber
from commitmq.errors import CorruptRecordError
from commitmq.store.queues.message_filter import TagFilter


class AnswerDecoder:
    """Decodes the answers for one consumer."""

    def __init__(self, settings: ConsumerSettings) -> None:
        # The node does not filter inner batches without a tag of their own, so their messages are filtered here.
        self._tags = _wanted_tags(settings.selector)
        self._unfiltered = settings.unfiltered_topic
        self._check_crc = settings.check_crc

    def decode(
        self, state: QueueState, frames: list[memoryview], count: int, next_offset: int, segments: SegmentMaps | None
    ) -> list[Part]:
        """The messages in an answer of ``count`` records; ``segments`` if the answer has units of mapped segments.

        Raises CorruptRecordError, and OSError when a segment cannot be mapped.
        """
        if segments is not None:
            parts = parts_of_units(state.topic, state.queue_id, frames[0], segments)
        else:
            parts = parts_of_records(state.topic, state.queue_id, frames)
        got = sum(map(len, parts))
        if got != count:
            raise CorruptRecordError(f"the node promised {count} records and sent {got}")
        for part in parts:
            check_places(part, state.position, next_offset)
            if self._check_crc:
                check_bytes(part)
        if is_light(state.topic):
            return [renumber(part) for part in parts]
        return expand(parts, state.position, None if state.topic == self._unfiltered else self._tags)


def _wanted_tags(selector: MessageSelector) -> frozenset[str] | None:
    """The tags that ``selector`` names; None for all tags, and for a filter that the node refuses for inner batches."""
    if selector.type != "TAG":
        return None
    try:
        parsed = TagFilter.parse(selector.expression)
    except ValueError:
        return None
    return None if parsed is None else frozenset(parsed.tags)
