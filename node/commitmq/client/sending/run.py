"""A run: one request with the records of one topic and queue, on its way to a process of the node.

A run knows the receivers of its outcome; the lane does not. :class:`MessagesRun` has single messages, each with a
future. The run of a batch is in :mod:`commitmq.client.sending.batch`. The lane, the delivery policy and the pump treat
all runs alike: they are answered, lost, expired and returned in one way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final, Protocol

from commitmq.client.results import RunAck
from commitmq.client.sending.send_future import SendFuture, finish_run
from commitmq.errors import SendError

NEVER_S: Final = float("inf")
MAX_RUN_BYTES: Final = 1024 * 1024
"""The limit of a run of single messages."""
Group = tuple[str, int, str, str]
"""Topic, queue or -1, ack, the key of what the messages ask for or "": single messages of one group may travel in one run."""
MakeError = Callable[[], SendError]
Finish = Callable[[list[SendFuture]], tuple[list[SendFuture], list[SendFuture]]]


class SendCallback(Protocol):
    """Gets the outcomes of single messages: the outbox."""

    def resolve(self, futures: list[SendFuture], finish: Finish) -> None:
        """Resolve the futures of a stored run."""

    def fail(self, futures: list[SendFuture], make_error: MakeError) -> None:
        """Fail the futures that are not done."""

    def put_back(self, group: Group, futures: list[SendFuture]) -> None:
        """The messages wait again."""


class NotYet(Exception):
    """The queues of the topic are unknown, because the node does not answer. The next try may succeed."""


class Job(Protocol):
    """Something that waits in the outbox as a whole and leaves as runs: a batch, or a message that travels alone."""

    is_counted: bool
    """Whether it takes room in the outbox; the outbox's lock is held to read and to set it."""
    deadline: float
    """In monotonic seconds. Before it the first run has to be sent, later the next answer has to come."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def in_flight(self) -> int:
        """Runs that were passed on and have no outcome yet."""

    @property
    def more(self) -> bool:
        """Whether the job has another run to send."""

    @property
    def may_move(self) -> bool:
        """Whether it names no queue and nothing of it was passed on, so that another node may take all of it."""

    def __len__(self) -> int:
        """Number of messages."""
        ...

    def next_run(self, put_deadline: float, *, only: bool = False) -> SendRun | None:
        """The next run; None when there is none, or where ``only`` is set and it is not the only one. Raises NotYet."""

    def fail(self, error: SendError) -> None:
        """The job sends no further run."""

    def finish(self) -> None:
        """Tell the outcome: nothing is in flight, and no further run will be sent."""


class SendRun:
    """One request with the records of one topic and queue. Only the owner of the connection calls the methods.

    It has no ABCMeta, with which each ``isinstance`` of a lane would be a call of Python code.

    ``fields`` is the request's header without its id, ``data`` its payload. ``sequence`` is the number of the first message in
    its queue, for an idempotent producer; ``order`` counts the first sending of its runs.
    """

    __slots__ = (
        "count",
        "data",
        "fields",
        "in_doubt",
        "is_free",
        "order",
        "queue",
        "refused_sequence",
        "sent_at",
        "sequence",
        "topic",
    )

    def __init__(self, topic: str, queue: int, count: int, fields: dict[str, Any], data: bytes) -> None:
        self.topic = topic
        self.queue = queue
        self.count = count
        self.fields = fields
        self.data = data
        self.sequence: int | None = None
        self.order = 0
        self.sent_at = 0.0  # monotonic seconds, for a trace and for a watch
        self.is_free = False  # no message of it names a queue
        self.in_doubt = False  # the connection took it once, and no answer came
        self.refused_sequence = False  # the node refused its numbers, and not its messages

    @abstractmethod
    def stored(self, answer: dict[str, Any]) -> None:
        """The node has stored the run; ``answer`` has the place."""

    @abstractmethod
    def failed(self, make_error: MakeError, answer: dict[str, Any] | None = None) -> None:
        """The run has failed permanently. ``answer`` is the node's refusal, if there is one. A second call changes
        nothing.
        """

    @abstractmethod
    def expire(self, now: float, make_error: MakeError) -> float:
        """Fail the messages that timed out. Returns the next deadline; NEVER_S when all messages have their outcome."""

    @abstractmethod
    def give_back(self) -> None:
        """The run is not stored: its messages wait again, before later ones."""


class MessagesRun(SendRun):
    """A run of single messages, each of which has a future. ``group`` is where they waited."""

    __slots__ = ("futures", "group", "outbox", "sizes", "unique")

    def __init__(
        self,
        outbox: SendCallback,
        group: Group,
        queue: int,
        futures: list[SendFuture],
        sizes: list[int],
        unique: tuple[bytes, int],
        fields: dict[str, Any],
        data: bytes,
    ) -> None:
        super().__init__(group[0], queue, len(futures), fields, data)
        self.outbox = outbox
        self.group = group
        self.is_free = group[1] < 0
        self.futures = futures
        self.sizes = sizes
        self.unique = unique

    def stored(self, answer: dict[str, Any]) -> None:
        prefix, counter = self.unique
        ack = RunAck(self.topic, self.queue, self.group[2], self.sizes, (prefix.decode(), counter), answer)
        self.outbox.resolve(self.futures, lambda futures: finish_run(futures, ack))

    def failed(self, make_error: MakeError, answer: dict[str, Any] | None = None) -> None:
        self.outbox.fail(self.futures, make_error)

    def expire(self, now: float, make_error: MakeError) -> float:
        late = [one for one in self.futures if one._state == "RUNNING" and one.deadline <= now]
        if late:
            self.outbox.fail(late, make_error)
        return min([one.deadline for one in self.futures if one._state == "RUNNING"], default=NEVER_S)

    def give_back(self) -> None:
        self.outbox.put_back(self.group, self.futures)
