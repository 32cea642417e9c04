"""The operations on groups: ``group.join``, ``heartbeat``, ``leave``, ``list``, ``describe``, ``positions`` and
``retry_topics``.
"""

from __future__ import annotations

from collections.abc import Callable

from commitmq.coordination import requests, topic_rules
from commitmq.coordination.allocation_table import MAX_STRATEGY_CHARACTERS, AllocationTable
from commitmq.coordination.answers import Answer, Fields, Operations
from commitmq.coordination.groups import Groups
from commitmq.coordination.listing import MAX_ENTRIES, Listing
from commitmq.coordination.membership import Queue, View
from commitmq.coordination.requests import Header
from commitmq.coordination.resets import to_begin_anew
from commitmq.coordination.share_operations import ShareOperations
from commitmq.coordination.subscriptions import SQL, Subscriptions
from commitmq.coordination.topics import Topics
from commitmq.errors import ProtocolError
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq.log import get_log

_SESSION_TIMEOUT_MIN_MS = 200
_SESSION_TIMEOUT_MAX_MS = 30 * 60_000
_MIN_HEARTBEAT_MS = 50
# While queues change hands members come this much more often, so that a rebalance takes little more than one interval.
_REBALANCE_SPEEDUP = 10
_MAX_GENERATION = (1 << 63) - 1
_MAX_HEARTBEATS = 1_000


class GroupOperations:
    """See the module; :attr:`operations` has them by name."""

    def __init__(
        self,
        groups: Groups,
        topics: Topics,
        subscriptions: Subscriptions,
        listing: Listing,
        shares: ShareOperations,
        broker_name: str,
    ) -> None:
        self._groups, self._topics, self._subscriptions, self._listing = groups, topics, subscriptions, listing
        self._shares = shares
        self._broker_name = broker_name
        self._log = get_log("coordinator")
        self.who: Callable[[], str | None] = lambda: None
        """The user of the request that is handled at the moment; None for nobody."""
        self.operations: Operations = {
            "group.join": self._join,
            "group.heartbeat": self._heartbeat,
            "group.heartbeats": self._heartbeats,
            "group.leave": self._leave,
            "group.list": self._list,
            "group.describe": self._describe,
            "group.positions": self._positions,
            "group.retry_topics": self._retry_topics,
        }

    def _join(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        wanted = requests.names(header, "topics")
        self._groups.check_topics(len(wanted))
        for name in wanted:
            topic_rules.check_name(name)
        timeout_ms = requests.optional_integer(
            header, "session_timeout_ms", _SESSION_TIMEOUT_MIN_MS, _SESSION_TIMEOUT_MAX_MS
        )
        timeout_ms = self._groups.config.session_timeout_ms if timeout_ms is None else timeout_ms
        owned = requests.queues(header, "owned", optional=True)
        generation = requests.optional_integer(header, "generation", 0, _MAX_GENERATION) or 0
        kind, expression = requests.selector(header, "filter")
        instance = requests.optional_text(header, "instance") or ""
        named = requests.optional_text(header, "strategy", MAX_STRATEGY_CHARACTERS)
        strategy = None if named is None else AllocationTable(named, self._broker_name)
        self._shares.check_assigned(group, now_ms)
        user = self.who() or ""
        membership = self._groups.membership(group)
        known = None if membership is None else membership.members.get(member)
        # The node's own account, and its processes, have no user.
        if user and known is not None and known.user != user:
            sentence = f"group {group}: {member!r} is the name of another user's consumer: choose another"
            raise ProtocolError("FENCED", sentence)
        view = self._groups.join(group, member, wanted, owned, timeout_ms, now_ms, generation, instance, strategy)
        joined = self._groups.membership(group)
        assert joined is not None
        joined.members[member].user = user
        # The retry topic is read without a filter: its messages have passed one, or come from an ordered consumer.
        filtered = [name for name in wanted if name != RETRY_PREFIX + group]
        self._subscriptions.join(group, filtered, expression if kind == SQL else None)
        self._log.info("member joined", group=group, member=member, topics=len(wanted))
        missing = sorted(name for name in wanted if not self._topics.exists(name))
        more: Fields = {"kept": view.kept, "missing": missing, **self._anew(group, member, generation)}
        more |= self._members(header, group, view, generation)
        return Answer(lambda: {**self._view(view, timeout_ms), **more})

    def _heartbeat(self, header: Header, now_ms: int) -> Answer:
        instance = requests.optional_text(header, "instance") or ""
        view, timeout_ms, more = self._heard(header, instance, now_ms, requests.queues(header, "owned"))
        return Answer(lambda: {**self._view(view, timeout_ms), **more})

    def _heartbeats(self, header: Header, now_ms: int) -> Answer:
        """Heartbeats of a gateway's members. The answer has only those that have to learn something."""
        instance = requests.optional_text(header, "instance") or ""
        changed: list[tuple[int, View, int, Fields]] = []
        refused: list[tuple[int, str, str]] = []
        for index, one in enumerate(requests.objects(header, "members", _MAX_HEARTBEATS)):
            try:
                owned = None if one.get("owned") is None else requests.queues(one, "owned")
                view, timeout_ms, more = self._heard({**one, "members": True}, instance, now_ms, owned)
            except ProtocolError as error:
                refused.append((index, error.code, error.message))
                continue
            if more or view.revoke or view.generation != one["generation"]:
                changed.append((index, view, timeout_ms, more))
        return Answer(
            lambda: {
                "changed": [[index, {**self._view(view, ms), **more}] for index, view, ms, more in changed],
                "refused": refused,
            }
        )

    def _heard(self, header: Header, instance: str, now_ms: int, owned: list[Queue] | None) -> tuple[View, int, Fields]:
        """One heartbeat: the answer for the member, its session's length and further fields."""
        group, member = requests.text(header, "group"), requests.text(header, "member")
        generation = requests.integer(header, "generation", 0, _MAX_GENERATION)
        self._groups.check_enabled(group)
        view = self._groups.heartbeat(group, member, generation, owned, now_ms, instance)
        membership = self._groups.membership(group)
        assert membership is not None
        more = self._anew(group, member, generation)
        more |= self._members(header, group, view, generation)
        return view, membership.member_of(member).session_timeout_ms, more

    def _members(self, header: Header, group: str, view: View, generation: int) -> Fields:
        """Names and instances of all members, for a gateway that asks for them: when they may be others than before."""
        membership = self._groups.membership(group)
        if not requests.flag(header, "members") or membership is None or view.generation == generation:
            return {}
        return {"members": [[name, one.instance] for name, one in sorted(membership.members.items())]}

    def _anew(self, group: str, member: str, generation: int) -> Fields:
        membership = self._groups.membership(group)
        queues = [] if membership is None else to_begin_anew(membership.member_of(member), generation)
        return {"anew": queues} if queues else {}

    def _view(self, view: View, session_timeout_ms: int) -> Fields:
        # Three heartbeats fit into every session, so that one lost heartbeat ends nothing.
        interval_ms = max(_MIN_HEARTBEAT_MS, min(self._groups.config.heartbeat_interval_ms, session_timeout_ms // 3))
        soon_ms = max(_MIN_HEARTBEAT_MS, interval_ms // _REBALANCE_SPEEDUP)
        return {
            "generation": view.generation,
            "assigned": view.assigned,
            "incarnations": self._topics.incarnations({topic for topic, _ in view.assigned}),
            "revoke": view.revoke,
            "heartbeat_interval_ms": interval_ms,
            "next_heartbeat_ms": interval_ms if view.settled else soon_ms,
            "session_timeout_ms": session_timeout_ms,
        }

    def _leave(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        self._groups.leave(group, member, requests.optional_text(header, "instance") or "")
        self._log.info("member left", group=group, member=member)
        return Answer(dict)

    def _list(self, header: Header, now_ms: int) -> Answer:
        after, limit = requests.cursor(header, str, str), requests.limit(header, MAX_ENTRIES)
        return Answer(lambda: self._listing.groups(after, limit))

    def _positions(self, header: Header, now_ms: int) -> Answer:
        after, limit = requests.cursor(header, str, str, int), requests.limit(header, MAX_ENTRIES)
        return Answer(lambda: self._listing.positions(after, limit))

    def _describe(self, header: Header, now_ms: int) -> Answer:
        name, limit = requests.text(header, "group"), requests.limit(header, MAX_ENTRIES)
        after = requests.part_cursor(header)
        described = self._listing.describe_group(name, after, limit, now_ms)
        described["group"]["broker"] = self._broker_name  # by which strategies tell the queues of nodes apart
        return Answer(lambda: described)

    def _retry_topics(self, header: Header, now_ms: int) -> Answer:
        group = requests.text(header, "group")
        self._groups.use(group)
        config = self._groups.config_of(group)
        if config.retry_queues < 1:
            # RocketMQ drops the failed messages of such a group. A program that handles messages should know.
            raise ProtocolError("NO_PERMISSION", f"group {group} keeps no failed messages: its retryQueueNums is 0")
        retry, dead = RETRY_PREFIX + group, DLQ_PREFIX + group
        wanted = {retry: min(config.retry_queues, topic_rules.MAX_QUEUES)}
        if not requests.flag(header, "only_retry"):
            wanted[dead] = 1
        for name, queues in wanted.items():
            if not self._topics.exists(name):
                self._topics.create(name, queues)
        staged = any(self._topics.is_staged(name) for name in wanted)
        fields = {"retry": retry, "dead": dead, "max_retries": config.max_retries}
        return Answer(lambda: fields, "topics" if staged else None)
