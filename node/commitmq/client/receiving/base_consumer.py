"""What a consumer and a reader share: polling batches of messages, alone or as a member of a group.

This module has more than 400 lines because a poll, a callback and a close from any thread share the state of one object, and
the order of their steps is what keeps messages from being skipped.
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
from typing import TYPE_CHECKING, Final, Self, TypeVar

from commitmq.client import checks
from commitmq.client.receiving.assignment import (
    Assignment,
    Begin,
    Gap,
    Queue,
    QueueState,
    Start,
    Taken,
    check_start,
    for_new_queues,
    new_state,
    start_offsets,
)
from commitmq.client.receiving.commits import Committer, Progress
from commitmq.client.receiving.membership import GroupMember
from commitmq.client.selector import MessageSelector, selector
from commitmq.errors import CommitMQError, NodeUnavailableError, RequestError
from commitmq.log import get_log
from commitmq.protocol.connection import Channel, Directory, check_fork
from commitmq.store.metadata.topic_name import validate_group, validate_topic

if TYPE_CHECKING:
    from commitmq.client.handling.run import Run
    from commitmq.client.receiving.batch import MessageBatch

_R = TypeVar("_R")
Told = Callable[[list[Queue]], object]
"""``on_assign`` and ``on_revoke``: called with queues, sorted."""

_REFRESH_S: Final = 3.0
_MODES: Final = ("auto", "ranges", "bytes")
# An automatic commit may keep a poll that long, and is tried again after a pause when the node did not answer.
_COMMIT_S: Final = 0.5
_LEAST_COMMIT_S: Final = 0.1
_COMMIT_PAUSE_S: Final = 1.0
# So long close waits for a node that does not answer: what was not committed is delivered again.
_CLOSE_S: Final = 2.0

_log = get_log("consumer")


class BaseConsumer:
    """What :class:`commitmq.Consumer` says, with a ``group``; what :class:`commitmq.Reader` says without one."""

    def __init__(
        self,
        topics: str | Iterable[str] = (),
        *,
        group: str | None,
        node: str | None = None,
        start: Start = "earliest",
        filter: str | MessageSelector = "*",
        queues: Iterable[Queue] | None = None,
        auto_commit: bool = True,
        auto_commit_interval_s: float = 1.0,
        mode: str = "auto",
        max_pull_bytes: int = 2 * 1024 * 1024,
        check_crc: bool = True,
        session_timeout_ms: int | None = None,
        rebalance_timeout_s: float = 10.0,
        max_poll_interval_s: float | None = 300.0,
        timeout_s: float = 10.0,
        member: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings."""
        # It needs numpy: whoever only imports this class, to produce, should not wait for it.
        from commitmq.client.receiving.puller import Puller

        self._closed = True
        names = list(dict.fromkeys([topics] if isinstance(topics, str) else topics))
        explicit = (
            None
            if queues is None
            else list(dict.fromkeys((topic, checks.integer("a queue", queue)) for topic, queue in queues))
        )
        if group is not None and explicit is not None:
            raise ValueError("a group assigns the queues by itself; give queues only without a group")
        if not names and not explicit:
            raise ValueError("a consumer needs at least one topic")
        for name in [*names, *(topic for topic, _ in explicit or ())]:
            validate_topic(name)
        if group is not None:
            validate_group(group)
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
        if max_poll_interval_s is not None:
            max_poll_interval_s = checks.seconds("max_poll_interval_s", max_poll_interval_s)
        timeout_s = checks.seconds("timeout_s", timeout_s)
        auto_commit_interval_s = checks.seconds("auto_commit_interval_s", auto_commit_interval_s, zero=True)
        rebalance_timeout_s = checks.seconds("rebalance_timeout_s", rebalance_timeout_s, zero=True)
        if checks.integer("max_pull_bytes", max_pull_bytes) < 1:
            raise ValueError(f"max_pull_bytes must be at least 1, not {max_pull_bytes}")
        checks.callback("on_assign", on_assign)
        checks.callback("on_revoke", on_revoke)
        wanted = selector(filter)
        self._group = group
        self._topics = names
        self._explicit = explicit
        self._start = check_start(start)
        self._auto_commit = auto_commit and group is not None
        self._interval_s = auto_commit_interval_s
        self._timeout_s = timeout_s
        self._on_assign, self._on_revoke = on_assign, on_revoke
        self._pid = os.getpid()
        self._commit_at = 0.0
        self._refresh_at = 0.0
        self._has_looked = False
        self._left: dict[
            tuple[Queue, int], int
        ] = {}  # where queues were read to that their topic, of an incarnation, lost
        self._missing: set[str] = set()  # topics that were told to be missing
        self._lookup: Channel | None = None
        self._member: GroupMember | None = None
        self._lock = threading.RLock()  # held by whatever uses the sockets
        self._user = 0  # the thread that holds it
        self._closing = False
        self._close_after: bool | None = None  # close(commit=…) that came from within a call
        self._handled: BaseException | None = None
        self._handling: Run | None = None  # what run() set up; it stays when run is over
        self._directory = Directory(node)
        self._assignment = Assignment(tells=on_revoke is not None)
        self._committer = Committer(self._directory, self._assignment)
        self._puller = Puller(
            self._directory,
            self._assignment,
            selector=wanted,
            group=group,
            mode=mode,
            max_bytes=max_pull_bytes,
            check_crc=check_crc,
            asks_for_queues=explicit is not None,
        )
        self._closed = False
        try:
            self._directory.metadata(timeout_s=timeout_s)
            if group is None:
                self._refresh(time.monotonic() + timeout_s)
            else:
                name = member or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
                self._member = self._committer.member = GroupMember(
                    node,
                    group,
                    name,
                    names,
                    self._start,
                    self._assignment,
                    selector=wanted,
                    session_timeout_ms=session_timeout_ms,
                    rebalance_timeout_s=rebalance_timeout_s,
                    max_poll_interval_s=max_poll_interval_s,
                )
                self._member.start()
                if not self._member.wait_joined(timeout_s):
                    raise NodeUnavailableError(f"group {group!r} could not be joined within {timeout_s} s")
                if self._member.error is not None:
                    raise self._member.error
        except BaseException:
            self.close(commit=False)
            raise

    # ------------------------------------------------------------ reading

    def poll(self, timeout_s: float = 1.0, max_messages: int = 10_000) -> MessageBatch:
        """The next messages: at least one if any arrives within ``timeout_s``, else an empty batch.

        Calling it says that the previous batch is done. While the node restarts, polls are empty. Raises ProtocolError
        for what waiting does not heal (a bad filter), CorruptRecordError for a damaged record: all before it
        were handed out, and the consumer stays there until :meth:`seek` passes over it; FencedError when another consumer
        has joined under this one's ``member`` name; CommitMQError when the consumer is closed.
        """
        taken = self._next(timeout_s, max_messages)
        # An exception can come from outside before this store, and then the next poll returns the batch, or behind the
        # return. Nothing may stand between the two.
        self._assignment.returned = taken
        return taken.batch

    def __iter__(self) -> Iterator[MessageBatch]:
        """Batches that are not empty, one poll each, until the consumer is closed."""
        while not self.is_closed:
            taken = self._next(1.0, 10_000)
            if taken.portions:
                self._assignment.returned = taken  # as in poll
                yield taken.batch

    def _next(self, timeout_s: float, max_messages: int) -> Taken:
        """What poll returns. It counts as handed out when it is the assignment's ``returned``."""
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
                # Even without time to wait, answers that are already here are taken.
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
        """Have the next messages sent while the program works on a batch. What goes wrong here is the next poll's."""
        try:
            self._puller.ask(time.monotonic())
        except (CommitMQError, OSError) as error:
            _log.debug("cannot ask for more messages", error=str(error))

    def seek(self, topic: str, queue: int, offset: int) -> None:
        """Read ``queue`` from ``offset`` on; only for queues that are assigned. Raises ValueError for others.

        An offset behind the queue's end is no place: reading goes on at the end, and ``gaps`` tells. It is not committed.
        """
        self._using(partial(self._seek, (topic, queue), checks.offset("a queue offset", offset)))

    def _seek(self, key: Queue, offset: int) -> None:
        with self._assignment.lock:
            self._assignment.settle()
            state = self._owned(key)
            state.forget()
            state.delivered = offset
            state.is_proven = False
            state.retry_at = 0.0

    def pause(self, queues: Iterable[Queue] | None = None) -> None:
        """Return no messages of these queues (default: of all that are assigned) until :meth:`resume`.

        They stay this consumer's, as long as it polls. A queue that is given back and comes again is not paused. Raises
        ValueError for queues that are not assigned.
        """
        self._set_paused(queues, True)

    def resume(self, queues: Iterable[Queue] | None = None) -> None:
        """End a :meth:`pause`."""
        self._set_paused(queues, False)

    def _set_paused(self, queues: Iterable[Queue] | None, paused: bool) -> None:
        self._check_usable()
        with self._assignment.lock:
            owned = self._assignment.owned
            states = (
                list(owned.values()) if queues is None else [self._owned((topic, queue)) for topic, queue in queues]
            )
            for state in states:
                state.is_paused = paused

    def _owned(self, key: Queue) -> QueueState:
        state = self._assignment.owned.get(key)
        if state is None:
            raise ValueError(f"queue {key[1]} of topic {key[0]!r} is not assigned to this consumer")
        return state

    @property
    def paused(self) -> list[Queue]:
        """The assigned queues of which nothing is returned, sorted."""
        with self._assignment.lock:
            return sorted(key for key, state in self._assignment.owned.items() if state.is_paused)

    @property
    def assignment(self) -> list[Queue]:
        """The queues this consumer reads now, sorted."""
        return sorted(self._assignment.keys())

    @property
    def positions(self) -> dict[Queue, int]:
        """For each assigned queue, the offset behind what was polled."""
        with self._assignment.lock:
            self._assignment.settle()
            return {key: state.delivered for key, state in self._assignment.owned.items()}

    @property
    def gaps(self) -> list[Gap]:
        """Where reading could not go on and jumped; the newest 1000."""
        return list(self._puller.gaps)

    # ------------------------------------------------------------ committing

    def _commit(self, offsets: Mapping[Queue, int] | None) -> dict[Queue, int]:
        if offsets is None:
            with self._assignment.lock:
                progress = self._committer.progress(list(self._assignment.owned.values()), delivered=True)
        else:
            progress = self._committer.of({key: checks.integer("an offset", value) for key, value in offsets.items()})
        if not progress.offsets:
            return {}
        return self._committer.commit(progress, time.monotonic() + self._timeout_s)

    # ------------------------------------------------------------ housekeeping between waits

    def _keep_house(self, deadline: float) -> None:
        member, assignment, handling = self._member, self._assignment, self._handling
        if self._puller.misses_queue:
            self._puller.misses_queue = False
            self._refresh_at = 0.0
            if member is not None:
                member.nudge()
        if member is None:
            if time.monotonic() >= self._refresh_at:
                try:
                    self._refresh(min(max(deadline, time.monotonic() + _LEAST_COMMIT_S), time.monotonic() + 0.3))
                except RequestError as error:
                    if not isinstance(error, NodeUnavailableError) and error.retry_after_ms is None:
                        raise
                    self._refresh_at = time.monotonic() + 1.0
        elif member.error is not None:
            raise member.error
        self._tell()
        if member is None:
            return
        if handling is not None:
            handling.keep_house()
        with assignment.lock:
            revoked = [state for state in assignment.owned.values() if state.revoked_at]
        if handling is not None:
            revoked = [state for state in revoked if handling.may_give_back(state)]
        if revoked:
            self._give_back(revoked, member, deadline)
        if self._auto_commit and time.monotonic() >= self._commit_at:
            self._commit_at = time.monotonic() + self._interval_s
            with assignment.lock:
                progress = self._progress(list(assignment.owned.values()), delivered=False)
            self._commit_soon(progress, deadline)

    def _progress(self, states: list[QueueState], *, delivered: bool) -> Progress:
        """What an automatic commit commits of these; ``delivered``: with what the last poll returned."""
        if self._handling is not None:
            return self._committer.of(self._handling.offsets(states))
        return self._committer.progress(states, delivered=delivered)

    def _commit_soon(self, progress: Progress, deadline: float) -> bool:
        """An automatic commit, which does not keep a poll for longer than it may last."""
        now = time.monotonic()
        if self._committer.commit_quietly(progress, max(min(deadline, now + _COMMIT_S), now + _LEAST_COMMIT_S)):
            return True
        self._commit_at = time.monotonic() + max(self._interval_s, _COMMIT_PAUSE_S)
        return False

    def _tell(self) -> None:
        """Tell the program which queues it lost, and which it has got."""
        assignment = self._assignment
        with assignment.lock:
            lost = sorted(assignment.lost)
            new = [state for state in assignment.owned.values() if not state.is_announced and not state.revoked_at]
        if lost:
            if self._on_revoke is not None:
                self._on_revoke(lost)
            with assignment.lock:
                assignment.lost = [key for key in assignment.lost if key not in lost]
        if new:
            if self._on_assign is not None:
                self._on_assign(sorted(state.key for state in new))
            for state in new:
                state.is_announced = True

    def _give_back(self, states: list[QueueState], member: GroupMember, deadline: float) -> None:
        """The coordinator wants these for another member, and the batch before this poll is done."""
        self._tell_revoked(states)
        if self._auto_commit and not self._commit_soon(self._progress(states, delivered=False), deadline):
            return  # what is not committed would be the next owner's again: later, or when it is too late
        with self._assignment.lock:
            for state in states:
                self._assignment.drop(state, told=True)
        member.nudge()

    def _tell_revoked(self, states: Iterable[QueueState]) -> None:
        announced = [state for state in states if state.is_announced]
        if not announced:
            return
        if self._on_revoke is not None:
            self._on_revoke(sorted(state.key for state in announced))
        for state in announced:
            state.is_announced = False

    def _refresh(self, deadline: float) -> None:
        """Without a group: look which queues the topics have now, and whether they are still the same topics."""
        self._refresh_at = time.monotonic() + _REFRESH_S
        incarnations: dict[str, int] = {}
        counts: dict[str, int] = {}
        wanted = list(self._explicit or ())
        names = self._topics if self._explicit is None else [topic for topic, _ in self._explicit]
        for name in dict.fromkeys(names):
            try:
                topic = self._committer.ask("topic.route", {"topic": name}, deadline)["topic"]
            except RequestError as error:
                if error.code != "TOPIC_NOT_EXIST":
                    raise
                if name not in self._missing:
                    self._missing.add(name)
                    _log.warning("the topic does not exist (yet): nothing is read of it until it does", topic=name)
                continue
            self._missing.discard(name)
            incarnations[name] = int(topic["incarnation"])
            counts[name] = int(topic["read_queues"])
            if self._explicit is None:
                wanted += [(name, queue) for queue in range(counts[name])]
        assignment = self._assignment
        old = assignment.of_old_incarnations(incarnations)
        with assignment.lock:
            # A queue that the topic lost goes too: when it comes back, it is read from where it was.
            gone = [key for key in assignment.owned if key not in wanted and key[0] in counts]
            for state in (assignment.owned[key] for key in gone):
                assignment.settle()
                self._left[state.key, state.incarnation] = state.delivered
            for key in {*old, *gone}:
                assignment.drop(assignment.owned[key])
        fresh = [queue for queue in wanted if queue not in assignment.owned]
        begin: dict[Queue, Begin] = {}
        for queue in fresh:
            left = self._left.pop((queue, incarnations.get(queue[0], -1)), None)
            if left is not None:
                begin[queue] = Begin(left, left)
        unknown = [queue for queue in fresh if queue not in begin]
        made_anew = {topic for topic, _ in old}
        # All of a topic that was made anew is new, and so is all of what came since the consumer was made.
        starts: dict[Start, list[Queue]] = {}
        for queue in unknown:
            late = for_new_queues(self._start) if self._has_looked and self._explicit is None else self._start
            starts.setdefault("earliest" if queue[0] in made_anew else late, []).append(queue)
        for start, part in starts.items():
            begin.update(self._look_up(part, start, incarnations, deadline))
        assignment.add(
            new_state(
                queue,
                begin[queue].offset,
                -1,
                incarnations.get(queue[0], -1),
                proven=begin[queue].offset == begin[queue].committable,
            )
            for queue in fresh
        )
        self._has_looked = True

    def _look_up(
        self, queues: list[Queue], start: Start, incarnations: dict[str, int], deadline: float
    ) -> dict[Queue, Begin]:
        while True:
            if self._lookup is None or self._lookup.lost():
                self._close_lookup()
                self._lookup, _ = self._directory.connect("reader", deadline)
            try:
                patience_s = max(deadline - time.monotonic(), 0.01)
                return start_offsets(self._lookup, queues, start, timeout_s=patience_s, incarnations=incarnations)
            except NodeUnavailableError:
                self._close_lookup()
                if time.monotonic() >= deadline:
                    raise

    def _close_lookup(self) -> None:
        if self._lookup is not None:
            self._lookup.close()
            self._lookup = None

    # ------------------------------------------------------------ the end

    def close(self, *, commit: bool | None = None, timeout_s: float | None = None) -> None:
        """Commit what was polled (automatic commits only), leave the group, close everything.

        ``commit=False`` leaves out the last batch: it is delivered again. That is the default when an exception is being
        handled, in an ``except`` or ``finally`` block: the batch that raised it is not done. A node that does not answer is
        waited for 2 s (``timeout_s``); what is not committed then is delivered again. Closing twice is allowed, and from any
        thread: a poll that waits returns an empty batch.
        """
        if timeout_s is not None:
            timeout_s = checks.seconds("timeout_s", timeout_s, zero=True)
        if self._closed:
            return
        if self._pid != os.getpid():
            self._closed = True  # the sockets and the session are the parent's
            return
        if commit is None:
            handled = sys.exception()
            commit = handled is None or handled is self._handled
        if self._user == threading.get_ident() or (self._handling is not None and self._handling.is_inside()):
            # A signal handler, a callback, or a handler of run: whoever called it still uses what is to be closed.
            self._close_after = commit
            self._stop_waiting()
            return
        self._stop_waiting()
        with self._lock:
            self._close(commit, min(self._timeout_s, _CLOSE_S) if timeout_s is None else timeout_s)

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed or self._closing

    def _stop_waiting(self) -> None:
        """Have a poll that is under way return; there will be no other."""
        self._closing = True
        if self._handling is not None:
            self._handling.start_nothing()
        self._assignment.ring()

    def _close(self, commit: bool, patience_s: float) -> None:
        if self._closed:
            return
        member, assignment = self._member, self._assignment
        answered = True
        outer, self._user = self._user, threading.get_ident()  # on_revoke may still commit
        try:
            if member is None or member.error is None:
                with assignment.lock:
                    states = list(assignment.owned.values())
                try:
                    self._tell_revoked(states)
                except BaseException:
                    commit = False  # it did not finish the last batch
                    raise
                finally:
                    if self._auto_commit and member is not None:
                        progress = self._progress(states, delivered=commit)
                        answered = self._committer.commit_quietly(progress, time.monotonic() + patience_s)
        finally:
            self._user = outer
            self._handled = None
            # First: interrupted here, a member would keep its queues, and the next close must get to it again.
            if member is not None:
                member.close(leave=answered)
            self._closed = True
            self._puller.close()
            self._committer.close()
            self._close_lookup()
            self._directory.close()
            assignment.close()

    def _using(self, work: Callable[[], _R]) -> _R:
        """Do ``work``. Another thread that closes the consumer meanwhile waits, and so does a close from within.

        Written out, because an exception may come from outside between any two steps of a context manager in Python.
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
                    self._close(self._close_after, min(self._timeout_s, _CLOSE_S))

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
        group = "" if self._group is None else f", group={self._group!r}"
        return f"{type(self).__name__}({self._topics!r}{group}, node={self._directory.address!r})"

    def _check_usable(self) -> None:
        check_fork(self._pid, "consumer")
        if self._closed or (self._closing and self._user != threading.get_ident()):
            raise CommitMQError("the consumer is closed")
