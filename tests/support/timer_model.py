"""RocketMQ's rules of the timer wheel for one message, written after its source: what tests compare columns and runs with."""

from __future__ import annotations

from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.semantics.derived import broker_order, derived
from commitmq.semantics.timer import TimerRules


def slot_time(out_ms: int, write_ms: int, rules: TimerRules) -> tuple[int, bool]:
    """(time of the slot, whether the message rolls), as TimerMessageStore.doEnqueue has it."""
    slots = rules.window_ms // rules.precision_ms
    if out_ms - write_ms < slots * rules.precision_ms:
        return out_ms, False
    if out_ms - write_ms - slots * rules.precision_ms < slots // 3 * rules.precision_ms:
        return write_ms + slots // 2 * rules.precision_ms, True
    return write_ms + slots * rules.precision_ms, True


def delivered(record: Record, enqueue_ms: int, dequeue_ms: int) -> Record:
    """The record that a due ``record`` of the timer topic is delivered as (TimerMessageStore.convert)."""
    properties = {
        **record.properties,
        Property.TIMER_ENQUEUE_MS: str(enqueue_ms),
        Property.TIMER_DEQUEUE_MS: str(dequeue_ms),
    }
    topic, queue = properties[Property.REAL_TOPIC], int(properties[Property.REAL_QUEUE_ID])
    return derived(record, topic, queue, broker_order(properties))
