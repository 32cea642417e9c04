"""dispatcher-memory: takes sends to memory topics and passes them to the store of those topics.

Owns       the folder of memory topics (commitmq.store.memory_files): made at the first start of a node's life, removed
           when the node stops.
Reads      the topic table.
Advances   the words in that folder's pages, ``memory_topics``.
Sockets    ROUTER ``memory`` (ipc and tcp) for producers, with the writer's operations and answers; PUB
           ``memory-changed``, which wakes readers; SUB ``topics`` (the coordinator).
Exit       workers.runtime.context.ExitCode; 74 when the folder cannot be used.

Producers send here directly: a detour through the writer would cost latency and, at high rates, the writer's time.

Acknowledged messages lie in shared memory, complete and published. So a killed process loses nothing: the next one
takes over and continues the queue offsets. The same holds after the death of the supervisor. A node that is stopped or
killed as a whole loses everything: its next life begins with an empty folder. An ack of ``flushed`` is impossible; the
answer says ``memory``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import orjson
import zmq

from commitmq.config import MEMORY_LEAST_SEGMENTS, NodeConfig
from commitmq.control import Word
from commitmq.errors import DiskFullError, ProtocolError, StoreError
from commitmq.format.constants import Host
from commitmq.format.message_id import pack_host
from commitmq.network.router import LONG_HEADER_BYTES, MAX_FRAMES
from commitmq.plugin import loading as plugins
from commitmq.plugin.hookspecs import Stored, TopicStore, TopicStoreView
from commitmq.protocol import wire
from commitmq.store.log.append import Appended, CommitLogAppender
from commitmq.store.log.run_check import MAX_RECORD_OVERHEAD_BYTES, CheckedRun, MessageIllegalError
from commitmq.store.memory_files import NodeWord, node_page, survives
from commitmq.store.shared_memory import DEFAULT_FOLDER, available_bytes, check_private, memory_folder
from commitmq.supervision.node_files import node_life
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.topic_view import TopicView, TopicViews
from commitmq.workers.writer.put_rules import (
    WRONG_ENDPOINT,
    FurtherQueues,
    PlacedRun,
    PutRefusal,
    PutRules,
    SendChecks,
    SpecialSendError,
)
from commitmq.workers.writer.send_requests import SendRequests

ROLE = "dispatcher-memory"
STORE_FACTORY: Final = "commitmq_dispatchers.memory:MemoryStore"
_NOBLOCK = int(zmq.NOBLOCK)
_SEND_MORE = int(zmq.SNDMORE) | _NOBLOCK
_POLL_MS = 500
_ANNOUNCE_MS = 1  # a sender that waits for each answer must not wait for a wake-up of readers each time
_TURN_REQUESTS = 256
_TURN_BYTES = 8 * 1024 * 1024
_BUDGET_SHARE = 0.75  # of the available memory
_FOLDER_SHARE = 0.9  # of the memory file system
_LEAST_SEGMENT_BYTES = 256 * 1024
_FULL_RETRY_MS = 1_000
_PAGE_BYTES = 4096


class _NoFurtherQueues(FurtherQueues):
    """Refuses further queues: the units of LMQs are in ConsumeQueues, and a memory topic has none."""

    def assign(self, topic: str, properties: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        raise SpecialSendError(
            "MESSAGE_ILLEGAL", f"a message of the memory topic {topic!r} cannot go to further queues"
        )


class _NothingWaits(PutRules):
    def place(self, run: CheckedRun, topic: str, queue_id: int) -> PlacedRun:
        raise PutRefusal(
            "MESSAGE_ILLEGAL",
            f"the memory topic {topic!r} takes no delayed messages and no transactions: they wait in the log",
        )


class MemoryChecks(SendChecks):
    """The writer's checks for the topics that the writer does not store."""

    def _check_place(self, name: str, topic: TopicView) -> None:
        if not topic.is_memory:
            raise PutRefusal(
                WRONG_ENDPOINT, f"topic {name!r} is kept in the log: send to the writer", endpoint="writer"
            )

    def _refuse_when_unwritable(self) -> None:
        """Accept always: memory topics do not use the disk."""


class MemorySends(SendRequests):
    """Answers as the writer does, and stores in the topic store."""

    def __init__(
        self,
        context: WorkerContext,
        checker: CommitLogAppender,
        topics: TopicViews,
        store: TopicStore,
        budget: int,
        segment_bytes: int,
    ) -> None:
        super().__init__(context, checker, {}, MemoryChecks(context, topics), lambda: None)
        self._topics = topics
        self._store = store
        self._further = _NoFurtherQueues(context.config, {})
        self._rules = _NothingWaits(checker, context.config, context.layout)
        # A run must fit into the budget beside the segments that it cannot evict.
        self._max_run_bytes = min(self._max_run_bytes, budget // MEMORY_LEAST_SEGMENTS)
        self._max_message_bytes = checker.max_message_bytes
        self.changed: dict[tuple[str, int], None] = {}
        self.storing = False  # true after the store raised an unexpected exception

    def _store_record(self, topic: str, queue_id: int, record: bytearray, born_host_bytes: int) -> tuple[int, Appended]:
        append = partial(self._store.append_record, topic, self._incarnation(topic), queue_id, record, born_host_bytes)
        return self._kept(topic, queue_id, append, 1, len(record))

    def _store_run(self, topic: str, queue_id: int, run: CheckedRun, host: bytes) -> tuple[int, Appended]:
        append = partial(self._store.append_run, topic, self._incarnation(topic), queue_id, run, host)
        return self._kept(topic, queue_id, append, run.count, len(run.data))

    def _kept(self, topic: str, queue_id: int, append: Callable[[], Stored], *size: int) -> tuple[int, Appended]:
        self.storing = True
        try:
            stored = append()
        except DiskFullError as error:
            self.storing = False
            raise PutRefusal("SERVICE_NOT_AVAILABLE", str(error), _FULL_RETRY_MS) from error
        except MessageIllegalError:
            self.storing = False
            raise
        self.storing = False
        self.changed[topic, queue_id] = None
        if self.counts is not None:
            self.counts.last = topic, size[0], size[1]
        return stored.queue_offset, stored.appended

    def _incarnation(self, name: str) -> int:
        topic = self._topics.get(name)
        assert topic is not None  # it was checked a moment ago
        return topic.incarnation


class MemoryProcess:
    """The loop's state."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        config, layout = context.config, context.layout
        self._topics = TopicViews(layout, context.control)
        self._news: zmq.Socket[bytes] = context.zmq.socket(zmq.SUB)
        self._news.setsockopt(zmq.LINGER, 0)
        self._news.setsockopt(zmq.SUBSCRIBE, b"topics")
        self._news.connect(layout.ipc("topics"))
        self._publisher: zmq.Socket[bytes] = context.zmq.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._publisher.bind(layout.ipc("memory-changed"))
        folder = memory_folder(layout)
        life = node_life(layout)
        budget, segment_bytes = sizes_of_life(config, folder, life)
        store_host = pack_host(Host(config.network.store_host, config.network.store_port))
        factory = plugins.resolve(str(context.params.get("factory", STORE_FACTORY)))
        self._store = cast(TopicStore, factory())  # type: ignore[operator]
        self._store.open(
            TopicStoreView(
                folder=folder,
                store=layout.root.resolve(),
                life=life,
                budget_bytes=budget,
                segment_bytes=segment_bytes,
                store_host=store_host,
                config=config,
                log=context.log,
            )
        )
        self._forget_gone()
        self._coordinator_bell = context.ringer("coordinator")
        checker = CommitLogAppender(
            0,
            segment_bytes=segment_bytes,
            open_segment=lambda _base: None,
            store_host=store_host,
            max_message_bytes=min(
                config.commit_log.max_message_bytes, segment_bytes - MAX_RECORD_OVERHEAD_BYTES - _PAGE_BYTES
            ),
            properties_crc=config.commit_log.append_properties_crc,
        )
        self._requests = MemorySends(context, checker, self._topics, self._store, budget, segment_bytes)
        self._next_announcement_ns = 0
        self._router, self.endpoints = context.bind_router("memory", takes_payload=True)
        self._requests.guard = self._router.guard
        context.register(self._router, quiet=True)
        context.register(self._news, quiet=True)
        self._say_heard()
        context.log.info("memory topics", folder=folder, budget_bytes=budget, segment_bytes=segment_bytes)

    # ------------------------------------------------------------ one turn

    def step(self) -> None:
        more = self.take_requests()
        if self._requests.changed and time.monotonic_ns() >= self._next_announcement_ns:
            self._announce()
        if self._requests.counts is not None:
            self._requests.counts.settle(0)
        readable = self._context.wait(0 if more else _ANNOUNCE_MS if self._requests.changed else _POLL_MS)
        if self._news in readable or self._topics.is_stale:
            self._hear_news()

    def take_requests(self) -> bool:
        """Handle the requests that have arrived, up to a turn's limits; True when there may be more."""
        budget = _TURN_BYTES
        router = self._router
        gate, line = router.gate, router.line
        more = True
        for _ in range(_TURN_REQUESTS):
            if line.waiting and (long := router.take_long()) is not None:
                identity, *frames = long
            else:
                if (first := router.next_sender(told=False)) is None:
                    more = False
                    gate.looks += 1
                    gate.is_empty = True
                    break
                gate.is_empty, identity = False, first
                frames = [frame := router.recv(_NOBLOCK, copy=False)]
                while frame.more:
                    if len(frames) > MAX_FRAMES:
                        router.skip_rest(identity, gate.peers.get(identity))
                        break
                    frame = router.recv(_NOBLOCK, copy=False)
                    frames.append(frame)
                connection = gate.peers.get(identity) or router.meet(identity, frames[0])
                if connection is None:
                    continue
                connection.handled += (size := sum(map(len, frames)) + connection.head_bytes * len(frames))
                is_plain = not line.waiting and not connection.ending and len(frames[0]) <= LONG_HEADER_BYTES
                if not is_plain and router.sets_aside([identity, *frames], size, connection):
                    continue
            if router.guard is not None and router.turns_away(router.guard, identity, frames[0]):
                continue
            answer = self._handle(identity, frames)
            with contextlib.suppress(zmq.ZMQError):  # the peer has gone, so its answer is dropped
                router.send(identity, _SEND_MORE)
                router.send(answer, _NOBLOCK)
            budget -= len(frames[-1])
            if budget <= 0:
                break
        return more

    def _announce(self) -> None:
        """Wake readers that wait for a changed queue: at once after a pause, else together with the next changes."""
        changed = self._requests.changed
        with contextlib.suppress(zmq.Again):
            self._publisher.send_multipart([b"q", orjson.dumps(list(changed))], _NOBLOCK)
        changed.clear()
        self._next_announcement_ns = time.monotonic_ns() + _ANNOUNCE_MS * 1_000_000

    def _handle(self, identity: bytes, frames: list[zmq.Frame]) -> bytes:
        header_frame = frames[0].bytes
        try:
            header = wire.parse_request(header_frame)
        except ProtocolError as error:
            return wire.error(wire.request_id(header_frame), error.code, error.message, outcome="not_stored")
        op = header["op"]
        if op == "hello":
            if len(frames) != 1:
                return wire.error(header["id"], "INVALID_PARAMETER", "hello takes no payload", outcome="not_stored")
            return self._requests.hello(header, frames[0])
        if op not in ("send", "append"):
            sentence = f"the memory process knows send, append and hello, not {op!r}"
            return wire.error(header["id"], "UNKNOWN_OP", sentence, outcome="not_stored")
        if self._topics.is_stale:
            # The coordinator stores and counts a change before it publishes it. A client may know a new topic already,
            # and must not be served with the older topic of that name that this process knows.
            self._hear_news()
        header["ack"] = "memory" if header.get("ack", "flushed") == "flushed" else header["ack"]
        try:
            answer = self._requests.send(identity, header, frames)
        except Exception as error:
            if self._requests.storing:
                raise  # store and queue offsets are in doubt: this process ends, the next one takes over
            self._context.log.exception("a request failed", op=op, error=repr(error))
            sentence = f"the node failed on this request: {error!r}"
            return wire.error(header["id"], "SYSTEM_ERROR", sentence, outcome="not_stored")
        assert isinstance(answer, bytes)
        return answer

    # ------------------------------------------------------------ topics

    def _hear_news(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._topics.hear(self._news.recv_multipart(_NOBLOCK)[-1])
        if self._topics.is_stale:
            self._topics.reload()
        self._forget_gone()
        self._say_heard()

    def _say_heard(self) -> None:
        """Confirm the deletions of ended topics to the coordinator: no more messages are taken for them."""
        version = self._topics.version
        if version != self._context.control.get(Word.MEMORY_TOPICS):
            self._context.control.put(Word.MEMORY_TOPICS, version)
            if self._topics.has_endings:
                self._coordinator_bell.ring()

    def _forget_gone(self) -> None:
        """Free the memory of topics that were deleted, or deleted and created again."""
        for name, incarnation in self._store.topics().items():
            topic = self._topics.get(name)
            if topic is None or not topic.is_memory or topic.incarnation != incarnation:
                self._store.forget(name)

    # ------------------------------------------------------------ the end

    def drain(self) -> None:
        """Take no more requests, answer those that have arrived. The node stops, and its memory topics end with it."""
        for name in self.endpoints:
            with contextlib.suppress(zmq.ZMQError):
                self._router.unbind(name)
        self._router.line.stop_resting()
        while self.take_requests():
            pass
        self._announce()
        self._store.close(keep=False)
        self._publisher.close()
        self._news.close()


def sizes_of_life(config: NodeConfig, folder: Path, life: str) -> tuple[int, int]:
    """:func:`sizes` as an earlier process of this life of the node determined it, if there was one.

    The messages stored by that process reduce the available memory: measured again, the budget would be smaller after
    each death, perhaps the segments too, and acknowledged messages would be evicted or unreadable.
    """
    if not config.memory.budget_bytes and survives(folder, life):
        check_private(folder)
        try:
            page = node_page(folder)
        except (OSError, StoreError):
            return sizes(config, folder)  # the file is unreadable
        found = page.get(NodeWord.BUDGET), page.get(NodeWord.SEGMENT_BYTES)
        page.close()
        if all(found):
            return found
    return sizes(config, folder)


def sizes(config: NodeConfig, folder: Path) -> tuple[int, int]:
    """``(budget, segment)`` in bytes: as configured, or derived from the machine's memory. Raises StoreError when the
    file system of ``folder`` cannot hold a configured budget.
    """
    memory = config.memory
    parent = folder.parent
    try:
        found = os.statvfs(parent)
    except OSError as error:
        raise StoreError(
            f"there is no folder for memory topics: {error.strerror} (memory.folder)", path=parent
        ) from error
    room = found.f_blocks * found.f_frsize
    if config.commit_log.transient_store_pool:
        room -= config.commit_log.transient_store_pool_size * config.commit_log.segment_bytes
    if memory.budget_bytes:
        if memory.budget_bytes > room:
            raise StoreError(
                f"memory.budget_bytes={memory.budget_bytes}, but the file system has {room} bytes for it; make it larger"
                f" (containers: --shm-size), set memory.folder to another than {DEFAULT_FOLDER}, or lower the budget",
                path=parent,
            )
        return memory.budget_bytes, memory.segment_bytes
    budget = int(min(available_bytes() * _BUDGET_SHARE, room * _FOLDER_SHARE))
    # On a small machine smaller segments are better than none; such a budget is too small for large messages.
    segment_bytes = min(memory.segment_bytes, budget // MEMORY_LEAST_SEGMENTS // _PAGE_BYTES * _PAGE_BYTES)
    if segment_bytes < _LEAST_SEGMENT_BYTES:
        segment_bytes = _LEAST_SEGMENT_BYTES
        budget = MEMORY_LEAST_SEGMENTS * segment_bytes
    return budget, segment_bytes


def run(context: WorkerContext) -> None:
    """The loop: requests, and news of topics."""
    process = MemoryProcess(context)
    context.ready(endpoints=process.endpoints)
    while not context.stopping:
        process.step()
    process.drain()
