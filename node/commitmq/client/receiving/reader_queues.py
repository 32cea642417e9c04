"""The queues of a reader, which has no group: all queues that its topics have now, or the queues that it was given."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from commitmq.client.receiving.assignment import (
    Assignment,
    Begin,
    Queue,
    Start,
    for_new_queues,
    new_state,
    start_offsets,
)
from commitmq.client.receiving.commits import Committer
from commitmq.client.receiving.position_file import Positions
from commitmq.client.receiving.settings import ConsumerSettings
from commitmq.errors import NodeUnavailableError, RequestError
from commitmq.log import get_log
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory

_INTERVAL_S: Final = 3.0
_RETRY_S: Final = 1.0
# A look within a poll may last so long.
_MOST_S: Final = 0.3
_LEAST_S: Final = 0.1
_ANY: Final = -2  # the incarnation of positions in a file of RocketMQ

_log = get_log("consumer")


class ReaderQueues:
    """Looks at the topics again and again, and keeps ``assignment`` equal to the queues that they have.

    A reader without a group has no other use for ``committer`` than its channel to the coordinator.
    """

    def __init__(
        self, directory: Directory, assignment: Assignment, committer: Committer, settings: ConsumerSettings
    ) -> None:
        self._directory = directory
        self._assignment = assignment
        self._committer = committer
        self._topics = settings.topics
        self._given = settings.queues
        self._start = settings.start
        self._look_at = 0.0
        self._has_looked = False
        # Where the reader was in a queue that its topic lost, by queue and incarnation of the topic.
        self._left: dict[tuple[Queue, int], Begin] = {}
        self._known: dict[str, int] = {}  # incarnations of topics that were read before, by an earlier consumer
        self._missing: set[str] = set()  # topics that do not exist, and of which the log said so
        self._reader: Channel | None = None

    def go_on(self, kept: Positions) -> None:
        """Begin at the positions that an earlier consumer left."""
        for queue, offset in kept.offsets.items():
            incarnation = kept.incarnations.get(queue[0], _ANY)
            self._left[queue, incarnation] = Begin(offset, offset, kept.log_generations.get(queue, -1))
            self._known[queue[0]] = incarnation

    def look_soon(self) -> None:
        """Have the next :meth:`look_if_due` look."""
        self._look_at = 0.0

    def look_if_due(self, deadline: float) -> None:
        """Look at the topics if the last look is too long ago. A node that is away is no error here."""
        now = time.monotonic()
        if now < self._look_at:
            return
        try:
            self.look(min(max(deadline, now + _LEAST_S), now + _MOST_S))
        except RequestError as error:
            passes = isinstance(error, NodeUnavailableError) or error.code == "CLIENT_ERROR"  # no descriptor is left
            if not passes and error.retry_after_ms is None:
                raise
            self._look_at = time.monotonic() + _RETRY_S

    def look(self, deadline: float) -> None:
        """Ask which queues the topics have, and take the changes into the assignment."""
        self._look_at = time.monotonic() + _INTERVAL_S
        counts, incarnations = self._ask_topics(deadline)
        wanted = list(self._given or ())
        if self._given is None:
            wanted += [(topic, queue) for topic, count in counts.items() for queue in range(count)]
        assignment = self._assignment
        old = assignment.of_old_incarnations(incarnations)
        with assignment.lock:
            # When the topic gets a lost queue again, the reader goes on where it was.
            gone = [key for key in assignment.owned if key not in wanted and key[0] in counts]
            for state in (assignment.owned[key] for key in gone):
                assignment.settle()
                self._left[state.key, state.incarnation] = Begin(state.delivered, state.delivered, state.log_generation)
            for key in {*old, *gone}:
                assignment.drop(assignment.owned[key])
        new = [queue for queue in wanted if queue not in assignment.owned]
        begin = self._begin(new, {topic for topic, _ in old}, incarnations, deadline)
        assignment.add(new_state(queue, begin[queue], -1, incarnations.get(queue[0], -1)) for queue in new)
        self._has_looked = True

    def _ask_topics(self, deadline: float) -> tuple[dict[str, int], dict[str, int]]:
        """Number of queues and incarnation of each topic that exists."""
        counts: dict[str, int] = {}
        incarnations: dict[str, int] = {}
        names = self._topics if self._given is None else [topic for topic, _ in self._given]
        for name in dict.fromkeys(names):
            try:
                topic = self._committer.ask("topic.route", {"topic": name}, deadline)["topic"]
            except RequestError as error:
                if error.code != "TOPIC_NOT_EXIST":
                    raise
                if name not in self._missing:
                    self._missing.add(name)
                    _log.warning("the topic does not exist yet; the consumer waits for it", topic=name)
                continue
            self._missing.discard(name)
            incarnations[name] = int(topic["incarnation"])
            counts[name] = int(topic["read_queues"])
        return counts, incarnations

    def _begin(
        self, new: list[Queue], made_anew: set[str], incarnations: Mapping[str, int], deadline: float
    ) -> dict[Queue, Begin]:
        """Where to begin in the queues ``new``; ``made_anew`` are topics that were deleted and made again."""
        begin: dict[Queue, Begin] = {}
        starts: dict[Start, list[Queue]] = {}
        # Every message of a new queue is new, and so is every message of a topic that was made anew.
        later = for_new_queues(self._start) if self._has_looked and self._given is None else self._start
        for queue in new:
            topic, incarnation = queue[0], incarnations.get(queue[0], -1)
            left = self._left.pop((queue, incarnation), self._left.pop((queue, _ANY), None))
            known = self._known.get(topic)
            if left is not None:
                begin[queue] = left
            elif known is not None:
                anew = known not in (_ANY, incarnation)
                starts.setdefault("earliest" if anew else for_new_queues(self._start), []).append(queue)
            else:
                starts.setdefault("earliest" if queue[0] in made_anew else later, []).append(queue)
        for start, queues in starts.items():
            begin.update(self._look_up(queues, start, incarnations, deadline))
        return begin

    def _look_up(
        self, queues: list[Queue], start: Start, incarnations: Mapping[str, int], deadline: float
    ) -> dict[Queue, Begin]:
        while True:
            if self._reader is None or self._reader.lost():
                self.close()
                self._reader, _ = self._directory.connect("reader", deadline)
            try:
                patience_s = max(deadline - time.monotonic(), 0.01)
                return start_offsets(self._reader, queues, start, timeout_s=patience_s, incarnations=incarnations)
            except NodeUnavailableError:
                self.close()
                if time.monotonic() >= deadline:
                    raise

    def close(self) -> None:
        """Close the connection to the reader process."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
