"""The operation ``group.share``: a group whose consumers share queues (RocketMQ's POP).

A group is *assigned* while it has members, each with queues of its own, or *shared* while the process ``pop`` hands out its
messages. Mixed use would give a message to two consumers, so the second kind is refused. ``pop`` repeats the request
while it works for the group; the lease ends by itself when it stops.

Resets: ``pop`` keeps in memory where a group goes on, ahead of the committed offsets. So each reset of a shared group gets the
next number, which ``Word.GROUP_RESETS`` has before the reset is answered. ``pop`` compares that word before each look for
messages, and learns by this operation which queues were reset behind the number that it has ``heard``. It begins them anew,
and a commit of what it did before is FENCED. A lost answer changes nothing: the queues are told until the number is heard.
A coordinator that starts does not know the resets before; ``pop`` finds those that set an offset back by comparing,
within 2 s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from commitmq.control import ControlBlock, Word
from commitmq.coordination import requests
from commitmq.coordination.answers import Answer, Fields, Operations
from commitmq.coordination.groups import Groups
from commitmq.coordination.requests import Header
from commitmq.coordination.topics import Topics
from commitmq.errors import ProtocolError
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX

LEASE_MS: Final = 15_000
_REVIVE_PREFIX: Final = "rmq_sys_REVIVE_LOG_"
_TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
_MAX_REVIVE_QUEUES: Final = 256
_LEASES: Final = 1_024
_RESETS_AN_ANSWER: Final = 2_000
_MAX_NUMBER: Final = (1 << 63) - 1


class ShareOperations:
    """See the module; :attr:`operations` has it by name."""

    def __init__(self, groups: Groups, topics: Topics, control: ControlBlock) -> None:
        self._groups, self._topics, self._control = groups, topics, control
        self._resets: dict[
            str, dict[tuple[str, int], int]
        ] = {}  # group -> queue -> number, in the order of the numbers
        self._until_ms: dict[str, int] = {}
        self._look_at = _LEASES
        self.operations: Operations = {"group.share": self._share}

    def check_assigned(self, group: str, now_ms: int) -> None:
        """ProtocolError NO_PERMISSION while the consumers of ``group`` share queues."""
        until_ms = self._until_ms.get(group)
        if until_ms is None:
            return
        if until_ms > now_ms:
            raise ProtocolError(
                "NO_PERMISSION",
                f"the consumers of group {group} share queues (ShareConsumer), so it takes no members (Consumer): use"
                f" another group, or try again {LEASE_MS // 1000} s after the last of them has closed",
            )
        del self._until_ms[group]
        self._resets.pop(group, None)

    def is_shared(self, group: str, now_ms: int) -> bool:
        """Whether the consumers of ``group`` share queues."""
        return self._until_ms.get(group, 0) > now_ms

    def note_resets(self, group: str, queues: Iterable[tuple[str, int]], now_ms: int) -> None:
        """Offsets of ``group`` were reset: if it is shared, ``pop`` begins ``queues`` anew before it hands out more."""
        if not self.is_shared(group, now_ms):
            return
        resets = self._resets.setdefault(group, {})
        for queue in queues:
            number = self._control.get(Word.GROUP_RESETS) + 1
            resets.pop(queue, None)
            resets[queue] = number
            self._control.put(Word.GROUP_RESETS, number)

    def check_heard(self, group: str, queue: tuple[str, int], heard: int | None) -> None:
        """ProtocolError FENCED for a commit of ``pop`` that has not heard of the last reset of ``queue``."""
        if heard is not None and self._resets.get(group, {}).get(queue, 0) > heard:
            raise ProtocolError(
                "FENCED", f"queue {queue[1]} of topic {queue[0]} in group {group}: its offset was reset"
            )

    def _unheard(self, group: str, heard: int) -> tuple[list[tuple[str, int]], int]:
        """The queues that were reset behind number ``heard``, and the number to hear next. What was heard is forgotten."""
        left = {queue: number for queue, number in self._resets.get(group, {}).items() if number > heard}
        if left:
            self._resets[group] = left
        else:
            self._resets.pop(group, None)
        told = list(left.items())[:_RESETS_AN_ANSWER]
        whole = len(told) == len(left)
        return [queue for queue, _ in told], self._control.get(Word.GROUP_RESETS) if whole else told[-1][1]

    def _share(self, header: Header, now_ms: int) -> Answer:
        """``topics``: the group's pop retry topics. ``revive``: the revive topic, of ``revive_queues`` queues. Without
        ``lease`` the group's kind is neither checked nor changed. ``heard``: the number of the last reset
        that the caller knows. With ``renew`` nothing is made, so that what a person deleted stays deleted until a
        consumer receives again.
        """
        group = requests.text(header, "group")
        renews = requests.flag(header, "renew")
        if renews and group not in self._groups.table.groups:
            raise ProtocolError("GROUP_NOT_EXIST", f"group {group} was deleted")
        self._groups.use(group)
        if requests.flag(header, "lease") and (membership := self._groups.membership(group)) is not None:
            raise ProtocolError(
                "NO_PERMISSION",
                f"group {group} has {len(membership.members)} members (Consumer), each with queues of its own, so its"
                " consumers cannot share queues (ShareConsumer): use another group",
            )
        config = self._groups.config_of(group)
        if config.retry_queues < 1:
            raise ProtocolError("NO_PERMISSION", f"group {group} keeps no failed messages: its retryQueueNums is 0")
        names = requests.names(header, "topics")
        heard = requests.optional_integer(header, "heard", 0, _MAX_NUMBER)
        revive = requests.text(header, "revive")
        queues = requests.optional_integer(header, "revive_queues", 1, _MAX_REVIVE_QUEUES) or 1
        mine = (f"{RETRY_PREFIX}{group}_", f"{RETRY_PREFIX}{group}+")
        for name in (*(name for name in names if not name.startswith(mine)), revive):
            if name != revive or not name.startswith(_REVIVE_PREFIX):
                raise ProtocolError("INVALID_PARAMETER", f"{name!r:.200} is no topic of a group that shares queues")
        wanted = {**dict.fromkeys(names, 1), DLQ_PREFIX + group: 1, revive: queues, _TIMER_TOPIC: 1}
        for name, count in wanted.items():
            if renews and not self._topics.exists(name):
                raise ProtocolError("TOPIC_NOT_EXIST", f"topic {name} of group {group} was deleted")
            self._topics.ensure(name, count)
        if requests.flag(header, "lease"):
            self._forget_old(now_ms)
            self._until_ms[group] = now_ms + LEASE_MS
        staged = any(self._topics.is_staged(name) for name in wanted)
        fields: Fields = {
            "max_retries": config.max_retries,
            "priority_factor": config.priority_factor,
            "lease_ms": LEASE_MS,
        }
        if heard is not None:
            fields["resets"], fields["heard"] = self._unheard(group, heard)
        return Answer(lambda: fields, "topics" if staged else None)

    def _forget_old(self, now_ms: int) -> None:
        """Drop the leases that have ended, when there are twice as many as after the last time. One that lasts stays.

        There are not more than `pop.max_groups`, the groups for which ``pop`` renews them, and those that end now.
        """
        if len(self._until_ms) >= self._look_at:
            self._until_ms = {name: until for name, until in self._until_ms.items() if until > now_ms}
            self._resets = {name: resets for name, resets in self._resets.items() if name in self._until_ms}
            self._look_at = max(_LEASES, 2 * len(self._until_ms))
