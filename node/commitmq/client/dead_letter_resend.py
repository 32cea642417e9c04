"""Sending dead letters to their topics again, each once, however often the work is interrupted and repeated.

One *pass* goes through the dead letters from the position on. A letter that is resent has a unique id that follows from its
place (:attr:`DeadLetter.resend_id`), so a later pass finds it with the index and leaves it out. Three things make this
certain:

* Every request of a pass carries a producer id, which is the group's, and an epoch, which is the time at which the pass began.
  The first one stores a line in the topic DEAD_LETTER_PASSES. From then on the node refuses what an earlier pass may still
  have under way, and what an earlier pass that sleeps will send.
* Then a letter is looked up. The index must have come to the end of the log behind that line.
* A request without an answer is repeated under its number, which the node stores once.

So it does not matter where a pass dies. Before the line: nothing was sent. Between a letter and the commit of the position:
the next pass finds the letter in the index. After the commit: the next pass begins behind it.

The position moves only over letters that were resent. A letter that the filter leaves out, or whose topic does not take it,
stays behind, and so does the position; letters behind it are resent all the same.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from commitmq.client.admin_results import GroupOffset
from commitmq.client.dead_letters import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    DeadLetter,
    DeadLetterFilter,
    DeadLetters,
    Request,
    Resent,
)
from commitmq.client.properties import user_properties
from commitmq.client.sending.options import shard
from commitmq.errors import CommitMQError, ProtocolError, RequestError
from commitmq.format.constants import DEAD_LETTER_PASSES, Property, SysFlag
from commitmq.semantics.fitting import without
from commitmq.semantics.retry import DEAD_LETTER_STATE

DEFAULT_RATE: Final = 500.0
_MAX_FAILURES: Final = 100
_COMPRESSED: Final = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK
_EPOCH_NS: Final = 10_000
_PAUSE_S: Final = 0.05
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
    """One pass; :meth:`run` once."""

    def __init__(
        self,
        request: Request,
        letters: DeadLetters,
        selected: DeadLetterFilter,
        *,
        rate: float,
        max_messages: int | None,
        dry_run: bool,
        timeout_s: float,
        on_progress: Progress | None,
    ) -> None:
        """``rate``: letters sent a second. ``timeout_s``: for one letter that the node cannot take now."""
        self._request, self._letters, self._filter = request, letters, selected
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
