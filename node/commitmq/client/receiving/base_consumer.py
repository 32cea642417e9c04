"""What a consumer and a reader share: polling batches of messages, alone or as a member of a group.

No message is skipped, whatever interrupts a poll or a callback: see :mod:`commitmq.client.receiving.assignment`.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar, Unpack

from commitmq.client import checks
from commitmq.client.receiving.assigned_queues import AssignedQueues
from commitmq.client.receiving.assignment import Assignment, Gap, Queue, QueueState, Taken
from commitmq.client.receiving.callbacks import QueueCallbacks, Told
from commitmq.client.receiving.commits import Committer, Progress
from commitmq.client.receiving.local_positions import LocalPositions
from commitmq.client.receiving.membership import GroupMember
from commitmq.client.receiving.reader_queues import ReaderQueues
from commitmq.client.receiving.settings import ConsumerSettings, GroupOptions
from commitmq.errors import CommitMQError, NodeUnavailableError
from commitmq.log import get_log
from commitmq.protocol.channel import check_fork
from commitmq.protocol.directory import Directory

if TYPE_CHECKING:
    from commitmq.client.handling.run import Run
    from commitmq.client.receiving.batch import MessageBatch

_R = TypeVar("_R")

# An automatic commit keeps a poll so long at most. If the node does not answer, the consumer tries again after the pause.
_COMMIT_S: Final = 0.5
_LEAST_COMMIT_S: Final = 0.1
_COMMIT_PAUSE_S: Final = 1.0
# close() waits so long for a node that does not answer. An uncommitted message is delivered again.
_CLOSE_S: Final = 2.0

_log = get_log("consumer")


class BaseConsumer(AssignedQueues):
    """With a ``group`` it does what :class:`commitmq.Consumer` says, without one what :class:`commitmq.Reader` says."""

    def __init__(
        self,
        topics: str | Iterable[str] = (),
        *,
        group: str | None,
        queues: Iterable[Queue] | None = None,
        node: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
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
        self._handling: Run | None = None  # what run() set up; it stays when run is over
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

        Raises CorruptRecordError for a damaged record. The messages before it were returned, and the consumer stays there
        until :meth:`seek` passes over the record. Raises ProtocolError for a lasting problem such as a bad filter, FencedError
        when another consumer has joined with this one's ``member`` name, CommitMQError when the consumer is closed.
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

    def _next(self, timeout_s: float, max_messages: int) -> Taken:
        """What poll returns. It counts as handed out once it is the assignment's ``returned``."""
        if max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        timeout_s = checks.seconds("timeout_s", timeout_s, zero=True)
        if self._user == threading.get_ident():
            raise CommitMQError("a poll is under way: on_assign, on_revoke and signal handlers must not poll")
        return self._using(partial(self._fetch, time.monotonic() + timeout_s, max_messages))

    def _fetch(self, deadline: float, max_messages: int) -> Taken:
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

        With an offset behind the queue's end the consumer goes on at the end, and ``gaps`` tells of it. Such an offset is not
        committed.
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
        """The newest 1000 places where the consumer could not go on and jumped."""
        return list(self._puller.gaps)

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

    def _progress(self, states: list[QueueState], *, delivered: bool) -> Progress:
        """What an automatic commit commits of these; ``delivered``: with what the last poll returned."""
        if self._handling is not None:
            return self._committer.of(self._handling.offsets(states))
        return self._committer.progress(states, delivered=delivered)

    def _commit_soon(self, progress: Progress, deadline: float) -> bool:
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
        """A callback of the run may go on: on_assign may seek."""
        if self._handling is not None and self._user != threading.get_ident():
            raise CommitMQError("run() polls, seeks and commits by itself; only pause, resume and close are for others")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(commit=error is None)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            warnings.warn(f"unclosed consumer {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close(commit=False)

    def __repr__(self) -> str:
        group = "" if self._settings.group is None else f", group={self._settings.group!r}"
        return f"{type(self).__name__}({self._settings.topics!r}{group}, node={self._directory.address!r})"

    def _check_usable(self) -> None:
        check_fork(self._pid, "consumer")
        if self._closed or (self._closing and self._user != threading.get_ident()):
            raise CommitMQError("the consumer is closed")
