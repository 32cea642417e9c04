"""Hosts one dispatcher: opening, position, catch-up, parking, flushes.

The host keeps the position. A batch that starts behind the position means that batches were missed (the queue was full,
this process was dead); the host then reads the log itself up to the batch's start. It trims rows that it has already
dispatched. If no batch comes although ``reput`` moved on, it reads the log as well. So a lost batch costs time, never
records. ``dispatched`` is stored only after ``dispatch`` returned, and readers are woken after that.

**Poison.** A dispatcher that dies too often on one record is parked (:mod:`commitmq.workers.dispatcher.dispatch_host`):
nothing is imported or opened, the process only answers requests.

**Ranges skipped by an operator** (:mod:`commitmq.workers.dispatcher.process`) are taken out of every batch.

Counts the deaths of a plugin's dispatcher in the batch behind its position, and so finds poison messages.

The host counts a death in the control block before each batch and takes it back after the batch. So its successor finds
there how often the dispatcher died in the batch behind its position, for any cause of death. With each death the
batches of that range get smaller, down to single records. At ``dispatch.park_after`` deaths the single record is known,
and the dispatcher is parked. Counting begins at zero when the node starts, because the plugin may have been repaired
in the meantime. The node's own dispatchers are never parked.

Offsets of the CommitLog as a dispatcher may have them: where records begin, and which record begins there.

One dispatcher's view of topics: the deleted ones, and the attributes of the others.

A deletion comes between the records stored before it and those after it. ``to_forget`` has the deletions that the
dispatcher has not reached yet.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any, Final

import orjson
import zmq

from commitmq import failpoints
from commitmq.config import DispatchConfig
from commitmq.control import ControlBlock, DispatcherFlag, DispatcherWord, Word
from commitmq.errors import CorruptRecordError, DiskFullError, StoreError
from commitmq.files.disk import DamagedFileError
from commitmq.files.disk_space import is_no_space
from commitmq.plugin import loading as plugins
from commitmq.plugin.hookspecs import Dispatcher, DispatcherView
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.store.metadata.topic_files import WatchedTable
from commitmq.store.queues.queue_files import has_record_before
from commitmq.workers.dispatcher.dispatch_state import DispatchState
from commitmq.workers.dispatcher.mover_calls import MoverCalls
from commitmq.workers.runtime.context import StartProgress, WorkerContext, monotonic_ms
from commitmq.workers.runtime.expired_segments import ExpiredSegments
from commitmq.workers.runtime.topic_view import CompiledSubscriptions, TopicViews


class DeathCount:
    """The words ``DEATHS`` and ``SUSPECT_END`` of one dispatcher. ``number``: deaths of its predecessors."""

    def __init__(self, control: ControlBlock, slot: int, config: DispatchConfig, *, counts: bool) -> None:
        """``counts`` is false for the node's own dispatchers."""
        self._control, self._slot, self._config = control, slot, config
        self.number = control.dispatcher(slot, DispatcherWord.DEATHS) if counts else 0
        self._suspect_end = control.dispatcher(slot, DispatcherWord.SUSPECT_END)

    @property
    def is_too_high(self) -> bool:
        """True when the host must park the dispatcher."""
        return self.number >= self._config.park_after

    def suspicious_rows(self) -> int:
        """Rows in a batch, fewer with each death: all of them at no death, one at the last chance before parking."""
        share = 1 - self.number / (self._config.park_after - 1)
        return max(1, int(self._config.batch_messages ** max(0.0, share)))

    def begin(self, end: int) -> None:
        """A batch that ends at ``end`` is about to be dispatched."""
        self._suspect_end = max(self._suspect_end, end)
        self._control.put_dispatcher(self._slot, DispatcherWord.SUSPECT_END, self._suspect_end)
        self._control.put_dispatcher(self._slot, DispatcherWord.DEATHS, self.number + 1)

    def survive(self, position: int) -> None:
        """The batch is dispatched, up to ``position``."""
        if position >= self._suspect_end:
            self.number = self._suspect_end = 0
        self._control.put_dispatcher(self._slot, DispatcherWord.DEATHS, self.number)

    def forgive(self) -> None:
        """Count deaths from zero again."""
        self.number = 0
        self._control.put_dispatcher(self._slot, DispatcherWord.DEATHS, 0)
        self._control.put_dispatcher(self._slot, DispatcherWord.SUSPECT_END, 0)


class LogPositions:
    """Looks into the log. Nothing here is fast: it reads from the beginning of a segment, or one record at a time."""

    def __init__(self, context: WorkerContext, log: CommitLog) -> None:
        self._context, self._control, self._log = context, context.control, log

    def begins_a_record(self, offset: int) -> bool:
        """Whether a record begins at ``offset``. True also at the end of the log, below its beginning, and where it cannot be
        read yet: such an offset was the writer's own end of the log at some time.
        """
        end = self._control.committed()
        if end <= offset <= self._control.get(Word.WRITTEN) or offset < self._control.get(Word.MIN_OFFSET):
            return True
        try:
            LogWalker(self._log, max_rows=1, max_bytes=self._log.segment_bytes).walk(offset, end)
        except CorruptRecordError:
            return False
        return True

    def is_inside_a_record(self, offset: int) -> bool:
        """Whether ``offset`` is in the log, and no record begins or ends there. One that is damaged begins where another
        ends.
        """
        if not self._control.get(Word.MIN_OFFSET) < offset < self._control.committed():
            return False
        return not self.begins_a_record(offset) and not has_record_before(self._log, offset)

    def check(self, said_by: str, offset: int) -> None:
        """Raise ValueError for a dispatcher's offset that is not between two records."""
        if not self.begins_a_record(offset):
            raise ValueError(f"{said_by} returned the offset {offset}, where no record begins")

    def record_behind(self, position: int, limit: int) -> dict[str, Any]:
        """The record behind ``position``: offset, size, topic, queue and queue offset (offset alone at ``limit``)."""
        start = position
        while start < limit:
            batch = LogWalker(self._log, max_rows=1, max_bytes=self._log.segment_bytes).walk(start, limit)
            if len(batch):
                row = batch.rows[0]
                return {
                    "physical_offset": int(row["physical_offset"]),
                    "size": int(row["size"]),
                    "topic": batch.topics[int(row["topic"])],
                    "queue": int(row["queue_id"]),
                    "queue_offset": int(row["queue_offset"]),
                }
            start = batch.end
        return {"physical_offset": position}

    def is_boundary(self, offset: int, low: int, high: int) -> bool:
        """Whether a record between ``low`` and ``high`` begins at ``offset``, or it is one of the two."""
        if offset in (low, high):
            return True
        start = max(low, offset - offset % self._log.segment_bytes)
        for batch in self._walk(start, high):
            if batch.end > offset:
                return bool((batch.rows["physical_offset"] == offset).any())
            if batch.end == offset:
                return True
        return False

    def offset_by_time(self, timestamp: int, low: int, high: int) -> int:
        """Physical offset of the first record stored at ``timestamp`` or later; ``high`` when there is none."""
        start = low
        for base in self._log.segments():
            if low < base < high:
                first = next(iter(self._walk(base, high, rows=1)), None)
                if first is None or not len(first) or int(first.rows["store_timestamp"][0]) >= timestamp:
                    break
                start = base
        for batch in self._walk(start, high):
            found = (batch.rows["store_timestamp"] >= timestamp).nonzero()[0]
            if len(found):
                return int(batch.rows["physical_offset"][found[0]])
        return high

    def _walk(self, start: int, limit: int, rows: int = 16_384) -> Iterator[DispatchBatch]:
        walker = LogWalker(self._log, max_rows=rows, max_bytes=32 * 1024 * 1024)
        while start < limit:
            batch = walker.walk(start, limit)
            yield batch
            start = batch.end
            self._context.heartbeat()


class DispatcherTopics:
    """Deletions and attributes of topics; ``position`` is always that of the dispatcher."""

    def __init__(self, context: WorkerContext, slot: int, positions: LogPositions) -> None:
        self._context, self._control, self._slot = context, context.control, slot
        self._positions = positions
        self.dispatcher: Dispatcher | None = None
        """The open dispatcher; without one a deletion waits."""
        self._tombstones = WatchedTable(context.layout.tombstones)
        self._checked: dict[str, int] | None = None
        self.deleted = dict(self._tombstones.load())
        self._told = dict(self.deleted)  # deletions that the dispatcher knows of, or will when it reaches their offset
        self.to_forget: list[
            tuple[int, str, int]
        ] = []  # (offset, topic, a version that did not have it yet), ascending
        self._topics_version = -1  # the TOPICS_VERSION up to which deletions are known
        self._views: TopicViews | None = None  # created when the dispatcher first asks: most do not

    def load(self) -> TopicViews:
        """The topic table, which is kept up to date from now on."""
        if self._views is None:
            self._views = TopicViews(self._context.layout, self._control)
        return self._views

    def resume(self, position: int) -> None:
        """A plugin's dispatcher begins at ``position``: it is told again of the deletions behind it."""
        self._told = {topic: at for topic, at in self.deleted.items() if not self._is_to_be_told(at, position)}

    def _is_to_be_told(self, deleted_at: int, position: int) -> bool:
        """Whether the dispatcher, opened at ``position``, must yet be told of a topic that was deleted at
        ``deleted_at``.

        Everything behind ``position`` comes again, deletions as well as records, or was never told because the process
        was dead or parked. An offset at which no record begins any more dates from a log that was cut since.
        """
        return position <= deleted_at <= self._control.get(Word.WRITTEN) and self._positions.begins_a_record(deleted_at)

    def hear(self, socket: zmq.Socket[bytes], position: int) -> None:
        """Take the coordinator's news; only deletions matter here."""
        with contextlib.suppress(zmq.Again):
            while True:
                frame = socket.recv_multipart(zmq.NOBLOCK)[1]
                if self._views is not None:
                    self._views.hear(frame)
                news = orjson.loads(frame)
                for topic, offset, _incarnation in news.get("deleted", []):
                    self._delete_topic(topic, offset, int(news["version"]) - 1, position)

    def check(self, position: int) -> None:
        """Compare versions, because news may be lost, and read the tombstones when the version moved."""
        self.forget_due(position)
        version = self._control.get(Word.TOPICS_VERSION)
        if version == self._topics_version:
            return
        # Read before the version counts as known, so that an unreadable file is tried again.
        tombstones = self._tombstones.load()
        if tombstones is not self._checked:
            for topic, offset in tombstones.items():
                self._delete_topic(topic, offset, self._topics_version, position)
            self._checked = tombstones
        self._topics_version = version
        self._say_carried_out()

    def _delete_topic(self, topic: str, offset: int, before: int, position: int) -> None:
        """Tell the dispatcher of the deletion after the records stored before it, below ``offset``, and before later
        ones. The dispatcher may be far behind, so the log is read up to ``offset`` in the loop's own time.
        """
        if self.dispatcher is None or self._told.get(topic, -1) >= offset:
            return
        self._told[topic] = offset
        bisect.insort(self.to_forget, (offset, topic, before))
        self.forget_due(position)

    def forget_due(self, position: int) -> None:
        """Tell the dispatcher of the deletions whose offset it has reached."""
        while self.to_forget and self.to_forget[0][0] <= position:
            offset, topic, _ = self.to_forget.pop(0)
            self.deleted[topic] = offset
            forget = getattr(self.dispatcher, "forget", None)
            if forget is not None:
                forget(topic)
                self._context.log.info("topic deleted", topic=topic, below=offset)
            self._say_carried_out()

    def _say_carried_out(self) -> None:
        """Publish the TOPICS_VERSION up to which deleted topics are fully removed. From then on readers may trust the
        queues of new topics of the same names, and tombstones may be dropped when the log holds nothing below them any
        more.
        """
        if self.dispatcher is not None:
            version = min((before for _, _, before in self.to_forget), default=self._topics_version)
            if version > self._control.dispatcher(self._slot, DispatcherWord.TOPICS):
                self._control.put_dispatcher(self._slot, DispatcherWord.TOPICS, version)

    def attributes(self, topic: str) -> dict[str, str] | None:
        """See DispatcherView. The topic table's file has a topic before a message of it can be in the log."""
        views = self.load()
        view = views.get(topic)
        # A topic that was created again under an old name may be of another kind than the known one.
        if (view is None or topic in self.deleted) and views.is_stale:
            views.reload()
            view = views.get(topic)
        return None if view is None else dict(view.attributes)


CONSUME_QUEUE: Final = "consume_queue"
BATCHES_A_TURN: Final = 16
_FAR_BEHIND: Final = 8
"""Batches as small as the one at hand: a dispatch costs as much as some hundred records of it."""
_DISK_RETRY_MS: Final = 500
_STATE: Final = "dispatcher state"
_FLUSH: Final = "flush"
_FLUSHING_LOOK_MS: Final = 20


class DispatcherHost:
    """One dispatcher and its position; ``dispatcher`` is None while it is parked."""

    def __init__(self, context: WorkerContext, name: str) -> None:
        """Reads the state; :meth:`open` or :meth:`park` comes next. Raises StoreError."""
        self.context = context
        self._control = context.control
        self.name = name
        self.slot = int(context.params.get("dispatcher_slot", 0))
        self.is_plugin = "plugin" in context.params
        self._sees_unflushed = not self.is_plugin or bool(context.params.get("can_undo"))
        config = context.config
        self.log = CommitLog(
            context.layout.commit_log, config.commit_log.segment_bytes, config.commit_log.max_mapped_segments
        )
        self._walker = LogWalker(
            self.log, max_rows=config.dispatch.batch_messages, max_bytes=config.dispatch.batch_bytes
        )
        self._expired = ExpiredSegments(context, self.log)
        self._changed: list[tuple[str, int]] = []
        self.positions = LogPositions(context, self.log)
        self.topics = DispatcherTopics(context, self.slot, self.positions)
        self._movers = MoverCalls(context, is_caller=name == CONSUME_QUEUE)
        self._flags = 0
        self._min_offset = self._control.get(Word.MIN_OFFSET)
        self.dispatcher: Dispatcher | None = None
        self._remade: tuple[int, int] | None = None
        """The part of the log from which files that a crash took are rebuilt."""
        self._remaking = StartProgress(context, "remaking")
        self.state: DispatchState | None = None
        self._control.put_dispatcher(self.slot, DispatcherWord.FLAGS, 0)
        self.position = self._control.dispatcher(self.slot, DispatcherWord.DISPATCHED)
        if name != CONSUME_QUEUE:
            # Recovery finds the ConsumeQueue's position. The other dispatchers store theirs.
            path = context.layout.own / "dispatchers" / f"{name}.json"
            self.state = DispatchState.load(path, context.log)
            if self.positions.is_inside_a_record(self.state.position):
                damage = DamagedFileError(f"no record begins or ends at its position {self.state.position}", path=path)
                self.state = DispatchState.start_over(path, context.log, damage)
            self.position = self.state.position if self.state.position >= 0 else self._min_offset
        # The predecessor's position when it died. The dispatcher may have to go back from there to its durable
        # position.
        self._reached = self._control.dispatcher(self.slot, DispatcherWord.DISPATCHED)
        self.deaths = DeathCount(self._control, self.slot, config.dispatch, counts=self.is_plugin)
        self._unreadable = -1
        self._next_flush_ms = 0
        self._next_thorough_ms = monotonic_ms() + config.consume_queue.flush_thorough_interval_ms
        self._publisher: zmq.Socket[bytes] | None = None
        if name == CONSUME_QUEUE:
            self._publisher = context.zmq.socket(zmq.PUB)
            self._publisher.setsockopt(zmq.LINGER, 0)
            self._publisher.bind(context.layout.ipc("queues-changed"))

    # ------------------------------------------------------------ opening and parking

    @property
    def is_parked(self) -> bool:
        return self.dispatcher is None

    def open(self) -> None:
        """Import and open the dispatcher. Any exception ends this process."""
        context, state = self.context, self.state
        epoch = self._control.get(Word.EPOCH)
        restarted = state is not None and state.epoch == epoch
        factory: Any = plugins.resolve(str(context.params["factory"]))
        if self.lost_its_place:
            # The node's own dispatchers saw everything before it was deleted; the units that a crash took from them had
            # expired.
            if self.is_plugin:
                self._report_gap(self.position, self._min_offset)
            self.position = self._min_offset
        dispatcher: Dispatcher = factory()
        progress = StartProgress(context)
        view = DispatcherView(
            context.layout,
            context.config,
            context.log,
            self.log,
            self.position,
            lambda: self.topics.deleted,
            self._changed.extend,
            settings=plugins.settings(context.config, str(context.params["plugin"])) if self.is_plugin else None,
            clean=state is not None and state.clean and (restarted or bool(context.params.get("clean"))),
            restarted=restarted,
            name=self.name,
            node_clean=bool(context.params.get("clean")),
            log_end=self._control.get(Word.RECOVERED_END),
            topic_attributes=self.topics.attributes,
            subscriptions_of=CompiledSubscriptions(
                context.layout, self._control, context.params.get("filters", ()) if not self.is_plugin else ()
            ),
            durable=self._control.dispatcher(self.slot, DispatcherWord.DURABLE),
            progress=progress,
        )
        if state is not None:
            state.epoch, state.clean = epoch, False
            context.room.wait(_STATE, state.save)
        if self.name == CONSUME_QUEUE:
            self.topics.load()
        position = dispatcher.open(view)
        progress.over()
        if type(position) is not int or position < 0:
            raise ValueError(f"open() must return the offset to resume from, not {position!r:.100}")
        position = self._within_the_log(dispatcher, position)
        if self.is_plugin:
            self.positions.check("open()", position)
            self.topics.resume(position)
        self.dispatcher = self.topics.dispatcher = dispatcher
        self.set_position(position if self.is_plugin else max(position, self._min_offset))
        skipped, gaps = (state.skipped, state.gaps) if state is not None else ([], [])
        context.tell(state="running", parked=None, skipped=skipped, gaps=gaps, remaking=None)
        recovered = self._control.get(Word.RECOVERED_END)
        if not self.is_plugin and self.name != CONSUME_QUEUE and self.position < recovered:
            self._remade = self.position, recovered
            self._tell_remade()
        # Records that expired while this dispatcher was dead, or parked, or before it was told of them when the node
        # ended.
        self._min_offset = 0
        self.check_min()
        self._movers.see_folders(context.layout.consume_queue)

    def _within_the_log(self, dispatcher: Dispatcher, position: int) -> int:
        """``position``, to which a dispatcher was opened; one that saw more than there is goes back. Raises StoreError."""
        state, end = self.state, self._control.committed()
        is_cut = state is not None and state.cut_to >= 0
        if state is not None and is_cut:
            end = min(end, state.cut_to)
        if position > end:
            # A power cut took records that were never flushed and that this dispatcher had seen; or an operator cut the
            # log.
            self.context.log.warning("the log ends before the dispatcher's position", position=position, end=end)
            try:
                if not hasattr(dispatcher, "truncate"):
                    raise NotImplementedError
                dispatcher.truncate(end)
            except NotImplementedError:
                sentence = "it cannot go back, and keeps what was cut from the log: remove its files to have it again"
                self.context.log.error(sentence, start=end, end=position)
            return end
        if state is not None and is_cut:
            # It has nothing of what was cut. One that went back may have to do so again, until it has flushed.
            state.cut_to = -1
            state.save()
        return position

    def park(self) -> None:
        """Stop at the record behind the position until an operator decides."""
        self.set_position(max(self._reached, self._min_offset))
        self._control.put_dispatcher(self.slot, DispatcherWord.FLAGS, DispatcherFlag.PARKED)
        suspect = self.suspect()
        self.set_position(suspect["physical_offset"])  # behind a filler, if there is one
        parked = {"deaths": self.deaths.number, **suspect}
        self.context.log.error("dispatcher is parked", dispatcher=self.name, **parked)
        skipped, gaps = (self.state.skipped, self.state.gaps) if self.state is not None else ([], [])
        self.context.tell(state="parked", parked=parked, skipped=skipped, gaps=gaps)

    def suspect(self) -> dict[str, Any]:
        """The record behind the position, see :meth:`LogPositions.record_behind`."""
        return self.positions.record_behind(self.position, self.limit())

    def forgive(self) -> None:
        """Count deaths from zero again, and clear the parked flag of a dispatcher that continues."""
        flags = self._control.dispatcher(self.slot, DispatcherWord.FLAGS)
        self._control.put_dispatcher(self.slot, DispatcherWord.FLAGS, flags & ~DispatcherFlag.PARKED)
        self.deaths.forgive()

    def drop(self) -> None:
        """Drop the dispatcher: its state is unknown."""
        self.dispatcher = self.topics.dispatcher = None

    # ------------------------------------------------------------ dispatching

    def limit(self) -> int:
        """End of the log as far as this dispatcher may see it now."""
        reput = self._control.get(Word.REPUT)
        return reput if self._sees_unflushed else min(reput, self._control.get(Word.FLUSHED))

    def take(self, frames: list[Any]) -> None:
        """Dispatch one batch, after reading the records missed before it. Raises NoBatchError."""
        # Check topics first: a record of a topic that was deleted and created again is stored after the deletion is
        # known. Its unit must not be appended to the old queue, which is removed as soon as this process hears of the
        # deletion.
        self.topics.check(self.position)
        self.check_min()
        batch = DispatchBatch.from_frames(frames, self.log)
        if batch.end <= self.position or self.deaths.number or batch.end > self.limit():
            return  # known already; or the log is read instead, in smaller pieces
        if batch.start > self.position and not self.read_log(batch.start, most=BATCHES_A_TURN):
            return  # too far behind: the loop reads on, and serves requests in between
        to_forget = self.topics.to_forget
        while to_forget and to_forget[0][0] < batch.end:
            if not self.read_log(to_forget[0][0], most=BATCHES_A_TURN):
                return
        if self._is_far_behind(batch):
            self.read_log(self.limit(), most=BATCHES_A_TURN)
            return  # the next ones are known then
        self._dispatch(batch.after(self.position))

    def _is_far_behind(self, batch: DispatchBatch) -> bool:
        """Whether this many small batches wait behind this one that the log gives the same records in a few large ones."""
        waits = self.limit() - batch.end
        return waits >= _FAR_BEHIND * (batch.end - batch.start) and len(batch) * _FAR_BEHIND <= self._walker.max_rows

    def read_log(self, limit: int, *, most: int = 1 << 62) -> bool:
        """Dispatch from the log itself up to ``limit``, in ``most`` batches; True when it got there."""
        while self.position < limit and most > 0:
            self.check_min()
            self.topics.check(self.position)
            if self.position >= limit:
                break  # the log now begins behind the position
            most -= 1
            stop = min(limit, self.topics.to_forget[0][0]) if self.topics.to_forget else limit
            walker = self._walker
            if self.deaths.number:
                walker = LogWalker(self.log, max_rows=self.deaths.suspicious_rows(), max_bytes=walker.max_bytes)
            try:
                batch = walker.walk(self.position, stop)
            except CorruptRecordError as error:
                if self._unreadable != self.position:  # it is tried again and again: one log line is enough
                    self.context.log.error("the log cannot be read", error=str(error))
                self._unreadable = self.position
                return False
            self._dispatch(batch)
            self.topics.forget_due(self.position)
            self.context.heartbeat()
        return self.position >= limit

    def _dispatch(self, batch: DispatchBatch) -> None:
        if self.is_plugin:
            self.deaths.begin(batch.end)
        if self.state is not None and self.state.skipped:
            batch = self.state.without_skipped(batch)
        self._hand_over(batch)
        if failpoints.ACTIVE:
            failpoints.hit(f"dispatcher.{self.name}.before_publish")
        if len(batch):
            self._control.put_dispatcher(self.slot, DispatcherWord.TIMESTAMP, int(batch.rows["store_timestamp"][-1]))
        self.set_position(batch.end)
        self._tell_remade()
        if self.is_plugin:
            self.deaths.survive(self.position)
        self._movers.see_topics(batch.topics)
        if self._changed and self._publisher is not None:
            with contextlib.suppress(zmq.Again):
                self._publisher.send_multipart([b"q", orjson.dumps(self._changed)], zmq.NOBLOCK)

    def _tell_remade(self) -> None:
        """Report how far the files are rebuilt; until then queries say that they are incomplete."""
        if self._remade is not None:
            start, end = self._remade
            if self.position < end:
                self._remaking(f"making files of the {self.name} again", self.position - start, end - start)
            else:
                self._remade = None
                self._remaking.over()

    def _hand_over(self, batch: DispatchBatch) -> None:
        assert self.dispatcher is not None
        while True:
            try:
                if failpoints.ACTIVE:
                    failpoints.hit(f"dispatcher.{self.name}.before_dispatch")
                self._changed.clear()
                self.dispatcher.dispatch(batch)
                break
            except DiskFullError as error:
                self.context.room.lacked(self.name, error)
                self._retry_later(DispatcherFlag.DISK_FULL, error)
            except StoreError as error:
                if self.is_plugin:
                    raise
                # An I/O error. Sends are refused in the meantime, because messages stored now could not be consumed.
                self._retry_later(DispatcherFlag.STORE_ERROR, error)
            except OSError as error:
                # Of a plugin: its next process dispatches the batch again. A full disk makes no record poison.
                if is_no_space(error):
                    self.deaths.survive(self.position)
                raise
        self.context.room.found(self.name)
        self._flag(0, "")

    def set_position(self, position: int) -> None:
        """Continue at ``position``."""
        self.position = position
        self._control.put_dispatcher(self.slot, DispatcherWord.DISPATCHED, position)

    def _retry_later(self, flag: DispatcherFlag, error: StoreError) -> None:
        """Publish why nothing is dispatched and wait a moment. A stop does not wait: recovery dispatches the rest."""
        self._flag(flag, str(error))
        if self.context.stopping:
            raise error
        self.context.wait(_DISK_RETRY_MS)

    def _flag(self, flag: int, reason: str) -> None:
        if flag == self._flags:
            return
        before, self._flags = self._flags, flag
        self._control.put_dispatcher(self.slot, DispatcherWord.FLAGS, flag)
        if flag == DispatcherFlag.STORE_ERROR:
            refused = ", sends are refused until it works again" if self.name == CONSUME_QUEUE else ""
            self.context.log.error(f"cannot dispatch{refused}", error=reason)
        elif before == DispatcherFlag.STORE_ERROR:
            self.context.log.info("dispatching again")

    @property
    def is_flushing(self) -> bool:
        """Whether the dispatcher is syncing in a thread, and will report a new durable position soon."""
        return bool(getattr(self.dispatcher, "is_flushing", False))

    def flush(self, *, force: bool = False) -> None:
        """Flush when an interval is over; publish and store the durable position."""
        now = monotonic_ms()
        if self.dispatcher is None or (not force and now < self._next_flush_ms):
            return
        config = self.context.config.consume_queue
        spreads = getattr(self.dispatcher, "spreads_flush", False)
        thorough = force or (now >= self._next_thorough_ms and not spreads)
        self._next_flush_ms = now + config.flush_interval_ms
        if self.name == CONSUME_QUEUE:
            told = getattr(self.dispatcher, "remaking", None)
            if told is None:
                self._remaking.over()
            else:
                self._remaking(*told)
        if thorough:
            self._next_thorough_ms = now + config.flush_thorough_interval_ms
        try:
            flushed = self.dispatcher.flush(thorough=thorough)
        except StoreError as error:
            if self.context.room.lacked(_FLUSH, error):
                return
            if self.is_plugin:
                raise
            self._flag(DispatcherFlag.STORE_ERROR, str(error))
            return
        self.context.room.found(_FLUSH)
        if self.is_plugin:
            self._check_flushed(flushed)
        else:
            self._go_back()
        if self.is_flushing:
            self._next_flush_ms = now + _FLUSHING_LOOK_MS
        durable, stamp = flushed
        self._remember(durable, stamp)
        self._control.put_dispatcher(self.slot, DispatcherWord.DURABLE_TIMESTAMP, stamp)
        self._control.put_dispatcher(self.slot, DispatcherWord.DURABLE, durable)

    def _go_back(self) -> None:
        """Continue further back when a dispatcher of the node's own found damage in its files."""
        ask = getattr(self.dispatcher, "going_back", None)
        back = None if ask is None else ask()
        if back is not None and back < self.position:
            self.context.log.warning("its files are damaged, it goes back", position=self.position, to=back)
            self._remade = back, self.position
            self.set_position(back)
            self._tell_remade()

    def _check_flushed(self, flushed: object) -> None:
        """Raise ValueError for an answer of ``flush`` that must not be stored, because the next start would rely on it."""
        if not isinstance(flushed, tuple) or [type(one) for one in flushed] != [int, int]:
            raise ValueError(f"flush() must return (durable offset, store timestamp), two of int, not {flushed!r:.100}")
        durable, stamp = flushed
        if not 0 <= durable <= self.position or not 0 <= stamp < 1 << 63:
            raise ValueError(f"flush() returned {flushed}, but the dispatcher is at the offset {self.position}")
        if durable != self.position:
            self.positions.check("flush()", durable)

    def _remember(self, durable: int, stamp: int) -> None:
        state = self.state
        is_known = state is None or (state.position, state.timestamp) == (durable, stamp)
        if state is None or (is_known and _STATE not in self.context.room.waiting):
            return
        state.position, state.timestamp, state.cut_to = durable, stamp, -1
        self._save(state)

    def _save(self, state: DispatchState) -> None:
        """Write the state if that is possible now. Without it only the next start begins further back."""
        try:
            self.context.room.try_to(_STATE, state.save)
        except StoreError as error:
            self.context.log.warning("cannot remember the position", error=str(error))

    # ------------------------------------------------------------ deletions from the log

    def check_min(self) -> None:
        """Follow the log's beginning: tell the dispatcher, and move the position up if it was deleted."""
        min_offset = self._control.get(Word.MIN_OFFSET)
        self._walker.release_below(min_offset)
        self._expired.release()
        if self.dispatcher is None or min_offset == self._min_offset:
            return
        if self.position < min_offset:
            self._report_gap(self.position, min_offset)
            self.set_position(min_offset)
        if min_offset > self._min_offset:
            self._min_offset = min_offset
            self.dispatcher.expire(min_offset)

    @property
    def lost_its_place(self) -> bool:
        """True when the record behind the position (or that it was parked at) was deleted."""
        return self.position < self._control.get(Word.MIN_OFFSET)

    def _report_gap(self, start: int, end: int) -> None:
        if self.state is not None and self.state.gaps and self.state.gaps[-1][1] == end:
            return
        self.context.log.error("records were deleted before this dispatcher saw them", start=start, end=end)
        if self.state is not None:
            self.state.gaps.append((start, end))
            self._save(self.state)
            self.context.tell(gaps=self.state.gaps)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        if self.dispatcher is not None:
            self.flush(force=True)
            self.dispatcher.close()
            if self.state is not None:
                self.state.clean = True
                self._save(self.state)
        self._movers.close()
        self._walker.release()
        self.log.close()
