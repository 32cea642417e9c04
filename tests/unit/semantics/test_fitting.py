"""Goal: a message that fitted once has a copy that fits, whatever the move adds to it; what goes is never the application's.

Method: hypothesis draws messages whose properties end at a limit or up to 2,000 bytes before it, with short and long names of
groups and topics, of first and later tries; each rule's copies are encoded until one fits, as the movers do.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import MAX_PROPERTIES_BYTES, Host, Property
from commitmq.format.record import Record, decode_record, encode_record
from commitmq.semantics.derived import broker_order, derived, first_that_fits, lighter
from commitmq.semantics.pop_revive import CheckPoint, CheckPointKey, retries
from commitmq.semantics.retry import TO_DEAD_LETTERS, SentBack, copies

CRC_BYTES = 20
HOSTS = st.sampled_from([Host("127.0.0.1", 1), Host("::1", 1)])
NAMES = st.sampled_from(["g", "a-group", "g" * 119, "g" * 120])
TOPICS = st.sampled_from(["t", "a_b", "t" * 126, "t" * 127])


@st.composite
def full_records(draw: st.DrawFn) -> Record:
    """A record whose properties end 0 to 2,000 bytes before the limit of a log with CRCs."""
    short = draw(st.integers(0, 2_000))
    times = draw(st.integers(0, 3))
    properties = {Property.UNIQUE_KEY: "7F" * 16, "b": "x"}
    if draw(st.booleans()):
        properties[Property.TRACE_CONTEXT] = "t" * draw(st.integers(1, 60))
    if times and draw(st.booleans()):
        properties |= {Property.RETRY_TOPIC: draw(TOPICS), Property.ORIGIN_MESSAGE_ID: "0" * 32}
    size = sum(len(name) + len(value) + 2 for name, value in properties.items())
    properties["a"] = "x" * (MAX_PROPERTIES_BYTES - CRC_BYTES - short - size - 3)
    return Record(
        draw(TOPICS), 3, 5, 7_000, properties=properties, reconsume_times=times, body=b"b",
        born_host=draw(HOSTS), store_host=draw(HOSTS),
    )  # fmt: skip


def encoded(record: Record) -> bytes:
    return encode_record(record, buckets=None, properties_crc=True)


def of_application(record: Record) -> dict[str, str]:
    return {name: record.properties[name] for name in ("a", "b", Property.UNIQUE_KEY)}


def waiting(made: SentBack) -> bytes:
    """What is stored: a retry waits in the topic of delays, which tells where it is to go."""
    record = made.record
    if made.dead:
        return encoded(record)
    place = {Property.REAL_TOPIC: record.topic, Property.REAL_QUEUE_ID: str(record.queue_id)}
    return encoded(derived(record, "SCHEDULE_TOPIC_XXXX", 3, broker_order({**record.properties, **place})))


@given(full_records(), NAMES, st.sampled_from([0, 3, TO_DEAD_LETTERS]), st.integers(0, 3))
def test_a_message_that_is_sent_back_has_a_copy_that_fits(source: Record, group: str, level: int, most: int) -> None:
    tries = list(copies(source, group, 1, delay_level=level, max_retries=most))
    made, data = first_that_fits(tries, waiting)
    stored = decode_record(data)
    assert of_application(stored) == of_application(source)
    assert stored.reconsume_times == source.reconsume_times + 1
    if tries[0].dead:
        assert made.dead
    if not made.dead:
        assert {Property.RETRY_TOPIC, Property.DELAY, Property.REAL_TOPIC} <= stored.properties.keys()
    assert made.record.topic == ("%DLQ%" if made.dead else "%RETRY%") + group
    # A try is given up for a dead letter only where nothing that is optional could go any more.
    assert made is next(one for one in tries if fits(one))


def fits(made: SentBack) -> bool:
    try:
        waiting(made)
    except InvalidMessageError:
        return False
    return True


@given(full_records(), NAMES, st.booleans())
def test_a_message_that_was_not_acknowledged_has_a_copy_that_fits(source: Record, group: str, v2: bool) -> None:
    """Where two groups could have one retry topic it keeps its group, or becomes a dead letter."""
    point = CheckPoint(CheckPointKey(source.topic, group, 3, 5, 1_700_000_000_000, "b"), 1_000, (0,))
    dead = [one.record for one in copies(source, group, 0, delay_level=TO_DEAD_LETTERS)]
    made, data = first_that_fits([*retries(source, point, Host("127.0.0.1", 1), v2=v2), *dead], encoded)
    stored = decode_record(data)
    assert of_application(stored) == of_application(source)
    if source.topic == "a_b" and not v2 and not made.topic.startswith("%DLQ%"):
        assert stored.properties[Property.ORIGIN_GROUP] == group


def test_a_copy_that_fits_keeps_everything() -> None:
    record = Record("t", properties={Property.WAIT: "false", Property.TRACE_CONTEXT: "x", "a": "1"})
    assert [list(one.properties) for one in lighter(record)] == [
        ["WAIT", "TRACE_CONTEXT", "a"],
        ["TRACE_CONTEXT", "a"],
        ["a"],
    ]
    assert first_that_fits(lighter(record), encoded)[0] is record


def test_nothing_fits() -> None:
    """A log that has CRCs now, and had none when the message came: the last refusal tells how much was left of it."""
    record = Record("t", properties={"a": "x" * (MAX_PROPERTIES_BYTES - 3)})
    with pytest.raises(InvalidMessageError, match="32787 bytes"):
        first_that_fits((one.record for one in copies(record, "g", 0, delay_level=TO_DEAD_LETTERS)), encoded)
    with pytest.raises(InvalidMessageError, match="no copy"):
        first_that_fits([], encoded)
