"""Goal: the loop of a run hands over what it fetches, follows the assignment, and commits nothing that is not done.

Method: the loop with a fetch that the test injects, on an assignment that the test changes. Real threads call the handlers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from commitmq.client.handling.engine import Engine
from commitmq.client.handling.pools import ThreadPool
from commitmq.client.handling.run import HandlerRun, HandlerSource
from commitmq.client.handling.send_back import SendBackRequest, SendBackResult
from commitmq.client.handling.settings import Settings
from commitmq.client.message import Message
from commitmq.client.receiving.assignment import (
    Assignment,
    BatchPortion,
    Chunk,
    FetchLimit,
    QueueState,
    StartOffset,
    TakenBatch,
    new_state,
)
from commitmq.client.receiving.batch import MessageBatch
from commitmq.client.receiving.part import RecordBatch, parts_of_records
from commitmq.errors import CorruptRecordError
from commitmq.format.record import Record, encode_record
from nodes import eventually


def part_of(topic: str, queue: int, offsets: range, **properties: str) -> RecordBatch:
    records = [
        Record(topic, queue, offset, 1000 * offset, body=b"%d" % offset, properties=properties) for offset in offsets
    ]
    data = b"".join(map(encode_record, records))
    return parts_of_records(topic, queue, [memoryview(data)])[0]


class Taking:
    """A sender that takes everything back, and remembers it."""

    def __init__(self) -> None:
        self.requests: list[SendBackRequest] = []

    def exchange(self, requests: list[SendBackRequest]) -> list[SendBackResult]:
        self.requests += requests
        return [SendBackResult()] * len(requests)

    def close(self) -> None:
        """Nothing is open."""


class Fed:
    """A run on an assignment, whose fetches return what the test feeds. Leaving it stops the run."""

    def __init__(self, handler: Callable[[Message], Any], **options: Any) -> None:
        self.assignment = Assignment()
        self.sender = Taking()
        self.engine = Engine(Settings(**options), self.sender)
        self.errors: list[tuple[Message | None, BaseException]] = []
        self.pool = ThreadPool(self.engine, handler, lambda *error: self.errors.append(error), name="test")
        self.closing = False
        self.feed: deque[tuple[QueueState, RecordBatch, int] | Exception] = deque()
        self.run = HandlerRun(
            self.engine,
            self.pool,
            HandlerSource(self.assignment, self._fetch, lambda timeout_s: time.sleep(0.01), lambda: self.closing),
        )
        self._thread = threading.Thread(target=self._loop)
        self.rooms: list[FetchLimit | None] = []

    def _fetch(self, deadline: float) -> TakenBatch:
        self.assignment.confirm()
        self.run.keep_house()
        if not self.feed:
            time.sleep(0.005)
            return TakenBatch(MessageBatch(), [])
        found = self.feed.popleft()
        if isinstance(found, Exception):
            raise found
        state, part, following = found
        self.rooms.append(state.room)
        state.chunks.append(Chunk([part], len(part), following))
        taken = self.assignment.making = TakenBatch(MessageBatch([part]), [BatchPortion(state, state.chunks[0])])
        return taken

    def _loop(self) -> None:
        self.run.loop()
        self.run.stop()

    def own(self, topic: str, queue: int, offset: int = 0) -> QueueState:
        state = new_state((topic, queue), StartOffset(offset, offset), offset)
        self.assignment.add([state])
        return state

    def offset(self, state: QueueState) -> int | None:
        """What may be committed of it; None: nothing that is not."""
        return self.run.offsets([state]).get(state.key)

    def __enter__(self) -> Fed:
        self.engine.start(16)
        self.pool.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing = True
        self.run.start_nothing()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.engine.close()
        self.pool.end(time.monotonic() + 5)
        self.assignment.close()


def test_offsets_follow_what_is_done() -> None:
    go_on = threading.Event()
    seen: list[int] = []

    def handle(message: Message) -> None:
        if message.queue_offset == 5:
            go_on.wait(30)
        seen.append(message.queue_offset)

    with Fed(handle, workers=3) as fed:
        state = fed.own("t", 0, offset=3)
        # Behind 9 a filter left out two messages: they count as done with the rest.
        fed.feed.append((state, part_of("t", 0, range(3, 10)), 12))
        eventually(lambda: len(seen) == 6, "all but one are done")
        assert fed.offset(state) == 5
        go_on.set()
        eventually(lambda: fed.offset(state) == 12, "all are done")
    assert sorted(seen) == list(range(3, 10))


def test_a_retried_message_has_the_topic_it_was_sent_to() -> None:
    seen: list[tuple[str, str]] = []
    with Fed(lambda message: seen.append((message.topic, message.stored_topic))) as fed:
        state = fed.own("%RETRY%g", 0)
        fed.feed.append((state, part_of("%RETRY%g", 0, range(1), RETRY_TOPIC="orders"), 1))
        fed.feed.append((state, part_of("%RETRY%g", 0, range(1, 2)), 2))
        eventually(lambda: fed.offset(state) == 2, "both are done")
    assert sorted(seen) == [("%RETRY%g", "%RETRY%g"), ("orders", "%RETRY%g")]


def test_a_failed_message_is_sent_back_from_where_it_is_stored() -> None:
    def handle(message: Message) -> None:
        raise ValueError(message.topic)

    with Fed(handle, backoff=3) as fed:
        state = fed.own("%RETRY%g", 0)
        fed.feed.append((state, part_of("%RETRY%g", 0, range(7, 8), RETRY_TOPIC="orders"), 8))
        eventually(lambda: fed.offset(state) == 8, "it is done when it is sent back")
    assert fed.sender.requests == [SendBackRequest("%RETRY%g", 0, 7, 7000, delay_s=3.0, max_retries=16)]
    assert [(message.topic, str(error)) for message, error in fed.errors if message] == [("orders", "orders")]


def test_a_queue_that_is_wanted_back_is_given_back_when_its_handlers_are_done() -> None:
    go_on = threading.Event()
    seen: list[int] = []

    def handle(message: Message) -> None:
        seen.append(message.queue_offset)
        go_on.wait(30)

    with Fed(handle, workers=1) as fed:
        state = fed.own("t", 0)
        fed.feed.append((state, part_of("t", 0, range(4)), 4))
        eventually(lambda: seen == [0], "the first one runs")
        assert not fed.run.may_give_back(state)
        state.revoked_at = 1.0
        time.sleep(0.05)
        go_on.set()
        eventually(lambda: fed.run.may_give_back(state), "it can be given back")
        assert fed.offset(state) == 1
        fed.assignment.drop(state)
        # It is assigned again, as another state: what is not done comes again.
        again = fed.own("t", 0, offset=1)
        fed.feed.append((again, part_of("t", 0, range(1, 4)), 4))
        eventually(lambda: fed.offset(again) == 4, "all is done")
    assert seen == [0, 1, 2, 3]


def test_what_a_lost_queue_s_handler_says_has_no_effect() -> None:
    go_on = threading.Event()

    def handle(message: Message) -> bool:
        go_on.wait(30)
        return False

    with Fed(handle, workers=1) as fed:
        state = fed.own("t", 0)
        fed.feed.append((state, part_of("t", 0, range(2)), 2))
        eventually(lambda: fed.engine.counts.running == 1, "one runs")
        fed.assignment.drop(state)
        eventually(lambda: fed.engine.counts.unfinished == 0, "the loop has noticed")
        go_on.set()
        eventually(lambda: fed.engine.counts.running == 0, "it has ended")
        time.sleep(0.05)
        assert fed.sender.requests == []
        assert fed.engine.counts.failed == 1


def test_the_limits_are_told_to_the_fetch() -> None:
    go_on = threading.Event()
    with Fed(lambda message: go_on.wait(30) or None, max_unfinished=3, max_unfinished_bytes=100) as fed:
        state = fed.own("t", 0)
        eventually(lambda: state.room == FetchLimit(3, 100), "an empty queue")
        fed.feed.append((state, part_of("t", 0, range(2)), 2))
        eventually(lambda: state.room == FetchLimit(1, 98), "two messages of one byte")
        fed.feed.append((state, part_of("t", 0, range(2, 3)), 3))
        eventually(lambda: state.room == FetchLimit(0, 0), "full")
        later = new_state(("t", 1), StartOffset(0, 0), 0)
        fed.assignment.add([later])
        assert later.room == FetchLimit(3, 100), "also before the next look"
        go_on.set()


def test_a_damaged_record_is_reported_and_other_errors_end_the_run() -> None:
    fed = Fed(lambda message: None)
    fed.feed.extend([CorruptRecordError("damaged"), ValueError("the end")])
    with pytest.raises(ValueError, match="the end"):
        fed.run.loop()
    assert [(message, str(error)) for message, error in fed.errors] == [(None, "damaged")]
    fed.engine.close()
    fed.assignment.close()


def test_room_of_parts() -> None:
    parts = [part_of("t", 0, range(5)), part_of("t", 0, range(5, 9))]
    size = int(parts[0].heads["size"][0])
    assert FetchLimit(100, 1 << 40).messages_of(parts) == 9
    assert FetchLimit(7, 1 << 40).messages_of(parts) == 7
    assert FetchLimit(100, 1).messages_of(parts) == 1, "the one that passes the limit"
    assert FetchLimit(100, size).messages_of(parts) == 1
    assert FetchLimit(100, size + 1).messages_of(parts) == 2
    assert FetchLimit(100, 6 * size).messages_of(parts) == 6
    assert FetchLimit(100, 6 * size + 1).messages_of(parts) == 7
