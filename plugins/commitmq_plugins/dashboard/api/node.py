"""The node as one visitor sees it: what he may not see is not there, and what he may not ask for is refused.

The command line that does the same as a change: to copy into a shell.

An administrator's client that asks on behalf of a visitor: what he may not do is refused, and the node is told his name.

What all visitors share: figures, topics and status of the node, which are gathered for the first of them who asks.

It is the node's own view; :mod:`.node` shows each visitor the part that he may see. A process of the node that does not answer
costs a page the deadline, and then the page's error or a figure that is not known.

Requests as dataclasses: each field has a type (str, int, bool, list of int or str), limits and a sentence.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from commitmq.client.admin import Admin
from commitmq.client.consumer import Reader
from commitmq.client.producer import Producer
from commitmq.errors import CommitMQError, NodeUnavailableError
from commitmq.plugin import WorkerContext
from commitmq.security.access_file import AccessFile, AccessTable, LiveAccess
from commitmq.security.on_behalf import Vouching
from commitmq.semantics.stored_topics import topics_of
from commitmq_plugins.dashboard.guard import ONLY_SUPER, Rights
from commitmq_plugins.dashboard.history import History
from commitmq_plugins.dashboard.settings import DashboardSettings
from commitmq_plugins.metrics.figures import Figures, Gathering, Lags
from commitmq_plugins.metrics.health import Health

if TYPE_CHECKING:
    import zmq

    from commitmq.client.message import Message
    from commitmq.client.transactions.transaction import OpenTransaction


def command(*words: str | int | None) -> str:
    """``commitmq`` and the words, quoted for a shell; None is left out."""
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


class Shared:
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
        self._gathering = Gathering(context, self.deadline_s)
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
        self.history = History(settings.history_s, settings.history_series)

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
        """All figures, ``age_ms`` old at most; while another thread gathers them, the ones before.

        Raises NodeUnavailableError when there are none yet, and the other thread still waits for them.
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
        """The supervisor's, ``age_ms`` old at most: it measures the memory of all processes for it.

        Raises NodeUnavailableError.
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
        """Users and policies."""
        with self._access_lock:
            return self._access.table()

    @property
    def asks_for_login(self) -> bool:
        """Whether the node has users or keys: then nobody else may act as the node's owner."""
        return self.context.has_keys or not self.access().is_open

    def silent(self, who: str) -> NodeUnavailableError:
        """The error of a page that cannot do without ``who``."""
        return NodeUnavailableError(f"{who} did not answer within {self.deadline_s:g} s")


class Node:
    """Made for each request of a visitor."""

    def __init__(self, shared: Shared, rights: Rights) -> None:
        self._shared, self.rights = shared, rights

    @property
    def context(self) -> WorkerContext:
        return self._shared.context

    @property
    def settings(self) -> DashboardSettings:
        return self._shared.settings

    @property
    def deadline_s(self) -> float:
        return self._shared.deadline_s

    @property
    def health(self) -> Health:
        return self._shared.health

    @property
    def history(self) -> History:
        return self._shared.history

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
class Kind:
    """A type without its None: ``name`` is str, int or bool; ``many`` for a tuple of them."""

    name: str
    many: bool
    optional: bool


def kind_of(annotation: Any) -> Kind:
    """The kind of a field's type, resolved."""
    optional = False
    if isinstance(annotation, types.UnionType):
        parts = [one for one in typing.get_args(annotation) if one is not type(None)]
        [annotation], optional = parts, True
    if typing.get_origin(annotation) is tuple:
        return Kind(typing.get_args(annotation)[0].__name__, True, optional)
    return Kind(annotation.__name__, False, optional)


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
