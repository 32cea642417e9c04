"""The consumer: polls batches of messages, alone or as a member of a group, and commits how far it got."""

from __future__ import annotations

import os
import secrets
import socket
import time
import warnings
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from commitmq.client.assignment import Assignment, Gap, Queue, QueueState, Start, check_start, new_state, start_offsets
from commitmq.client.connection import Channel, Directory, check_fork
from commitmq.client.membership import GroupMember
from commitmq.client.selector import MessageSelector, selector
from commitmq.errors import CommitMQError, FencedError, NodeUnavailableError, ProtocolError
from commitmq.log import get_log
from commitmq.store.topic_name import validate_group, validate_topic

if TYPE_CHECKING:
    from commitmq.client.batch import MessageBatch

_REFRESH_S: Final = 3.0
_MODES: Final = ("auto", "ranges", "bytes")

_log = get_log("consumer")


class Consumer:
    """Reads topics of one node. Not thread-safe: one thread polls (heartbeats have a thread of their own).

    With a ``group``, its members share the queues of their topics, each queue is read by one of them, and the group's
    offsets are kept by the node. Without one (``group=None``) all queues are read, or those in ``queues``, and nothing
    is committed.

    ``start`` says where to begin in a queue for which the group has no offset: ``earliest``, ``latest``, a datetime
    (first message stored then or later; without a time zone it is local time) or a queue offset. ``filter`` is a tag
    expression, ``TagA || TagB`` or ``*``, or a selector: ``Sql("price > 10 AND region = 'eu'")``.

    ``auto_commit``: what a poll returned is committed when poll is called again (at most every
    ``auto_commit_interval_s``), when a queue is given back, and by ``close``. So a message counts as processed when its
    batch was, and after a crash it is delivered again: at least once. A ``with`` block that ends by an exception does
    not commit the batch that raised it. Without ``auto_commit`` call :meth:`commit`.

    On the node's own host messages are read from its mapped files without a copy (``mode="auto"``); ``mode="bytes"``
    has them sent. When offsets fell out of the log, reading goes on at the nearest message there is; ``gaps`` tells.
    Every record's CRC is compared, which costs some 0.3 µs a message; ``check_crc=False`` leaves it.
    """

    def __init__(
        self,
        group: str | None,
        topics: str | Iterable[str] = (),
        *,
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
        timeout_s: float = 10.0,
        member: str | None = None,
    ) -> None:
        """Connects. Raises NodeUnavailableError without a node, ProtocolError when it refuses, ValueError for settings."""
        # Both need numpy: whoever only imports this class, to produce, should not wait for it.
        from commitmq.client.batch import MessageBatch
        from commitmq.client.puller import Puller

        self._closed = True
        self._new_batch = MessageBatch
        names = [topics] if isinstance(topics, str) else list(topics)
        explicit = None if queues is None else [(topic, int(queue)) for topic, queue in queues]
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
        wanted = selector(filter)
        self._group = group
        self._topics = names
        self._explicit = explicit
        self._start = check_start(start)
        self._auto_commit = auto_commit and group is not None
        self._interval_s = auto_commit_interval_s
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._commit_at = 0.0
        self._refresh_at = 0.0
        self._coordinator: Channel | None = None
        self._lookup: Channel | None = None
        self._member: GroupMember | None = None
        self._directory = Directory(node)
        self._assignment = Assignment()
        self._puller = Puller(
            self._directory,
            self._assignment,
            selector=wanted,
            group=group,
            mode=mode,
            max_bytes=max_pull_bytes,
            check_crc=check_crc,
        )
        self._closed = False
        try:
            self._directory.metadata(timeout_s=timeout_s)
            if group is None:
                self._refresh(time.monotonic() + timeout_s)
            else:
                name = member or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
                self._member = GroupMember(
                    node,
                    group,
                    name,
                    names,
                    self._start,
                    self._assignment,
                    selector=wanted,
                    session_timeout_ms=session_timeout_ms,
                    rebalance_timeout_s=rebalance_timeout_s,
                    commit_start=self._auto_commit,
                )
                if not self._member.joined.wait(timeout_s):
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
        were handed out, and the consumer stays there until :meth:`seek` passes over it.
        """
        self._check_usable()
        if max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        deadline = time.monotonic() + timeout_s
        with self._assignment.lock:
            for state in self._assignment.owned.values():
                state.confirmed = state.delivered
        while True:
            self._keep_house()
            self._puller.ask()
            parts = self._puller.take(max_messages)
            if parts:
                return self._new_batch(parts)
            self._puller.raise_problem()
            remaining = deadline - time.monotonic()
            # Even without time to wait, answers that are already here are taken.
            self._puller.wait(max(remaining, 0))
            if remaining <= 0:
                parts = self._puller.take(max_messages)
                return self._new_batch(parts)

    def seek(self, topic: str, queue: int, offset: int) -> None:
        """Read ``queue`` from ``offset`` on; only for queues that are assigned. Raises ValueError for others."""
        self._check_usable()
        with self._assignment.lock:
            state = self._assignment.owned.get((topic, queue))
            if state is None:
                raise ValueError(f"queue {queue} of topic {topic!r} is not assigned to this consumer")
            self._puller.forget([state])
            state.position = state.delivered = state.confirmed = offset
            state.retry_at = 0.0

    @property
    def assignment(self) -> list[Queue]:
        """The queues this consumer reads now, sorted."""
        return sorted(self._assignment.keys())

    @property
    def positions(self) -> dict[Queue, int]:
        """For each assigned queue, the offset behind what was polled."""
        with self._assignment.lock:
            return {key: state.delivered for key, state in self._assignment.owned.items()}

    @property
    def gaps(self) -> list[Gap]:
        """Where reading could not go on and jumped; the newest 1000."""
        return list(self._puller.gaps)

    # ------------------------------------------------------------ committing

    def commit(self, offsets: Mapping[Queue, int] | None = None) -> dict[Queue, int]:
        """Commit how far the group got; returns what the node now holds for each queue.

        Without ``offsets`` everything that was polled counts as done. An offset is that of the next message to read.
        The answer comes when it is durable. Raises FencedError when a queue is no longer this consumer's (it was given
        to another member): nothing was committed then.
        """
        self._check_usable()
        if self._group is None:
            raise CommitMQError("a consumer without a group has no offsets to commit")
        with self._assignment.lock:
            if offsets is None:
                offsets = {
                    key: state.delivered
                    for key, state in self._assignment.owned.items()
                    if state.delivered != state.committed
                }
        return self._commit(offsets) if offsets else {}

    def _commit(self, offsets: Mapping[Queue, int]) -> dict[Queue, int]:
        deadline = time.monotonic() + self._timeout_s
        entries = [[topic, queue, offset] for (topic, queue), offset in offsets.items()]
        while True:
            assert self._member is not None
            try:
                fields = {
                    "group": self._group,
                    "member": self._member.member,
                    "generation": self._member.generation,
                    "offsets": entries,
                }
                answer = self._ask("offset.commit", fields, deadline)
                break
            except ProtocolError as error:
                again = error.code in ("UNKNOWN_MEMBER", "SERVICE_NOT_AVAILABLE")
                if not again or time.monotonic() >= deadline or self._closed:
                    raise
                # The coordinator was started again and does not know us yet: the membership thread sees to that.
                self._member.nudge()
                time.sleep(0.05)
        stored = {(topic, queue): int(offset) for topic, queue, offset in answer["stored"]}
        with self._assignment.lock:
            for key, offset in stored.items():
                state = self._assignment.owned.get(key)
                if state is not None:
                    state.committed = offset
                    state.settled = offsets[key]
        return stored

    def _commit_quietly(self, offsets: dict[Queue, int]) -> None:
        """An automatic commit: what is refused because the queue is another's by now is only logged."""
        if not offsets:
            return
        try:
            self._commit(offsets)
            return
        except FencedError as error:
            if len(offsets) == 1:
                _log.warning("an automatic commit was refused", group=self._group, error=error.message)
                return
        except ProtocolError as error:
            _log.warning("an automatic commit failed, it will be tried again", group=self._group, error=str(error))
            return
        # One queue that is not ours refuses the whole request: each for itself, then.
        for key, offset in offsets.items():
            self._commit_quietly({key: offset})

    # ------------------------------------------------------------ housekeeping between waits

    def _keep_house(self) -> None:
        member = self._member
        if member is None:
            if time.monotonic() >= self._refresh_at:
                try:
                    self._refresh(time.monotonic() + 0.3)
                except NodeUnavailableError:
                    self._refresh_at = time.monotonic() + 1.0
            return
        if member.error is not None:
            raise member.error
        with self._assignment.lock:
            revoked = [state for state in self._assignment.owned.values() if state.revoked_at]
        if revoked:
            self._give_back(revoked)
        if self._auto_commit and time.monotonic() >= self._commit_at:
            self._commit_at = time.monotonic() + self._interval_s
            self._commit_quietly(self._uncommitted(self._assignment.owned.values()))

    def _uncommitted(self, states: Iterable[QueueState], *, delivered: bool = False) -> dict[Queue, int]:
        with self._assignment.lock:
            return {
                state.key: state.delivered if delivered else state.confirmed
                for state in list(states)
                if (state.delivered if delivered else state.confirmed) != state.committed
            }

    def _give_back(self, states: list[QueueState]) -> None:
        """The coordinator wants these for another member, and the batch before this poll is done."""
        assert self._member is not None
        if self._auto_commit:
            self._commit_quietly(self._uncommitted(states))
        with self._assignment.lock:
            for state in states:
                if self._assignment.owned.get(state.key) is state:
                    del self._assignment.owned[state.key]
        self._puller.forget(states)
        self._member.nudge()

    def _refresh(self, deadline: float) -> None:
        """Without a group: look which queues the topics have now."""
        self._refresh_at = time.monotonic() + _REFRESH_S
        wanted = self._explicit
        if wanted is None:
            wanted = []
            for name in self._topics:
                try:
                    answer = self._ask("topic.route", {"topic": name}, deadline)
                except ProtocolError as error:
                    if error.code != "TOPIC_NOT_EXIST":
                        raise
                    continue
                wanted += [(name, queue) for queue in range(int(answer["topic"]["read_queues"]))]
        fresh = [queue for queue in wanted if queue not in self._assignment.owned]
        if not fresh:
            return
        if self._lookup is None or self._lookup.lost():
            if self._lookup is not None:
                self._lookup.close()
                self._lookup = None
            self._lookup, _ = self._directory.connect("reader", deadline)
        begin = start_offsets(self._lookup, fresh, self._start, timeout_s=self._timeout_s)
        self._assignment.add(new_state(queue, begin[queue], -1) for queue in fresh)

    def _ask(self, op: str, fields: dict[str, Any], deadline: float) -> dict[str, Any]:
        while True:
            if self._coordinator is None or self._coordinator.lost_while_idle():
                self._close_coordinator()
                self._coordinator, _ = self._directory.connect("coordinator", deadline)
            try:
                return self._coordinator.request(op, fields, timeout_s=max(deadline - time.monotonic(), 0.01))[0]
            except NodeUnavailableError:
                # Every request here can be repeated: a commit says where, not how much further.
                self._close_coordinator()
                if time.monotonic() >= deadline:
                    raise

    def _close_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    # ------------------------------------------------------------ the end

    def close(self, *, commit: bool = True) -> None:
        """Commit what was polled (automatic commits only; not with ``commit=False``), leave the group, close
        everything.

        Closing twice is allowed.
        """
        if self._closed:
            return
        if self._pid != os.getpid():
            self._closed = True  # the sockets and the session are the parent's
            return
        try:
            if self._member is not None and self._auto_commit and self._member.error is None:
                self._commit_quietly(self._uncommitted(self._assignment.owned.values(), delivered=commit))
        finally:
            self._closed = True
            if self._member is not None:
                self._member.close()
            self._puller.close()
            self._close_coordinator()
            if self._lookup is not None:
                self._lookup.close()
            self._directory.close()
            self._assignment.close()

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
        return f"Consumer({self._group!r}, {self._topics!r}, node={self._directory.address!r})"

    def _check_usable(self) -> None:
        check_fork(self._pid, "consumer")
        if self._closed:
            raise CommitMQError("the consumer is closed")
