"""A run: one request with the records of one topic and queue, on its way to a process of the node.

A run knows its outcome's receivers, and the connection does not: :class:`MessagesRun` has single messages, each with a future;
the run of a batch is in :mod:`commitmq.client.sending.batch`. Both are answered, lost, expired and given back in one way, so
the connection, the numbering of idempotent producers and the pump treat all runs alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from commitmq.client.results import RunAck
from commitmq.client.sending.send_future import SendFuture, finish_run
from commitmq.errors import SendError

if TYPE_CHECKING:
    from commitmq.client.sending.send_core import SendCore

NEVER_S: Final = float("inf")
MakeError = Callable[[], SendError]


class NotYet(Exception):
    """Nobody tells the topic's queues, because the node does not answer. The next try may succeed."""


class Run:
    """See the module. All methods belong to the owner of the connection.

    ``fields`` is the request's header without its id, ``data`` its payload. ``sequence`` is the number of the first message in
    its queue, for an idempotent producer; ``order`` counts the first sending of its runs.
    """

    __slots__ = ("count", "data", "fields", "in_doubt", "order", "queue", "refused_sequence", "sequence", "topic")

    def __init__(self, topic: str, queue: int, count: int, fields: dict[str, Any], data: bytes) -> None:
        self.topic = topic
        self.queue = queue
        self.count = count
        self.fields = fields
        self.data = data
        self.sequence: int | None = None
        self.order = 0
        self.in_doubt = False  # the connection took it once, and no answer came
        self.refused_sequence = False  # the node refused its numbers, and not its messages

    def stored(self, answer: dict[str, Any]) -> None:
        """The node has stored it and says where."""
        raise NotImplementedError

    def failed(self, make_error: MakeError, answer: dict[str, Any] | None = None) -> None:
        """It has failed for good. ``answer`` is the node's refusal, where there is one. A second call changes nothing."""
        raise NotImplementedError

    def expire(self, now: float, make_error: MakeError) -> float:
        """Fail whatever is out of time; returns the next deadline, NEVER_S when nobody waits for this run any more."""
        raise NotImplementedError

    def give_back(self) -> None:
        """It is certainly not stored: its messages wait again, before those that came after them."""
        raise NotImplementedError


class MessagesRun(Run):
    """A run of single messages, each of which has a future. ``group`` is where they waited: topic, queue or -1, ack."""

    __slots__ = ("core", "futures", "group", "sizes", "unique")

    def __init__(
        self,
        core: SendCore,
        group: tuple[str, int, str],
        queue: int,
        futures: list[SendFuture],
        sizes: list[int],
        unique: tuple[bytes, int],
        fields: dict[str, Any],
        data: bytes,
    ) -> None:
        super().__init__(group[0], queue, len(futures), fields, data)
        self.core = core
        self.group = group
        self.futures = futures
        self.sizes = sizes
        self.unique = unique

    def stored(self, answer: dict[str, Any]) -> None:
        prefix, counter = self.unique
        ack = RunAck(self.topic, self.queue, self.group[2], self.sizes, (prefix.decode(), counter), answer)
        self.core.resolve(self.futures, lambda futures: finish_run(futures, ack))

    def failed(self, make_error: MakeError, answer: dict[str, Any] | None = None) -> None:
        self.core.fail(self.futures, make_error)

    def expire(self, now: float, make_error: MakeError) -> float:
        late = [one for one in self.futures if one._state == "RUNNING" and one.deadline <= now]
        if late:
            self.core.fail(late, make_error)
        return min([one.deadline for one in self.futures if one._state == "RUNNING"], default=NEVER_S)

    def give_back(self) -> None:
        self.core.put_back(self.group, self.futures)
