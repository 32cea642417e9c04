"""A consumer as a member of its group: it joins, sends heartbeats, gains queues and gives them back.

The member has a thread and sockets of its own, so heartbeats continue while the program works on a batch, however long
that takes. When the coordinator wants a queue back, the member gives it back

* at once, if every message of it that was delivered is committed;
* else at the next poll, which says that the program is done with the last batch. A consumer that commits automatically
  commits the queue first;
* else after ``rebalance_timeout_s``, with a warning. The new owner then begins at the last committed offset, and a late
  commit of this consumer raises FencedError.

With ``on_revoke`` the first case does not apply, because a poll must call ``on_revoke`` before. A member that has not
polled for ``max_poll_interval_s`` leaves the group until it polls again: its thread may be dead, and nobody would read
its queues.

After the end of its session and after a refused commit the member compares the committed offsets with those that it
knows. When they differ in a queue, an operator has reset the group or another member had the queue. The member then
drops the queue, gains it again and begins at the committed offset.

The member also gains the queues of a topic again that was deleted and rebuilt. The answers show this by the
incarnation. The member begins at the first message, and the coordinator refuses a commit of the old topic.

The first member that gains a queue of a topic without offsets looks up where to begin in all queues of the topic, and
commits this in each queue without an offset (``begin``), whoever reads the queue. So when one queue has no offset and
others have, the queue came later, and the member begins at its first message. The same holds for a topic that came
after the member had joined.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import zmq

from commitmq.client.checks import Bell
from commitmq.client.receiving.assignment import (
    Assignment,
    Queue,
    QueueState,
    Start,
    StartOffset,
    for_new_queues,
    new_state,
    start_offsets,
)
from commitmq.client.receiving.settings import ConsumerSettings
from commitmq.errors import CommitMQError, FencedError, NodeUnavailableError, ProtocolError, RequestError
from commitmq.format.constants import RETRY_PREFIX
from commitmq.log import get_log
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory

_REQUEST_S = 2.0
_CONNECT_S = 0.5
_RETRY_S = 0.5

_log = get_log("consumer")


class GroupMember:
    """A consumer's membership of its group. The consumer uses the same ``assignment``."""

    def __init__(
        self,
        node: str | None,
        group: str,
        member: str,
        assignment: Assignment,
        settings: ConsumerSettings,
    ) -> None:
        self.group = group
        self.member = member
        # It tells this consumer from another one of the same name that took its place, or whose place it took.
        self.instance = secrets.token_hex(8)
        self.generation = 0
        self.error: CommitMQError | None = None  # why the coordinator refuses this member permanently
        self._joined = Bell()  # no threading.Event, because an interrupted wait may leave the lock of one held
        self._assignment = assignment
        self._settings = settings
        self._topics = settings.topics
        self._directory = Directory(node)
        self._coordinator: Channel | None = None
        self._reader: Channel | None = None
        self._is_member = False
        self._joins_anew = False  # because its topics are others now
        self._made_anew: set[str] = set()  # topics that were recreated, until their queues are gained again
        self._late: set[str] = set()  # topics that did not exist when this member joined
        self._has_joined = False
        self._doubts = False  # the committed offsets may differ from those that this member knows
        self._stopping = False
        self._leave = True
        self._bell = Bell()
        self._poller = zmq.Poller()
        self._poller.register(self._bell.fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"commitmq-member-{group}", daemon=True)

    def start(self) -> None:
        """Start the thread that joins. After an interruption in here the caller can still :meth:`close` this member."""
        self._thread.start()

    def wait_joined(self, timeout_s: float) -> bool:
        """Wait until the coordinator has accepted the member or refused it permanently (``error``). False after the
        time.
        """
        poller = zmq.Poller()
        poller.register(self._joined.fd, zmq.POLLIN)
        return bool(poller.poll(int(timeout_s * 1000)))

    def subscribe(self, topics: Iterable[str]) -> None:
        """Read ``topics`` too; the group's retry topic from its first message on."""
        self._topics = list(dict.fromkeys([*self._topics, *topics]))
        self._joins_anew = True
        self.nudge()

    def nudge(self) -> None:
        """Send the next heartbeat now, because a queue was returned or the offsets are in doubt."""
        self._bell.ring()

    def doubt(self) -> None:
        """After a refused commit, ask for the committed offsets and the assignment."""
        self._doubts = True
        self.nudge()

    def close(self, *, leave: bool = True) -> None:
        """Leave the group, so that other members get the queues at once, and end the thread. Closing twice is allowed."""
        self._leave = leave
        self._stopping = True
        self.nudge()
        # A thread that is not alive was never started, or it is about to run and sees ``_stopping`` first.
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
                        # The session ended, or the coordinator was started again. Join again, with the queues that we have.
                        self._is_member = False
                        self._doubts = True
                        _log.warning("the session ended, joining again", group=self.group, reason=error.message)
                        continue
                    if error.code == "FENCED":
                        # Another consumer has our name. To join again would take the name back, and so on without an end.
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
                    # Without this a dead thread would stall its queues, and nobody would notice.
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
            self._verify()  # before the coordinator gives us our queues again
        owned = assignment.keys()
        if self._is_member:
            answer = self._ask("group.heartbeat", {"generation": self.generation, "owned": owned})
        else:
            settings, selector = self._settings, self._settings.selector
            fields: dict[str, Any] = {"topics": self._topics, "owned": owned, "generation": self.generation}
            if selector.type != "TAG":
                fields["filter"] = {"type": selector.type, "expression": selector.expression}
            if settings.strategy is not None:
                fields["strategy"] = settings.strategy
            if settings.session_timeout_ms is not None:
                fields["session_timeout_ms"] = settings.session_timeout_ms
            answer = self._ask("group.join", fields)
            self._is_member = True
            if not self._has_joined:
                self._has_joined = True
                self._late.update(answer.get("missing", ()))
                for topic in sorted(self._late):
                    sentence = "the topic does not exist yet; the consumer waits for it"
                    _log.warning(sentence, group=self.group, topic=topic)
        with assignment.lock:
            if not answer.get("kept", True):
                # Other members may have had our queues since, and an operator may have reset their offsets.
                for state in list(assignment.owned.values()):
                    assignment.drop(state)
            for topic, queue in answer.get("anew", ()):  # somebody has reset its offset
                if (known := assignment.owned.get((topic, queue))) is not None:
                    assignment.drop(known)
            # Under the lock, so a commit either has this generation or is of queues that are still ours.
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
            # Tell it at once: another member may wait for a released queue, and the gained ones are owned now.
            self.nudge()
        pause_s = float(answer.get("next_heartbeat_ms", answer["heartbeat_interval_ms"])) / 1000
        return pause_s if count == len(gained) else min(pause_s, _RETRY_S)

    def _is_idle(self) -> bool:
        """Whether the last poll is too long ago."""
        most_s, assignment = self._settings.max_poll_interval_s, self._assignment
        return most_s is not None and not assignment.is_polling and time.monotonic() - assignment.polled_at > most_s

    def _stay_away(self) -> float:
        """Leave the group until the next poll."""
        if self._is_member:
            _log.warning(
                "the last poll is too long ago; the consumer leaves its group until it polls again",
                group=self.group, member=self.member, max_poll_interval_s=self._settings.max_poll_interval_s,
            )  # fmt: skip
            self._ask("group.leave", {})
            self._is_member = False
            with self._assignment.lock:
                for state in list(self._assignment.owned.values()):
                    self._assignment.drop(state)
        return _RETRY_S

    def _verify(self) -> None:
        """Drop, without a commit, the queues whose committed offset is not the one that this member knows."""
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
                # A commit without an answer may have been stored.
                if not known[topic, queue] <= offset <= max(state.committed, state.sent):
                    _log.warning(
                        "the group's offset was changed, by a reset or a cut of the log; the consumer continues there",
                        group=self.group, topic=topic, queue=queue, was=known[topic, queue], now=offset,
                    )  # fmt: skip
                    assignment.drop(state)

    def _revoke(self, queues: list[Queue]) -> bool:
        """Mark ``queues`` as wanted back, and return those that can be given now. True when there was one."""
        assignment = self._assignment
        released = False
        now = time.monotonic()
        with assignment.lock:
            wanted = set(queues)
            for key, state in list(assignment.owned.items()):
                if key not in wanted:
                    state.revoked_at = 0.0  # the coordinator does not want it any more
                    continue
                state.revoked_at = state.revoked_at or now
                late = now - state.revoked_at > self._settings.rebalance_timeout_s
                in_hand = assignment.is_in_hand(state) or (assignment.tells and state.is_announced)
                if not in_hand or late:
                    if in_hand:
                        _log.warning(
                            "the consumer gives a queue back without a commit, because it did not poll in time",
                            group=self.group, topic=key[0], queue=key[1],
                        )  # fmt: skip
                    assignment.drop(state)
                    released = True
        if queues:
            assignment.ring()
        return released

    def _gain(self, queues: list[Queue], assigned: dict[str, int]) -> int:
        """Begin to read ``queues``, and return how many. The topics of the others changed in the meantime: look again."""
        answer = self._ask("offset.fetch", {"queues": queues})
        incarnations: dict[str, int] = answer["incarnations"]
        # The next heartbeat brings the queues of topics that were deleted or recreated since this assignment.
        queues = [key for key in queues if incarnations.get(key[0], -1) == assigned.get(key[0])]
        committed = {(topic, queue): int(offset) for topic, queue, offset in answer["offsets"]}
        begin: dict[Queue, StartOffset] = {}
        for topic in {topic for topic, queue in queues if committed[topic, queue] < 0}:
            try:
                begin.update(self._begin(topic, incarnations, committed))
            except RequestError as error:
                if error.code not in ("FENCED", "TOPIC_NOT_EXIST"):
                    raise
                return 0  # a topic was deleted in the meantime
        queues = [key for key in queues if committed[key] >= 0 or key in begin]
        generation = int(answer["log_generation"])
        self._assignment.add(
            new_state(
                key,
                begin.get(key, StartOffset(committed[key], committed[key], generation)),
                committed[key],
                incarnations[key[0]],
            )
            for key in queues
        )
        self._made_anew -= {topic for topic, _ in queues}
        _log.info("queues assigned", group=self.group, member=self.member, queues=len(queues))
        return len(queues)

    def _begin(self, topic: str, incarnations: dict[str, int], committed: dict[Queue, int]) -> dict[Queue, StartOffset]:
        """Where to begin in the queues of ``topic`` without an offset. The beginnings are committed, and put in
        ``committed``.

        Queues that the topic has lost in the meantime are omitted.
        """
        count = int(self._ask("topic.route", {"topic": topic})["topic"]["read_queues"])
        queues = sorted({(topic, queue) for queue in range(count)} | {key for key in committed if key[0] == topic})
        answer = self._ask("offset.fetch", {"queues": queues})
        if answer["incarnations"].get(topic) != incarnations[topic]:
            raise ProtocolError("FENCED", f"topic {topic} was recreated")
        found = {(topic, queue): int(offset) for _, queue, offset in answer["offsets"]}
        start: Start = self._settings.start
        if topic in self._made_anew or topic == RETRY_PREFIX + self.group:  # no failed message may be skipped
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
        begun: dict[Queue, StartOffset] = {}
        for _, queue, offset in stored:
            key = (topic, int(queue))
            if key in committed:
                committed[key] = int(offset)
            if begin[key].committable == offset:
                begun[key] = begin[key]  # another offset is that of a member that was first
        return begun

    def _ask(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        if self._coordinator is None or self._coordinator.lost():
            self._close_channels()
            # Only for a short time, because close() waits for this thread.
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


_PAUSE_S: Final = 0.05
_AGAIN: Final = ("UNKNOWN_MEMBER", "SERVICE_NOT_AVAILABLE")


class CommitProgress(NamedTuple):
    """Offsets to commit, with the last known offsets, the incarnations and the generations of the log; see the module."""

    offsets: dict[Queue, int]
    known: dict[Queue, int]
    incarnations: dict[str, int]
    log_generations: dict[Queue, int]


class Committer:
    """The commits of a consumer. Only the thread that polls uses this.

    Besides the offsets, every commit carries the incarnations of the topics, the offsets that the consumer last knew as
    committed (``known``) and the generations of the log in which it learnt the offsets. So a commit can neither reach a
    topic that was recreated, nor undo a reset by an operator, nor pass over messages that came after a power cut had
    taken others.

    The channel of one consumer to the coordinator, and the commits on it.
    """

    def __init__(self, directory: Directory, assignment: Assignment) -> None:
        self.member: GroupMember | None = None
        self._directory = directory
        self._assignment = assignment
        self._coordinator: Channel | None = None

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    # ------------------------------------------------------------ what there is to commit

    def progress(self, states: Iterable[QueueState], *, delivered: bool) -> CommitProgress:
        """The uncommitted offsets of these queues: behind every ``delivered`` message, or behind the confirmed ones only."""
        with self._assignment.lock:
            self._assignment.settle()
            offsets = {
                state.key: offset
                for state in states
                if (offset := state.delivered if delivered and state.is_proven else state.confirmed) != state.committed
            }
            return self.of(offsets)

    def of(self, offsets: Mapping[Queue, int]) -> CommitProgress:
        """These offsets, with what is known of their queues."""
        with self._assignment.lock:
            owned = self._assignment.owned
            states = [owned[key] for key in offsets if key in owned]
            return CommitProgress(
                dict(offsets),
                {state.key: state.committed for state in states if state.committed >= 0},
                {state.topic: state.incarnation for state in states if state.incarnation >= 0},
                {state.key: state.log_generation for state in states if state.log_generation >= 0},
            )

    # ------------------------------------------------------------ committing

    def commit(self, progress: CommitProgress, deadline: float) -> dict[Queue, int]:
        """Commit all offsets or none. Raises FencedError, ProtocolError, and NodeUnavailableError at ``deadline``."""
        return self._commit(progress, deadline, partial=False)

    def commit_quietly(self, progress: CommitProgress, deadline: float) -> bool:
        """Commit as many of the offsets as possible. A refused one, of a queue that was lost, gives a line in the log only.

        False when the node did not answer in time or cannot write now: then the caller should try again.
        """
        if not progress.offsets:
            return True
        try:
            self._commit(progress, deadline, partial=True)
        except FencedError as error:
            _log.warning("an automatic commit was refused", group=self._group, error=error.message)
        except RequestError as error:
            _log.warning("an automatic commit failed, it will be tried again", group=self._group, error=str(error))
            return False
        return True

    @property
    def _group(self) -> str:
        return "" if self.member is None else self.member.group

    def _commit(self, progress: CommitProgress, deadline: float, *, partial: bool) -> dict[Queue, int]:
        member = self.member
        assert member is not None
        with self._assignment.lock:
            states = {key: self._assignment.owned.get(key) for key in progress.offsets}
            for key, state in states.items():
                if state is not None:
                    state.sent = max(state.sent, progress.offsets[key])
        while True:
            with self._assignment.lock:
                generation = member.generation
                given_up = [key for key, state in states.items() if self._assignment.owned.get(key) is not state]
            if given_up and not partial:
                raise FencedError(
                    f"member {member.member!r} of group {member.group} lost {len(given_up)} of these queues in the meantime:"
                    " they were returned, or its session ended"
                )
            queues = [key for key in states if key not in given_up]
            if given_up and not queues:
                return {}
            fields = {
                "group": member.group,
                "member": member.member,
                "instance": member.instance,
                "generation": generation,
                "offsets": [[*key, progress.offsets[key]] for key in queues],
                "known": [progress.known.get(key, -1) for key in queues],
                "incarnations": progress.incarnations,
                "log_generations": [progress.log_generations.get(key, -1) for key in queues],
                "partial": partial,
            }
            try:
                answer = self.ask("offset.commit", fields, deadline)
                break
            except FencedError:
                member.doubt()
                raise
            except RequestError as error:
                if error.code not in _AGAIN or time.monotonic() + _PAUSE_S >= deadline:
                    raise
                # The coordinator was started again and does not know this member yet. The membership thread joins again.
                member.nudge()
                time.sleep(_PAUSE_S)
        stored = {(topic, queue): int(offset) for topic, queue, offset in answer["stored"]}
        with self._assignment.lock:
            for key, offset in stored.items():
                state = self._assignment.owned.get(key)
                if state is not None and state.incarnation == progress.incarnations.get(key[0], state.incarnation):
                    state.committed = offset
                    state.settled = progress.offsets[key]
        refused = answer.get("refused") or ()
        for topic, queue, _code, sentence in refused:
            _log.warning(
                "an automatic commit was refused", group=member.group, topic=topic, queue=queue, error=sentence
            )
        if refused:
            member.doubt()
        return stored

    def ask(self, op: str, fields: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Send a request to the coordinator, and again until ``deadline`` while the coordinator is away."""
        while True:
            if self._coordinator is None or self._coordinator.lost_while_idle():
                self.close()
                self._coordinator, _ = self._directory.connect("coordinator", deadline)
            try:
                return self._coordinator.request(op, fields, timeout_s=max(deadline - time.monotonic(), 0.01))[0]
            except NodeUnavailableError:
                # Every request here can be repeated, because a commit names an offset and not a distance.
                self.close()
                if time.monotonic() >= deadline:
                    raise
            except BaseException as error:
                if not isinstance(error, RequestError):
                    self.close()  # interrupted: the answer may be half read
                raise
