"""Goal: a message that is sent back is stored in RocketMQ's bytes: as a retry that waits, or as a dead letter.

Method: every retry record and dead letter of a golden store is made again by the writer's own way, from the record that the
consumer sent back.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.config import load
from commitmq.format.constants import Property
from commitmq.format.message_id import parse_offset_message_id
from commitmq.format.record import Record
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.retry import dead_letter_topic, retry_topic
from commitmq.store.layout import StoreLayout
from commitmq.store.log.run_check import RunCheck
from commitmq.workers.writer import send_requests as module
from commitmq.workers.writer.put_rules import PutRefusal, PutRules
from commitmq.workers.writer.send_requests import SendBacks
from pending_store import BROKER, PendingStore, blank

GROUP = "Pending_retry"


@pytest.fixture
def backs(pending: PendingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SendBacks:
    """The writer's, over the golden log, for a group whose retry topic has several queues."""
    config = load(None, [f"network.store_host={BROKER.ip}", f"network.store_port={BROKER.port}"])
    check = RunCheck(store_host=bytes(8), max_message_bytes=1 << 20, properties_crc=False)
    monkeypatch.setattr(module, "read_record", lambda _, place: pending.at(place))
    topics: Any = SimpleNamespace(get=lambda _: SimpleNamespace(is_writable=True, write_queues=8))
    context: Any = SimpleNamespace(config=config)
    return SendBacks(context, topics, PutRules(check, config, StoreLayout(tmp_path)))


def source_of(pending: PendingStore, record: Record) -> Record:
    """The record that was sent back: the first delivery, or the retry before."""
    if record.reconsume_times == 1:
        return pending.at(parse_offset_message_id(record.properties[Property.ORIGIN_MESSAGE_ID])[1])
    retries = pending.with_key(retry_topic(GROUP), record.properties[Property.UNIQUE_KEY])
    return next(one for one in retries if one.reconsume_times == record.reconsume_times - 1)


def request_of(source: Record, **more: Any) -> dict[str, Any]:
    place = {"queue": source.queue_id, "queue_offset": source.queue_offset, "physical_offset": source.physical_offset}
    return {"group": GROUP, "topic": source.topic, **place, **more}


def test_a_retry_waits_in_rocketmqs_bytes(pending: PendingStore, backs: SendBacks) -> None:
    """In the queue of its level, 3 and the tries so far, for %RETRY%group; one try more, WAIT=false, first topic and id."""
    rounds = []
    for record in pending.of(SCHEDULE_TOPIC):
        if record.properties[Property.REAL_TOPIC] != retry_topic(GROUP):
            continue
        level, source = int(record.properties[Property.DELAY]), source_of(pending, record)
        asked = 0 if level == 3 + source.reconsume_times else level
        backs._turn = int(record.properties[Property.REAL_QUEUE_ID]) - 1  # RocketMQ draws a queue, we take turns
        copy = backs.copy_of(request_of(source, delay_level=asked))
        assert not copy.dead
        assert copy.placed.run.data.tobytes() == blank(pending.data[record.physical_offset])
        assert (copy.placed.topic, copy.placed.queue_id) == (SCHEDULE_TOPIC, level - 1)
        rounds.append(record.reconsume_times)
    assert (rounds.count(1), rounds.count(2)) == (16, 6)


def test_a_dead_letter_is_stored_in_rocketmqs_bytes(pending: PendingStore, backs: SendBacks) -> None:
    """Two went there at once and have no REAL_TOPIC, two after two tries and have it; DELAY is 0 and delays nothing."""
    stored = pending.of(dead_letter_topic(GROUP))
    for record in stored:
        source = source_of(pending, record)
        level = -1 if source.reconsume_times == 0 else 0
        copy = backs.copy_of(request_of(source, delay_level=level, max_retries=2))
        assert copy.dead
        assert copy.placed.run.data.tobytes() == blank(pending.data[record.physical_offset])
        assert (copy.placed.topic, copy.placed.queue_id) == (record.topic, 0)
    assert [Property.REAL_TOPIC in one.properties for one in stored] == [False, False, True, True]


def test_a_level_above_the_last_waits_in_the_last(
    pending: PendingStore, backs: SendBacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 16 tries 3 and the tries are more than there are levels."""
    source = pending.of(retry_topic(GROUP))[0]
    monkeypatch.setattr(module, "read_record", lambda *_: replace(source, reconsume_times=16))
    copy = backs.copy_of(request_of(source, max_retries=99))
    assert (copy.placed.topic, copy.placed.queue_id) == (SCHEDULE_TOPIC, 17)
    assert b"\x02DELAY\x0118\x02" in b"\x02" + copy.placed.run.data.tobytes()


def test_a_message_is_named_by_its_place(pending: PendingStore, backs: SendBacks) -> None:
    source = pending.of(retry_topic(GROUP))[0]
    for wrong in ({"topic": "other"}, {"queue": 9}, {"queue_offset": 9_999}):
        with pytest.raises(PutRefusal, match="is not") as caught:
            backs.copy_of(request_of(source) | wrong)
        assert caught.value.code == "MESSAGE_ILLEGAL"
