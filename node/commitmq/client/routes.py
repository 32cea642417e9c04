"""Where messages of a topic can go: how many queues it has, asked of the coordinator and remembered for a while."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from commitmq.client.sending.line import Line
from commitmq.errors import NodeUnavailableError, Outcome, RequestError, SendError, send_error
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH, STORAGE_MEMORY, STORAGE_TYPE

_TTL_S: Final = 10.0
_STALE_S: Final = 20.0  # until then what is known is used while it is asked again
_TYPE_PATIENCE_S: Final = 1.0
_FAILURE_S: Final = 2.0
_WRONG_KIND: Final = "MESSAGE_ILLEGAL"
_MAX_TOPICS: Final = 10_000


def not_stored(code: str, sentence: str, retry_after_ms: int | None = None) -> SendError:
    """The error of a send that certainly left nothing in the log."""
    return send_error(code, sentence, Outcome.NOT_STORED, retry_after_ms)


def unknown(sentence: str, code: str = "CONNECTION_LOST") -> SendError:
    """The error of a send that was passed on and not answered."""
    return send_error(code, f"{sentence}; whether it is stored is not known", Outcome.UNKNOWN)


class Routes:
    """Thread-safe; has a connection of its own, so that asking does not disturb sends under way."""

    def __init__(self, node: str | None) -> None:
        self._directory = Directory(node)
        self._coordinator: Channel | None = None
        self._line = Line()  # whose turn it is to ask
        self._known: dict[str, tuple[int, float, bool]] = {}  # queues to write to, when asked, kept in memory
        self._batch_topics: dict[str, tuple[bool, float]] = {}
        self._guessed: set[str] = set()  # topics in _batch_topics that nobody has told of
        self._refreshing: dict[str, None] = {}  # topics a thread asks for again; it runs while there are any
        self._refreshing_lock = threading.Lock()
        self._failures: dict[
            str, tuple[SendError, float]
        ] = {}  # and when, of topics that were asked for in the background
        self.told: Callable[[str], None] = lambda _topic: None
        """Called in a thread of its own when a topic that was asked for in the background has its outcome."""
        self.patience_s = math.inf
        """No question to the coordinator takes longer."""
        self.away: Callable[[SendError], None] = lambda _error: None
        """Called when the coordinator does not answer, in the thread that asked."""
        self._closed = False
        self._turns: dict[str, int] = {}  # one a topic: with a common one, topics sent to in turn would skip queues
        self._first_turn = int.from_bytes(os.urandom(2), "big")  # so that many short-lived producers use all queues

    def queues(self, topic: str, deadline: float) -> int:
        """Number of queues of ``topic`` that can be written to; the topic is created if the node does that.

        Raises SendError (not stored). A known number is used while the coordinator is away.
        """
        known = self._known.get(topic)
        if known is not None:
            age_s = time.monotonic() - known[1]
            if age_s < _TTL_S:
                return known[0]
            if age_s < _STALE_S:
                self._refresh(topic)
                return known[0]
        return self._look_up(topic, known, deadline)

    def fresh(self, topic: str) -> bool:
        """Whether :meth:`queues` and :meth:`is_memory` answer without waiting for the coordinator."""
        known = self._known.get(topic)
        return known is not None and time.monotonic() - known[1] < _STALE_S - 1.0

    def ask(self, topic: str) -> SendError | None:
        """Ask for ``topic`` in the background, unless that is under way; :attr:`told` hears of the end.

        Returns the error of the last time, once: then nothing is asked.
        """
        failure = self._failures.pop(topic, None)
        if failure is not None and time.monotonic() - failure[1] < _FAILURE_S:
            return failure[0]
        if topic not in self._refreshing:
            self._refresh(topic)
        return None

    def _look_up(self, topic: str, known: tuple[int, float, bool] | None, deadline: float) -> int:
        line, ticket = self._line, Line.ticket()
        deadline = min(deadline, time.monotonic() + self.patience_s)
        try:
            line.append(ticket)
            if not line.wait(ticket, deadline):
                if known is not None:
                    return known[0]
                raise not_stored("NODE_UNAVAILABLE", "the coordinator does not answer")
            answer = self._ask("topic.route", {"topic": topic, "create": True}, deadline)
        except NodeUnavailableError as error:
            if known is not None:
                self._known[topic] = (known[0], time.monotonic(), known[2])
                return known[0]
            problem = not_stored(error.code, error.message)
            self.away(problem)
            raise problem from error
        except RequestError as error:
            raise send_error(error.code, error.message, Outcome.NOT_STORED, error.retry_after_ms) from error
        finally:
            line.remove(ticket)
            line.wake()
        count = int(answer["topic"]["write_queues"])
        if count < 1:
            raise not_stored("NO_PERMISSION", f"topic {topic!r} has no queue that can be written to")
        attributes = answer["topic"].get("attributes", {})
        in_memory = attributes.get(STORAGE_TYPE) == STORAGE_MEMORY
        self._known[topic] = (count, time.monotonic(), in_memory)
        self._note_type(topic, attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH)
        return count

    def reply_topic(self, deadline: float) -> tuple[str, int]:
        """The topic of replies, which the coordinator makes at need, and its number of queues.

        Raises SendError (not stored).
        """
        line, ticket = self._line, Line.ticket()
        try:
            line.append(ticket)
            if not line.wait(ticket, deadline):
                raise not_stored("NODE_UNAVAILABLE", "the coordinator does not answer")
            topic = self._ask("topic.reply", {}, deadline)["topic"]
        except SendError:
            raise
        except RequestError as error:
            raise send_error(error.code, error.message, Outcome.NOT_STORED, error.retry_after_ms) from error
        finally:
            line.remove(ticket)
            line.wake()
        return str(topic["name"]), int(topic["read_queues"])

    def _refresh(self, topic: str) -> None:
        """Ask again for a topic in use, in a thread, so that no send waits for it."""
        with self._refreshing_lock:
            begins = not self._refreshing
            self._refreshing[topic] = None
        if begins:
            threading.Thread(target=self._refresh_all, name="commitmq-producer-routes", daemon=True).start()

    def _refresh_all(self) -> None:
        while True:
            with self._refreshing_lock:
                topic = next(iter(self._refreshing), None)
            if topic is None or self._closed:
                return
            try:
                self._look_up(topic, self._known.get(topic), time.monotonic() + _TYPE_PATIENCE_S)
            except SendError as error:
                self.forget(topic)  # the next send to it asks for itself and hears why
                if len(self._failures) >= _MAX_TOPICS:
                    self._failures.clear()
                self._failures[topic] = (error, time.monotonic())
            with self._refreshing_lock:
                self._refreshing.pop(topic, None)
                is_last = not self._refreshing
            self.told(topic)
            if is_last:
                return

    def takes_inner_batches(self, topic: str, deadline: float) -> bool:
        """True when the topic's queues count batches, so that messages come as inner batches. Never raises.

        Without an answer in a second the last one holds, and a topic never heard of is taken for a plain one: a send whose
        queue is given does not depend on the coordinator, and the node refuses what does not fit (:meth:`guessed_wrong`).
        """
        known = self._batch_topics.get(topic)
        if known is None or time.monotonic() - known[1] >= _TTL_S:
            with contextlib.suppress(SendError):
                self.queues(topic, min(deadline, time.monotonic() + _TYPE_PATIENCE_S))
            if self._batch_topics.get(topic) is known:  # no answer
                self._note_type(topic, known is not None and known[0])
                if known is None:
                    self._guessed.add(topic)
        return self._batch_topics[topic][0]

    def _note_type(self, topic: str, is_batch: bool) -> None:
        if len(self._batch_topics) >= _MAX_TOPICS:
            self._batch_topics.clear()
            self._guessed.clear()
        self._batch_topics[topic] = (is_batch, time.monotonic())
        self._guessed.discard(topic)

    def is_guess(self, topic: str) -> bool:
        """Whether the kind of the topic's queues is not known: the coordinator has never answered."""
        return topic in self._guessed

    def guessed_wrong(self, topic: str, error: SendError, deadline: float) -> bool:
        """After a refused batch: whether it was one of the wrong kind by a guess, and the kind is known now.

        Raises SendError (not stored, to be tried again) when the coordinator does not answer until ``deadline``.
        """
        if not self.is_guess(topic) or error.code != _WRONG_KIND or error.outcome is not Outcome.NOT_STORED:
            return False
        self.forget(topic)
        self.queues(topic, deadline)
        return True

    def is_memory(self, topic: str, deadline: float) -> bool:
        """True for a topic that the node keeps in memory: another process takes its messages.

        Asked once a topic, and again after :meth:`forget`. A topic that the coordinator says nothing of counts as one
        of the log: who takes sends to it knows better and says so.
        """
        known = self._known.get(topic)
        if known is None:
            try:
                self.queues(topic, deadline)
            except SendError:
                return False
            known = self._known.get(topic)
        return known is not None and known[2]

    def forget(self, topic: str) -> None:
        """Ask again before the next send to ``topic``: its queues may have changed."""
        self._known.pop(topic, None)
        self._batch_topics.pop(topic, None)

    def next_queue(self, topic: str, deadline: float) -> int:
        """Round robin over the topic's queues. Raises as :meth:`queues`."""
        queues = self.queues(topic, deadline)
        turn = self._turns.get(topic, self._first_turn) + 1
        if len(self._turns) >= _MAX_TOPICS:
            self._turns.clear()
        self._turns[topic] = turn
        return turn % queues

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        line, ticket = self._line, Line.ticket()
        try:
            line.append(ticket)
            line.wait(ticket, math.inf)  # who asks has a deadline; a socket must not be closed while it is used
            self._drop()
            self._directory.close()
        finally:
            line.remove(ticket)
            line.wake()

    def _ask(self, op: str, fields: dict[str, Any], deadline: float) -> dict[str, Any]:
        if self._closed:  # nobody would close another connection
            raise NodeUnavailableError("the producer is closed")
        while True:
            if self._coordinator is None or self._coordinator.lost_while_idle():
                self._drop()
                self._coordinator, _ = self._directory.connect("coordinator", deadline)
            try:
                return self._coordinator.request(op, fields, timeout_s=max(deadline - time.monotonic(), 0.01))[0]
            except NodeUnavailableError:
                self._drop()
                if time.monotonic() >= deadline:
                    raise

    def _drop(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
