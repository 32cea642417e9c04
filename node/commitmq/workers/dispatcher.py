"""dispatcher-NAME: hosts one dispatcher, built-in or a plugin's.

Owns: what its dispatcher owns. Reads: DispatchBatches, the CommitLog. Advances: ``dispatched`` and ``durable`` of its slot.
Sockets: PULL bound to ``dispatch-NAME`` (ipc); PUB ``queues-changed`` for the ConsumeQueue dispatcher, which wakes readers;
SUB ``topics`` of the coordinator (deleted topics). Exit codes: workers.runtime.ExitCode.

The position is the host's: a batch that starts behind it means something was missed (the queue was full, this process was
dead), and the host reads the log itself up to where the batch starts; rows that it has are trimmed. If no batch comes
although ``reput`` moved on, it reads the log as well. So a lost batch costs time, never records.

``dispatched`` is stored only after ``dispatch`` returned, and readers are woken after that.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

import orjson
import zmq

from commitmq import failpoints, plugins
from commitmq.control import DispatcherWord, Word
from commitmq.errors import CorruptRecordError, DiskFullError, StoreError
from commitmq.hookspecs import Dispatcher, DispatcherView
from commitmq.store.commit_log import CommitLog
from commitmq.store.dispatch_batch import DispatchBatch, LogWalker
from commitmq.workers.reput import dispatch_endpoint
from commitmq.workers.runtime import WorkerContext, monotonic_ms

ROLE = "dispatcher"
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_POLL_MS = 100
_CATCH_UP_AFTER_MS = 30
_DISK_RETRY_MS = 500
CONSUME_QUEUE = "consume_queue"
FLAG_DISK_FULL = 1
FLAG_STORE_ERROR = 4


class DispatcherHost:
    """One dispatcher and its position."""

    def __init__(self, context: WorkerContext, name: str, dispatcher: Dispatcher) -> None:
        self._context = context
        self._name = name
        self._dispatcher = dispatcher
        self._slot = int(context.params.get("dispatcher_slot", 0))
        self._control = context.control
        config = context.config
        self._log = CommitLog(
            context.layout.commit_log, config.commit_log.segment_bytes, config.commit_log.max_mapped_segments
        )
        self._walker = LogWalker(
            self._log, max_rows=config.dispatch.batch_messages, max_bytes=config.dispatch.batch_bytes
        )
        self._changed: list[tuple[str, int]] = []
        self._deleted = self._load_tombstones()
        self._flags = 0
        self.pull: zmq.Socket[bytes] = context.zmq.socket(zmq.PULL)
        self.pull.setsockopt(zmq.RCVHWM, config.dispatch.queue_batches)
        self.pull.bind(dispatch_endpoint(context, name))
        context.register(self.pull)
        self.topics: zmq.Socket[bytes] = context.zmq.socket(zmq.SUB)
        self.topics.setsockopt(zmq.SUBSCRIBE, b"topics")
        self.topics.connect(context.layout.ipc("topics"))
        context.register(self.topics, quiet=True)
        self._publisher: zmq.Socket[bytes] | None = None
        if name == CONSUME_QUEUE:
            self._publisher = context.zmq.socket(zmq.PUB)
            self._publisher.setsockopt(zmq.LINGER, 0)
            self._publisher.bind(context.layout.ipc("queues-changed"))
        view = DispatcherView(
            context.layout,
            config,
            context.log,
            self._log,
            self._control.dispatcher(self._slot, DispatcherWord.DISPATCHED),
            lambda: self._deleted,
            self._changed.extend,
        )
        self.position = dispatcher.open(view)
        self._set_position(self.position)
        self._next_flush_ms = 0
        self._next_thorough_ms = monotonic_ms() + config.consume_queue.flush_thorough_interval_ms
        self._topics_version = -1

    def take(self, frames: list[Any]) -> None:
        """Dispatch one batch, reading first what was missed before it."""
        batch = DispatchBatch.from_frames(frames, self._log)
        if batch.end <= self.position:
            return
        if batch.start > self.position:
            self.read_log(batch.start)
        self._dispatch(batch.after(self.position))

    def read_log(self, limit: int) -> None:
        """Dispatch from the log itself up to ``limit``."""
        while self.position < limit:
            try:
                batch = self._walker.walk(self.position, limit)
            except CorruptRecordError as error:
                self._context.log.error("the log cannot be read", error=str(error))
                return
            self._dispatch(batch)
            self._context.heartbeat()

    def _dispatch(self, batch: DispatchBatch) -> None:
        while True:
            try:
                if failpoints.ACTIVE:
                    failpoints.hit(f"dispatcher.{self._name}.before_dispatch")
                self._changed.clear()
                self._dispatcher.dispatch(batch)
                break
            except DiskFullError as error:
                self._retry_later(FLAG_DISK_FULL, error)
            except StoreError as error:
                # An I/O error: sends are refused meanwhile, because what is stored now could not be consumed.
                self._retry_later(FLAG_STORE_ERROR, error)
        self._flag(0, "")
        if failpoints.ACTIVE:
            failpoints.hit(f"dispatcher.{self._name}.before_publish")
        if len(batch):
            self._control.put_dispatcher(self._slot, DispatcherWord.TIMESTAMP, int(batch.rows["store_timestamp"][-1]))
        self._set_position(batch.end)
        if self._changed and self._publisher is not None:
            with contextlib.suppress(zmq.Again):
                self._publisher.send_multipart([b"q", orjson.dumps(self._changed)], zmq.NOBLOCK)

    def _set_position(self, position: int) -> None:
        self.position = position
        self._control.put_dispatcher(self._slot, DispatcherWord.DISPATCHED, position)

    def _retry_later(self, flag: int, error: StoreError) -> None:
        """Say why nothing is dispatched and wait a moment. A stop does not wait: recovery dispatches the rest."""
        self._flag(flag, str(error))
        if self._context.stopping:
            raise error
        self._context.wait(_DISK_RETRY_MS)

    def _flag(self, flag: int, reason: str) -> None:
        if flag == self._flags:
            return
        self._flags = flag
        self._control.put_dispatcher(self._slot, DispatcherWord.FLAGS, flag)
        if flag:
            self._context.log.error("cannot dispatch, sends are refused until it works again", error=reason)
        else:
            self._context.log.info("dispatching again")

    def flush(self, *, force: bool = False) -> None:
        """Flush when an interval is over; publish how far it is durable."""
        now = monotonic_ms()
        if not force and now < self._next_flush_ms:
            return
        config = self._context.config.consume_queue
        thorough = force or now >= self._next_thorough_ms
        self._next_flush_ms = now + config.flush_interval_ms
        if thorough:
            self._next_thorough_ms = now + config.flush_thorough_interval_ms
        try:
            durable, stamp = self._dispatcher.flush(thorough=thorough)
        except StoreError as error:
            self._flag(FLAG_STORE_ERROR, str(error))
            return
        self._control.put_dispatcher(self._slot, DispatcherWord.DURABLE_TIMESTAMP, stamp)
        self._control.put_dispatcher(self._slot, DispatcherWord.DURABLE, durable)

    def hear_topics(self) -> None:
        """Take the coordinator's news; deletions are what matters here."""
        with contextlib.suppress(zmq.Again):
            while True:
                news = orjson.loads(self.topics.recv_multipart(zmq.NOBLOCK)[1])
                for topic, offset in news.get("deleted", []):
                    self._delete_topic(topic, offset)

    def check_topics(self) -> None:
        """News may be lost: compare versions now and then, and read the tombstones when they moved."""
        version = self._control.get(Word.TOPICS_VERSION)
        if version == self._topics_version:
            return
        self._topics_version = version
        for topic, offset in self._load_tombstones().items():
            if self._deleted.get(topic, -1) < offset:
                self._delete_topic(topic, offset)

    def _delete_topic(self, topic: str, offset: int) -> None:
        """Everything below ``offset`` was stored before the deletion: dispatch it first, so that nothing of it comes later."""
        if self._deleted.get(topic, -1) >= offset:
            return
        self.read_log(min(offset, self._control.get(Word.REPUT)))
        self._deleted[topic] = offset
        forget = getattr(self._dispatcher, "forget", None)
        if forget is not None:
            forget(topic)
            self._context.log.info("topic deleted", topic=topic, below=offset)

    def _load_tombstones(self) -> dict[str, int]:
        path = self._context.layout.own / "deleted_topics.json"
        try:
            return {str(name): int(offset) for name, offset in orjson.loads(path.read_bytes()).items()}
        except FileNotFoundError:
            return {}

    def close(self) -> None:
        """Flush everything and close."""
        self.flush(force=True)
        self._dispatcher.close()
        self._walker.release()
        self._log.close()


def run(context: WorkerContext) -> None:
    """The loop: batches as they come, the log where they do not, a flush each interval."""
    name = context.role.removeprefix("dispatcher-")
    spec = next(one for one in plugins.load().dispatchers(context.config) if one.name == name)
    factory = cast("Any", plugins.resolve(spec.factory))
    host = DispatcherHost(context, name, factory())
    control = context.control
    context.ready()
    idle_since = monotonic_ms()
    readable: set[Any] = set()
    while True:
        took = False
        for _ in range(16):
            if not int(host.pull.getsockopt(_EVENTS)) & _POLLIN:
                break
            frames = host.pull.recv_multipart(zmq.NOBLOCK, copy=False)
            host.take([frame.buffer for frame in frames])
            took = True
        now = monotonic_ms()
        if took:
            idle_since = now
        reput = control.get(Word.REPUT)
        if not took and host.position < reput and (now - idle_since >= _CATCH_UP_AFTER_MS or context.stopping):
            host.read_log(reput)
            idle_since = monotonic_ms()
        if host.topics in readable:
            host.hear_topics()
        host.check_topics()
        host.flush()
        if context.stopping and host.position >= reput:
            break
        behind = host.position < reput
        readable = context.wait(0 if took else _CATCH_UP_AFTER_MS if behind else _POLL_MS)
    host.close()
