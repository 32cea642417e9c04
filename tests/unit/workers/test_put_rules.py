"""Goal: a message with a delay, a time or a transaction is stored where it waits, in RocketMQ's bytes, or is refused.

Method: from RocketMQ's own records (a golden store) the client's message is made again, with its properties in another
order, checked as a run and placed by the writer's rules. The result is RocketMQ's record but for what the writer fills in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commitmq.config import load
from commitmq.format.constants import Host, Property, SysFlag
from commitmq.format.java import java_string_hash
from commitmq.format.record import Record, decode_record, encode_record
from commitmq.semantics.delay import DELAY_LEVELS_MS, MAX_LEVEL, SCHEDULE_TOPIC
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import HALF_TOPIC
from commitmq.store.layout import StoreLayout
from commitmq.store.log.run_check import CheckedRun, RunCheck
from commitmq.workers.writer import put_rules
from commitmq.workers.writer.put_rules import PlacedRun, PutRefusal, PutRules
from pending_store import PendingStore, blank

NOW_MS = 1_795_339_323_456
CHECK = RunCheck(store_host=bytes(8), max_message_bytes=1 << 20, properties_crc=False)
NOBODY = Host("0.0.0.0", 0)


class Clock:
    now_ms = NOW_MS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(put_rules, "time", SimpleNamespace(time_ns=lambda: made.now_ms * 1_000_000))
    return made  # type: ignore[return-value]


@pytest.fixture
def rules(tmp_path: Path, clock: Clock) -> PutRules:
    return PutRules(CHECK, load(None, ["timer.max_delay_ms=604800000"]), StoreLayout(tmp_path))


def run_of(*records: Record) -> CheckedRun:
    """A client's run, as the writer has checked it."""
    data = b"".join(encode_record(replace(one, store_host=NOBODY), buckets=None) for one in records)
    first = records[0]
    return CHECK.check_run(data, first.topic.encode(), first.queue_id, born_v6=False, forwarded=True)


def message(**properties: str) -> Record:
    named = {"UNIQ_KEY": "AB", **properties}
    return Record("orders", 2, properties=named, body=b"x", born_timestamp=5, born_host=Host("1.2.3.4", 5))


def placed(rules: PutRules, *records: Record) -> PlacedRun:
    return rules.place(run_of(*records), records[0].topic, records[0].queue_id)


def properties_of(one: PlacedRun) -> dict[str, str]:
    return dict(decode_record(one.run.data.tobytes(), check_crc=False).properties)


def as_sent(record: Record, added: tuple[str, ...], chooser: random.Random) -> Record:
    """The message that a client sent, of the ``record`` that a broker stored with the properties ``added``."""
    kept = [(name, value) for name, value in record.properties.items() if name not in added]
    return replace(
        record,
        topic=record.properties[Property.REAL_TOPIC],
        queue_id=int(record.properties[Property.REAL_QUEUE_ID]),
        properties=dict(shuffled(kept, chooser)),
        queue_offset=0,
        physical_offset=0,
        store_timestamp=0,
        prepared_transaction_offset=0,
    )


def shuffled(pairs: list[tuple[str, str]], chooser: random.Random) -> list[tuple[str, str]]:
    """Another order in which the names that share a bucket of Java's table keep theirs."""
    groups: dict[int, list[tuple[str, str]]] = {}
    for pair in pairs:
        value = java_string_hash(pair[0]) & 0xFFFFFFFF
        groups.setdefault((value ^ (value >> 16)) & 127, []).append(pair)
    order = list(groups.values())
    chooser.shuffle(order)
    return [pair for group in order for pair in group]


# ---------------------------------------------------------------- timers


def test_a_sent_timer_message_waits_in_rocketmqs_bytes(pending: PendingStore, rules: PutRules, clock: Clock) -> None:
    """Topic rmq_sys_wheel_timer, queue 0, TIMER_OUT_MS, REAL_TOPIC and REAL_QID, all properties in Java's order, sysFlag."""
    chooser, seen, added = random.Random(7), 0, (Property.TIMER_OUT_MS, Property.REAL_TOPIC, Property.REAL_QUEUE_ID)
    for record in pending.of(TIMER_TOPIC):
        if Property.TIMER_ROLL_TIMES in record.properties or Property.CLUSTER not in record.properties:
            continue
        sent = as_sent(record, added, chooser)
        wanted = blank(pending.data[record.physical_offset])
        for clock.now_ms in range(record.store_timestamp, record.born_timestamp - 1, -1):
            made = placed(rules, sent)  # (RocketMQ looked at its clock a moment before it stored the message)
            if made.run.data.tobytes() == wanted:
                break
        assert made.run.data.tobytes() == wanted, record.properties
        assert (made.topic, made.queue_id) == (TIMER_TOPIC, 0)
        assert made.due_ms == int(record.properties[Property.TIMER_OUT_MS])
        seen += 1
    assert seen > 30


@pytest.mark.parametrize(
    ("asked_ms", "out_ms"),
    [(500, 0), (544, 0), (545, 1_000), (1_544, 1_000), (1_545, 2_000), (259_200_000, 259_200_000)],
)
def test_a_time_is_rounded_down_and_an_exact_second_goes_one_earlier(
    rules: PutRules, asked_ms: int, out_ms: int
) -> None:
    first = NOW_MS // 1_000 * 1_000
    assert placed(rules, message(TIMER_DELAY_MS=str(asked_ms))).due_ms == first + out_ms


def test_the_first_request_of_seconds_milliseconds_and_a_time_wins(rules: PutRules) -> None:
    asked = {"TIMER_DELAY_SEC": "20", "TIMER_DELAY_MS": "50000", "TIMER_DELIVER_MS": "1"}
    first = NOW_MS // 1_000 * 1_000
    assert placed(rules, message(**asked)).due_ms == first + 20_000
    del asked["TIMER_DELAY_SEC"]
    assert placed(rules, message(**asked)).due_ms == first + 50_000
    del asked["TIMER_DELAY_MS"]
    plain = placed(rules, message(**asked))
    assert (plain.topic, plain.queue_id, plain.due_ms) == ("orders", 2, None), "its time has passed"
    assert properties_of(plain) == {"UNIQ_KEY": "AB", "TIMER_DELIVER_MS": "1"}


@pytest.mark.parametrize("name", ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
@pytest.mark.parametrize("text", ["x", " 1", "1_0", "٣", "9223372036854775808", "1.0", "-"])
def test_a_request_that_is_no_number_is_illegal(rules: PutRules, name: str, text: str) -> None:
    with pytest.raises(PutRefusal, match=name) as caught:
        placed(rules, message(**{name: text}))
    assert caught.value.code == "WHEEL_TIMER_MSG_ILLEGAL"


def test_a_delay_beyond_the_limit_is_illegal(rules: PutRules) -> None:
    assert placed(rules, message(TIMER_DELAY_MS="604800000")).topic == TIMER_TOPIC
    with pytest.raises(PutRefusal, match="604800001") as caught:
        placed(rules, message(TIMER_DELAY_MS="604800001"))
    assert caught.value.code == "WHEEL_TIMER_MSG_ILLEGAL"


def test_a_cancellation_of_what_has_passed_is_illegal(rules: PutRules) -> None:
    cancel = message(TIMER_DELIVER_MS=str(NOW_MS), TIMER_DEL_UNIQKEY="AB")
    with pytest.raises(PutRefusal) as caught:
        placed(rules, cancel)
    assert caught.value.code == "WHEEL_TIMER_MSG_ILLEGAL"


# ---------------------------------------------------------------- delay levels


def test_each_level_has_its_queue(rules: PutRules) -> None:
    assert len(DELAY_LEVELS_MS) == MAX_LEVEL == 18
    for level in range(1, 19):
        made = placed(rules, message(DELAY=str(level)))
        assert (made.topic, made.queue_id) == (SCHEDULE_TOPIC, level - 1)
        assert properties_of(made) == {
            "UNIQ_KEY": "AB", "DELAY": str(level), "REAL_TOPIC": "orders", "REAL_QID": "2",
        }  # fmt: skip


@pytest.mark.parametrize("text", ["19", "25", "2147483647", "+18", "018"])
def test_a_level_above_the_last_is_the_last_and_its_property_says_so(rules: PutRules, text: str) -> None:
    made = placed(rules, message(DELAY=text))
    assert (made.topic, made.queue_id, properties_of(made)["DELAY"]) == (SCHEDULE_TOPIC, 17, "18")


@pytest.mark.parametrize("text", ["0", "-0", "-1", "-2147483648"])
def test_a_level_of_nothing_or_less_is_no_delay(rules: PutRules, text: str) -> None:
    made = placed(rules, message(DELAY=text))
    assert (made.topic, made.queue_id, properties_of(made)) == ("orders", 2, {"UNIQ_KEY": "AB", "DELAY": text})


@pytest.mark.parametrize("text", ["x", "1s", "1.0", " 1", "٣", "2147483648", "99999999999"])
def test_a_level_that_is_no_number_is_refused(rules: PutRules, text: str) -> None:
    with pytest.raises(PutRefusal, match="DELAY must be a delay level") as caught:
        placed(rules, message(DELAY=text))
    assert caught.value.code == "MESSAGE_ILLEGAL"


def test_a_delay_level_wins_over_a_time_and_takes_the_requests_away(rules: PutRules) -> None:
    asked = {"TIMER_DELAY_SEC": "2", "TIMER_DELAY_MS": "x", "TIMER_DELIVER_MS": "1"}
    made = placed(rules, message(DELAY="3", KEYS="k", **asked))
    assert (made.topic, made.queue_id) == (SCHEDULE_TOPIC, 2)
    assert not properties_of(made).keys() & asked.keys()
    assert properties_of(made)["KEYS"] == "k"
    assert placed(rules, message(DELAY="0", TIMER_DELAY_SEC="2")).topic == TIMER_TOPIC


# ---------------------------------------------------------------- half messages


def test_a_half_message_waits_in_rocketmqs_bytes(pending: PendingStore, rules: PutRules) -> None:
    """Topic RMQ_SYS_TRANS_HALF_TOPIC, queue 0, __transactionId__, REAL_TOPIC and REAL_QID, no transaction bits."""
    chooser, seen, added = random.Random(9), 0, ("__transactionId__", Property.REAL_TOPIC, Property.REAL_QUEUE_ID)
    for record in pending.of(HALF_TOPIC):
        if Property.TRANSACTION_CHECK_TIMES in record.properties:
            continue
        made = placed(rules, as_sent(record, added, chooser))
        assert made.run.data.tobytes() == blank(pending.data[record.physical_offset]), record.properties
        assert (made.topic, made.queue_id) == (HALF_TOPIC, 0)
        assert record.sys_flag & SysFlag.TRANSACTION_MASK == 0
        seen += 1
    assert seen == 26


@pytest.mark.parametrize(("text", "is_half"), [("true", True), ("TRUE", True), ("1", False), ("yes", False)])
def test_the_property_makes_a_half_message(rules: PutRules, text: str, is_half: bool) -> None:
    made = placed(rules, message(TRAN_MSG=text, PGROUP="g"))
    assert (made.topic, made.queue_id) == ((HALF_TOPIC, 0) if is_half else ("orders", 2))


def test_a_retry_that_an_old_client_sends_delayed_is_no_half_message(rules: PutRules) -> None:
    """Clients before 4.6.1 leave TRAN_MSG in what they send to a retry topic."""
    half = message(TRAN_MSG="true", PGROUP="g", DELAY="4")
    made = placed(rules, replace(half, reconsume_times=1))
    assert (made.topic, made.queue_id, properties_of(made)["TRAN_MSG"]) == (SCHEDULE_TOPIC, 3, "true")
    assert placed(rules, half).topic == HALF_TOPIC
    for once in (message(TRAN_MSG="true", PGROUP="g"), message(TRAN_MSG="true", PGROUP="g", DELAY="0")):
        assert placed(rules, replace(once, reconsume_times=1)).topic == HALF_TOPIC


def test_what_could_never_be_committed_is_no_half_message(rules: PutRules) -> None:
    half: dict[str, Any] = {"TRAN_MSG": "true", "PGROUP": "g"}
    for wrong in ({"DELAY": "x"}, {"TIMER_DELAY_SEC": "x"}, {"TIMER_DELAY_SEC": "999999"}):
        with pytest.raises(PutRefusal):
            placed(rules, message(**half, **wrong))
    assert placed(rules, message(**half, DELAY="3", TIMER_DELAY_SEC="x")).topic == HALF_TOPIC, "the level will win"
    with pytest.raises(PutRefusal, match="PGROUP"):
        placed(rules, message(TRAN_MSG="true"))
    with pytest.raises(PutRefusal, match="UNIQ_KEY"):
        placed(rules, replace(message(), properties=half))


def test_messages_of_a_run_keep_their_order_and_ends(rules: PutRules) -> None:
    many = [message(TRAN_MSG="true", PGROUP="g", KEYS=str(number)) for number in range(3)]
    made = placed(rules, *many)
    starts = np.concatenate(([0], made.run.ends[:-1])).tolist()
    data = made.run.data.tobytes()
    assert [decode_record(data, at, check_crc=False).properties["KEYS"] for at in starts] == ["0", "1", "2"]
