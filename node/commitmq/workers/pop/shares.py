"""The groups whose consumers share queues, and where each group continues in each queue.

The offset of a group lies behind the last message that was delivered (RocketMQ's rule). The process keeps it in memory
and commits it through the coordinator. After a death the check points in the log tell what was delivered behind the
committed offset (:mod:`commitmq.workers.pop.recovery`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.semantics.pop import USUAL_NAMES, RetryNames
from commitmq.workers.runtime.context import monotonic_ms
from commitmq.workers.runtime.run_mover import CoordinatorLine

_RENEW_MS: Final = 2_000
SHARE: Final = "group.share"
"""The operation that makes a group whose consumers share queues."""
_IDLE_MS: Final = 30_000
_AWAY_MS: Final = 1_000
_COMMITS: Final = 500  # offsets in one request
_REQUESTS: Final = 32

QueueKey = tuple[str, int]
"""A topic of the store, retry topics too, and a queue."""


@dataclass(slots=True)
class Share:
    """One group. ``next``: the offset of the next message to hand out, by queue; ``committed``: what the node has."""

    group: str
    max_retries: int = 16
    priority_factor: int = 100
    """Of 100 pops of a topic of the type PRIORITY, this many begin with its highest queue."""
    topics: set[str] = field(default_factory=set)
    """Those that it pops; their retry topics exist."""
    next: dict[QueueKey, int] = field(default_factory=dict)
    committed: dict[QueueKey, int] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    """Those of the topics whose offsets these are: a commit for a deleted topic says nothing of the next one of its name."""
    used_ms: int = 0
    renew_ms: int = 0
    ordered: bool = False
    """Whether its consumers receive in order; all of them do, or none."""
    heard: int = 0
    """The number of the last reset that is known here (Word.GROUP_RESETS)."""
    reads: int = -1
    """The number of the last change of what groups may read that is known here (Word.GROUP_READS)."""
    problem: str = ""
    """Why the group may not share any more."""

    def dirty(self) -> list[tuple[str, int, int]]:
        return [(*key, offset) for key, offset in self.next.items() if offset != self.committed.get(key, -1)]


class Shares:
    """All groups, ``max_groups`` at most. ``revive`` is the revive topic, of ``revive_queues`` queues; ``resets`` gives the
    number of the last reset of any group, ``reads`` that of the last change of what groups may read.
    """

    def __init__(
        self,
        line: CoordinatorLine,
        revive: str,
        revive_queues: int,
        max_groups: int,
        resets: Callable[[], int] = int,
        reads: Callable[[], int] = int,
        names: RetryNames = USUAL_NAMES,
    ) -> None:
        self._names = names
        self._line, self._resets, self._reads = line, resets, reads
        self._max_groups = max_groups
        self._revive = {"revive": revive, "revive_queues": revive_queues}
        self.on_behalf_of: dict[str, Any] = {}
        """For whom a group is made that is not there, as a request says it; empty for nobody."""
        self._shares: dict[str, Share] = {}
        self.begun_anew: Callable[[str, QueueKey], None] = lambda group, key: None
        """Called when a queue of a group starts over: its offset was set back by an operator, or its topic was deleted.
        """
        self.handed_out: dict[tuple[str, str, int], int] = {}
        """Where the check points in the log end, by group, topic and queue; found after a death."""

    def __iter__(self) -> Any:
        return iter(self._shares.values())

    def get(self, group: str) -> Share | None:
        return self._shares.get(group)

    def of(self, group: str, topics: list[str], *, ordered: bool = False) -> Share:
        """The share of ``group``, which pops ``topics``. Raises ProtocolError for a group that may not."""
        now = monotonic_ms()
        share = self._shares.get(group)
        if share is not None and share.ordered is not ordered:
            ways = ("in order", "without order") if share.ordered else ("without order", "in order")
            sentence = (
                f"the consumers of group {group} receive {ways[0]}, so none can receive {ways[1]}: use another group"
            )
            raise ProtocolError("NO_PERMISSION", sentence)
        reads = self._reads()
        # (Of this group, or of another.)
        is_other = share is not None and (share.heard != self._resets() or share.reads != reads)
        if share is None or share.problem or is_other or not share.topics.issuperset(topics):
            if share is None and len(self._shares) >= self._max_groups:
                sentence = f"{self._max_groups} groups share queues already (pop.max_groups)"
                raise ProtocolError("LIMIT_EXCEEDED", sentence, retry_after_ms=5_000)
            answer = self._line.one(self._request(group, topics, 0 if share is None else share.heard))
            if share is None:
                share = self._shares[group] = Share(group, ordered=ordered)
            share.topics.update(topics)
            share.renew_ms, share.problem, share.reads = now + _RENEW_MS, "", reads
            self._hear(share, answer)
        share.used_ms = now
        return share

    def max_retries(self, group: str, topic: str) -> int:
        """How often a message of ``group`` may come again; makes sure that the topics for it exist."""
        share = self._shares.get(group)
        if share is not None and topic in share.topics:
            return share.max_retries
        return int(self._line.one({**self._request(group, [topic], None), "lease": False})["max_retries"])

    def _request(self, group: str, topics: list[str], heard: int | None) -> dict[str, Any]:
        return {
            "op": SHARE,
            "group": group,
            "topics": [self._names.written(topic, group) for topic in topics],
            "lease": True,
            "heard": heard,
            **self._revive,
            **self.on_behalf_of,
        }

    def _hear(self, share: Share, answer: dict[str, Any]) -> None:
        """Take the group's settings, and begin the queues again that were reset since."""
        share.max_retries, share.priority_factor = int(answer["max_retries"]), int(answer.get("priority_factor", 100))
        for topic, queue in answer["resets"]:
            self._begin_anew(share, (topic, queue))
        share.heard = int(answer["heard"])

    # ------------------------------------------------------------ offsets

    def see(self, share: Share, name: str, incarnation: int) -> None:
        """The topic ``name`` has this ``incarnation``: queues of an earlier one start over, before the next read."""
        if incarnation > share.incarnations.get(name, incarnation):
            self._made_anew(share, {"incarnations": {name: incarnation}})

    def load(self, share: Share, queues: list[QueueKey], begin: dict[QueueKey, int]) -> None:
        """Learn where ``share`` continues in ``queues``; in one without an offset at ``begin``. Raises ProtocolError."""
        new = [key for key in queues if key not in share.next]
        if not new:
            return
        answer = self._line.one({"op": "offset.fetch", "group": share.group, "queues": new})
        if self._made_anew(share, answer):
            raise ProtocolError("SERVICE_NOT_AVAILABLE", "a topic was recreated just now", retry_after_ms=50)
        for topic, queue, offset in answer["offsets"]:
            key = (topic, queue)
            share.committed[key] = offset
            start = begin[key] if offset < 0 else offset
            share.next[key] = max(start, self.handed_out.get((share.group, topic, queue), 0))

    def commit_handed_out(self) -> None:
        """Commit where the check points end, once: kept here, they would undo a later reset, or count for a later topic of the
        name. Raises ProtocolError without a coordinator.
        """
        by_group: dict[str, list[tuple[str, int, int]]] = {}
        for (group, topic, queue), offset in self.handed_out.items():
            by_group.setdefault(group, []).append((topic, queue, offset))
        requests: list[dict[str, Any]] = [
            {"op": "offset.commit", "group": group, "offsets": offsets[at : at + _COMMITS], "partial": True}
            for group, offsets in by_group.items()
            for at in range(0, len(offsets), _COMMITS)
        ]
        for first in range(0, len(requests), _REQUESTS):
            some = requests[first : first + _REQUESTS]
            for request, answer in zip(some, self._line.ask(some), strict=True):
                if answer.get("ok"):
                    for topic, queue, _ in request["offsets"]:
                        self.handed_out.pop((request["group"], topic, queue), None)

    def commit(
        self, extra: list[dict[str, Any]], is_in_flight: Callable[[Share], bool], *, only_ordered: bool = False
    ) -> bool:
        """Commit what changed, and renew leases; ``extra`` requests of the caller go with it. False: not all succeeded.

        ``is_in_flight``: whether messages of a share are in flight, so that it stays. ``only_ordered``: leave out the shares
        whose offsets must not pass check points that are not flushed.
        """
        now = monotonic_ms()
        requests: list[dict[str, Any]] = list(extra)
        shares: list[Share | None] = [None] * len(extra)
        for share in list(self._shares.values()):
            if only_ordered and not share.ordered:
                continue
            dirty = share.dirty()
            for at in range(0, len(dirty), _COMMITS):
                known = [
                    max(share.committed.get((topic, queue), -1), -1) for topic, queue, _ in dirty[at : at + _COMMITS]
                ]
                offsets = dirty[at : at + _COMMITS]
                # ``partial``: a queue that was reset says nothing of the others, which would begin behind their offsets.
                names = {topic for topic, _, _ in offsets}
                made = {name: one for name, one in share.incarnations.items() if name in names}
                fields = {"offsets": offsets, "known": known, "incarnations": made, "partial": True}
                requests.append({"op": "offset.commit", "group": share.group, "heard": share.heard, **fields})
                shares.append(share)
            active = share.used_ms + _IDLE_MS > now or is_in_flight(share)
            if not active and not dirty:
                del self._shares[share.group]
            elif active and share.renew_ms <= now and share.topics:
                share.renew_ms = now + _RENEW_MS
                requests.append({**self._request(share.group, sorted(share.topics), share.heard), "renew": True})
                known_queues = list(share.next)[:_COMMITS]
                if known_queues:
                    requests.append({"op": "offset.fetch", "group": share.group, "queues": known_queues})
                shares += [share] * (2 if known_queues else 1)
        if not requests:
            return True
        whole = True
        for request, share_, answer in zip(requests, shares, self._line.ask(requests), strict=True):
            whole &= self._heard(request, share_, answer)
        return whole

    def _heard(self, request: dict[str, Any], share: Share | None, answer: dict[str, Any]) -> bool:
        if answer.get("ok"):
            if share is not None:
                self._made_anew(share, answer)
                if request["op"] == SHARE:
                    self._hear(share, answer)
                for topic, queue, offset in answer.get("stored") or answer.get("offsets") or ():
                    self._stored(share, (topic, queue), offset)
                for topic, queue, _code, _why in answer.get("refused") or ():
                    # It was reset, or its topic was deleted or recreated.
                    self._begin_anew(share, (topic, queue))
            return True
        if share is None:
            return False
        if request["op"] == SHARE:
            if answer.get("code") in ("TOPIC_NOT_EXIST", "GROUP_NOT_EXIST"):
                share.topics.clear()  # they were deleted; whoever receives next makes them again
                return True
            share.problem = str(answer.get("error"))
        elif answer.get("code") in ("FENCED", "TOPIC_NOT_EXIST", "INVALID_PARAMETER"):
            # The group was reset, or a topic was deleted or recreated.
            for topic, queue, _ in request.get("offsets", ()):
                self._begin_anew(share, (topic, queue))
            return True
        return False

    def _made_anew(self, share: Share, answer: dict[str, Any]) -> bool:
        """Take the incarnations of an ``offset.fetch``; True when the queues of a topic start over."""
        changed = False
        for topic, incarnation in (answer.get("incarnations") or {}).items():
            if share.incarnations.setdefault(topic, incarnation) != incarnation:
                share.incarnations[topic] = incarnation
                for key in [key for key in share.next if key[0] == topic]:
                    self._begin_anew(share, key)
                    changed = True
        return changed

    def _stored(self, share: Share, key: QueueKey, offset: int) -> None:
        """The node has ``offset``: what was committed, or what an operator has set since."""
        if offset < share.committed.get(key, -1):
            self._begin_anew(share, key)
        elif key in share.next:
            share.committed[key] = offset
            share.next[key] = max(share.next[key], offset)

    def _begin_anew(self, share: Share, key: QueueKey) -> None:
        """Begin with what the node has."""
        share.next.pop(key, None)
        share.committed.pop(key, None)
        self.handed_out.pop((share.group, *key), None)
        self.begun_anew(share.group, key)
