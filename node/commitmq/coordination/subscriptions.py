"""Which groups select messages by which SQL92 expression: ``config/consumerFilter.json`` (RocketMQ's), and what the
ConsumeQueue dispatcher and the readers go by, ``run/subscriptions.json``.

A subscription gets bits in the bit maps of extension units (spec 3.8), so that readers can pass over messages that
cannot match. That is only right for units that were written with the subscription known. So a change takes two steps:
the new list is written and ``Word.SUBSCRIPTIONS_VERSION`` moved, which every batch of the dispatcher looks at before it
begins; then ``from`` is the end of the log, because what is written later is dispatched later. Readers trust bit maps
from there on, and look at the word after they took the bound of what may be shown: when the list changes, nothing that
was dispatched without a subscription is judged as if it were with it. ``from`` is not kept: after a restart, bit maps
count from the log's end again, whoever wrote the store in between.

A group that nobody is in any more is dead; its subscriptions go a day later, as in RocketMQ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from commitmq import failpoints
from commitmq.control import ControlBlock, Word
from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq.store import bloom, json_config
from commitmq.store.layout import StoreLayout

SQL: Final = "SQL92"
# The Bloom filter is sized for this many groups with an expression on one topic; more of them get no bits.
MAX_PER_TOPIC: Final = 32
MAX_SUBSCRIPTIONS: Final = 4_096
MAX_EXPRESSION_CHARACTERS: Final = 16_384
_DEAD_FOR_MS: Final = 24 * 3_600_000

_log = get_log("coordinator")


@dataclass(slots=True)
class Subscription:
    """One group's expression on one topic; times are wall-clock ms. ``since`` is its ``from``, None until it has one."""

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


@dataclass(slots=True)
class Subscriptions:
    """All of them; the coordinator's. Nothing here decides about an answer: what cannot be written is tried again."""

    layout: StoreLayout
    control: ControlBlock
    by_topic: dict[str, dict[str, Subscription]] = field(default_factory=dict)
    _changed: bool = True
    _stale_file: bool = False
    _failed: bool = False

    @classmethod
    def load(cls, layout: StoreLayout, control: ControlBlock) -> Subscriptions:
        """From RocketMQ's file. One that cannot be read is put aside: it holds nothing that consumers do not say again."""
        found = cls(layout, control)
        path = layout.config / "consumerFilter.json"
        try:
            data = json_config.load(path) or {}
            for topic, entry in dict(data.get("filterDataByTopic") or {}).items():
                for group, one in dict(entry.get("groupFilterData") or {}).items():
                    if one.get("expressionType") == SQL and isinstance(one.get("expression"), str):
                        found._of(str(topic))[str(group)] = Subscription(
                            str(group),
                            str(topic),
                            one["expression"],
                            int(one.get("bornTime") or 0),
                            int(one.get("deadTime") or 0) or _now_ms(),
                            int(one.get("clientVersion") or 0),
                        )
        except (StoreError, TypeError, ValueError, AttributeError) as error:
            _log.error("consumerFilter.json cannot be read, it is made anew", error=str(error))
            found.by_topic.clear()
        return found

    def _of(self, topic: str) -> dict[str, Subscription]:
        return self.by_topic.setdefault(topic, {})

    def __len__(self) -> int:
        return sum(map(len, self.by_topic.values()))

    def join(self, group: str, topics: Iterable[str], expression: str | None) -> None:
        """A member of ``group`` joined that selects by ``expression``; None: not by SQL92, or everything."""
        now = _now_ms()
        if expression is not None and len(expression) > MAX_EXPRESSION_CHARACTERS:
            expression = None
        for topic in topics:
            of_topic = self.by_topic.get(topic, {})
            known = of_topic.get(group)
            if expression is None:
                if known is not None and not known.dead_ms:
                    known.dead_ms, self._stale_file = now, True
                continue
            if known is not None and known.expression == expression:
                if known.dead_ms:
                    known.dead_ms, self._stale_file = 0, True
                continue
            if known is None and len(self) >= MAX_SUBSCRIPTIONS:
                continue  # its messages are found without bit maps
            self._of(topic)[group] = Subscription(group, topic, expression, now, version=now)
            self._changed = True

    def look(self, is_live: Callable[[str], bool]) -> None:
        """Mark what nobody uses any more, and drop what was dead for a day."""
        now = _now_ms()
        for topic, of_topic in list(self.by_topic.items()):
            for group, one in list(of_topic.items()):
                if not one.dead_ms and not is_live(group):
                    one.dead_ms, self._stale_file = now, True
                elif one.dead_ms and now - one.dead_ms >= _DEAD_FOR_MS:
                    del of_topic[group]
                    self._changed = True
            if not of_topic:
                del self.by_topic[topic]

    def write(self) -> None:
        """Make changes known and durable. A failure is logged, and tried again with the next call."""
        if not (self._changed or self._stale_file or self._failed):
            return
        try:
            if self._changed:
                self._publish()
                written, now = self.control.get(Word.WRITTEN), _now_ms()
                for of_topic in self.by_topic.values():
                    for one in of_topic.values():
                        if one.since is None:
                            one.since, one.born_ms = written, max(one.born_ms, now)
                self._publish()
                self._changed = False
            if self.by_topic or self._stale_file or (self.layout.config / "consumerFilter.json").exists():
                json_config.persist(self.layout.config / "consumerFilter.json", self.to_json())
            self._stale_file = self._failed = False
        except (OSError, StoreError) as error:
            if not self._failed:
                _log.error("subscriptions could not be written", error=str(error))
            self._failed = True

    def _publish(self) -> None:
        listed = [
            {"group": one.group, "topic": one.topic, "type": SQL, "expression": one.expression, "from": one.since}
            for of_topic in self.by_topic.values()
            for one in list(of_topic.values())[:MAX_PER_TOPIC]
        ]
        path = subscriptions_path(self.layout)
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(orjson.dumps(listed))
        if failpoints.ACTIVE:
            failpoints.hit("subscriptions.before_replace")
        os.replace(fresh, path)
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
