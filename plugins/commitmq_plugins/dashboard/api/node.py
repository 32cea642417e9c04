"""The node as one visitor sees it: what he may not see is not there, and what he may not ask for is refused.

:class:`SharedNode` has what all visitors share: figures, topics and status of the node, which are gathered for the
first of them who asks, and histories of them (:class:`HistoryRings`). A process of the node that does not answer costs
a page the deadline, and then the page's error or a figure that is not known. :class:`VisitorNode` shows each visitor
the part that he may see, and asks on his behalf: what he may not do is refused, and the node is told his name.

Requests are dataclasses: each field has a type (str, int, bool, list of int or str), limits and a sentence. A change names
the command line that does the same, to copy into a shell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import threading
import time
import types
import typing
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from commitmq.client.admin import Admin
from commitmq.client.consumer import Reader
from commitmq.client.producer import Producer
from commitmq.errors import CommitMQError, NodeUnavailableError
from commitmq.plugin import WorkerContext
from commitmq.security.access_file import AccessFile, AccessTable, LiveAccess
from commitmq.security.native_rights import Vouching
from commitmq.semantics.retry import topics_of
from commitmq_plugins.dashboard import DashboardSettings
from commitmq_plugins.dashboard.guard import ONLY_SUPER, Rights
from commitmq_plugins.metrics.figures import FigureCollector, Figures, Health, Lags

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message
    from commitmq.client.transactions.transaction import OpenTransaction


DAY_S: Final = 86_400
_MOST_SAMPLES: Final = 1_441
_Numbers = npt.NDArray[np.float64]


class HistoryRings:
    """Rings of figures: one sample every ``history_s`` seconds, of a day, 1,441 at most, in the memory of the process.

    Of the node the end of the log is kept, of topics their ends, and of groups how many messages wait. What is not known at a
    sample is a gap. A topic is followed while groups read it, or since somebody looked at its history. The number of topics
    and of groups is bounded: a new one takes the place of one that is gone, or waits, the groups that are furthest behind
    first.

    Thread-safe. ``step_s``: between two samples; ``most``: topics, and groups, that are kept.
    """

    def __init__(self, step_s: int, most: int) -> None:
        self.step_s, self._most = step_s, most
        self._length = max(2, min(_MOST_SAMPLES, DAY_S // max(1, step_s) + 1))
        self._lock = threading.Lock()
        self._count = 0
        self._times_ms = self._empty()
        self._node = self._empty()
        self._topics: OrderedDict[str, _Numbers] = OrderedDict()
        self._groups: OrderedDict[str, _Numbers] = OrderedDict()

    def follow(self, topic: str) -> None:
        """Somebody looks at this topic."""
        with self._lock:
            self._series(self._topics, topic)

    def followed(self, read: Iterable[str]) -> list[str]:
        """The topics whose ends the next sample wants; ``read``: those that groups read."""
        with self._lock:
            room = self._most - len(self._topics)
            new = [name for name in dict.fromkeys(read) if name not in self._topics]
            return [*self._topics, *new[: max(0, room)]]

    def add(self, at_ms: int, written: int, topics: Mapping[str, int | None], groups: Mapping[str, int | None]) -> None:
        with self._lock:
            at = self._count % self._length
            self._count += 1
            self._times_ms[at], self._node[at] = at_ms, written
            for kept, values in ((self._topics, topics), (self._groups, groups)):
                for series in kept.values():
                    series[at] = math.nan
                known = [(name, one) for name, one in values.items() if one is not None]
                known.sort(key=lambda pair: -pair[1])
                for name, one in known:
                    if name in kept or self._makes_room(kept, values):
                        self._series(kept, name)[at] = one

    def rate_of_node(self, span_s: int) -> list[tuple[int, float | None]]:
        """Bytes a second, with the time of each sample."""
        with self._lock:
            return _rates(self._since(self._node, span_s))

    def rate_of_topic(self, topic: str, span_s: int) -> list[tuple[int, float | None]]:
        """Messages a second; empty for one that is not followed yet."""
        with self._lock:
            series = self._topics.get(topic)
            return [] if series is None else _rates(self._since(series, span_s))

    def lag_of_group(self, group: str, span_s: int) -> list[tuple[int, float | None]]:
        """Messages that waited; empty for a group that is not known."""
        with self._lock:
            series = self._groups.get(group)
            return [] if series is None else self._since(series, span_s)

    def _makes_room(self, kept: OrderedDict[str, _Numbers], values: Mapping[str, int | None]) -> bool:
        """Whether another series fits: one without a value now gives way."""
        if len(kept) >= self._most:
            gone = next((name for name in kept if name not in values), None)
            if gone is None:
                return False
            del kept[gone]
        return True

    def _series(self, kept: OrderedDict[str, _Numbers], name: str) -> _Numbers:
        found = kept.get(name)
        if found is None:
            found = kept[name] = self._empty()
        kept.move_to_end(name)
        while len(kept) > self._most:
            kept.popitem(last=False)
        return found

    def _since(self, series: _Numbers, span_s: int) -> list[tuple[int, float | None]]:
        """Time and value of the samples in the last ``span_s`` before the newest one, the oldest first."""
        count = min(self._count, self._length)
        order = [number % self._length for number in range(self._count - count, self._count)]
        if not order:
            return []
        newest_ms = self._times_ms[order[-1]]
        found = []
        for at in order:
            if self._times_ms[at] >= newest_ms - span_s * 1000:
                one = float(series[at])
                found.append((int(self._times_ms[at]), None if math.isnan(one) else one))
        return found

    def _empty(self) -> _Numbers:
        return np.full(self._length, np.nan)


def _rates(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """The differences a second. A count that went back, as of a topic that was recreated, is a gap."""
    found: list[tuple[int, float | None]] = []
    for (before_ms, before), (at_ms, now) in pairwise(points):
        seconds = (at_ms - before_ms) / 1000
        rate = None
        if before is not None and now is not None and now >= before and seconds > 0:
            rate = (now - before) / seconds
        found.append((at_ms, rate))
    return found


def command(*words: str | int | None) -> str:
    """``commitmq`` and the words, quoted for a shell; None is omitted."""
    return shlex.join(["commitmq", *(str(one) for one in words if one is not None)])


_BY_PLACE = ("reader", "view")


class VisitorAdmin(Admin):
    """For one visitor at a time: set ``rights`` before each page. Requests go through :meth:`_request` and :meth:`status`."""

    def __init__(self, node: str, vouching: Vouching, rights: Rights, *, timeout_s: float) -> None:
        super().__init__(node, timeout_s=timeout_s)
        self.rights = rights
        self._vouching = vouching

    def status(self) -> dict[str, Any]:
        self.rights.check("admin", "status", {})
        return super().status()

    def view(self, where: int | str, topic: str | None = None) -> Message:
        """A place does not tell its topic, so what is there decides."""
        found = super().view(where, topic)
        if not all(self.rights.reads_topic(name) for name in topics_of(found.stored_topic, found.properties)):
            self.rights.refuse("view", f"user {self.rights.user} may not read the topic of this message")
        return found

    def open_transactions(self, after: int | None, limit: int) -> tuple[list[OpenTransaction], int | None]:
        """A page of :meth:`transactions`, and where the next one begins."""
        from commitmq.client.transactions.transaction import OpenTransaction

        fields = {"limit": limit} if after is None else {"limit": limit, "after": after}
        page = self._ask_transactions("transaction.list", fields)
        return [OpenTransaction.of(one) for one in page["transactions"]], page["next"]

    def end_transaction(self, one: OpenTransaction, decision: str) -> dict[str, Any]:
        """As :meth:`transaction_resolve`, for one that was found. A check may have moved it since."""
        place = {"queue_offset": one.queue_offset, "physical_offset": one.physical_offset}
        return self._ask_transactions("transaction.end", {**place, "decision": decision, "by_person": True})

    def _request(
        self,
        role: str,
        op: str,
        fields: dict[str, Any],
        *,
        payload: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[zmq.Frame]]:
        if (role, op) != _BY_PLACE:
            self.rights.check(role, op, fields)
        told = self._vouching.fields(op, self.rights.actor)
        return super()._request(role, op, {**fields, **told}, payload=payload, timeout_s=timeout_s)


_LEAST_RATE_S: Final = 1.0
_MOST_RATE_S: Final = 60.0
_MOST_QUEUES: Final = 200
_MOST_SEEN: Final = 32


class SharedNode:
    """Thread-safe. Nothing of it works while nobody asks, so an idle dashboard costs nothing."""

    def __init__(self, context: WorkerContext, settings: DashboardSettings) -> None:
        self.context, self.settings = context, settings
        self.deadline_s = settings.deadline_ms / 1000
        self.health = Health(context)
        self._access = LiveAccess(AccessFile(context.layout.root), context.log)
        self._access_lock = threading.Lock()
        self._own = threading.local()
        self._admins: list[VisitorAdmin] = []
        self._status_admin: Admin | None = None
        self._lock = threading.Lock()
        self._gathering = FigureCollector(context, self.deadline_s)
        self._figures: Figures | None = None
        self._figures_at_s = 0.0
        self._topics: dict[str, Any] | None = None
        self._status_lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._status_at_s = -math.inf
        self._bounds_lock = threading.Lock()
        self._lags = Lags(context)
        self._written: list[tuple[float, int]] = []
        self._seen: dict[tuple[str, str], tuple[AccessTable, dict[str, Any], dict[str, Any]]] = {}
        self.history = HistoryRings(settings.history_s, settings.history_series)

    def close(self) -> None:
        """When no thread works any more."""
        for admin in self._admins:
            admin.close()
        if self._status_admin is not None:
            self._status_admin.close()
        self._gathering.close()
        self._lags.close()

    def admin(self, rights: Rights) -> VisitorAdmin:
        """The calling thread's, for this visitor. Each of its requests ends after the deadline, with NodeUnavailableError."""
        found: VisitorAdmin | None = getattr(self._own, "admin", None)
        if found is None:
            found = self._own.admin = self.new_admin(rights, self.deadline_s)
            self._admins.append(found)
        found.rights = rights
        return found

    def new_admin(self, rights: Rights, timeout_s: float) -> VisitorAdmin:
        """Another one, which the caller closes."""
        return VisitorAdmin(self.context.address, self.context.vouching, rights, timeout_s=timeout_s)

    def figures(self) -> Figures:
        """All figures, ``age_ms`` old at most; while another thread gathers them, the ones before. Raises
        NodeUnavailableError when there are none yet, and the other thread still waits for them.
        """
        before = self._figures
        if not self._lock.acquire(timeout=self.deadline_s if before is None else 0):
            if before is not None:
                return before
            raise NodeUnavailableError(f"the node's figures were not there within {self.deadline_s:g} s")
        try:
            now_s = time.monotonic()
            if self._figures is None or now_s - self._figures_at_s >= self.settings.age_ms / 1000:
                self._figures = self._gathering.gather()
                self._figures_at_s = time.monotonic()
                self._note_written(self._figures_at_s, self._figures.words["written"])
            return self._figures
        finally:
            self._lock.release()

    def topics(self) -> dict[str, Any]:
        """All topics by name; while another thread asks for them, as they were. Raises NodeUnavailableError."""
        if self._lock.acquire(timeout=self.deadline_s if self._topics is None else 0):
            try:
                self._topics = self._gathering.topics()
            finally:
                self._lock.release()
        if self._topics is None:
            raise self.silent("the coordinator")
        return self._topics

    def seen_topics(self, rights: Rights, topics: dict[str, Any]) -> dict[str, Any]:
        """Those of ``topics`` that a visitor may see. Answers are kept while topics and policies stay: there may be many."""
        key = rights.user or "", rights.actor.address
        known = self._seen.get(key)
        if known is None or known[0] is not rights.table or known[1] is not topics:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            seen = {name: row for name, row in topics.items() if rights.sees_topic(name)}
            known = self._seen[key] = rights.table, topics, seen
        return known[2]

    def status(self) -> dict[str, Any]:
        """The supervisor's, ``age_ms`` old at most: it measures the memory of all processes for it. Raises
        NodeUnavailableError.
        """
        if not self._status_lock.acquire(timeout=self.deadline_s):
            raise self.silent("the supervisor")
        try:
            if time.monotonic() - self._status_at_s >= self.settings.age_ms / 1000:
                if self._status_admin is None:
                    self._status_admin = Admin(self.context.address, timeout_s=self.deadline_s)
                self._status = self._status_admin.status()
                self._status_at_s = time.monotonic()
            return self._status
        finally:
            self._status_lock.release()

    def bounds(self, queues: list[tuple[str, int]]) -> list[tuple[int, int] | None]:
        """First offset and end of each queue, read from the ConsumeQueues as a reader does; None while not known."""
        topics = self.topics()
        with self._bounds_lock:
            self._lags.begin(topics)
            return [self._lags.bounds(topic, queue) for topic, queue in queues]

    def sample(self) -> None:
        """Add a sample to the histories; of what is not known there is none."""
        figures = self.figures()
        groups: dict[str, int | None] = {}
        for (name, _), lag in figures.group_lags.items():
            groups[name] = (groups.get(name) or 0) + lag.messages
        wanted = self.history.followed(topic for _, topic in figures.group_lags)
        rows = {name: int(row["read_queues"]) for name in wanted if (row := (figures.topics or {}).get(name))}
        places = [(name, queue) for name, queues in rows.items() if queues <= _MOST_QUEUES for queue in range(queues)]
        ends: dict[str, int | None] = {}
        if figures.topics is not None:
            for (name, _), bounds in zip(places, self.bounds(places), strict=True):
                before = ends.get(name, 0)
                ends[name] = None if bounds is None or before is None else before + bounds[1]
        self.history.add(figures.at_ms, figures.words["written"], ends, groups)

    def bytes_in_per_s(self) -> float | None:
        """Of the last minute; None until the dashboard has looked twice."""
        if len(self._written) < 2:
            return None
        (began_s, first), (ended_s, last) = self._written[0], self._written[-1]
        return (last - first) / (ended_s - began_s) if ended_s - began_s >= _LEAST_RATE_S else None

    def _note_written(self, at_s: float, written: int) -> None:
        self._written = [*(one for one in self._written if at_s - one[0] <= _MOST_RATE_S), (at_s, written)]

    def access(self) -> AccessTable:
        with self._access_lock:
            return self._access.table()

    @property
    def asks_for_login(self) -> bool:
        """Whether the node has users or keys: then nobody else may act as the node's owner."""
        return self.context.has_keys or not self.access().is_open

    def silent(self, who: str) -> NodeUnavailableError:
        """The error of a page that cannot do without ``who``."""
        return NodeUnavailableError(f"{who} did not answer within {self.deadline_s:g} s")


class VisitorNode:
    """Made for each request of a visitor."""

    def __init__(self, shared: SharedNode, rights: Rights) -> None:
        self._shared, self.rights = shared, rights
        self.context, self.settings, self.deadline_s = shared.context, shared.settings, shared.deadline_s
        self.health, self.history = shared.health, shared.history

    @property
    def admin(self) -> VisitorAdmin:
        """The calling thread's. Each of its requests ends after the deadline, with NodeUnavailableError."""
        return self._shared.admin(self.rights)

    def new_admin(self, timeout_s: float) -> VisitorAdmin:
        """One with another deadline; the caller closes it."""
        return self._shared.new_admin(self.rights, timeout_s)

    @contextlib.contextmanager
    def reader(self, queues: list[tuple[str, int]]) -> Iterator[Reader]:
        """A reader without a group: nothing of it stays in the node. Raises NotAllowedError."""
        for topic in {topic for topic, _ in queues}:
            self.rights.check("reader", "pull", {"topic": topic})
        options: Any = {"mode": "bytes", "start": "latest", "timeout_s": self.deadline_s, "max_pull_bytes": 1 << 20}
        with Reader(queues=queues, node=self.context.address, **options) as found:
            yield found

    @contextlib.contextmanager
    def producer(self, topic: str) -> Iterator[Producer]:
        """A producer for one message to ``topic``. Raises NotAllowedError."""
        self.rights.check("writer", "send", {"topic": topic})
        with Producer(self.context.address, timeout_s=self.deadline_s) as found:
            yield found

    def figures(self) -> Figures:
        """The shared figures, with the topics and groups that the visitor may see. Raises NodeUnavailableError."""
        found, rights = self._shared.figures(), self.rights
        if rights.everything:
            return found
        topics, groups = found.topics, found.groups
        return replace(
            found,
            topics=None if topics is None else self._shared.seen_topics(rights, topics),
            groups=None if groups is None else {name: row for name, row in groups.items() if rights.sees_group(name)},
        )

    def topics(self) -> dict[str, Any]:
        """The topics that the visitor may see, by name. Raises NodeUnavailableError."""
        found = self._shared.topics()
        return found if self.rights.everything else self._shared.seen_topics(self.rights, found)

    def status(self) -> dict[str, Any]:
        """The supervisor's, ``age_ms`` old at most. Raises NodeUnavailableError, NotAllowedError."""
        self.rights.check("admin", "status", {})
        return self._shared.status()

    def bounds(self, queues: list[tuple[str, int]]) -> list[tuple[int, int] | None]:
        """First offset and end of each queue; None while not known, and for topics that the visitor may not read."""
        rights = self.rights
        if rights.everything:
            return self._shared.bounds(queues)
        readable = {topic for topic in {topic for topic, _ in queues} if rights.reads_topic(topic)}
        known = iter(self._shared.bounds([one for one in queues if one[0] in readable]))
        return [next(known) if topic in readable else None for topic, _ in queues]

    def bytes_in_per_s(self) -> float | None:
        """Of the last minute; None until the dashboard has looked twice."""
        return self._shared.bytes_in_per_s()

    def access(self) -> AccessTable:
        """Users and policies, for super users. Raises NotAllowedError."""
        self.check_super()
        return self._shared.access()

    def check_super(self) -> None:
        """Raises NotAllowedError for a visitor who may not do everything."""
        self.rights.check(*ONLY_SUPER, {})

    def silent(self, who: str) -> NodeUnavailableError:
        """The error of a page that cannot do without ``who``."""
        return self._shared.silent(who)


_T = TypeVar("_T")
_TRUE: Final = ("1", "true", "on", "yes")
_FALSE: Final = ("0", "false", "off", "no", "")
MAX_OFFSET: Final = (1 << 63) - 1
_LONGEST: Final = 1_024


class BadValueError(CommitMQError, ValueError):
    """A value of a request does not fit; the sentence names it."""


def value(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    low: int = 0,
    high: int = MAX_OFFSET,
    choices: tuple[str, ...] = (),
    longest: int = _LONGEST,
) -> Any:
    """A field of a request: ``longest`` in characters, or in entries of a list."""
    facts = {"doc": doc, "low": low, "high": high, "choices": choices, "longest": longest}
    if default == ():
        return dataclasses.field(default_factory=tuple, metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


@dataclasses.dataclass(frozen=True, slots=True)
class FieldType:
    """A type without its None: ``name`` is str, int or bool; ``many`` for a tuple of them."""

    name: str
    many: bool
    optional: bool


def kind_of(annotation: Any) -> FieldType:
    """The kind of a field's type, resolved."""
    optional = False
    if isinstance(annotation, types.UnionType):
        parts = [one for one in typing.get_args(annotation) if one is not type(None)]
        [annotation], optional = parts, True
    if typing.get_origin(annotation) is tuple:
        return FieldType(typing.get_args(annotation)[0].__name__, True, optional)
    return FieldType(annotation.__name__, False, optional)


def take(schema: type[_T], given: Mapping[str, Sequence[Any]]) -> _T:
    """``given``: all values by name, texts or JSON's. Raises BadValueError. Names that the schema lacks are refused."""
    fields = {one.name: one for one in dataclasses.fields(schema)}  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(fields)):
        raise BadValueError(f"there is no value {unknown[0]!r:.100} here; there are {', '.join(fields) or 'none'}")
    hints = typing.get_type_hints(schema)
    taken: dict[str, Any] = {}
    for name, field in fields.items():
        kind = kind_of(hints[name])
        values = [one for one in given.get(name, ()) if one is not None]
        if kind.optional and all(one == "" for one in values):
            values = []
        if not values:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise BadValueError(f"{name} is missing")
            continue
        if kind.many:
            most = field.metadata["longest"]
            if len(values) > most:
                raise BadValueError(f"{name} has {most} entries at most, not {len(values)}")
            taken[name] = tuple(_one(name, kind.name, one, field.metadata) for one in values)
        else:
            taken[name] = _one(name, kind.name, values[-1], field.metadata)
    return schema(**taken)


def _one(name: str, kind: str, given: Any, facts: Mapping[str, Any]) -> str | int | bool:
    if kind == "bool":
        text = str(given).lower()
        if text not in (*_TRUE, *_FALSE):
            raise BadValueError(f"{name} is true or false, not {given!r:.100}")
        return text in _TRUE
    if kind == "int":
        if isinstance(given, bool | float) or not _is_integer(str(given)):
            raise BadValueError(f"{name} is a whole number, not {given!r:.100}")
        if not facts["low"] <= int(given) <= facts["high"]:
            raise BadValueError(f"{name} is between {facts['low']} and {facts['high']}, not {int(given)}")
        return int(given)
    if not isinstance(given, str):
        raise BadValueError(f"{name} is a text, not {given!r:.100}")
    if len(given) > facts["longest"]:
        raise BadValueError(f"{name} has {facts['longest']} characters at most, not {len(given)}")
    if facts["choices"] and given not in facts["choices"]:
        raise BadValueError(f"{name} is one of {', '.join(facts['choices'])}, not {given!r:.100}")
    return given


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 20


def moment(name: str, text: str) -> datetime:
    """``2026-06-01T12:00`` (UTC unless it says otherwise), or milliseconds. Raises BadValueError."""
    try:
        if _is_integer(text):
            return datetime.fromtimestamp(int(text) / 1000, UTC)
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        raise BadValueError(f"{name} is a time as 2026-06-01T12:00 (UTC), or milliseconds, not {text!r:.100}") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
