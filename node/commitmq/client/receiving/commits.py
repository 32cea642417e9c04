"""The commits of a consumer. Only the thread that polls uses this.

Besides the offsets, every commit carries the incarnations of the topics, the offsets that the consumer last knew as
committed (``known``) and the generations of the log in which it learnt the offsets. So a commit can neither reach a topic that
was made anew, nor undo a reset by an operator, nor pass over messages that came after a power cut had taken others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from commitmq.client.receiving.assignment import Assignment, Queue, QueueState
from commitmq.client.receiving.membership import GroupMember
from commitmq.errors import FencedError, NodeUnavailableError, RequestError
from commitmq.log import get_log
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory

_PAUSE_S: Final = 0.05
_AGAIN: Final = ("UNKNOWN_MEMBER", "SERVICE_NOT_AVAILABLE")

_log = get_log("consumer")


class Progress(NamedTuple):
    """Offsets to commit, with the last known offsets, the incarnations and the generations of the log; see the module."""

    offsets: dict[Queue, int]
    known: dict[Queue, int]
    incarnations: dict[str, int]
    log_generations: dict[Queue, int]


class Committer:
    """The channel of one consumer to the coordinator, and the commits on it."""

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

    def progress(self, states: Iterable[QueueState], *, delivered: bool) -> Progress:
        """The uncommitted offsets of these queues: behind every ``delivered`` message, or behind the confirmed ones only."""
        with self._assignment.lock:
            self._assignment.settle()
            offsets = {
                state.key: offset
                for state in states
                if (offset := state.delivered if delivered and state.is_proven else state.confirmed) != state.committed
            }
            return self.of(offsets)

    def of(self, offsets: Mapping[Queue, int]) -> Progress:
        """These offsets, with what is known of their queues."""
        with self._assignment.lock:
            owned = self._assignment.owned
            states = [owned[key] for key in offsets if key in owned]
            return Progress(
                dict(offsets),
                {state.key: state.committed for state in states if state.committed >= 0},
                {state.topic: state.incarnation for state in states if state.incarnation >= 0},
                {state.key: state.log_generation for state in states if state.log_generation >= 0},
            )

    # ------------------------------------------------------------ committing

    def commit(self, progress: Progress, deadline: float) -> dict[Queue, int]:
        """Commit all offsets or none. Raises FencedError, ProtocolError, and NodeUnavailableError at ``deadline``."""
        return self._commit(progress, deadline, partial=False)

    def commit_quietly(self, progress: Progress, deadline: float) -> bool:
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

    def _commit(self, progress: Progress, deadline: float, *, partial: bool) -> dict[Queue, int]:
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
                    f"member {member.member!r} of group {member.group} lost {len(given_up)} of these queues meanwhile:"
                    " they were given back, or its session ended"
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
