"""The dead letters of a group: reading ``%DLQ%group`` page by page, selecting letters, and how far the group is with them.

The *position* says which dead letters are dealt with: those before it were resent or purged. It is the committed offset of
the group DEAD_LETTER_GROUP in the dead-letter topic, so it is as durable as every committed offset. Nothing of the log is
deleted before it expires.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from commitmq.client.admin_results import GroupOffset
from commitmq.client.properties import user_properties
from commitmq.client.receiving.query import milliseconds
from commitmq.client.sending.options import shard
from commitmq.errors import CommitMQError, ProtocolError, RequestError, TopicNotFoundError
from commitmq.format.constants import DEAD_LETTER_GROUP, DEAD_LETTER_PASSES, Property, SysFlag
from commitmq.semantics.derived import without
from commitmq.semantics.retry import (
    DEAD_LETTER_STATE,
    UNDELIVERED_GROUP,
    dead_letter_topic,
    is_retry_topic,
    popped_topic,
)

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message


Request = Callable[..., "tuple[dict[str, Any], list[zmq.Frame]]"]
"""``request(role, op, fields, payload=())``: the answer and its frames."""

PAGE_MESSAGES: Final = 256
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"

_PAUSE_S: Final = 0.05
_INDEX_S: Final = 10.0
_COUNTER_AND_TIME: Final = 12  # the last characters of a unique id: ms since the month began 8, counter 4


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which dead letters: all conditions that are given must hold.

    ``topic`` is the original topic, ``tag`` and ``key`` are the message's. ``begin`` and ``end`` are the times at which it
    became a dead letter, in milliseconds or as datetimes, both inclusive. ``offsets`` are queue offsets of the dead letters.
    """

    topic: str | None = None
    tag: str | None = None
    key: str | None = None
    begin: int | datetime | None = None
    end: int | datetime | None = None
    offsets: Sequence[int] | None = None

    def matches(self, letter: DeadLetter) -> bool:
        """Whether ``letter`` is one of these."""
        message = letter.message
        begin, end = milliseconds(self.begin), milliseconds(self.end)
        return (
            (self.topic is None or letter.topic == self.topic)
            and (self.tag is None or message.tags == self.tag)
            and (self.key is None or self.key in message.keys)
            and (begin is None or message.store_timestamp >= begin)
            and (end is None or message.store_timestamp <= end)
            and (self.offsets is None or message.queue_offset in self.offsets)
        )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter. ``message`` is as it lies in the dead-letter topic, ``topic`` its original topic or None.

    ``state``: ``dead``; ``resent``, once it lies in its topic again; ``purged``, when the position is behind it and it was not
    resent.
    """

    message: Message
    topic: str | None
    state: str = "dead"

    @property
    def origin_id(self) -> str | None:
        """The offset message id that the message had in its original topic."""
        properties = self.message.properties
        return properties.get(Property.ORIGIN_MESSAGE_ID) or properties.get(DLQ_ORIGIN_MESSAGE_ID)

    @property
    def resend_id(self) -> str:
        """The unique id that the message gets when it is resent, always the same: so a second copy is noticed.

        Its form is that of every unique id (spec 2.10), with the time at which the message became a dead letter.
        """
        message = self.message
        text = f"{message.stored_topic} {message.queue_id} {message.queue_offset} {message.physical_offset}"
        digest = hashlib.sha256(f"{text} {message.store_timestamp}".encode()).hexdigest().upper()
        return digest[: 32 - _COUNTER_AND_TIME] + _month_ms(message.store_timestamp) + digest[-4:]

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON: the message, its original topic and id, and the state."""
        return {"state": self.state, "origin_topic": self.topic, "origin_id": self.origin_id, **self.message.to_json()}


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """``purged``: dead letters that were given up (with ``dry_run``: would be). ``positions``: where a resend begins."""

    group: str
    dry_run: bool
    purged: int
    positions: list[GroupOffset] = field(default_factory=list)


class DeadLetterCount(NamedTuple):
    """``dead``: the dead letters of ``group`` that a resend would look at. Those that a filtered resend took out are in it."""

    group: str
    dead: int


class DeadLetterPage(NamedTuple):
    """Dead letters of one queue, in order. ``next_offset`` is where the next page begins."""

    queue: int
    letters: list[DeadLetter]
    next_offset: int


class DeadLetterQueue:
    """The dead letters of one group that exist now; later ones belong to the next look."""

    def __init__(self, request: Request, group: str) -> None:
        """Raises ProtocolError TOPIC_NOT_EXIST when the group has no dead-letter topic."""
        self.group = group
        self.topic = dead_letter_topic(group)
        self._request = request
        try:
            answer, _ = request("reader", "offsets", {"topic": self.topic})
        except TopicNotFoundError:
            raise TopicNotFoundError(
                "TOPIC_NOT_EXIST", f"group {group} has no dead letters: topic {self.topic} does not exist"
            ) from None
        self.begins = {int(row[0]): int(row[1]) for row in answer["queues"]}
        self.ends = {int(row[0]): int(row[2]) for row in answer["queues"]}

    def positions(self) -> dict[int, int]:
        """The position in each queue."""
        wanted = [[self.topic, queue] for queue in self.begins]
        answer, _ = self._request("coordinator", "offset.fetch", {"group": DEAD_LETTER_GROUP, "queues": wanted})
        return {queue: max(offset, self.begins[queue]) for _, queue, offset in answer["offsets"]}

    def move(self, positions: dict[int, int], *, purges: bool = False) -> list[GroupOffset]:
        """Move the position ahead, durably. One that is further already stays; returns the position of each of the queues.

        ``purges``: the audit log has it as ``dlq.purge``.
        """
        offsets = [[self.topic, queue, offset] for queue, offset in positions.items()]
        fields: dict[str, Any] = {"group": DEAD_LETTER_GROUP, "offsets": offsets}
        answer, _ = self._request("coordinator", "offset.commit", {**fields, "by_person": True} if purges else fields)
        return [GroupOffset(*one[:3]) for one in answer["stored"]]

    def pages(self, queue: int, offset: int, most: int = PAGE_MESSAGES) -> Iterator[DeadLetterPage]:
        """The dead letters of ``queue`` from ``offset`` on, up to ``most`` at a time."""
        end = self.ends[queue]
        while offset < end:
            fields = {"topic": self.topic, "queue": queue, "offset": offset, "max_messages": min(most, end - offset)}
            answer, frames = self._request("reader", "pull", fields)
            letters = [self._letter(one) for one in _messages(self.topic, queue, frames)]
            following = min(int(answer["next_offset"]), end)
            yield DeadLetterPage(queue, [one for one in letters if one.message.queue_offset < end], following)
            if following <= offset:
                return
            offset = following

    def at(self, queue: int, offset: int) -> DeadLetter:
        """One dead letter. ProtocolError INVALID_PARAMETER when there is none."""
        if self.begins.get(queue, 0) <= offset < self.ends.get(queue, 0):
            for page in self.pages(queue, offset, 1):
                for letter in page.letters:
                    if letter.message.queue_offset == offset:
                        return letter
                break
        raise ProtocolError("INVALID_PARAMETER", f"{self.topic} has no message {offset} in queue {queue}")

    def dead(self) -> int:
        """How many dead letters a resend would look at."""
        positions = self.positions()
        return sum(max(end - positions[queue], 0) for queue, end in self.ends.items())

    def oldest(self, count: int, selected: DeadLetterFilter | None, *, all_states: bool) -> list[DeadLetter]:
        """The oldest of those that are ``selected``; without ``all_states`` only those that a resend would send."""
        wanted = selected or DeadLetterFilter()
        resent = self._resent()
        found: list[DeadLetter] = []
        for queue, position in self.positions().items():
            for page in self.pages(queue, self.begins[queue] if all_states else position):
                for letter in page.letters:
                    if len(found) == count:
                        return found
                    if wanted.matches(letter):
                        letter = _with_state(letter, position, resent)
                        if all_states or letter.state == "dead":
                            found.append(letter)
        return found

    def show(self, queue: int, offset: int) -> DeadLetter:
        """One dead letter with its state. Raises as :meth:`at`."""
        return _with_state(self.at(queue, offset), self.positions()[queue], self._resent())

    def purge(self, until: int | datetime | None, *, dry_run: bool) -> PurgeResult:
        """Move the position behind all dead letters, or behind those up to ``until``."""
        positions = self.positions()
        targets = dict(self.ends)
        if until is not None:
            fields = {"topic": self.topic, "timestamp": (milliseconds(until) or 0) + 1}
            answer, _ = self._request("reader", "offsets", fields)
            by_time = {int(row[0]): row[1] if row[3] is None else row[3] for row in answer["queues"]}
            targets = {queue: min(by_time.get(queue, end), end) for queue, end in targets.items()}
        moves = {queue: at for queue, at in targets.items() if at > positions[queue]}
        purged = self._not_resent({queue: (positions[queue], at) for queue, at in moves.items()})
        if moves and not dry_run:
            self.move(moves, purges=True)
            positions |= moves
        return PurgeResult(
            self.group, dry_run, purged, [GroupOffset(self.topic, queue, at) for queue, at in positions.items()]
        )

    def _not_resent(self, parts: dict[int, tuple[int, int]]) -> int:
        """How many dead letters of these parts of queues were not resent; all, where no resend began or no index tells."""
        whole = sum(end - first for first, end in parts.values())
        resent = self._resent()
        count = 0
        try:
            self._request("reader", "offsets", {"topic": DEAD_LETTER_PASSES})
            for queue, (first, end) in parts.items():
                for page in self.pages(queue, first):
                    mine = [one for one in page.letters if one.message.queue_offset < end]
                    count += sum(not resent.has(one) for one in mine)
                    if page.next_offset >= end:
                        break
        except TopicNotFoundError:
            return whole
        except ProtocolError as error:
            if error.code != "SERVICE_NOT_AVAILABLE":
                raise
            return whole
        return count

    def _resent(self) -> Resent:
        deadline = time.monotonic() + _INDEX_S

        def wait() -> None:
            if time.monotonic() > deadline:
                raise ProtocolError("SERVICE_NOT_AVAILABLE", f"the index is behind the log for {_INDEX_S:g} s")
            time.sleep(_PAUSE_S)

        return Resent(self._request, wait=wait)

    def _letter(self, message: Message) -> DeadLetter:
        properties = message.properties
        topic = properties.get(Property.RETRY_TOPIC) or properties.get(DLQ_ORIGIN_TOPIC)
        if topic is None and self.group == UNDELIVERED_GROUP:
            topic = properties.get(Property.REAL_TOPIC)
        if topic is not None:
            topic = popped_topic(topic, self.group)
        return DeadLetter(message, None if topic is None or is_retry_topic(topic) else topic)


class Resent:
    """Says which dead letters lie in their topics again, by the index of the node.

    The first answer fixes the end of the log up to which it looks; the index must have come so far.
    """

    def __init__(self, request: Request, *, wait: Callable[[], None]) -> None:
        """``wait`` is called while the index is behind; it raises when that takes too long."""
        self._request, self._wait = request, wait
        self._up_to: int | None = None

    def has(self, letter: DeadLetter, *, deleted: bool = False) -> bool:
        """Whether the letter lies in its topic again; with ``deleted`` also if that topic was deleted since.

        Raises ProtocolError SERVICE_NOT_AVAILABLE when the index cannot tell.
        """
        if letter.topic is None:
            return False
        following: str | None = None
        while True:
            fields = {"topic": letter.topic, "key": letter.resend_id, "type": "unique", "max": 1}
            more = {"up_to": self._up_to, "next": following, "deleted": deleted or None}
            try:
                answer, _ = self._request("reader", "query", fields | {k: v for k, v in more.items() if v is not None})
            except TopicNotFoundError:
                return False  # its topic was deleted
            self._up_to = int(answer["log_end"])
            if answer["count"]:
                return True
            if answer["indexed_to"] < self._up_to:
                self._wait()
                continue
            following = answer["next"]
            if following is None:
                if not answer["complete"]:
                    raise ProtocolError(
                        "SERVICE_NOT_AVAILABLE", f"the index cannot say what of topic {letter.topic} was resent: look at it"
                        " with `commitmq dispatcher list`",
                    )  # fmt: skip
                return False


def _with_state(letter: DeadLetter, position: int, resent: Resent) -> DeadLetter:
    is_behind = letter.message.queue_offset < position
    if resent.has(letter, deleted=is_behind):
        return replace(letter, state="resent")
    return replace(letter, state="purged") if is_behind else letter


def _messages(topic: str, queue: int, frames: Sequence[zmq.Frame]) -> Iterator[Message]:
    from commitmq.client.receiving.query import batch_of

    return iter(batch_of(topic, [frame.buffer for frame in frames]))


def _month_ms(when_ms: int) -> str:
    """Eight hex digits: the milliseconds from the beginning of the month (UTC) to ``when_ms``."""
    when = datetime.fromtimestamp(when_ms / 1000, UTC)
    start = datetime(when.year, when.month, 1, tzinfo=UTC)
    return f"{when_ms - int(start.timestamp() * 1000) & 0xFFFFFFFF:08X}"


_MAX_FAILURES: Final = 100
_COMPRESSED: Final = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK
_EPOCH_NS: Final = 10_000
_KEPT: Final = (Property.TAGS, Property.KEYS, Property.SHARDING_KEY)
_REFUSED_LETTER: Final = frozenset(
    ("TOPIC_NOT_EXIST", "NO_PERMISSION", "MESSAGE_ILLEGAL", "INVALID_PARAMETER", "PROPERTIES_SIZE_EXCEEDED")
)

Progress = Callable[[int, int], object]
"""Called with the dead letters that were looked at, and their number."""


@dataclass(frozen=True, slots=True)
class ResendFailure:
    """A dead letter that stays one: its place in the dead-letter topic, its original topic, and why."""

    queue: int
    offset: int
    topic: str | None
    reason: str


@dataclass(slots=True)
class ResendResult:
    """What a pass did. ``sent`` (with ``dry_run``: would be sent), ``sent_before`` (by an earlier pass), ``left`` (not in the
    filter), ``failed``; ``failures`` has the first 100 of them. ``topics`` has the number sent to each topic. ``positions``
    is where the next pass begins. ``complete``: False when ``max_messages`` ended the pass.
    """

    group: str
    dry_run: bool
    sent: int = 0
    sent_before: int = 0
    left: int = 0
    failed: int = 0
    complete: bool = True
    topics: dict[str, int] = field(default_factory=dict)
    failures: list[ResendFailure] = field(default_factory=list)
    positions: list[GroupOffset] = field(default_factory=list)

    @property
    def examined(self) -> int:
        """Dead letters that the pass has looked at."""
        return self.sent + self.sent_before + self.left + self.failed


def resent_properties(letter: DeadLetter) -> dict[str, str]:
    """The properties of ``letter`` when it is sent again: those of its sender, its origin, and its resend id.

    What the retries left there goes. ``DLQ_ORIGIN_TOPIC`` and ``DLQ_ORIGIN_MESSAGE_ID`` are RocketMQ's names (spec 2.6).
    """
    stored = letter.message.properties
    properties = {name: stored[name] for name in _KEPT if stored.get(name)}
    own = user_properties(stored)
    properties.update({name: value for name, value in own.items() if name not in DEAD_LETTER_STATE and value})
    properties[DLQ_ORIGIN_TOPIC] = str(letter.topic)
    if letter.origin_id:
        properties[DLQ_ORIGIN_MESSAGE_ID] = letter.origin_id
    properties[Property.UNIQUE_KEY] = letter.resend_id
    return properties


class ResendPass:
    """Sending dead letters to their topics again, each once, however often the work is interrupted and repeated.

    One *pass* goes through the dead letters from the position on. A letter that is resent has a unique id that follows from
    its place (:attr:`DeadLetter.resend_id`), so a later pass finds it with the index and leaves it out. Three things make
    this certain:

    * Every request of a pass carries a producer id, which is the group's, and an epoch, which is the time at which the pass
      began. The first one stores a line in the topic DEAD_LETTER_PASSES. From then on the node refuses what an earlier pass
      may still have under way, and what an earlier pass that sleeps will send.
    * Then a letter is looked up. The index must have come to the end of the log behind that line.
    * A request without an answer is repeated under its number, which the node stores once.

    So it does not matter where a pass dies. Before the line: nothing was sent. Between a letter and the commit of the
    position: the next pass finds the letter in the index. After the commit: the next pass begins behind it.

    The position moves only over letters that were resent. A letter that the filter leaves out, or whose topic does not take
    it, stays behind, and so does the position; letters behind it are resent all the same.

    One pass; :meth:`run` once.
    """

    def __init__(
        self,
        request: Request,
        letters: DeadLetterQueue,
        selected: DeadLetterFilter | None,
        *,
        rate: float,
        max_messages: int | None,
        dry_run: bool,
        timeout_s: float,
        on_progress: Progress | None,
    ) -> None:
        """``rate``: letters sent a second. ``timeout_s``: for one letter that the node cannot take now."""
        self._request, self._letters, self._filter = request, letters, selected or DeadLetterFilter()
        self._pace_s, self._most = 1 / rate, max_messages
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._result = ResendResult(letters.group, dry_run)
        self._resent = Resent(request, wait=self._wait_for_index)
        self._waits_until = 0.0
        self._next_at = 0.0
        self._numbers: Counter[tuple[str, int]] = Counter()
        self._queues: dict[str, int | ProtocolError] = {}
        self._sender: dict[str, Any] | None = None  # once the pass has begun to send

    def run(self) -> ResendResult:
        """Raises ProtocolError, NodeUnavailableError, CorruptRecordError; what was sent until then counts."""
        letters, result = self._letters, self._result
        positions = letters.positions()
        total = sum(max(letters.ends[queue] - at, 0) for queue, at in positions.items())
        for queue, position in positions.items():
            stays = False
            for page in letters.pages(queue, position):
                reached = position
                for letter in page.letters:
                    if self._is_enough():
                        break
                    stays = not self._deal_with(letter) or stays
                    reached = reached if stays else letter.message.queue_offset + 1
                else:
                    reached = reached if stays else page.next_offset
                position = self._move(queue, position, reached)
                if self._on_progress is not None:
                    self._on_progress(result.examined, total)
                if self._is_enough():
                    break
            result.positions.append(GroupOffset(letters.topic, queue, position))
        result.complete = result.examined >= total or not self._is_enough()
        return result

    def _is_enough(self) -> bool:
        return self._most is not None and self._result.sent >= self._most

    def _move(self, queue: int, position: int, reached: int) -> int:
        if reached == position or self._result.dry_run:
            return position
        return self._letters.move({queue: reached})[0].offset

    def _deal_with(self, letter: DeadLetter) -> bool:
        """False when ``letter`` stays a dead letter."""
        result = self._result
        if not self._filter.matches(letter):
            result.left += 1
            return False
        try:
            queues = self._queues_of(letter)
            if not result.dry_run:
                self._begin()
            if self._is_there(letter):
                result.sent_before += 1
                return True
            if not result.dry_run:
                self._throttle()
                self._send(letter, queues)
        except RequestError as error:
            if error.code not in _REFUSED_LETTER:
                raise
            result.failed += 1
            if len(result.failures) < _MAX_FAILURES:
                message = letter.message
                failure = ResendFailure(message.queue_id, message.queue_offset, letter.topic, error.message)
                result.failures.append(failure)
            return False
        result.sent += 1
        result.topics[str(letter.topic)] = result.topics.get(str(letter.topic), 0) + 1
        return True

    def _queues_of(self, letter: DeadLetter) -> int:
        """The number of queues of the letter's topic. Raises ProtocolError when it cannot go there."""
        if letter.topic is None:
            raise ProtocolError("TOPIC_NOT_EXIST", "it does not say from which topic it came (RETRY_TOPIC)")
        known = self._queues.get(letter.topic)
        if known is None:
            try:
                answer, _ = self._request("coordinator", "topic.describe", {"topic": letter.topic})
                known = int(answer["topic"]["write_queues"])
                if known < 1:
                    known = ProtocolError("NO_PERMISSION", f"topic {letter.topic} has no queues to write to")
            except ProtocolError as error:
                if error.code != "TOPIC_NOT_EXIST":
                    raise
                known = error
            self._queues[letter.topic] = known
        if isinstance(known, ProtocolError):
            raise known
        return known

    def _is_there(self, letter: DeadLetter) -> bool:
        self._waits_until = time.monotonic() + self._timeout_s
        return self._resent.has(letter)

    def _wait_for_index(self) -> None:
        if time.monotonic() >= self._waits_until:
            raise ProtocolError(
                "SERVICE_NOT_AVAILABLE", f"the index is behind the log for {self._timeout_s:g} s, and only it tells which dead"
                " letters were resent: look at it with `commitmq dispatcher list`",
            )  # fmt: skip
        time.sleep(_PAUSE_S)

    def _throttle(self) -> None:
        now = time.monotonic()
        if now < self._next_at:
            time.sleep(self._next_at - now)
        self._next_at = max(self._next_at, now) + self._pace_s

    # ------------------------------------------------------------ sending

    def _begin(self) -> None:
        """Begin the pass in the node: what an earlier one still has under way is refused from now on."""
        if self._sender is not None:
            return
        self._request(
            "coordinator", "topic.create", {"topic": DEAD_LETTER_PASSES, "queues": 1, "resends": self._letters.group}
        )
        name = "dead-letters-" + hashlib.sha256(self._letters.group.encode()).hexdigest()[:32]
        self._sender = {"producer_id": name, "producer_epoch": time.time_ns() // _EPOCH_NS}
        line = {"group": self._letters.group, "epoch": self._sender["producer_epoch"]}
        identity = hashlib.sha256(orjson.dumps(line)).hexdigest()[:32].upper()
        self._put(
            DEAD_LETTER_PASSES, 0, orjson.dumps(line), {"KEYS": self._letters.group, Property.UNIQUE_KEY: identity}
        )

    def _send(self, letter: DeadLetter, queues: int) -> None:
        message = letter.message
        key = message.sharding_key
        queue = shard(key, queues) if key else message.queue_offset % queues
        more = {"flag": message.flag, "sys_flag": message.sys_flag & _COMPRESSED}
        properties = resent_properties(letter)
        # It grows by its origin, its resend id and the mark of the pass. The origin goes where there is no room for it;
        # without room for the others the letter stays one.
        tries = [properties, *without(properties, (DLQ_ORIGIN_MESSAGE_ID, DLQ_ORIGIN_TOPIC))]
        for number, one in enumerate(tries, 1):
            try:
                self._put(str(letter.topic), queue, message.raw_body, one, **more)
                return
            except RequestError as error:
                if error.code != "PROPERTIES_SIZE_EXCEEDED" or number == len(tries):
                    raise

    def _put(self, topic: str, queue: int, body: bytes, properties: dict[str, str], **more: int) -> None:
        """Send one message under the next number of the queue, until the node has stored it."""
        assert self._sender is not None
        fields = {
            **self._sender,
            "topic": topic,
            "queue": queue,
            "sequence": self._numbers[topic, queue],
            "properties": properties,
            "born": time.time_ns() // 1_000_000,
            "ack": "flushed",
            **more,
        }
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                answer, _ = self._request("writer", "send", fields, payload=[body])
                break
            except RequestError as error:
                if error.code in ("PRODUCER_FENCED", "OUT_OF_ORDER_SEQUENCE"):
                    raise self._overtaken() from error
                pause_s = max(_PAUSE_S, (error.retry_after_ms or 0) / 1000)
                if not error.retryable or time.monotonic() + pause_s >= deadline:
                    raise
                time.sleep(pause_s)
        if answer.get("duplicate") and answer["stored_before"][0][3] != properties[Property.UNIQUE_KEY]:
            raise self._overtaken()  # another pass began within the same 10 µs
        self._numbers[topic, queue] += 1

    def _overtaken(self) -> CommitMQError:
        return CommitMQError(
            f"another resend of the dead letters of group {self._letters.group} has begun; this one ends here, and nothing"
            " is lost or doubled"
        )
