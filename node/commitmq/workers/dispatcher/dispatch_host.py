"""Hosts one dispatcher: position, catch-up, crash counting, parking, skipped ranges.

The host keeps the position. A batch that starts behind the position means that batches were missed (the queue was full,
this process was dead); the host then reads the log itself up to the batch's start. It trims rows that it has already
dispatched. If no batch comes although ``reput`` moved on, it reads the log as well. So a lost batch costs time, never
records. ``dispatched`` is stored only after ``dispatch`` returned, and readers are woken after that.

**Poison.** The host counts a death in the control block before each batch and takes it back after the batch. So its
successor finds there how often the dispatcher died in the batch behind its position, whatever killed it. With each
death the batches of that range get smaller, down to single records. At ``dispatch.park_after`` deaths the single record
is known, and the dispatcher is parked: nothing is imported or opened, the process only answers requests. Counting
begins at zero when the node starts, because the plugin may have been repaired meanwhile. The node's own dispatchers are
never parked.

**Ranges skipped by a person.** ``skip`` and a reset to a later position add ranges to the dispatcher's state. From then
on their records are taken out of every batch, also when the dispatcher goes back to an older position of its own.
"""

from __future__ import annotations

import bisect
import contextlib
from typing import Any, Final

import orjson
import zmq

from commitmq import failpoints
from commitmq.control import DispatcherFlag, DispatcherWord, Word
from commitmq.errors import CommitMQError, CorruptRecordError, DiskFullError, StoreError
from commitmq.plugin import loading as plugins
from commitmq.plugin.hookspecs import Dispatcher, DispatcherView
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.store.metadata.deleted_topics import WatchedTable
from commitmq.workers.dispatcher.dispatch_state import DispatchState
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.expired_segments import ExpiredSegments
from commitmq.workers.runtime.start_progress import StartProgress
from commitmq.workers.runtime.subscription_view import CompiledSubscriptions
from commitmq.workers.runtime.topic_view import TopicViews

CONSUME_QUEUE: Final = "consume_queue"
BATCHES_A_TURN: Final = 16
_DISK_RETRY_MS: Final = 500
_FLUSHING_LOOK_MS: Final = 20


class DispatcherHost:
    """One dispatcher and its position; ``dispatcher`` is None while it is parked."""

    def __init__(self, context: WorkerContext, name: str) -> None:
        """Reads the state; :meth:`open` or :meth:`park` comes next. Raises StoreError."""
        self._context = context
        self._control = context.control
        self.name = name
        self.slot = int(context.params.get("dispatcher_slot", 0))
        self.is_plugin = "factory" in context.params
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
        self._tombstones = WatchedTable(context.layout.tombstones)
        self._checked: dict[str, int] | None = None
        self._deleted = dict(self._tombstones.load())
        self._told = dict(self._deleted)  # deletions that the dispatcher knows of, or will when it reaches their offset
        self._to_forget: list[
            tuple[int, str, int]
        ] = []  # (offset, topic, a version that did not have it yet), ascending
        self._flags = 0
        self._topics_version = -1  # the TOPICS_VERSION up to which deletions are known
        self._views: TopicViews | None = None  # created when the dispatcher first asks: most do not
        self._min_offset = self._control.get(Word.MIN_OFFSET)
        self.dispatcher: Dispatcher | None = None
        self.state: DispatchState | None = None
        self._control.put_dispatcher(self.slot, DispatcherWord.FLAGS, 0)
        self.position = self._control.dispatcher(self.slot, DispatcherWord.DISPATCHED)
        if name != CONSUME_QUEUE:
            # Recovery finds the ConsumeQueue's position. The other dispatchers store theirs.
            self.state = DispatchState.load(context.layout.own / "dispatchers" / f"{name}.json")
            self.position = self.state.position if self.state.position >= 0 else self._min_offset
        # The predecessor's position when it died. The dispatcher may have to go back from there to its durable
        # position.
        self._reached = self._control.dispatcher(self.slot, DispatcherWord.DISPATCHED)
        self._deaths = self._control.dispatcher(self.slot, DispatcherWord.DEATHS) if self.is_plugin else 0
        self._suspect_end = self._control.dispatcher(self.slot, DispatcherWord.SUSPECT_END)
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

    @property
    def died_too_often(self) -> bool:
        """True when the next thing to do is :meth:`park`."""
        return self._deaths >= self._context.config.dispatch.park_after

    def open(self) -> None:
        """Import and open the dispatcher. Any exception ends this process."""
        context, state = self._context, self.state
        epoch = self._control.get(Word.EPOCH)
        restarted = state is not None and state.epoch == epoch
        factory: Any = plugins.resolve(self._factory())
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
            lambda: self._deleted,
            self._changed.extend,
            settings=plugins.settings(context.config, str(context.params["plugin"])) if self.is_plugin else None,
            clean=state is not None and state.clean and (restarted or bool(context.params.get("clean"))),
            restarted=restarted,
            name=self.name,
            node_clean=bool(context.params.get("clean")),
            log_end=self._control.get(Word.RECOVERED_END),
            topic_attributes=self._topic_attributes,
            subscriptions_of=CompiledSubscriptions(
                context.layout, self._control, context.params.get("filters", ()) if not self.is_plugin else ()
            ),
            durable=self._control.dispatcher(self.slot, DispatcherWord.DURABLE),
            progress=progress,
        )
        if state is not None:
            state.epoch, state.clean = epoch, False
            state.save()
        if self.name == CONSUME_QUEUE:
            self._views = TopicViews(context.layout, self._control)
        position = dispatcher.open(view)
        progress.over()
        end = self._control.committed()
        if type(position) is not int or position < 0:
            raise ValueError(f"open() must return the offset to resume from, not {position!r:.100}")
        if position > end:
            # A power cut took records that were never flushed and that this dispatcher had seen.
            context.log.warning("the log ends before the dispatcher's position", position=position, end=end)
            dispatcher.truncate(end)
            position = end
        if self.is_plugin:
            self._check_place("open()", position)
            self._told = {topic: at for topic, at in self._deleted.items() if not self._is_to_be_told(at, position)}
        self.dispatcher = dispatcher
        self._set_position(position if self.is_plugin else max(position, self._min_offset))
        skipped, gaps = (state.skipped, state.gaps) if state is not None else ([], [])
        context.tell(state="running", parked=None, skipped=skipped, gaps=gaps)
        # Records that expired while this dispatcher was dead, or parked, or before it was told of them when the node
        # ended.
        self._min_offset = 0
        self.check_min()

    def _is_to_be_told(self, deleted_at: int, position: int) -> bool:
        """Whether the dispatcher, opened at ``position``, must yet be told of a topic that was deleted at
        ``deleted_at``.

        Everything behind ``position`` comes again, deletions as well as records, or was never told because the process
        was dead or parked. An offset at which no record begins any more dates from a log that was cut since.
        """
        return position <= deleted_at <= self._control.get(Word.WRITTEN) and self._begins_a_record(deleted_at)

    def _check_place(self, said_by: str, offset: int) -> None:
        """Raise ValueError for a dispatcher's offset that is not between two records."""
        if not self._begins_a_record(offset):
            raise ValueError(f"{said_by} returned the offset {offset}, where no record begins")

    def _begins_a_record(self, offset: int) -> bool:
        """True also at the end of the log, below its beginning, and where it cannot be read yet: such an offset was the
        writer's own end of the log at some time.
        """
        end = self._control.committed()
        if end <= offset <= self._control.get(Word.WRITTEN) or offset < self._control.get(Word.MIN_OFFSET):
            return True
        try:
            LogWalker(self.log, max_rows=1, max_bytes=self.log.segment_bytes).walk(offset, end)
        except CorruptRecordError:
            return False
        return True

    def _factory(self) -> str:
        if self.is_plugin:
            return str(self._context.params["factory"])
        own = plugins.load_each(one for one in plugins.candidates() if one.distribution == plugins.OWN_DISTRIBUTION)
        for _, spec in own.dispatchers(self._context.config):
            if spec.name == self.name:
                return spec.factory
        raise ImportError(f"no built-in plugin has the dispatcher {self.name}: {[one.failure for one in own.reports]}")

    def park(self) -> None:
        """Stop at the record behind the position until a person decides."""
        self._set_position(max(self._reached, self._min_offset))
        self._control.put_dispatcher(self.slot, DispatcherWord.FLAGS, DispatcherFlag.PARKED)
        suspect = self.suspect()
        self._set_position(suspect["physical_offset"])  # behind a filler, if there is one
        parked = {"deaths": self._deaths, **suspect}
        self._context.log.error("dispatcher is parked", dispatcher=self.name, **parked)
        skipped, gaps = (self.state.skipped, self.state.gaps) if self.state is not None else ([], [])
        self._context.tell(state="parked", parked=parked, skipped=skipped, gaps=gaps)

    def suspect(self) -> dict[str, Any]:
        """The record behind the position: offset, size, topic, queue and queue offset (offset alone at the end)."""
        limit = self.limit()
        start = self.position
        while start < limit:
            batch = LogWalker(self.log, max_rows=1, max_bytes=self.log.segment_bytes).walk(start, limit)
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
        return {"physical_offset": self.position}

    def forgive(self) -> None:
        """Count deaths from zero again, and clear the parked flag of a dispatcher that goes on."""
        self._deaths = 0
        flags = self._control.dispatcher(self.slot, DispatcherWord.FLAGS)
        self._control.put_dispatcher(self.slot, DispatcherWord.FLAGS, flags & ~DispatcherFlag.PARKED)
        self._control.put_dispatcher(self.slot, DispatcherWord.DEATHS, 0)
        self._control.put_dispatcher(self.slot, DispatcherWord.SUSPECT_END, 0)

    # ------------------------------------------------------------ dispatching

    def limit(self) -> int:
        """End of what this dispatcher may see now."""
        reput = self._control.get(Word.REPUT)
        return reput if self._sees_unflushed else min(reput, self._control.get(Word.FLUSHED))

    def take(self, frames: list[Any]) -> None:
        """Dispatch one batch, after reading the records missed before it."""
        # Check topics first: a record of a topic that was deleted and created again is stored after the deletion is
        # known. Its unit must not be appended to the old queue, which is removed as soon as this process hears of the
        # deletion.
        self.check_topics()
        self.check_min()
        batch = DispatchBatch.from_frames(frames, self.log)
        if batch.end <= self.position or self._deaths or batch.end > self.limit():
            return  # known already; or the log is read instead, in smaller pieces
        if batch.start > self.position and not self.read_log(batch.start, most=BATCHES_A_TURN):
            return  # too far behind: the loop reads on, and serves requests in between
        while self._to_forget and self._to_forget[0][0] < batch.end:
            if not self.read_log(self._to_forget[0][0], most=BATCHES_A_TURN):
                return
        self._dispatch(batch.after(self.position))

    def read_log(self, limit: int, *, most: int = 1 << 62) -> bool:
        """Dispatch from the log itself up to ``limit``, in ``most`` batches; True when it got there."""
        while self.position < limit and most > 0:
            self.check_min()
            self.check_topics()
            if self.position >= limit:
                break  # the log now begins behind the position
            most -= 1
            stop = min(limit, self._to_forget[0][0]) if self._to_forget else limit
            walker = self._walker
            if self._deaths:
                walker = LogWalker(self.log, max_rows=self._suspicious_rows(), max_bytes=walker.max_bytes)
            try:
                batch = walker.walk(self.position, stop)
            except CorruptRecordError as error:
                if self._unreadable != self.position:  # it is tried again and again: one log line is enough
                    self._context.log.error("the log cannot be read", error=str(error))
                self._unreadable = self.position
                return False
            self._dispatch(batch)
            self._forget_due()
            self._context.heartbeat()
        return self.position >= limit

    def _suspicious_rows(self) -> int:
        """Rows in a batch, fewer with each death: all of them at no death, one at the last chance before parking."""
        dispatch = self._context.config.dispatch
        share = 1 - self._deaths / (dispatch.park_after - 1)
        return max(1, int(dispatch.batch_messages ** max(0.0, share)))

    def _dispatch(self, batch: DispatchBatch) -> None:
        if self.is_plugin:
            self._count_death(batch.end)
        if self.state is not None and self.state.skipped:
            batch = self.state.without_skipped(batch)
        self._hand_over(batch)
        if failpoints.ACTIVE:
            failpoints.hit(f"dispatcher.{self.name}.before_publish")
        if len(batch):
            self._control.put_dispatcher(self.slot, DispatcherWord.TIMESTAMP, int(batch.rows["store_timestamp"][-1]))
        self._set_position(batch.end)
        if self.is_plugin:
            self._survived()
        if self._changed and self._publisher is not None:
            with contextlib.suppress(zmq.Again):
                self._publisher.send_multipart([b"q", orjson.dumps(self._changed)], zmq.NOBLOCK)

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
                self._retry_later(DispatcherFlag.DISK_FULL, error)
            except StoreError as error:
                if self.is_plugin:
                    raise
                # An I/O error. Sends are refused meanwhile, because messages stored now could not be consumed.
                self._retry_later(DispatcherFlag.STORE_ERROR, error)
        self._flag(0, "")

    def _count_death(self, end: int) -> None:
        self._suspect_end = max(self._suspect_end, end)
        self._control.put_dispatcher(self.slot, DispatcherWord.SUSPECT_END, self._suspect_end)
        self._control.put_dispatcher(self.slot, DispatcherWord.DEATHS, self._deaths + 1)

    def _survived(self) -> None:
        if self.position >= self._suspect_end:
            self._deaths = self._suspect_end = 0
        self._control.put_dispatcher(self.slot, DispatcherWord.DEATHS, self._deaths)

    def _set_position(self, position: int) -> None:
        self.position = position
        self._control.put_dispatcher(self.slot, DispatcherWord.DISPATCHED, position)

    def _retry_later(self, flag: DispatcherFlag, error: StoreError) -> None:
        """Publish why nothing is dispatched and wait a moment. A stop does not wait: recovery dispatches the rest."""
        self._flag(flag, str(error))
        if self._context.stopping:
            raise error
        self._context.wait(_DISK_RETRY_MS)

    def _flag(self, flag: int, reason: str) -> None:
        if flag == self._flags:
            return
        self._flags = flag
        self._control.put_dispatcher(self.slot, DispatcherWord.FLAGS, flag)
        if flag:
            refused = ", sends are refused until it works again" if self.name == CONSUME_QUEUE else ""
            self._context.log.error(f"cannot dispatch{refused}", error=reason)
        else:
            self._context.log.info("dispatching again")

    @property
    def is_flushing(self) -> bool:
        """Whether the dispatcher is syncing in a thread, and will report a new durable position soon."""
        return bool(getattr(self.dispatcher, "is_flushing", False))

    def flush(self, *, force: bool = False) -> None:
        """Flush when an interval is over; publish and store the durable position."""
        now = monotonic_ms()
        if self.dispatcher is None or (not force and now < self._next_flush_ms):
            return
        config = self._context.config.consume_queue
        spreads = getattr(self.dispatcher, "spreads_flush", False)
        thorough = force or (now >= self._next_thorough_ms and not spreads)
        self._next_flush_ms = now + config.flush_interval_ms
        if thorough:
            self._next_thorough_ms = now + config.flush_thorough_interval_ms
        try:
            flushed = self.dispatcher.flush(thorough=thorough)
        except StoreError as error:
            if self.is_plugin:
                raise
            self._flag(DispatcherFlag.STORE_ERROR, str(error))
            return
        if self.is_plugin:
            self._check_flushed(flushed)
        if self.is_flushing:
            self._next_flush_ms = now + _FLUSHING_LOOK_MS
        durable, stamp = flushed
        self._remember(durable, stamp)
        self._control.put_dispatcher(self.slot, DispatcherWord.DURABLE_TIMESTAMP, stamp)
        self._control.put_dispatcher(self.slot, DispatcherWord.DURABLE, durable)

    def _check_flushed(self, flushed: object) -> None:
        """Raise ValueError for an answer of ``flush`` that must not be stored, because the next start would rely on it."""
        if not isinstance(flushed, tuple) or [type(one) for one in flushed] != [int, int]:
            raise ValueError(f"flush() must return (durable offset, store timestamp), two of int, not {flushed!r:.100}")
        durable, stamp = flushed
        if not 0 <= durable <= self.position or not 0 <= stamp < 1 << 63:
            raise ValueError(f"flush() returned {flushed}, but the dispatcher is at the offset {self.position}")
        if durable != self.position:
            self._check_place("flush()", durable)

    def _remember(self, durable: int, stamp: int) -> None:
        state = self.state
        if state is None or (state.position, state.timestamp) == (durable, stamp):
            return
        state.position, state.timestamp = durable, stamp
        try:
            state.save()
        except StoreError as error:
            # Only the next start begins further back.
            self._context.log.warning("cannot remember the position", error=str(error))

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
            self._set_position(min_offset)
        if min_offset > self._min_offset:
            self._min_offset = min_offset
            self.dispatcher.expire(min_offset)

    @property
    def lost_its_place(self) -> bool:
        """True when the record behind the position was deleted: for a parked dispatcher, the record that it was parked
        at.
        """
        return self.position < self._control.get(Word.MIN_OFFSET)

    def _report_gap(self, start: int, end: int) -> None:
        if self.state is not None and self.state.gaps and self.state.gaps[-1][1] == end:
            return
        self._context.log.error("records were deleted before this dispatcher saw them", start=start, end=end)
        if self.state is not None:
            self.state.gaps.append((start, end))
            self.state.save()
            self._context.tell(gaps=self.state.gaps)

    def hear_topics(self, socket: zmq.Socket[bytes]) -> None:
        """Take the coordinator's news; only deletions matter here."""
        with contextlib.suppress(zmq.Again):
            while True:
                frame = socket.recv_multipart(zmq.NOBLOCK)[1]
                if self._views is not None:
                    self._views.hear(frame)
                news = orjson.loads(frame)
                for topic, offset, _incarnation in news.get("deleted", []):
                    self._delete_topic(topic, offset, int(news["version"]) - 1)

    def check_topics(self) -> None:
        """Compare versions, because news may be lost, and read the tombstones when the version moved."""
        self._forget_due()
        version = self._control.get(Word.TOPICS_VERSION)
        if version == self._topics_version:
            return
        # Read before the version counts as known, so that an unreadable file is tried again.
        tombstones = self._tombstones.load()
        if tombstones is not self._checked:
            for topic, offset in tombstones.items():
                self._delete_topic(topic, offset, self._topics_version)
            self._checked = tombstones
        self._topics_version = version
        self._say_carried_out()

    def _delete_topic(self, topic: str, offset: int, before: int) -> None:
        """Tell the dispatcher of the deletion after the records stored before it, below ``offset``, and before later
        ones.

        The dispatcher may be far behind, so the log is read up to ``offset`` in the loop's own time.
        """
        if self.dispatcher is None or self._told.get(topic, -1) >= offset:
            return
        self._told[topic] = offset
        bisect.insort(self._to_forget, (offset, topic, before))
        self._forget_due()

    def _forget_due(self) -> None:
        """Tell the dispatcher of the deletions whose offset it has reached."""
        while self._to_forget and self._to_forget[0][0] <= self.position:
            offset, topic, _ = self._to_forget.pop(0)
            self._deleted[topic] = offset
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
            version = min((before for _, _, before in self._to_forget), default=self._topics_version)
            if version > self._control.dispatcher(self.slot, DispatcherWord.TOPICS):
                self._control.put_dispatcher(self.slot, DispatcherWord.TOPICS, version)

    def _topic_attributes(self, topic: str) -> dict[str, str] | None:
        """See DispatcherView. The topic table's file has a topic before a message of it can be in the log."""
        if self._views is None:
            self._views = TopicViews(self._context.layout, self._control)
        view = self._views.get(topic)
        # A topic that was created again under an old name may be of another kind than the known one.
        if (view is None or topic in self._deleted) and self._views.is_stale:
            self._views.reload()
            view = self._views.get(topic)
        return None if view is None else dict(view.attributes)

    # ------------------------------------------------------------ requests of a person

    def skip_suspect(self) -> dict[str, Any]:
        """Skip for ever the record that the dispatcher was parked at. Returns it. Raises StoreError."""
        assert self.state is not None
        suspect = self.suspect()
        start = suspect["physical_offset"]
        if "size" not in suspect:
            raise CommitMQError("there is no record behind the dispatcher's position")
        self.state.skipped.append((start, start + suspect["size"]))
        self.state.save()
        self.forgive()
        return suspect

    def move(self, to: int) -> None:
        """Continue at ``to``, a record's offset: forwards by skipping the range between, backwards by ``truncate``.

        Raises NotImplementedError when the dispatcher cannot go back, StoreError when its state cannot be written. Any
        exception of the dispatcher means that this process must end.
        """
        assert self.state is not None
        if to >= self.position:
            if to > self.position:
                self.state.skipped.append((self.position, to))
            self.state.save()
            self.forgive()
            self._context.tell(skipped=self.state.skipped)
            return
        was_parked, before = self.dispatcher is None, self.position
        try:
            if self.dispatcher is None:
                self.open()
            assert self.dispatcher is not None
            self.dispatcher.truncate(to)
        except Exception as error:
            if was_parked or not isinstance(error, NotImplementedError):
                # The dispatcher's state is unknown: as after a crash, the next process opens it again, or is parked
                # again.
                self.dispatcher = None
                self._set_position(before)
            raise
        # Skipped records behind ``to`` are wanted again: going back means all of them.
        self.state.skipped = [(start, min(end, to)) for start, end in self.state.skipped if start < to]
        self.state.position = to
        self.state.save()
        self.forgive()
        self._context.tell(skipped=self.state.skipped)
        self._set_position(to)
        self._control.put_dispatcher(self.slot, DispatcherWord.DURABLE, to)

    def close(self) -> None:
        """Flush everything and close."""
        if self.dispatcher is not None:
            self.flush(force=True)
            self.dispatcher.close()
            if self.state is not None:
                self.state.clean = True
                self.state.save()
        self._walker.release()
        self.log.close()
