"""The contract with plugins (pluggy project name ``commitmq``): hooks, dispatchers, workers and filters.

Every hook's docstring says when it fires, in which process, whether it can fire twice, and the effect of an exception.
Hooks grow by optional arguments (a plugin names only the ones it wants). ``HOOK_API_VERSION`` changes when a hook is
removed or changes its meaning. A plugin may declare the version it was written for with ``COMMITMQ_HOOK_API = 1`` at
its top level; a plugin that names another version is omitted with a sentence, instead of failing later.

A plugin is a module (or any object) that the entry-point group ``commitmq`` names. It is imported in a process of its
own when a node starts, and in the command line. Its dispatchers, workers and filters are named as ``module:attribute``
and imported only in the process that runs them. So a plugin can break no process but its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from commitmq.security.start_rule import Listener

if TYPE_CHECKING:
    from pathlib import Path

    import click
    import numpy as np
    from numpy.typing import NDArray

    from commitmq.config import NodeConfig
    from commitmq.log import Log
    from commitmq.store.layout import StoreLayout
    from commitmq.store.log.append import Appended
    from commitmq.store.log.commit_log import CommitLog
    from commitmq.store.log.dispatch_batch import DispatchBatch
    from commitmq.store.log.run_check import CheckedRun
    from commitmq.store.queues.message_filter import FilterBatch
    from commitmq.store.queues.record_filter import RecordFilter

HOOK_API_VERSION = 1
PROJECT = "commitmq"

_hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as an implementation of the hook of the same name."""


@dataclass(frozen=True, slots=True)
class DispatcherView:
    """The part of the node that a dispatcher may use.

    ``position`` is the suggested resume offset (bytes of the log): behind the last durable record of the dispatcher's
    previous run, the log's first byte for a new one. ``settings`` is the plugin's own section of the configuration (see
    :func:`commitmq_config`), None without one. ``folder`` is a place for its files that no other part uses; the
    dispatcher creates it at first use.

    ``clean``: the dispatcher closed in order and so did the node. ``restarted``: only this process died and the node
    lived on, so nothing of the page cache was lost. Both false: data that was not synced may be gone. ``node_clean`` is
    the node's half of ``clean``: the last user of the store, RocketMQ perhaps, stopped in order. ``log_end`` is the end
    of the log that recovery found at the start of the node. References behind it were lost, unless the records were
    written since.

    ``topic_attributes(topic)``: attributes of a topic (``queue.type`` and so on) in the present topic table; None when
    the table has no such topic, because it was deleted since the record was stored.

    ``durable`` is the last return value of the previous process's ``flush``. Data between it and ``position`` may be
    only in the page cache, so it must be synced before a flush may return more.

    ``progress(phase, done, total, unit)``: a slow ``open`` should call it now and then, from its own thread. ``status``
    shows it, and the node knows that this process does not hang.
    """

    layout: StoreLayout
    config: NodeConfig
    log: Log
    commit_log: CommitLog
    position: int
    topics_deleted: Callable[[], dict[str, int]]
    announce: Callable[[list[tuple[str, int]]], None]
    settings: Any = None
    clean: bool = True
    restarted: bool = False
    name: str = ""
    node_clean: bool = False
    log_end: int | None = None
    topic_attributes: Callable[[str], Mapping[str, str] | None] = lambda _topic: None
    subscriptions_of: Callable[[str], list[tuple[bytes, RecordFilter]]] = lambda _topic: []
    """For the ConsumeQueue's dispatcher: the SQL92 filters of a topic's groups, each with its bits (spec 3.8)."""
    durable: int | None = None
    progress: Callable[[str, int, int, str], None] = lambda _phase, _done, _total, _unit: None

    @property
    def folder(self) -> Any:
        """``commitmq/dispatchers/NAME`` under the store, as a :class:`pathlib.Path`."""
        return self.layout.own / "dispatchers" / self.name


class Dispatcher(Protocol):
    """Sees every record of the log, in order, in a process of its own. All offsets are physical, in bytes.

    Replay is at least once: after a crash records at or behind the returned position come again, so ``dispatch`` must
    be idempotent by physical offset. An exception in any of these methods ends the process; it is started again with
    back-off. A plugin's dispatcher that dies ``dispatch.park_after`` times on the same record is parked: it waits for
    ``commitmq dispatcher retry`` or ``skip`` while everything else continues.

    Two more methods are optional. ``forget(topic: str) -> None``: the topic was deleted, and all its records so far
    have been dispatched. The call is repeated when the records are, and comes late when the dispatcher was dead or
    parked at the time. ``query(request: dict) -> dict``: answer a query from ``Admin.dispatcher_query``, between two
    batches. Both are dicts of JSON values, ``network.max_frame_bytes`` at most. An exception fails the query, not the
    process.
    """

    def open(self, view: DispatcherView) -> int:
        """Called once per process. Returns the offset to resume from: everything below is in this dispatcher's files."""

    def dispatch(self, batch: DispatchBatch) -> None:
        """Take the records of ``batch``, which starts where the last one ended. On return they are readable.

        A batch may be empty, and records that an operator skipped are missing from it. ``batch.end`` is the new
        position.
        """

    def flush(self, *, thorough: bool) -> tuple[int, int]:
        """Make the dispatched records durable. Returns (durable offset, store timestamp in ms of its newest record).

        Called once a second, between two batches. The offset must lie between two records, at the end of the last batch
        at most. Any other value, or anything but two ints, ends the process and is not stored.

        Not ``thorough``: the dispatcher may leave small amounts for later. The call is thorough once a minute and at
        the end. For a dispatcher with a true attribute ``spreads_flush`` it is thorough only at the end; such a
        dispatcher ensures by itself that nothing stays unsynced for long. A dispatcher that syncs in a thread, so that
        dispatching continues in the meantime, returns the durable offset so far; while its attribute ``is_flushing`` is
        true it is called again within a moment.
        """

    def truncate(self, offset: int) -> None:
        """Drop everything at or behind ``offset``; the next batch begins there.

        Raise NotImplementedError if that is impossible: a reset to an earlier offset is then refused, and what an
        operator cuts from the log stays in this dispatcher's files.
        """

    def expire(self, min_offset: int) -> None:
        """The log now starts at ``min_offset``: references below may be dropped. Called when it grew, and once after
        ``open``.
        """

    def close(self) -> None:
        """The process ends in good order; called after a last ``flush(thorough=True)``."""


@dataclass(frozen=True, slots=True)
class TopicStoreView:
    """The part of the node that a topic store may use. Sizes in bytes.

    ``folder`` is the place of its files, outside ``store`` (the root of the node's store). ``life`` names this life of
    the node: messages that an earlier process stored in the same life are taken over, all others are gone.
    ``store_host`` is the store host of its records: 4 or 16 address bytes and the port.
    """

    folder: Path
    store: Path
    life: str
    budget_bytes: int
    segment_bytes: int
    store_host: bytes
    config: NodeConfig
    log: Log


@dataclass(frozen=True, slots=True)
class Stored:
    """``queue_offset`` is the first record's, the others follow; ``appended`` is their place."""

    queue_offset: int
    appended: Appended


class TopicStore(Protocol):
    """A dispatcher that keeps topics itself: messages sent to them never come to the CommitLog.

    The node checks the sends, routes them by topic, answers and wakes readers. The store keeps the records, gives them
    queue offsets, and lays them out as commitmq.store.memory_files says, where readers find them.
    ``incarnation`` differs between a topic and a later one of the same name. One process calls these methods, one at a
    time. An exception other than the named errors ends the process; it is started again.
    """

    def open(self, view: TopicStoreView) -> None:
        """Called once per process."""

    def append_record(
        self, topic: str, incarnation: int, queue: int, record: bytearray, born_host_bytes: int
    ) -> Stored:
        """Keep one record (CommitLogAppender.encode); readable on return. Raises as append_run."""

    def append_run(self, topic: str, incarnation: int, queue: int, run: CheckedRun, born_host: bytes) -> Stored:
        """Keep the whole run or nothing; readable on return. Raises MessageIllegalError, DiskFullError."""

    def topics(self) -> dict[str, int]:
        """Topics with kept messages, with their incarnations."""

    def forget(self, topic: str) -> None:
        """The topic was deleted."""

    def close(self, *, keep: bool) -> None:
        """The process ends in good order. Without ``keep`` the node ends too, and nothing needs to be kept."""


@dataclass(frozen=True, slots=True)
class DispatcherSpec:
    """One dispatcher of a plugin. ``factory`` is ``module:attribute``, imported in the dispatcher's own process only.

    ``can_undo``: the dispatcher's ``truncate`` works, so it may see records before they are flushed (which a power cut
    can take back; in synchronous mode no record is dispatched before it is flushed anyway). ``stores_topics``: it is a
    :class:`TopicStore` instead, for topics whose attribute ``storage.type`` is ``name``; so far only the built-in one
    of memory topics is run.
    """

    name: str
    factory: str
    can_undo: bool = False
    stores_topics: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker process of a plugin: ``factory`` is ``module:function``, imported and called in that process only.

    The function takes a :class:`commitmq.workers.runtime.context.WorkerContext`, calls ``context.ready()`` when it serves,
    loops over ``context.wait(timeout_ms)`` until ``context.stopping``, and returns when it has drained. The plugin's
    section of the configuration is ``context.params["settings"]``.

    ``is_server``: clients wait for this worker's answers, as they wait for the node's own. It then runs with the niceness
    of the node; other workers have ``dispatch.plugin_niceness``, so that they give way to the node.

    ``listeners``: the addresses at which it listens. The node does not start when one of them breaks the start rule
    (:mod:`commitmq.security.start_rule`), when the settings give one of the ports that they name to two processes, or when
    another program has one that is vital.

    A start waits for a worker with either, ``supervisor.server_wait_s`` at most. It says where the worker serves, the first of
    the endpoints given to ``context.ready``, or why it does not.
    """

    name: str
    factory: str
    is_server: bool = False
    listeners: tuple[Listener, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigSection:
    """A plugin's own section ``[plugins.NAME]``: ``schema`` is a frozen dataclass whose fields all have defaults.

    Types come from the defaults (bool, int, float, str); limits from :func:`commitmq.config.setting`. If the dataclass
    has a method ``check()``, it is called with the values in place and raises ValueError for values that do not fit
    together.
    """

    name: str
    schema: type[Any]


@_hookspec
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:  # type: ignore[empty-body]
    """The dispatchers this plugin adds: each sees every record of the log, in a process of its own.

    Fires in the discovery process, once at every start of a node, before any worker runs; it fires again when the
    supervisor itself is restarted, and in ``commitmq plugins``. Must not touch the store. Raising leaves this plugin's
    dispatchers out, named in ``status`` and ``commitmq plugins``; the node runs on.
    """


@_hookspec
def commitmq_workers(config: NodeConfig) -> list[WorkerSpec]:  # type: ignore[empty-body]
    """The worker processes this plugin adds, for instance a server for another protocol.

    Fires in the discovery process, once at every start of a node, before any worker runs; it fires again when the
    supervisor itself is restarted, and in ``commitmq plugins``. The workers start after all of the node's own and stop
    before them; one that dies is started again with back-off. Raising leaves this plugin's workers out, named in
    ``status`` and ``commitmq plugins``; the node runs on.
    """


@_hookspec
def commitmq_register_commands(cli: click.Group) -> None:
    """Add commands to ``commitmq``: ``@cli.command()`` on functions of the plugin.

    Fires in the command line's process, at most once, when the verb asked for is not one of the node's own, and for
    ``commitmq --help``. A verb that exists already is refused. Raising leaves this plugin's commands out, with one line
    on standard error; the command line continues.
    """


@_hookspec
def commitmq_config() -> ConfigSection:  # type: ignore[empty-body]
    """The plugin's own section of the configuration, ``[plugins.NAME]`` in the file or ``--set plugins.NAME.key=value``.

    Fires in the discovery process, once at every start of a node, before ``commitmq_dispatchers``; it fires again in
    every process that runs a part of this plugin, and in ``commitmq plugins``. A value that does not fit refuses the
    start with exit code CONFIG_ERROR. Raising leaves the section out, named in ``status`` and ``commitmq plugins``.
    """


class CompiledFilter(Protocol):
    """One expression, ready to judge messages. It is shared by all consumers that use the expression: keep no state.

    An attribute ``terms`` (int) may give the number of tests for each message, by default the number of its properties:
    the more tests, the fewer messages the reader judges in one turn.
    """

    @property
    def properties(self) -> tuple[str, ...]:
        """Names of the message properties that the filter looks at; only their columns are in a batch."""
        ...

    def matches(self, batch: FilterBatch) -> NDArray[np.bool_]:
        """One boolean for each message of ``batch``: whether the consumer wants it.

        Called in every pull, in the reader's only thread: use the columns' tests, not a loop over messages. A message
        is judged again whenever it is read again, so the answer must depend on the message alone.
        """
        ...


class MessageFilter(Protocol):
    """Understands one type of expression."""

    def compile(self, expression: str) -> CompiledFilter:
        """Compile ``expression``, which may be any text from a client: bound its length and nesting.

        Raises FilterError with the ``position`` and the reason when the expression is wrong.
        """
        ...


@dataclass(frozen=True, slots=True)
class FilterSpec:
    """One type of filter expression, under the name that a pull gives as ``filter_type`` (``SQL92``).

    ``factory`` is ``module:attribute`` of a :class:`MessageFilter`, or of a callable that returns one without
    arguments. It is imported in the readers only, at the first pull that asks for the type.
    """

    type: str
    factory: str


@_hookspec
def commitmq_filters(config: NodeConfig) -> list[FilterSpec]:  # type: ignore[empty-body]
    """The types of message filters this plugin adds.

    Fires in the discovery process, once at every start of a node, before any worker runs; it fires again when the
    supervisor itself is restarted, and in ``commitmq plugins``. Must not touch the store. A type that exists already,
    or ``TAG``, is refused. Raising leaves this plugin's filters out, named in ``status`` and ``commitmq plugins``; the
    node runs on. The filters run in the readers. A filter that cannot be imported, or raises while it compiles or
    matches, fails that request with FILTER_FAILED, naming the plugin and the reason, and the reader continues. Only a
    failure that no process survives (a crash in native code, a loop without end) costs the reader, which is then
    started again.
    """
