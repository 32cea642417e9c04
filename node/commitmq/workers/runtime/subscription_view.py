"""SQL92 subscriptions in the ConsumeQueue dispatcher and the readers (see commitmq.coordination.subscriptions).

The list is read again whenever ``Word.SUBSCRIPTIONS_VERSION`` moved. When it cannot be read, no subscription is known:
a message then gets no bits and no unit is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from commitmq.control import ControlBlock, Word
from commitmq.coordination.subscriptions import subscriptions_path
from commitmq.errors import RequestError
from commitmq.format import bloom
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.queues.consume_queue_ext import Extensions
from commitmq.store.queues.pull_result import Units
from commitmq.store.queues.record_filter import RecordFilter
from commitmq.workers.reader.filters import Filters

_NEVER = 1 << 62


class Known(NamedTuple):
    """One subscription: its expression, its bits, and the log offset at which bit maps begin to include it."""

    kind: str
    expression: str
    mask: bytes
    since: int


class SubscriptionView:
    """Subscriptions by topic and group."""

    def __init__(self, layout: StoreLayout, control: ControlBlock) -> None:
        self._path = subscriptions_path(layout)
        self._control = control
        self._version = -1
        self._known: dict[str, dict[str, Known]] = {}

    def refresh(self) -> bool:
        """Read the list again if it changed. True when it was read."""
        # Take the version first: a change in between is then read once more, not missed.
        version = self._control.get(Word.SUBSCRIPTIONS_VERSION)
        if version == self._version:
            return False
        self._version = version
        before, self._known = self._known, {}
        if not version:
            return True
        texts: dict[str, str] = {}  # many groups may use one expression
        try:
            for one in orjson.loads(self._path.read_bytes()):
                topic, group = one["topic"], one["group"]
                since = _NEVER if one["from"] is None else int(one["from"])
                expression = texts.setdefault(one["expression"], one["expression"])
                known = before.get(topic, {}).get(group)
                mask = bloom.mask(group, topic) if known is None else known.mask
                self._known.setdefault(topic, {})[group] = Known(one["type"], expression, mask, since)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._known = {}
            get_log("subscriptions").error("the list of subscriptions cannot be read", error=str(error))
        return True

    def of_topic(self, topic: str) -> Iterable[Known]:
        return self._known.get(topic, {}).values()

    def expressions(self) -> set[tuple[str, str]]:
        """Type and expression of every subscription."""
        return {(one.kind, one.expression) for of_topic in self._known.values() for one in of_topic.values()}

    def of_group(self, topic: str, group: str) -> Known | None:
        return self._known.get(topic, {}).get(group)


class CompiledSubscriptions:
    """For the dispatcher: the filters of a topic's subscriptions, each with its bits. Only the node's own filter types.

    An expression is compiled once, when the first message of its topic comes, and kept as long as a subscription has it.
    """

    def __init__(self, layout: StoreLayout, control: ControlBlock, specs: Iterable[Mapping[str, Any]]) -> None:
        self._view = SubscriptionView(layout, control)
        # Every subscription on a topic is evaluated for every message of it, so none may be compiled again and again.
        self._filters = Filters(specs, limit=_NEVER)
        self._wrong: set[tuple[str, str]] = set()
        self._of_topic: dict[str, list[tuple[bytes, RecordFilter]]] = {}

    def __call__(self, topic: str) -> list[tuple[bytes, RecordFilter]]:
        """``(bits, filter)`` of each current subscription on ``topic``."""
        if self._view.refresh():
            self._of_topic.clear()
            expressions = self._view.expressions()
            self._filters.keep_only(expressions)
            self._wrong &= expressions
        found = self._of_topic.get(topic)
        if found is None:
            found = self._of_topic[topic] = []
            for one in self._view.of_topic(topic):
                if (one.kind, one.expression) in self._wrong:
                    continue
                try:
                    compiled = self._filters.get(one.kind, one.expression)
                except RequestError:
                    self._wrong.add((one.kind, one.expression))
                    continue  # its consumers get that error with every pull, so no unit is ever skipped for them
                if compiled is not None:
                    found.append((one.mask, compiled))
        return found


class BitMapFilter:
    """A pull's filter that first looks at the bit maps. ``wanted`` decides about every message that they do not exclude."""

    def __init__(self, wanted: RecordFilter, known: Known) -> None:
        self._wanted = wanted
        self._mask: NDArray[np.uint8] = np.frombuffer(known.mask, np.uint8)
        self._since = known.since
        self.judge = wanted.judge
        self.terms = wanted.terms

    def may_match(self, units: Units, codes: NDArray[np.int64], extensions: Extensions | None) -> NDArray[np.bool_]:
        """Which units can belong to wanted messages. Bit maps older than the subscription exclude nothing."""
        possible = self._wanted.may_match(units, codes, extensions)
        if extensions is None:
            return possible
        known = extensions.has_bitmap & (units["physical_offset"] >= self._since)
        hit = ((extensions.bitmaps & self._mask) == self._mask).all(axis=1)
        return np.asarray(possible & (hit | ~known), np.bool_)
