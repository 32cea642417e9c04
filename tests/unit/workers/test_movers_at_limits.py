"""Goal: each mover makes of any message a copy that fits, a dead letter that fits, or sets it aside; nothing is lost silently,
no other message goes along, and no mover ends.

Method: hypothesis draws batches of messages whose properties end at a limit or up to 2,000 bytes before it, whose number of
properties is around the most that can be put into order, with names of topics at their limits, hosts of both kinds, and a
log that has CRCs now and may have had none then. Each mover's own way makes its records of them, without processes; what comes
out is checked as the writer checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.client.dead_letters import DLQ_ORIGIN_MESSAGE_ID, DLQ_ORIGIN_TOPIC, resent_properties
from commitmq.config import load
from commitmq.errors import InvalidMessageError
from commitmq.format.constants import MAX_PROPERTIES_BYTES, Host, Property
from commitmq.format.message_id import pack_host
from commitmq.format.properties import encode_properties
from commitmq.format.record import Record, decode_record, encode_record
from commitmq.semantics.derived import first_that_fits, without
from commitmq.semantics.pop_revive import CheckPoint, CheckPointKey
from commitmq.semantics.reply import pushed
from commitmq.semantics.retry import UNDELIVERED_TOPIC
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import renewed_half, renewed_immune_half
from commitmq.store.log.run_check import RunCheck
from commitmq.workers.pop.points import Records
from commitmq.workers.runtime.run_making import RunMaker
from commitmq.workers.runtime.run_mover import MovedRun
from commitmq.workers.timer.deliveries import added_properties
from commitmq.workers.transaction.ends import Append, Appends, placed_commit

V4, V6 = Host("127.0.0.1", 1), Host("::1", 1)
CONFIG = load(None, ["commit_log.append_properties_crc=true", "network.store_host=127.0.0.1"])
CHECK = RunCheck(store_host=pack_host(Host("127.0.0.1", 0)), max_message_bytes=64, properties_crc=True)
CRC_BYTES = 20
TOPICS = ["t", "t_u", "t" * 127, "%RETRY%" + "g" * 120 + "_" + "t" * 127]


class Shape(NamedTuple):
    """A message: its properties end ``short`` bytes before the limit of a record, with a CRC or without one."""

    short: int
    had_crc: bool
    topic: str
    further: int
    trace: int
    body: int
    host: Host
    tries: int

    def made(self, **named: str) -> Record:
        """With the properties ``named``; REAL_TOPIC becomes that of the shape."""
        properties = {Property.UNIQUE_KEY: "7F" * 16, **named}
        if Property.REAL_TOPIC in properties:
            properties[Property.REAL_TOPIC] = self.topic
        properties |= {f"n{number}": "1" for number in range(self.further)}
        if self.trace:
            properties[Property.TRACE_CONTEXT] = "c" * self.trace
        size = sum(len(name) + len(value) + 2 for name, value in properties.items())
        room = MAX_PROPERTIES_BYTES - self.had_crc * CRC_BYTES - size - 3
        properties["a"] = "x" * max(1, room - self.short)
        return Record(self.topic, 2, properties=properties, body=b"b" * self.body, born_timestamp=5, born_host=self.host,
                      store_host=self.host, reconsume_times=self.tries, has_properties_crc=self.had_crc)  # fmt: skip


SHAPES = st.builds(
    Shape,
    st.one_of(st.integers(0, 40), st.integers(0, 2_000)),
    st.booleans(),
    st.sampled_from(TOPICS),
    st.sampled_from([0, 0, 0, 500, *range(504, 513), 520]),
    st.sampled_from([0, 1, 20, 60]),
    st.sampled_from([0, 64, 5_000]),  # (the log has the last one, though the limit is lower now)
    st.sampled_from([V4, V6]),
    st.integers(0, 3),
)
BATCHES = st.lists(SHAPES, min_size=1, max_size=4)
SOME = settings(max_examples=40, deadline=None)


def batch(shapes: Sequence[Shape], **named: str) -> list[Record]:
    """Messages of ``shapes``, and a small one among them."""
    small = Record(
        "t", 2, properties={**named, "a": "small"}, body=b"small", born_timestamp=5, born_host=V4, store_host=V4
    )
    many = [one.made(**named) for one in shapes]
    return [*many[:2], small, *many[2:]]


def stored(run: MovedRun) -> list[Record]:
    """The records of a run that the writer takes. Raises MessageIllegalError for one that it does not take."""
    data = run.run.data.tobytes()
    checked = CHECK.check_run(data, run.topic.encode(), run.queue_id, born_v6=run.born_v6, moved=True)
    ends = checked.ends.tolist()
    return [decode_record(data[start:end], check_crc=False) for start, end in zip([0, *ends], ends, strict=False)]


def of_application(record: Record) -> dict[str, str]:
    return {name: value for name, value in record.properties.items() if name[0] in "an" and name.islower()}


# ---------------------------------------------------------------- schedule and timer


def moved(records: Sequence[Record], *, timer: bool = False, rolls: bool = False) -> tuple[dict[int, Record], set[int]]:
    """What becomes of ``records``, by their numbers, and which are set aside."""
    data = [encode_record(one, buckets=None, properties_crc=one.has_properties_crc) for one in records]
    sizes = np.array([len(one) for one in data], np.int64)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)[:-1]))
    aside: list[int] = []
    maker = RunMaker(None, CONFIG, lambda _why, place: aside.append(place))  # type: ignore[arg-type]
    more = None
    if timer:
        times = np.full(len(records), 7, np.int64) if rolls else None
        more = added_properties(np.full(len(records), (1 << 63) - 1, np.int64), 1_795_000_000_000, times)
    to = (TIMER_TOPIC, 0) if rolls else None
    found: dict[int, Record] = {}
    numbers = {start: number for number, start in enumerate(starts.tolist())}
    for run in maker.runs(0, np.frombuffer(b"".join(data), np.uint8), starts, sizes, more=more, to=to):
        for place, record in zip(run.places, stored(run), strict=True):
            assert numbers[place] not in found, "each is moved once"
            found[numbers[place]] = record
    return found, {numbers[place] for place in aside}


def check_moved(records: Sequence[Record], found: dict[int, Record], aside: set[int], topic: str = "") -> None:
    assert found.keys() | aside == set(range(len(records)))
    assert not found.keys() & aside
    for number, record in found.items():
        source = records[number]
        assert of_application(record) == of_application(source)
        assert (record.body, record.born_timestamp, record.reconsume_times) == (source.body, 5, source.reconsume_times)
        assert record.topic in (topic or source.properties[Property.REAL_TOPIC], UNDELIVERED_TOPIC)
    small = next(number for number, one in enumerate(records) if one.body == b"small")
    assert found[small].topic != UNDELIVERED_TOPIC
    for number in aside:  # only what had no CRC, and has no room for one
        assert not records[number].has_properties_crc


@SOME
@given(BATCHES)
def test_schedule(shapes: list[Shape]) -> None:
    records = batch(shapes, REAL_TOPIC="t", REAL_QID="2", DELAY="3")
    check_moved(records, *moved(records))


@SOME
@given(BATCHES)
def test_timer(shapes: list[Shape]) -> None:
    records = batch(shapes, REAL_TOPIC="t", REAL_QID="2", TIMER_OUT_MS="1795000000000")
    check_moved(records, *moved(records, timer=True))


@SOME
@given(BATCHES)
def test_rolls_of_the_timer(shapes: list[Shape]) -> None:
    records = batch(shapes, REAL_TOPIC="t", REAL_QID="2", TIMER_OUT_MS="1795000000000", TIMER_ROLL_TIMES="6")
    check_moved(records, *moved(records, timer=True, rolls=True), TIMER_TOPIC)


# ---------------------------------------------------------------- pop


@SOME
@given(SHAPES, st.sampled_from(["g", "g" * 120]), st.integers(0, 3), st.booleans())
def test_pop(shape: Shape, group: str, most: int, v2: bool) -> None:
    source = shape.made()
    if source.topic.startswith("%RETRY%"):
        group = "g" * 120
    records = Records(CONFIG if not v2 else load(None, ["pop.retry_topics_v2=true"]), "C")
    point = CheckPoint(CheckPointKey(source.topic, group, 2, 5, 1_795_000_000_000, "b"), 1_000, (0,))
    try:
        made = records.again(source, point, most)
    except InvalidMessageError:
        assert not source.has_properties_crc
        return
    ((run, _),) = records.runs([made])
    (record,) = stored(run)
    assert of_application(record) == of_application(source)
    assert record.reconsume_times == source.reconsume_times + 1
    if source.reconsume_times >= most:
        assert record.topic == "%DLQ%" + group


# ---------------------------------------------------------------- transactions


def appended(record: Record) -> Append:
    """As the transaction process encodes it, beside a small one that must not suffer."""
    appends = object.__new__(Appends)
    appends.host, appends._has_crc, appends._run_bytes = V4, True, 1 << 20
    one, small = Append(record), Append(Record(record.topic, record.queue_id, born_host=V4))
    runs = appends._runs([one, small])
    assert any(small in run.appends for run in runs)
    if not one.code:
        data = next(data for run in runs for data, mine in zip(run.data, run.appends, strict=True) if mine is one)
        assert len(decode_record(data, check_crc=False).properties["a"]) == len(record.properties["a"])
    return one


@SOME
@given(SHAPES, st.integers(0, 15))
def test_half_messages_and_commits(shape: Shape, times: int) -> None:
    """A half message that cannot be put back is asked about where it is; its commit has less than it has."""
    half = shape.made(REAL_TOPIC="t", REAL_QID="2", PGROUP="g", TRAN_MSG="true")
    half.topic = "RMQ_SYS_TRANS_HALF_TOPIC"
    for copy in (renewed_half(half, times), renewed_immune_half(half, times)):
        assert appended(copy).code in ("", "MESSAGE_ILLEGAL")
    commit = appended(placed_commit(half))
    assert not commit.code or not half.has_properties_crc


# ---------------------------------------------------------------- replies and resends


@SOME
@given(SHAPES)
def test_replies_that_are_pushed(shape: Shape) -> None:
    reply = shape.made(CORRELATION_ID="c", REPLY_TO_CLIENT="client", MSG_TYPE="reply")
    properties = pushed(reply.properties, 1_795_000_000_000, {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"})
    encode_properties(properties)
    assert {**properties, **reply.properties} == properties


@SOME
@given(SHAPES)
def test_dead_letters_that_are_resent(shape: Shape) -> None:
    """Without their origin they have less than a dead letter that has one."""
    source = shape.made(RETRY_TOPIC="orders", ORIGIN_MESSAGE_ID="0" * 32)
    message: Any = SimpleNamespace(
        properties=source.properties, queue_id=0, queue_offset=3, store_timestamp=5, topic="d"
    )
    message.unique_key, message.body = "7F" * 16, b""
    letter: Any = SimpleNamespace(message=message, topic="orders", origin_id="0" * 32, resend_id="8F" * 16)
    whole = resent_properties(letter)
    tries = [whole, *without(whole, (DLQ_ORIGIN_MESSAGE_ID, DLQ_ORIGIN_TOPIC))]
    properties, _ = first_that_fits(tries, encode_properties)
    assert {name: properties[name] for name in of_application(source)} == of_application(source)
