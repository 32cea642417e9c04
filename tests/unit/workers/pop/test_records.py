"""Goal: what the process pop appends has RocketMQ's bytes; a request that is no request is refused.

Method: check points, acks and revived messages of the golden store ``semantics``, made anew by the process's own way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commitmq.config import PopConfig, load
from commitmq.errors import ProtocolError
from commitmq.format.constants import Property
from commitmq.format.record import Record, decode_record
from commitmq.semantics.pop_revive import Ack, CheckPoint, CheckPointKey, revive_topic
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.workers.pop.points import Records
from commitmq.workers.pop.requests import invisible_of, pop_of, receipts_of
from commitmq.workers.reader.filters import Filters
from golden_stores import unpack
from pending_store import BROKER, PendingStore, read_pending_store

KEY = CheckPointKey("orders", "g", 2, 40, 1_763_800_001_000, "b0")
LIMITS = PopConfig()
HANDLE = "40 1763800001000 60000 1 0 b0 2 41"


@pytest.fixture(scope="module")
def pending(tmp_path_factory: pytest.TempPathFactory) -> PendingStore:
    return read_pending_store(unpack("semantics", tmp_path_factory.mktemp("golden")).root)


@pytest.fixture(scope="module")
def records() -> Records:
    config = load(None, [f"network.store_host={BROKER.ip}", f"network.store_port={BROKER.port}"])
    return Records(config, "C")


def as_stored(made: Record, records: Records, stored: Record) -> Record:
    """``made`` as the writer would store it at the place of ``stored``."""
    sent = decode_record(records.encoded(made))
    return replace(
        sent,
        queue_offset=stored.queue_offset,
        physical_offset=stored.physical_offset,
        store_timestamp=stored.store_timestamp,
    )


def test_check_points_and_acks_have_rocketmqs_bytes(pending: PendingStore, records: Records) -> None:
    revive = revive_topic("C")
    points: dict[CheckPointKey, CheckPoint] = {}
    count = 0
    for stored in pending.of(TIMER_TOPIC):
        if stored.properties.get(Property.REAL_TOPIC) != revive:
            continue
        queue = int(stored.properties[Property.REAL_QUEUE_ID])
        if stored.properties[Property.TAGS] == "ck":
            point = CheckPoint.parse(stored.body)
            points[point.key] = point
            made = records.check_point(point, queue, stored.born_timestamp)
        else:
            ack = Ack.parse(stored.body)
            made = records.ack(ack, points[ack.key].invisible_ms, queue, stored.born_timestamp)
        assert pending.has(as_stored(made, records, stored), stored)
        count += 1
    assert count == 41


def test_an_ack_that_is_overdue_goes_to_the_revive_topic(records: Records) -> None:
    made = records.ack(Ack(KEY, 41), 60_000, 3, KEY.pop_time + 60_000)
    assert (made.topic, made.queue_id) == (revive_topic("C"), 3)
    made = records.ack(Ack(KEY, 41), 60_000, 3, KEY.pop_time + 59_999)
    assert (made.topic, made.queue_id) == (TIMER_TOPIC, 0)


def test_a_message_becomes_a_dead_letter_after_its_last_try(records: Records) -> None:
    point = CheckPoint(KEY, 60_000, (0,))
    record = Record("%RETRY%g_orders", body=b"x", reconsume_times=15, properties={"TAGS": "a"}, born_host=BROKER)
    again = records.again(record, point, 16)
    assert (again.topic, again.reconsume_times) == ("%RETRY%g_orders", 16)
    dead = records.again(replace(record, reconsume_times=16), point, 16)
    assert (dead.topic, dead.queue_id, dead.properties["RETRY_TOPIC"]) == ("%DLQ%g", 0, "orders")
    assert records.again(record, point, 0).topic == "%DLQ%g"


def test_runs_keep_the_order_of_a_queue_and_the_limit_of_a_run(tmp_path: Path) -> None:
    records = Records(load(None, ["commit_log.max_run_bytes=65536"]), "C")
    many = [Record("a", number % 2, body=b"%d" % number * 5_000, born_host=BROKER) for number in range(40)]
    numbers: dict[int, list[int]] = {0: [], 1: []}
    for run, members in records.runs(many):
        assert len(run.run.data) <= 65_536
        assert run.run.count == len(members)
        assert decode_record(run.run.data[: run.run.ends[0]].tobytes()).body == many[members[0]].body
        numbers[run.queue_id] += members
    assert numbers == {0: list(range(0, 40, 2)), 1: list(range(1, 40, 2))}


# ---------------------------------------------------------------- requests


def header(**fields: Any) -> dict[str, Any]:
    return {"id": 1, "group": "g", **fields}


def test_a_receipt_names_the_message(records: Records) -> None:
    (one,) = receipts_of(header(receipts=[["orders", HANDLE]]), LIMITS, 8, KEY.pop_time)
    assert (one.key, one.offset) == (KEY, 41)
    (back,) = receipts_of(header(receipts=[["orders", HANDLE.replace("1 0 b0", "1 1 b0")]]), LIMITS, 8, KEY.pop_time)
    assert back.key.topic == "%RETRY%g_orders"


def test_receipts_of_one_delivery_are_taken_as_each_by_itself() -> None:
    delivery = HANDLE.rpartition(" ")[0]
    texts = [f"{delivery} {number}" for number in ("41", "42", "043", "99")]
    pairs = [["orders", text] for text in (*texts, texts[0].replace("1 0 b0", "1 1 b0"))] + [["other", texts[0]]]
    found = receipts_of(header(receipts=pairs), LIMITS, 8, KEY.pop_time)
    alone = [receipts_of(header(receipts=[pair]), LIMITS, 8, KEY.pop_time)[0] for pair in pairs]
    assert [one[:2] for one in found] == [one[:2] for one in alone]
    assert [one.extended(7_000, 500) for one in found] == [one.extended(7_000, 500) for one in alone]
    for bad in ("", "-1", "x", "9" * 30, "9" * 5_000, "\u0661"):
        receipts = [["orders", HANDLE], ["orders", f"{delivery} {bad}"]]
        with pytest.raises(ProtocolError):
            receipts_of(header(receipts=receipts), LIMITS, 8, KEY.pop_time)


@pytest.mark.parametrize(
    "receipts",
    [
        None, [], [["orders"]], [["orders", 5]], [[5, HANDLE]], [["or ders", HANDLE]], [["orders", HANDLE]] * 1_025,
        [["orders", "x"]], [["orders", HANDLE.rpartition(" ")[0]]],
        [["orders", HANDLE.replace(" 1 0 ", " 8 0 ")]], [["orders", "-" + HANDLE]],
        [["orders", HANDLE.replace("60000", "0")]], [["orders", HANDLE.replace("60000", "999999999999")]],
        [["orders", HANDLE.replace("1763800001000", "9" * 30)]],
        [["orders", HANDLE.replace("1763800001000", "1763976400000")]],
    ],
)  # fmt: skip
def test_what_is_no_receipt_is_refused(receipts: Any) -> None:
    with pytest.raises(ProtocolError) as refused:
        receipts_of(header(receipts=receipts), LIMITS, 8, KEY.pop_time)
    assert refused.value.code == "INVALID_PARAMETER"


@pytest.mark.parametrize(
    "fields",
    [
        {"topics": []}, {"topics": "orders"}, {"topics": ["a b"]}, {"topics": [1]}, {"topics": ["a"] * 65},
        {"start": "now"}, {"filter": 1}, {"max_messages": 0}, {"wait_ms": -1}, {"invisible_ms": 1_999},
        {"invisible_ms": 43_200_001}, {"invisible_ms": None}, {"group": ""}, {"group": "a b"},
    ],
)  # fmt: skip
def test_what_is_no_pop_is_refused(fields: dict[str, Any]) -> None:
    good = header(topics=["orders"], invisible_ms=60_000)
    assert pop_of(b"c", good, LIMITS, Filters((), limit=1)).topics == ["orders"]
    with pytest.raises(ProtocolError):
        pop_of(b"c", good | fields, LIMITS, Filters((), limit=1))


def test_limits_cut_what_a_pop_asks_for() -> None:
    asked = header(topics=["orders"], invisible_ms=60_000, max_messages=10_000, wait_ms=10_000_000)
    one = pop_of(b"c", asked, LIMITS, Filters((), limit=1))
    assert (one.max_messages, one.wait_ms) == (LIMITS.max_messages, LIMITS.max_wait_ms)
    assert invisible_of({"invisible_ms": 2_000}, LIMITS) == 2_000


@pytest.mark.parametrize(("topic", "back"), [("orders", "%RETRY%g+orders"), ("%RETRY%g_orders", "%RETRY%g_orders")])
def test_a_message_comes_back_into_the_second_form_and_stays_in_the_first(topic: str, back: str) -> None:
    """PopReviveService of RocketMQ with enableRetryTopicV2."""
    records = Records(load(None, ["pop.retry_topics_v2=true"]), "C")
    point = CheckPoint(KEY._replace(topic=topic), 5_000, (0,))
    assert records.again(Record(topic, body=b"x", queue_offset=40), point, 16).topic == back
