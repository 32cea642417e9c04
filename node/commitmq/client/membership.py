"""A consumer's life in its group: joining, heartbeats, queues gained and given back. A thread and sockets of its own.

Heartbeats therefore go on while the program works on a batch, however long that takes. A queue that the coordinator
wants back is given back

* at once, when nothing of it was handed out that is not committed;
* else at the next poll (which means that the previous batch is done), after its offset was committed if the consumer
  commits automatically;
* else after ``rebalance_timeout_s``, with a warning: the new owner then starts from the last committed offset, and a
  late commit of this consumer is refused (FencedError).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

import zmq

from commitmq.client.assignment import Assignment, Queue, Start, new_state, start_offsets
from commitmq.client.connection import Channel, Directory
from commitmq.client.selector import MessageSelector
from commitmq.errors import CommitMQError, NodeUnavailableError, ProtocolError
from commitmq.log import get_log

_REQUEST_S = 2.0
_RETRY_S = 0.5

_log = get_log("consumer")


class GroupMember:
    """See the module. ``assignment`` is shared with the consumer."""

    def __init__(
        self,
        node: str | None,
        group: str,
        member: str,
        topics: Iterable[str],
        start: Start,
        assignment: Assignment,
        *,
        selector: MessageSelector | None = None,
        session_timeout_ms: int | None,
        rebalance_timeout_s: float,
        commit_start: bool,
    ) -> None:
        self.group = group
        self.member = member
        self.generation = 0
        self.error: CommitMQError | None = None  # why the coordinator refuses this member for good
        self.joined = threading.Event()
        self._topics = list(topics)
        self._selector = selector
        self._start = start
        self._assignment = assignment
        self._session_timeout_ms = session_timeout_ms
        self._rebalance_timeout_s = rebalance_timeout_s
        self._commit_start = commit_start
        self._directory = Directory(node)
        self._coordinator: Channel | None = None
        self._reader: Channel | None = None
        self._is_member = False
        self._stopping = False
        self._leave = True
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._bell, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"commitmq-member-{group}", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Send the next heartbeat now: something was given back, or an answer is doubted."""
        os.eventfd_write(self._bell, 1)

    def close(self, *, leave: bool = True) -> None:
        """Leave the group (its other members get the queues at once) and end the thread."""
        self._leave = leave
        self._stopping = True
        self.nudge()
        self._thread.join()
        os.close(self._bell)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                pause_s = _RETRY_S
                try:
                    pause_s = self._turn()
                    self.error = None
                    self.joined.set()
                except NodeUnavailableError as error:
                    self._close_channels()
                    _log.warning("the coordinator does not answer", group=self.group, error=error.message)
                except ProtocolError as error:
                    if error.code == "UNKNOWN_MEMBER":
                        # The session ended, or the coordinator was started again: join again with what we have.
                        self._is_member = False
                        _log.warning("the session ended, joining again", group=self.group, reason=error.message)
                        continue
                    if error.code not in ("SERVICE_NOT_AVAILABLE", "SYSTEM_BUSY"):
                        self.error = error
                        self.joined.set()
                        self._assignment.ring()
                    _log.warning("the coordinator refused", group=self.group, error=str(error))
                    pause_s = max(pause_s, (error.retry_after_ms or 0) / 1000)
                except Exception as error:
                    # A member that dies silently would stall its queues until somebody notices.
                    self.error = CommitMQError(f"the membership thread failed: {error!r}")
                    self.joined.set()
                    self._assignment.ring()
                    _log.exception("membership failed", group=self.group)
                self._sleep(pause_s)
            if self._leave and self._is_member and self._coordinator is not None:
                with contextlib.suppress(ProtocolError):
                    self._ask("group.leave", {})
        finally:
            self._close_channels()
            self._directory.close()

    def _sleep(self, seconds: float) -> None:
        self._poller.poll(int(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _turn(self) -> float:
        """One join or heartbeat; returns the seconds until the next."""
        assignment = self._assignment
        owned = assignment.keys()
        if self._is_member:
            answer = self._ask("group.heartbeat", {"generation": self.generation, "owned": owned})
        else:
            fields: dict[str, Any] = {"topics": self._topics, "owned": owned}
            if self._selector is not None and self._selector.type != "TAG":
                fields["filter"] = {"type": self._selector.type, "expression": self._selector.expression}
            if self._session_timeout_ms is not None:
                fields["session_timeout_ms"] = self._session_timeout_ms
            answer = self._ask("group.join", fields)
            self._is_member = True
        self.generation = int(answer["generation"])
        gained = [(topic, queue) for topic, queue in answer["assigned"] if (topic, queue) not in assignment.owned]
        revoked = [(topic, queue) for topic, queue in answer["revoke"]]
        released = self._revoke(revoked)
        if gained:
            self._gain(gained)
        if gained or released:
            # Say so at once: others may be waiting for what was released, and what was gained is now owned.
            self.nudge()
        return float(answer.get("next_heartbeat_ms", answer["heartbeat_interval_ms"])) / 1000

    def _revoke(self, queues: list[Queue]) -> bool:
        """Mark ``queues`` as wanted back and give back those that can be; True when any was."""
        assignment = self._assignment
        released = False
        now = time.monotonic()
        with assignment.lock:
            wanted = set(queues)
            for key, state in list(assignment.owned.items()):
                if key not in wanted:
                    state.revoked_at = 0.0  # it stays ours after all
                    continue
                state.revoked_at = state.revoked_at or now
                late = now - state.revoked_at > self._rebalance_timeout_s
                if state.delivered == state.settled or late:
                    if late:
                        _log.warning(
                            "queue given back without a commit: the program did not poll in time",
                            group=self.group, topic=key[0], queue=key[1],
                        )  # fmt: skip
                    del assignment.owned[key]
                    released = True
        if queues:
            assignment.ring()
        return released

    def _gain(self, queues: list[Queue]) -> None:
        answer = self._ask("offset.fetch", {"queues": queues})
        committed = {(topic, queue): int(offset) for topic, queue, offset in answer["offsets"]}
        fresh = [queue for queue in queues if committed[queue] < 0]
        begin: dict[Queue, int] = {}
        if fresh:
            begin = start_offsets(self._reader_channel(), fresh, self._start, timeout_s=_REQUEST_S)
            if self._commit_start:
                # Otherwise the next owner would look for "latest" anew, and miss what came in between.
                self._ask("offset.commit", {"offsets": [[*queue, begin[queue]] for queue in fresh]})
                committed.update(begin)
        self._assignment.add(new_state(queue, begin.get(queue, committed[queue]), committed[queue]) for queue in queues)
        _log.info("queues assigned", group=self.group, member=self.member, queues=len(queues))

    def _ask(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        if self._coordinator is None or self._coordinator.lost():
            self._close_channels()
            self._coordinator, _ = self._directory.connect("coordinator", time.monotonic() + _REQUEST_S)
        answer, _ = self._coordinator.request(
            op, {"group": self.group, "member": self.member, **fields}, timeout_s=_REQUEST_S
        )
        return answer

    def _reader_channel(self) -> Channel:
        if self._reader is None or self._reader.lost():
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            self._reader, _ = self._directory.connect("reader", time.monotonic() + _REQUEST_S)
        return self._reader

    def _close_channels(self) -> None:
        for channel in (self._coordinator, self._reader):
            if channel is not None:
                channel.close()
        self._coordinator = self._reader = None
