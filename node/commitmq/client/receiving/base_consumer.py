"""What a consumer and a reader share: polling batches of messages, alone or as a member of a group.

No message is skipped, whatever interrupts a poll or a callback: see :mod:`commitmq.client.receiving.assignment`.

The commits of a broadcasting consumer: into a file of its own. It takes the place of a group's committer.

The queues of a reader, which has no group: all queues that its topics have now, or the queues that it was given.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, Unpack

from commitmq.client import checks
from commitmq.client.closing import OwnClient
from commitmq.client.receiving.assignment import (
    Assignment,
    Gap,
    Queue,
    QueueState,
    Start,
    StartOffset,
    TakenBatch,
    for_new_queues,
    new_state,
    start_offsets,
)
from commitmq.client.receiving.membership import CommitProgress, Committer, GroupMember
from commitmq.client.receiving.position_file import PositionFile, SavedOffsets
from commitmq.client.receiving.settings import ConsumerSettings, GroupOptions, QueueCallbacks, RebalanceCallback
from commitmq.errors import CommitMQError, NodeUnavailableError, RequestError, StoreError
from commitmq.log import get_log
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory

if TYPE_CHECKING:
    from commitmq.client.handling.run import HandlerRun
    from commitmq.client.receiving.batch import MessageBatch


DEFAULT_MEMBER = "DEFAULT"

_log = get_log("consumer")


class LocalPositions:
    """Used by the thread that polls."""

    def __init__(self, settings: ConsumerSettings, assignment: Assignment) -> None:
        """Raises StoreError when another consumer has the file, or it cannot be read."""
        assert settings.group is not None
        self._group = settings.group
        self._assignment = assignment
        self._broker_name = ""
        self._file = PositionFile(settings.positions_folder, settings.member or DEFAULT_MEMBER, settings.group)
        try:
            self.kept = self._file.load()
        except BaseException:
            self._file.close()
            raise

    def begin(self, committer: Committer, deadline: float) -> None:
        """Ask the node whether the group may broadcast, and for the name that the file has for it. Raises ProtocolError."""
        answer = committer.ask("group.broadcast", {"group": self._group}, deadline)
        self._broker_name = str(answer["broker"])

    def close(self) -> None:
        self._file.close()

    def commit(self, progress: CommitProgress, deadline: float) -> dict[Queue, int]:
        """Keep these offsets. Raises StoreError."""
        if not progress.offsets:
            return {}
        # A topic's offsets are of one incarnation: what is kept of an earlier one goes.
        anew = {
            topic
            for topic, incarnation in progress.incarnations.items()
            if self.kept.incarnations.get(topic, incarnation) != incarnation
        }
        kept = self.kept
        offsets = {queue: offset for queue, offset in kept.offsets.items() if queue[0] not in anew}
        generations = {queue: one for queue, one in kept.log_generations.items() if queue not in progress.offsets}
        learnt = {queue: one for queue, one in progress.log_generations.items() if queue in progress.offsets}
        made = SavedOffsets(
            {**offsets, **progress.offsets},
            {**kept.incarnations, **progress.incarnations},
            {**generations, **learnt},
        )
        self._file.store(made, self._broker_name)
        self.kept = made
        with self._assignment.lock:
            for key, offset in progress.offsets.items():
                state = self._assignment.owned.get(key)
                if state is not None:
                    state.committed = state.settled = offset
        return dict(progress.offsets)

    def commit_quietly(self, progress: CommitProgress, deadline: float) -> bool:
        """False when the disk refused: the caller tries again later."""
        try:
            self.commit(progress, deadline)
        except StoreError as error:
            _log.warning("positions could not be kept, it will be tried again", group=self._group, error=str(error))
            return False
        return True


_INTERVAL_S: Final = 3.0
_RETRY_S: Final = 1.0
# A look within a poll may last so long.
_MOST_S: Final = 0.3
_LEAST_S: Final = 0.1
_ANY: Final = -2  # the incarnation of positions in a file of RocketMQ


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
        self._left: dict[tuple[Queue, int], StartOffset] = {}
        self._known: dict[str, int] = {}  # incarnations of topics that were read before, by an earlier consumer
        self._missing: set[str] = set()  # topics that do not exist, and of which the log said so
        self._reader: Channel | None = None

    def go_on(self, kept: SavedOffsets) -> None:
        """Begin at the positions that an earlier consumer left."""
        for queue, offset in kept.offsets.items():
            incarnation = kept.incarnations.get(queue[0], _ANY)
            self._left[queue, incarnation] = StartOffset(offset, offset, kept.log_generations.get(queue, -1))
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
            # When the topic gets a lost queue again, the reader continues where it was.
            gone = [key for key in assignment.owned if key not in wanted and key[0] in counts]
            for state in (assignment.owned[key] for key in gone):
                assignment.settle()
                self._left[state.key, state.incarnation] = StartOffset(
                    state.delivered, state.delivered, state.log_generation
                )
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
    ) -> dict[Queue, StartOffset]:
        """Where to begin in the queues ``new``; ``made_anew`` are topics that were deleted and rebuilt."""
        begin: dict[Queue, StartOffset] = {}
        starts: dict[Start, list[Queue]] = {}
        # Every message of a new queue is new, and so is every message of a topic that was recreated.
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
    ) -> dict[Queue, StartOffset]:
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


_R = TypeVar("_R")

# An automatic commit keeps a poll so long at most. If the node does not answer, the consumer tries again after the pause.
_COMMIT_S: Final = 0.5
_LEAST_COMMIT_S: Final = 0.1
_COMMIT_PAUSE_S: Final = 1.0
# close() waits so long for a node that does not answer. An uncommitted message is delivered again.
_CLOSE_S: Final = 2.0


class BaseConsumer(OwnClient):
    """With a ``group`` it does what :class:`commitmq.Consumer` says, without one what :class:`commitmq.Reader` says."""

    _kind = "consumer"

    def __init__(
        self,
        topics: str | Iterable[str] = (),
        *,
        group: str | None,
        queues: Iterable[Queue] | None = None,
        node: str | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings."""
        # The puller needs numpy, and a program that only sends imports this class too, so the import is here.
        from commitmq.client.receiving.puller import Puller

        self._closed = True
        settings = self._settings = ConsumerSettings(topics, group=group, queues=queues, **options)
        self._pid = os.getpid()
        self._commit_at = 0.0
        self._lock = threading.RLock()  # held by every thread that uses the sockets
        self._user = 0  # the thread that holds it
        self._closing = False
        self._close_after: bool | None = None  # close(commit=…) that was called within a poll
        self._handled: BaseException | None = None
        self._handling: HandlerRun | None = None  # what run() set up; it stays when run is over
        self._callbacks = QueueCallbacks(on_assign, on_revoke)
        self._directory = Directory(node)
        self._assignment = Assignment(tells=on_revoke is not None)
        self._committer = Committer(self._directory, self._assignment)
        self._puller = Puller(self._directory, self._assignment, settings)
        self._queues = ReaderQueues(self._directory, self._assignment, self._committer, settings)
        self._member: GroupMember | None = None
        self._local: LocalPositions | None = None
        self._closed = False
        try:
            self._directory.metadata(timeout_s=settings.timeout_s)
            if settings.broadcasting:
                self._broadcast(time.monotonic() + settings.timeout_s)
            elif group is None:
                self._queues.look(time.monotonic() + settings.timeout_s)
            else:
                self._join(node, group)
        except BaseException:
            self.close(commit=False)
            raise

    def _broadcast(self, deadline: float) -> None:
        local = self._local = LocalPositions(self._settings, self._assignment)
        local.begin(self._committer, deadline)
        self._queues.go_on(local.kept)
        self._queues.look(deadline)
        # At once: a consumer that dies before its first commit must not begin at another "latest".
        local.commit(self._progress(list(self._assignment.owned.values()), delivered=False), deadline)

    @property
    def _keeper(self) -> Committer | LocalPositions | None:
        """Who keeps the offsets; nobody for a reader."""
        return self._local or (None if self._member is None else self._committer)

    def _join(self, node: str | None, group: str) -> None:
        settings = self._settings
        name = settings.member or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._member = self._committer.member = GroupMember(node, group, name, self._assignment, settings)
        self._member.start()
        if not self._member.wait_joined(settings.timeout_s):
            raise NodeUnavailableError(f"group {group!r} could not be joined within {settings.timeout_s} s")
        if self._member.error is not None:
            raise self._member.error

    # ------------------------------------------------------------ reading

    def poll(self, timeout_s: float = 1.0, max_messages: int = 10_000) -> MessageBatch:
        """The next messages: at least one if one arrives within ``timeout_s``, else an empty batch.

        The call says that the program is done with the previous batch. While the node restarts, batches are empty.

        Raises CorruptRecordError for a damaged record. The messages before it were returned, and the consumer stays
        there until :meth:`seek` skips the record. Raises ProtocolError for a lasting problem such as a bad filter,
        FencedError when another consumer has joined with this one's ``member`` name, CommitMQError when the consumer is
        closed.
        """
        taken = self._next(timeout_s, max_messages)
        # An exception such as Ctrl-C can come before this store, and then the next poll returns the batch. It can also come
        # behind the return. So nothing may stand between the two.
        self._assignment.returned = taken
        return taken.batch

    def __iter__(self) -> Iterator[MessageBatch]:
        """Batches with messages, one poll each, until the consumer is closed."""
        while not self.is_closed:
            taken = self._next(1.0, 10_000)
            if taken.portions:
                self._assignment.returned = taken  # as in poll
                yield taken.batch

    def _next(self, timeout_s: float, max_messages: int) -> TakenBatch:
        """What poll returns. It counts as delivered once it is the assignment's ``returned``."""
        if max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        timeout_s = checks.seconds("timeout_s", timeout_s, zero=True)
        if self._user == threading.get_ident():
            raise CommitMQError("a poll is under way: on_assign, on_revoke and signal handlers must not poll")
        return self._using(partial(self._fetch, time.monotonic() + timeout_s, max_messages))

    def _fetch(self, deadline: float, max_messages: int) -> TakenBatch:
        assignment, puller = self._assignment, self._puller
        self._handled = sys.exception()
        assignment.is_polling = True
        try:
            assignment.confirm()
            while True:
                self._keep_house(deadline)
                puller.ask(deadline)
                taken = puller.take(max_messages)
                if taken.portions:
                    break
                puller.raise_problem()
                remaining = deadline - time.monotonic()
                # Answers that have come are taken even if there is no time to wait.
                puller.wait(max(remaining, 0))
                if remaining <= 0 or self._closing:
                    taken = puller.take(max_messages)
                    break
            self._ask_ahead()
            return taken
        finally:
            assignment.is_polling = False
            assignment.polled_at = time.monotonic()

    def _ask_ahead(self) -> None:
        """Ask for the next messages while the program works on a batch. The next poll raises an error that lasts."""
        try:
            self._puller.ask(time.monotonic())
        except (CommitMQError, OSError) as error:
            _log.debug("cannot ask for more messages", error=str(error))

    def seek(self, topic: str, queue: int, offset: int) -> None:
        """Read ``queue`` from ``offset`` on. Raises ValueError for a queue that is not assigned to this consumer.

        With an offset behind the queue's end the consumer continues at the end, and ``gaps`` tells of it. Such an
        offset is not committed.
        """
        self._using(partial(self._seek, (topic, queue), checks.offset("a queue offset", offset)))

    def _seek(self, key: Queue, offset: int) -> None:
        with self._assignment.lock:
            self._assignment.settle()
            state = self._assignment.state_of(key)
            state.forget()
            state.delivered = offset
            state.is_proven = False
            state.retry_at = 0.0

    @property
    def gaps(self) -> list[Gap]:
        """The newest 1000 places where the consumer could not continue and jumped."""
        return list(self._puller.gaps)

    # ------------------------------------------------------------ the assigned queues

    def pause(self, queues: Iterable[Queue] | None = None) -> None:
        """Return no messages of these queues (default: all assigned queues) until :meth:`resume`.

        The queues stay assigned as long as the consumer polls. A queue that is returned and assigned again is not
        paused. Raises ValueError for a queue that is not assigned.
        """
        self._check_usable()
        self._assignment.set_paused(queues, True)

    def resume(self, queues: Iterable[Queue] | None = None) -> None:
        """End a :meth:`pause`."""
        self._check_usable()
        self._assignment.set_paused(queues, False)

    @property
    def paused(self) -> list[Queue]:
        """The paused queues, sorted."""
        with self._assignment.lock:
            return sorted(key for key, state in self._assignment.owned.items() if state.is_paused)

    @property
    def assignment(self) -> list[Queue]:
        """The assigned queues, sorted."""
        return sorted(self._assignment.keys())

    @property
    def positions(self) -> dict[Queue, int]:
        """For each assigned queue the offset behind the last message that a poll returned."""
        return self._assignment.positions()

    # ------------------------------------------------------------ committing

    def _commit(self, offsets: Mapping[Queue, int] | None) -> dict[Queue, int]:
        if offsets is None:
            with self._assignment.lock:
                progress = self._committer.progress(list(self._assignment.owned.values()), delivered=True)
        else:
            progress = self._committer.of({key: checks.integer("an offset", value) for key, value in offsets.items()})
        until = time.monotonic() + self._settings.timeout_s
        keeper = self._keeper
        return keeper.commit(progress, until) if keeper is not None and progress.offsets else {}

    # ------------------------------------------------------------ housekeeping between waits

    def _keep_house(self, deadline: float) -> None:
        member, assignment, handling = self._member, self._assignment, self._handling
        if self._puller.misses_queue:
            self._puller.misses_queue = False
            self._queues.look_soon()
            if member is not None:
                member.nudge()
        if member is None:
            self._queues.look_if_due(deadline)
        elif member.error is not None:
            raise member.error
        self._callbacks.tell_changes(assignment)
        if self._keeper is None:
            return
        if handling is not None:
            handling.keep_house()
        if member is not None:
            self._give_back_revoked(member, deadline)
        if self._settings.auto_commit and time.monotonic() >= self._commit_at:
            self._commit_at = time.monotonic() + self._settings.auto_commit_interval_s
            with assignment.lock:
                progress = self._progress(list(assignment.owned.values()), delivered=False)
            self._commit_soon(progress, deadline)

    def _give_back_revoked(self, member: GroupMember, deadline: float) -> None:
        assignment, handling = self._assignment, self._handling
        with assignment.lock:
            revoked = [state for state in assignment.owned.values() if state.revoked_at]
        revoked = [state for state in revoked if handling is None or handling.may_give_back(state)]
        if revoked:
            self._give_back(revoked, member, deadline)

    def _progress(self, states: list[QueueState], *, delivered: bool) -> CommitProgress:
        """What an automatic commit commits of these; ``delivered``: with what the last poll returned."""
        if self._handling is not None:
            return self._committer.of(self._handling.offsets(states))
        return self._committer.progress(states, delivered=delivered)

    def _commit_soon(self, progress: CommitProgress, deadline: float) -> bool:
        """Commit automatically, and keep the poll for a short time only. False when the commit must be tried again."""
        now = time.monotonic()
        keeper = self._keeper
        if keeper is None or keeper.commit_quietly(
            progress, max(min(deadline, now + _COMMIT_S), now + _LEAST_COMMIT_S)
        ):
            return True
        self._commit_at = time.monotonic() + max(self._settings.auto_commit_interval_s, _COMMIT_PAUSE_S)
        return False

    def _give_back(self, states: list[QueueState], member: GroupMember, deadline: float) -> None:
        """Give queues back that the coordinator wants for another member. This poll says that the last batch is done."""
        self._callbacks.tell_revoked(states)
        if self._settings.auto_commit and not self._commit_soon(self._progress(states, delivered=False), deadline):
            return  # the next owner would get the uncommitted messages again, so a later poll tries once more
        with self._assignment.lock:
            for state in states:
                self._assignment.drop(state, told=True)
        member.nudge()

    # ------------------------------------------------------------ the end

    def close(self, *, commit: bool | None = None, timeout_s: float | None = None) -> None:
        """Commit the polled messages if the consumer commits automatically, leave the group and close every connection.

        ``commit=False`` does not commit the last batch, so its messages are delivered again. That is the default while an
        exception is handled, in an ``except`` or ``finally`` block: the program did not finish the batch. ``timeout_s`` (2)
        bounds the wait for a node that does not answer. Any thread may close, and close twice. A poll that waits returns.
        """
        if timeout_s is not None:
            timeout_s = checks.seconds("timeout_s", timeout_s, zero=True)
        if self._closed:
            return
        if self._pid != os.getpid():
            self._closed = True  # the sockets and the session belong to the parent process
            return
        if commit is None:
            handled = sys.exception()
            commit = handled is None or handled is self._handled
        if self._user == threading.get_ident() or (self._handling is not None and self._handling.is_inside()):
            # A signal handler, a callback or a handler closes. The poll or run still uses the sockets, and closes at its end.
            self._close_after = commit
            self._stop_waiting()
            return
        self._stop_waiting()
        with self._lock:
            self._close(commit, min(self._settings.timeout_s, _CLOSE_S) if timeout_s is None else timeout_s)

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed or self._closing

    def _stop_waiting(self) -> None:
        """Make a poll that is under way return, and refuse every later one."""
        self._closing = True
        if self._handling is not None:
            self._handling.start_nothing()
        self._assignment.ring()

    def _close(self, commit: bool, patience_s: float) -> None:
        if self._closed:
            return
        member, assignment, keeper = self._member, self._assignment, self._keeper
        answered = True
        outer, self._user = self._user, threading.get_ident()  # on_revoke may still commit
        try:
            if member is None or member.error is None:
                with assignment.lock:
                    states = list(assignment.owned.values())
                try:
                    self._callbacks.tell_revoked(states)
                except BaseException:
                    commit = False  # the program did not finish the last batch
                    raise
                finally:
                    if self._settings.auto_commit and keeper is not None:
                        progress = self._progress(states, delivered=commit)
                        answered = keeper.commit_quietly(progress, time.monotonic() + patience_s)
        finally:
            self._user = outer
            self._handled = None
            # The member leaves first. If this is interrupted, the next close comes here again; else it would keep its queues.
            if member is not None:
                member.close(leave=answered)
            self._closed = True
            self._puller.close()
            self._committer.close()
            if self._local is not None:
                self._local.close()
            self._queues.close()
            self._directory.close()
            assignment.close()

    def _using(self, work: Callable[[], _R]) -> _R:
        """Do ``work`` with the lock held. A close by another thread waits for its end, and so does a close from within.

        This is no context manager in Python, because an exception such as Ctrl-C may come between any two steps of one.
        """
        self._check_usable()
        self._check_no_run()
        with self._lock:
            self._check_usable()
            outer, self._user = self._user, threading.get_ident()
            try:
                return work()
            finally:
                self._user = outer
                if not outer and self._close_after is not None:
                    self._close(self._close_after, min(self._settings.timeout_s, _CLOSE_S))

    def _check_no_run(self) -> None:
        """A callback of the run may continue: on_assign may seek."""
        if self._handling is not None and self._user != threading.get_ident():
            raise CommitMQError("run() polls, seeks and commits by itself; only pause, resume and close are for others")

    def __exit__(self, *error: object) -> None:
        self.close(commit=error[0] is None)

    def _forgotten(self) -> None:
        self.close(commit=False)

    def __repr__(self) -> str:
        group = "" if self._settings.group is None else f", group={self._settings.group!r}"
        return f"{type(self).__name__}({self._settings.topics!r}{group}, node={self._directory.address!r})"

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._closing and self._user != threading.get_ident():
            raise CommitMQError("the consumer is closed")
