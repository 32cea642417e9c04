"""The operation ``group.share``: a group whose consumers share queues (RocketMQ's POP).

A group is *assigned* while it has members, each with queues of its own, or *shared* while the process ``pop`` hands out its
messages. Mixed use would give a message to two consumers, so the second kind is refused. ``pop`` repeats the request
while it works for the group; the lease ends by itself when it stops.
"""

from __future__ import annotations

from typing import Final

from commitmq.coordination import requests
from commitmq.coordination.answers import Answer, Operations
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


class ShareOperations:
    """See the module; :attr:`operations` has it by name."""

    def __init__(self, groups: Groups, topics: Topics) -> None:
        self._groups, self._topics = groups, topics
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

    def _share(self, header: Header, now_ms: int) -> Answer:
        """``topics``: the group's pop retry topics. ``revive``: the revive topic, of ``revive_queues`` queues. Without
        ``lease`` the group's kind is neither checked nor changed.
        """
        group = requests.text(header, "group")
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
        revive = requests.text(header, "revive")
        queues = requests.optional_integer(header, "revive_queues", 1, _MAX_REVIVE_QUEUES) or 1
        mine = (f"{RETRY_PREFIX}{group}_", f"{RETRY_PREFIX}{group}+")
        for name in (*(name for name in names if not name.startswith(mine)), revive):
            if name != revive or not name.startswith(_REVIVE_PREFIX):
                raise ProtocolError("INVALID_PARAMETER", f"{name!r:.200} is no topic of a group that shares queues")
        wanted = {**dict.fromkeys(names, 1), DLQ_PREFIX + group: 1, revive: queues, _TIMER_TOPIC: 1}
        for name, count in wanted.items():
            self._topics.ensure(name, count)
        if requests.flag(header, "lease"):
            self._forget_old(now_ms)
            self._until_ms[group] = now_ms + LEASE_MS
        staged = any(self._topics.is_staged(name) for name in wanted)
        fields = {"max_retries": config.max_retries, "lease_ms": LEASE_MS}
        return Answer(lambda: fields, "topics" if staged else None)

    def _forget_old(self, now_ms: int) -> None:
        """Drop the leases that have ended, when there are twice as many as after the last time. One that lasts stays.

        There are not more than `pop.max_groups`, the groups for which ``pop`` renews them, and those that end now.
        """
        if len(self._until_ms) >= self._look_at:
            self._until_ms = {name: until for name, until in self._until_ms.items() if until > now_ms}
            self._look_at = max(_LEASES, 2 * len(self._until_ms))
