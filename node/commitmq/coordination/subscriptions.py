"""The SQL92 subscriptions of consumer groups, and the list of them for the ConsumeQueue dispatcher and the readers.

Files: ``config/consumerFilter.json`` (RocketMQ's), and ``run/subscriptions.json``, which the other processes read.

A subscription gets bits in the bit maps of extension units (spec 3.8), so that readers can skip messages that cannot
match. That is right only for units that were written with the subscription known. So a change takes two steps. First
the new list is written and ``Word.SUBSCRIPTIONS_VERSION`` moved; the dispatcher looks at that word before each batch.
Then ``from`` becomes the end of the log, because later records are dispatched later. Readers trust bit maps from there
on, and look at the word after they took the bound of readable records. So when the list changes, no unit that was
dispatched without a subscription is judged as if it had been dispatched with it. ``from`` is not kept: after a restart,
bit maps count from the log's end again, whichever program wrote the store in between.

A group without members is dead; its subscriptions are dropped a day later, as in RocketMQ.

Bit maps only save look-ups, so no process waits for these files: both are written at intervals, and never for more than
a small share of the time, however many subscriptions there are. ``filter.max_subscriptions``,
``filter.max_kept_expression_bytes`` and ``filter.max_kept_bytes`` limit how many subscriptions are kept, and how long
their expressions may be; messages of the others are found without bit maps. One expression is kept once, however many
groups use it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq.config import FilterConfig
from commitmq.control import ControlBlock, Word
from commitmq.coordination.groups import Pace
from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.format import bloom
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config

SQL: Final = "SQL92"
# The Bloom filter is sized for this many groups with an expression on one topic; further groups get no bits.
MAX_PER_TOPIC: Final = 32
_DEAD_FOR_MS: Final = 24 * 3_600_000

_log = get_log("coordinator")


@dataclass(slots=True)
class Subscription:
    """One group's expression on one topic; times are wall-clock ms. ``since`` is its ``from``, None until it is set."""

    group: str
    topic: str
    expression: str
    born_ms: int
    dead_ms: int = 0
    version: int = 0
    since: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The entry as RocketMQ writes it."""
        return {
            "bloomFilterData": {"bitNum": bloom.BITS, "bitPos": bloom.positions(self.group, self.topic)},
            "bornTime": self.born_ms,
            "clientVersion": self.version,
            "consumerGroup": self.group,
            "dead": bool(self.dead_ms),
            "deadTime": self.dead_ms,
            "expression": self.expression,
            "expressionType": SQL,
            "topic": self.topic,
        }


class Subscriptions:
    """All subscriptions of the coordinator. No answer depends on them: a failed write is tried again."""

    def __init__(
        self,
        layout: StoreLayout,
        control: ControlBlock,
        config: FilterConfig | None = None,
        *,
        publish_interval_ms: int = 0,
        file_interval_ms: int = 0,
    ) -> None:
        """Use :meth:`load`."""
        self.layout = layout
        self.control = control
        self.by_topic: dict[str, dict[str, Subscription]] = {}
        self._config = config or FilterConfig()
        self._topics_of: dict[str, set[str]] = {}  # group -> topics it has an expression on
        self._uses: Counter[str] = Counter()  # expression -> subscriptions
        self._texts: dict[str, str] = {}  # expression -> the one shared string
        self._kept_bytes = 0
        self._count = 0
        self._dead: dict[tuple[str, str], int] = {}  # topic, group -> when it died; the longest dead first
        self._changed = True
        self._stale_file = False
        self._publish_pace, self._file_pace = Pace(publish_interval_ms), Pace(file_interval_ms)

    @classmethod
    def load(
        cls,
        layout: StoreLayout,
        control: ControlBlock,
        config: FilterConfig | None = None,
        *,
        publish_interval_ms: int = 0,
        file_interval_ms: int = 0,
    ) -> Subscriptions:
        """Load RocketMQ's file. An unreadable file is put aside: consumers repeat everything in it when they join. The
        intervals are the shortest times between two writes of ``run/subscriptions.json``, and of RocketMQ's file.
        """
        found = cls(layout, control, config, publish_interval_ms=publish_interval_ms, file_interval_ms=file_interval_ms)
        entries: list[Subscription] = []
        try:
            data = json_config.load(layout.config / "consumerFilter.json") or {}
            for topic, entry in dict(data.get("filterDataByTopic") or {}).items():
                for group, one in dict(entry.get("groupFilterData") or {}).items():
                    if one.get("expressionType") == SQL and isinstance(one.get("expression"), str):
                        entries.append(
                            Subscription(
                                str(group),
                                str(topic),
                                one["expression"],
                                int(one.get("bornTime") or 0),
                                int(one.get("deadTime") or 0) or _now_ms(),
                                int(one.get("clientVersion") or 0),
                            )
                        )
        except (StoreError, TypeError, ValueError, AttributeError) as error:
            _log.error("consumerFilter.json cannot be read, it is recreated", error=str(error))
            return found
        for one in sorted(entries, key=lambda one: one.dead_ms):
            if found._has_room(one.expression):
                found._keep(one)
                found._dead[one.topic, one.group] = one.dead_ms
        return found

    def __len__(self) -> int:
        return self._count

    def join(self, group: str, topics: Iterable[str], expression: str | None) -> None:
        """A member of ``group`` joined that selects by ``expression``; None: not by SQL92, or all messages."""
        now = _now_ms()
        if expression is not None and len(expression.encode(errors="replace")) > self._config.max_kept_expression_bytes:
            expression = None
        if expression is None:
            for topic in self._topics_of.get(group, frozenset()).intersection(topics):
                self._bury(self.by_topic[topic][group], now)
            return
        for topic in topics:
            known = self.by_topic.get(topic, {}).get(group)
            if known is not None and known.expression == expression:
                if known.dead_ms:
                    known.dead_ms, self._stale_file = 0, True
                continue
            if known is not None:
                self._drop(known)
            if self._has_room(expression):
                self._keep(Subscription(group, topic, expression, now, version=now))
            self._changed = True

    def _has_room(self, expression: str) -> bool:
        if self._count >= self._config.max_subscriptions:
            return False
        more = 0 if expression in self._uses else len(expression.encode(errors="replace"))
        return self._kept_bytes + more <= self._config.max_kept_bytes

    def _keep(self, one: Subscription) -> None:
        one.expression = self._texts.setdefault(one.expression, one.expression)
        if not self._uses[one.expression]:
            self._kept_bytes += len(one.expression.encode(errors="replace"))
        self._uses[one.expression] += 1
        self._count += 1
        self.by_topic.setdefault(one.topic, {})[one.group] = one
        self._topics_of.setdefault(one.group, set()).add(one.topic)

    def _drop(self, one: Subscription) -> None:
        self._uses[one.expression] -= 1
        if not self._uses[one.expression]:
            del self._uses[one.expression], self._texts[one.expression]
            self._kept_bytes -= len(one.expression.encode(errors="replace"))
        self._count -= 1
        for table, key, entry in ((self.by_topic, one.topic, one.group), (self._topics_of, one.group, one.topic)):
            of_key: Any = table[key]
            of_key.pop(entry) if isinstance(of_key, dict) else of_key.discard(entry)
            if not of_key:
                del table[key]
        self._changed = True

    def _bury(self, one: Subscription, now: int) -> None:
        if not one.dead_ms:
            one.dead_ms, self._stale_file = now, True
            self._dead.pop((one.topic, one.group), None)
            self._dead[one.topic, one.group] = now

    def group_ended(self, group: str) -> None:
        """The last member left ``group``: its subscriptions are dead."""
        now = _now_ms()
        for topic in self._topics_of.get(group, ()):
            self._bury(self.by_topic[topic][group], now)

    def look(self) -> None:
        """Drop the subscriptions that were dead for a day."""
        now = _now_ms()
        while self._dead:
            (topic, group), dead_ms = next(iter(self._dead.items()))
            if now - dead_ms < _DEAD_FOR_MS:
                break
            del self._dead[topic, group]
            one = self.by_topic.get(topic, {}).get(group)
            if one is not None and one.dead_ms == dead_ms:
                self._drop(one)

    def write(self, now_ms: int = 0, *, at_once: bool = False) -> None:
        """Publish changes and make them durable: those due at monotonic ``now_ms``, or all of them ``at_once``. Raises
        OSError, StoreError; a later call tries again.
        """
        if self._changed and (at_once or self._publish_pace.is_due(now_ms)):
            with self._publish_pace:
                self._publish_both_steps()
            self._changed, self._stale_file = False, self._stale_file or self._is_in_file()
        if self._stale_file and (at_once or self._file_pace.is_due(now_ms)):
            with self._file_pace:
                json_config.persist(self.layout.config / "consumerFilter.json", self.to_json())
            self._stale_file = False

    def _is_in_file(self) -> bool:
        return bool(self.by_topic) or (self.layout.config / "consumerFilter.json").exists()

    def next_write_ms(self) -> int | None:
        """When :meth:`write` has something to do, in monotonic ms; None: not before something changes."""
        times = [self._publish_pace.next_ms] if self._changed else []
        times += [self._file_pace.next_ms] if self._stale_file else []
        return min(times, default=None)

    def _publish_both_steps(self) -> None:
        self._publish()
        written, now = self.control.get(Word.WRITTEN), _now_ms()
        for of_topic in self.by_topic.values():
            for one in of_topic.values():
                if one.since is None:
                    one.since, one.born_ms = written, max(one.born_ms, now)
        self._publish()

    def _publish(self) -> None:
        listed = [
            {"group": one.group, "topic": one.topic, "type": SQL, "expression": one.expression, "from": one.since}
            for of_topic in self.by_topic.values()
            for one in list(of_topic.values())[:MAX_PER_TOPIC]
        ]
        atomic_file.replace(subscriptions_path(self.layout), orjson.dumps(listed), "subscriptions", durable=False)
        self.control.put(Word.SUBSCRIPTIONS_VERSION, self.control.get(Word.SUBSCRIPTIONS_VERSION) + 1)

    def to_json(self) -> dict[str, Any]:
        """``consumerFilter.json`` as RocketMQ writes it."""
        return {
            "filterDataByTopic": {
                topic: {"groupFilterData": {group: one.to_json() for group, one in of_topic.items()}, "topic": topic}
                for topic, of_topic in self.by_topic.items()
            }
        }


def subscriptions_path(layout: StoreLayout) -> Path:
    """``run/subscriptions.json``: a list of ``{group, topic, type, expression, from}``."""
    return layout.run / "subscriptions.json"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
