"""A consumer's life in its group: joining, heartbeats, queues gained and given back. A thread and sockets of its own.

Heartbeats therefore go on while the program works on a batch, however long that takes. A queue that the coordinator
wants back is given back

* at once, when nothing of it was handed out that is not committed;
* else at the next poll (which means that the previous batch is done), after its offset was committed if the consumer
  commits automatically;
* else after ``rebalance_timeout_s``, with a warning: the new owner then starts from the last committed offset, and a
  late commit of this consumer is refused (FencedError).

A consumer that wants to be told of it (``on_revoke``) gives nothing back without a poll but after that time. One that has
not polled for ``max_poll_interval_s`` leaves the group until it polls again: its thread may be dead, and its queues would
be read by nobody.

Whoever joins again after its session ended, or whose commit was refused, compares what the group has committed with what it
knows. A queue where that is something else (an operator has reset it, another member had it) is gained anew, and read from
there.

The same happens to the queues of a topic that was deleted and made anew, which the answers tell by its incarnation; what is
committed of the old one then is refused. They are gained anew at once, and begin at the beginning: all of it is new.

Where to begin in a topic that the group has no offset in is looked up for all of its queues at once, and committed wherever
there is none yet (``begin``), whoever reads the queue. So a queue without an offset in a topic that has others came later: all
of it is new too. The same holds for a topic that was not there when the consumer joined.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable
from typing import Any

import zmq

from commitmq.client.bell import Bell
from commitmq.client.receiving.assignment import (
    Assignment,
    Begin,
    Queue,
    Start,
    for_new_queues,
    new_state,
    start_offsets,
)
from commitmq.client.selector import MessageSelector
from commitmq.errors import CommitMQError, NodeUnavailableError, ProtocolError, RequestError
from commitmq.format.constants import RETRY_PREFIX
from commitmq.log import get_log
from commitmq.protocol.connection import Channel, Directory

_REQUEST_S = 2.0
_CONNECT_S = 0.5
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
        max_poll_interval_s: float | None = None,
    ) -> None:
        self.group = group
        self.member = member
        # Tells this consumer from another one of the same name, which takes its place, or has taken it.
        self.instance = secrets.token_hex(8)
        self.generation = 0
        self.error: CommitMQError | None = None  # why the coordinator refuses this member for good
        self._joined = Bell()  # no threading.Event: whoever is interrupted while it waits for one may leave it locked
        self._topics = list(topics)
        self._selector = selector
        self._start = start
        self._assignment = assignment
        self._session_timeout_ms = session_timeout_ms
        self._rebalance_timeout_s = rebalance_timeout_s
        self._max_poll_interval_s = max_poll_interval_s
        self._directory = Directory(node)
        self._coordinator: Channel | None = None
        self._reader: Channel | None = None
        self._is_member = False
        self._joins_anew = False  # with other topics
        self._made_anew: set[str] = set()  # topics that were, and whose queues were not gained since
        self._late: set[str] = set()  # topics that were not there when we joined
        self._has_joined = False
        self._doubts = False  # what is committed may not be what we know
        self._stopping = False
        self._leave = True
        self._bell = Bell()
        self._poller = zmq.Poller()
        self._poller.register(self._bell.fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"commitmq-member-{group}", daemon=True)

    def start(self) -> None:
        """Begin to join. The caller already knows this member: interrupted in here, it can still :meth:`close` it."""
        self._thread.start()

    def wait_joined(self, timeout_s: float) -> bool:
        """Wait until the coordinator has answered, or refused for good (``error``); False when it did neither in time."""
        poller = zmq.Poller()
        poller.register(self._joined.fd, zmq.POLLIN)
        return bool(poller.poll(int(timeout_s * 1000)))

    def subscribe(self, topics: Iterable[str]) -> None:
        """Read ``topics`` too; the group's retry topic from its first message on."""
        self._topics = list(dict.fromkeys([*self._topics, *topics]))
        self._joins_anew = True
        self.nudge()

    def nudge(self) -> None:
        """Send the next heartbeat now: something was given back, or an answer is doubted."""
        self._bell.ring()

    def doubt(self) -> None:
        """A commit was refused: look what is committed, and what is still ours."""
        self._doubts = True
        self.nudge()

    def close(self, *, leave: bool = True) -> None:
        """Leave the group (its other members get the queues at once) and end the thread. Closing twice is allowed."""
        self._leave = leave
        self._stopping = True
        self.nudge()
        # It was never started, or has not begun to run, when it is not alive: then it ends as it begins.
        if self._thread.is_alive():
            self._thread.join()
        self._bell.close()
        self._joined.close()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                pause_s = _RETRY_S
                try:
                    pause_s = self._turn()
                    self.error = None
                    self._joined.ring()
                except NodeUnavailableError as error:
                    self._close_channels()
                    _log.warning("the coordinator does not answer", group=self.group, error=error.message)
                except RequestError as error:
                    if error.code == "UNKNOWN_MEMBER":
                        # The session ended, or the coordinator was started again: join again with what we have.
                        self._is_member = False
                        self._doubts = True
                        _log.warning("the session ended, joining again", group=self.group, reason=error.message)
                        continue
                    if error.code == "FENCED":
                        # Another consumer has our name. Joining again would take it back, and both would go on like that.
                        self.error, self._is_member, self._stopping = error, False, True
                        self._joined.ring()
                        self._assignment.ring()
                    elif error.code not in ("SERVICE_NOT_AVAILABLE", "SYSTEM_BUSY"):
                        self.error = error
                        self._joined.ring()
                        self._assignment.ring()
                    _log.warning("the coordinator refused", group=self.group, error=str(error))
                    pause_s = max(pause_s, (error.retry_after_ms or 0) / 1000)
                except Exception as error:
                    # A member that dies silently would stall its queues until somebody notices.
                    self.error = CommitMQError(f"the membership thread failed: {error!r}")
                    self._joined.ring()
                    self._assignment.ring()
                    _log.exception("membership failed", group=self.group)
                self._sleep(pause_s)
            if self._leave and self._is_member and self._coordinator is not None:
                with contextlib.suppress(RequestError):
                    self._ask("group.leave", {})
        finally:
            self._close_channels()
            self._directory.close()

    def _sleep(self, seconds: float) -> None:
        self._poller.poll(int(seconds * 1000))
        self._bell.clear()

    def _turn(self) -> float:
        """One join or heartbeat; returns the seconds until the next."""
        assignment = self._assignment
        if self._is_idle():
            return self._stay_away()
        if self._joins_anew:
            self._joins_anew = self._is_member = False
        if self._doubts and not self._is_member:
            self._verify()  # before our queues are ours again, and what is committed of them counts
        owned = assignment.keys()
        if self._is_member:
            answer = self._ask("group.heartbeat", {"generation": self.generation, "owned": owned})
        else:
            fields: dict[str, Any] = {"topics": self._topics, "owned": owned, "generation": self.generation}
            if self._selector is not None and self._selector.type != "TAG":
                fields["filter"] = {"type": self._selector.type, "expression": self._selector.expression}
            if self._session_timeout_ms is not None:
                fields["session_timeout_ms"] = self._session_timeout_ms
            answer = self._ask("group.join", fields)
            self._is_member = True
            if not self._has_joined:
                self._has_joined = True
                self._late.update(answer.get("missing", ()))
                for topic in sorted(self._late):
                    sentence = "the topic does not exist (yet): nothing is read of it until it does"
                    _log.warning(sentence, group=self.group, topic=topic)
        with assignment.lock:
            if not answer.get("kept", True):
                # Others may have had our queues since, and what is committed of them may have been reset.
                for state in list(assignment.owned.values()):
                    assignment.drop(state)
            # Under the lock: a commit either knows this generation or is of queues that are still ours.
            self.generation = int(answer["generation"])
        if self._doubts:
            self._doubts = False
            try:
                self._verify()
            except BaseException:
                self._doubts = True
                raise
        gained = [(topic, queue) for topic, queue in answer["assigned"] if (topic, queue) not in assignment.owned]
        revoked = [(topic, queue) for topic, queue in answer["revoke"]]
        old = assignment.of_old_incarnations(answer["incarnations"])
        self._made_anew.update(topic for topic, _ in old)
        released = self._revoke([*revoked, *old])
        count = self._gain(gained, answer["incarnations"]) if gained else 0
        if count or released:
            # Say so at once: others may be waiting for what was released, and what was gained is now owned.
            self.nudge()
        pause_s = float(answer.get("next_heartbeat_ms", answer["heartbeat_interval_ms"])) / 1000
        return pause_s if count == len(gained) else min(pause_s, _RETRY_S)

    def _is_idle(self) -> bool:
        """Whether nobody has polled for too long."""
        most_s, assignment = self._max_poll_interval_s, self._assignment
        return most_s is not None and not assignment.is_polling and time.monotonic() - assignment.polled_at > most_s

    def _stay_away(self) -> float:
        """Leave the group until somebody polls."""
        if self._is_member:
            _log.warning(
                "nobody has polled for too long: the consumer leaves its group until it polls again",
                group=self.group, member=self.member, max_poll_interval_s=self._max_poll_interval_s,
            )  # fmt: skip
            self._ask("group.leave", {})
            self._is_member = False
            with self._assignment.lock:
                for state in list(self._assignment.owned.values()):
                    self._assignment.drop(state)
        return _RETRY_S

    def _verify(self) -> None:
        """Give up, without a commit, the queues where something else is committed than we know."""
        assignment = self._assignment
        with assignment.lock:
            known = {key: state.committed for key, state in assignment.owned.items() if state.committed >= 0}
        if not known:
            return
        answer = self._ask("offset.fetch", {"queues": list(known)})
        with assignment.lock:
            for topic, queue, offset in answer["offsets"]:
                state = assignment.owned.get((topic, queue))
                if state is None or state.incarnation != answer["incarnations"].get(topic, state.incarnation):
                    continue
                # What was sent may have arrived although we heard no answer.
                if not known[topic, queue] <= offset <= max(state.committed, state.sent):
                    _log.warning(
                        "the group's offset was changed by somebody else: going on from there", group=self.group,
                        topic=topic, queue=queue, was=known[topic, queue], now=offset,
                    )  # fmt: skip
                    assignment.drop(state)

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
                in_hand = assignment.is_in_hand(state) or (assignment.tells and state.is_announced)
                if not in_hand or late:
                    if in_hand:
                        _log.warning(
                            "queue given back without a commit: the program did not poll in time",
                            group=self.group, topic=key[0], queue=key[1],
                        )  # fmt: skip
                    assignment.drop(state)
                    released = True
        if queues:
            assignment.ring()
        return released

    def _gain(self, queues: list[Queue], assigned: dict[str, int]) -> int:
        """Begin with ``queues``; returns with how many. The others' topics changed in this moment: look again."""
        answer = self._ask("offset.fetch", {"queues": queues})
        incarnations: dict[str, int] = answer["incarnations"]
        # What was deleted or made anew since the queues were assigned comes with the next heartbeat, as what it is then.
        queues = [key for key in queues if incarnations.get(key[0], -1) == assigned.get(key[0])]
        committed = {(topic, queue): int(offset) for topic, queue, offset in answer["offsets"]}
        begin: dict[Queue, Begin] = {}
        for topic in {topic for topic, queue in queues if committed[topic, queue] < 0}:
            try:
                begin.update(self._begin(topic, incarnations, committed))
            except RequestError as error:
                if error.code not in ("FENCED", "TOPIC_NOT_EXIST"):
                    raise
                return 0  # a topic was deleted
        queues = [key for key in queues if committed[key] >= 0 or key in begin]
        states = []
        for key in queues:
            offset, committable = begin.get(key, Begin(committed[key], committed[key]))
            proven = offset == committable
            states.append(new_state(key, offset, committed[key], incarnations[key[0]], proven=proven))
        self._assignment.add(states)
        self._made_anew -= {topic for topic, _ in queues}
        _log.info("queues assigned", group=self.group, member=self.member, queues=len(queues))
        return len(queues)

    def _begin(self, topic: str, incarnations: dict[str, int], committed: dict[Queue, int]) -> dict[Queue, Begin]:
        """Where to begin in the queues of ``topic`` that have no offset; all of them are committed, also in ``committed``.

        Queues that the topic has lost meanwhile are left out.
        """
        count = int(self._ask("topic.route", {"topic": topic})["topic"]["read_queues"])
        queues = sorted({(topic, queue) for queue in range(count)} | {key for key in committed if key[0] == topic})
        answer = self._ask("offset.fetch", {"queues": queues})
        if answer["incarnations"].get(topic) != incarnations[topic]:
            raise ProtocolError("FENCED", f"topic {topic} was made anew")
        found = {(topic, queue): int(offset) for _, queue, offset in answer["offsets"]}
        start: Start = self._start
        if topic in self._made_anew or topic == RETRY_PREFIX + self.group:  # (none that failed is skipped)
            start = "earliest"
        elif topic in self._late or any(offset >= 0 for offset in found.values()):
            start = for_new_queues(start)
        fresh = [key for key in queues if found[key] < 0]
        begin = start_offsets(
            self._reader_channel(), fresh, start, timeout_s=_REQUEST_S, incarnations={topic: incarnations[topic]}
        )
        offsets = [[*key, begin[key].committable] for key in fresh if key[1] < count]
        stored = self._ask(
            "offset.commit",
            {
                "offsets": offsets,
                "incarnations": {topic: incarnations[topic]},
                "begin": True,
                "partial": True,
                "generation": self.generation,
            },
        )["stored"]
        begun: dict[Queue, Begin] = {}
        for _, queue, offset in stored:
            key = (topic, int(queue))
            if key in committed:
                committed[key] = int(offset)
            if begin[key].committable == offset:
                begun[key] = begin[key]  # else another member was first
        return begun

    def _ask(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        if self._coordinator is None or self._coordinator.lost():
            self._close_channels()
            # Not long at a time: who closes the consumer waits for this thread.
            self._coordinator, _ = self._directory.connect("coordinator", time.monotonic() + _CONNECT_S)
        answer, _ = self._coordinator.request(
            op, {"group": self.group, "member": self.member, "instance": self.instance, **fields}, timeout_s=_REQUEST_S
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
