"""Expiry manually: the operation ``expire`` of the cleanup worker.

    expire {before?, keep_bytes?, dry_run?}

``before``: delete segments stored before this time (milliseconds since 1970). ``keep_bytes``: delete segments further
than this many bytes behind the log's end. With both, delete only segments that both allow. With neither, delete the
segments that expired by age now, at any hour. Only whole segments are deleted. The answer comes when the deletion is
done. Repeating a request is harmless.

Asks the coordinator for the positions of all consumer groups; cleanup must not delete unread messages.

cleanup: deletes the oldest segments of the CommitLog, by age, disk use, a budget, or manually (spec section 10).

Owns       deletion of segments, ``commitmq/min_offset``.
Reads      the disk's use, the files' times; flushed, dispatched and durable positions; through the coordinator, with
           ``retention.keep_unconsumed``, the positions of the consumer groups.
Advances   MIN_OFFSET (recovery sets its first value). DISK_FULL is not its word: allocate makes the writer refuse
sends.
Sockets    ROUTER ``cleanup`` (ipc and tcp) for expiry manually; DEALER to the coordinator; rings readers.
Exit       :class:`commitmq.workers.runtime.context.ExitCode`.

A round: decide (:mod:`commitmq.store.log.expiry`), wait until the writer has a durable snapshot of its producer
table up to the new minimum, make the minimum durable, publish it, wait until the workers have unmapped the segments
(HOLDERS_MS at most: a mapping of an unlinked file is harmless), then unlink one segment after the other. Nothing is
ever truncated. ConsumeQueue and index files follow: their dispatchers see that the minimum grew.

Killed anywhere, it leaves at worst segments below the minimum; its successor, or recovery, deletes them first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import zmq

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.control import DispatcherWord, Word, WorkerWord
from commitmq.errors import CommitMQError, NodeUnavailableError, ProtocolError, StoreError
from commitmq.files.disk import sync_folder
from commitmq.files.disk_space import DiskUse, DiskWatch
from commitmq.format.file_names import segment_name
from commitmq.protocol import wire
from commitmq.protocol.channel import new_routing_id
from commitmq.store.log import expiry
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.expiry import Claim, Plan, Reason, RetentionState, Rules, decide, local_hour, next_by_age
from commitmq.store.queues import queue_ends
from commitmq.store.queues.queue_ends import GroupPosition, UnitFinder, slowest
from commitmq.workers.runtime.clocks import DoubtingClock, wall_ms
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.request_socket import RequestSocket

_MOST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ManualCleanup:
    """The parameters of an expiry manually."""

    before_ms: int | None = None
    keep_bytes: int | None = None
    dry_run: bool = False


def expiry_socket(context: WorkerContext, expire: Callable[[ManualCleanup], dict[str, Any]]) -> RequestSocket:
    operations = {"expire": lambda _client, header: expire(_by_hand(header))}
    return RequestSocket(context, "cleanup", operations, {"expire": ("before", "keep_bytes")})


def _by_hand(header: dict[str, Any]) -> ManualCleanup:
    numbers = []
    for field in ("before", "keep_bytes"):
        value = header.get(field)
        if value is not None and (type(value) is not int or not 0 <= value < _MOST):
            raise ProtocolError("INVALID_PARAMETER", f"{field} must be a whole number, not {value!r:.40}")
        numbers.append(value)
    dry_run = header.get("dry_run", False)
    if type(dry_run) is not bool:
        raise ProtocolError("INVALID_PARAMETER", f"dry_run must be true or false, not {dry_run!r:.40}")
    return ManualCleanup(numbers[0], numbers[1], dry_run)


_PATIENCE_S: Final = 10.0


def group_positions(context: WorkerContext) -> list[GroupPosition]:
    """Committed offsets of all groups, and offset 0 for queues that a member reads without having committed. Raises
    NodeUnavailableError when the coordinator does not answer in time, ProtocolError when it refuses.
    """
    dealer: zmq.Socket[bytes] = context.zmq.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, new_routing_id())
    try:
        dealer.connect(context.layout.ipc("coordinator"))
        found: list[GroupPosition] = []
        after: Any = None
        while True:
            page = _ask(context, dealer, {"op": "group.positions", "id": len(found), "after": after})
            found += [GroupPosition(*row) for row in page["positions"]]
            after = page["next"]
            if after is None:
                return found
    finally:
        dealer.close()


def _ask(context: WorkerContext, dealer: zmq.Socket[bytes], question: dict[str, Any]) -> dict[str, Any]:
    dealer.send(wire.pack(question))
    deadline = time.monotonic() + _PATIENCE_S
    while not dealer.poll(200):
        context.heartbeat()
        if time.monotonic() >= deadline:
            raise NodeUnavailableError("the coordinator does not answer")
    context.heartbeat()
    answer = wire.parse_answer(dealer.recv())
    if not answer["ok"]:
        raise wire.refusal(answer)
    return answer


ROLE = "cleanup"
HOLDERS_MS: Final = 2_000
PRODUCERS_MS: Final = 10_000
# As in RocketMQ (60 s and 10 s), so that a node that was down for days is not busy deleting while it starts.
_FIRST_LOOK_INTERVALS: Final = 6
_MEASURE_MS: Final = 60_000
_HEARTBEAT_MS: Final = 1_000
_EXPIRY: Final = "log minimum"
_NAP_MS: Final = 50


class Cleaner:
    """Decides, deletes and reports; the loop is :func:`run`."""

    def __init__(self, context: WorkerContext, clock: DoubtingClock | None = None) -> None:
        self._context = context
        self._control = context.control
        self._layout = layout = context.layout
        self._log = context.log
        self._segment_bytes = context.config.commit_log.segment_bytes
        self._take_settings(context.config)
        context.on_settings(self._take_settings)
        self._watch = DiskWatch(layout.commit_log, [layout.consume_queue, layout.index], self._segment_bytes)
        self._clock = clock or DoubtingClock()
        self._durable = expiry.MinOffsetFile(layout)
        self._holders: dict[str, int] = context.params.get("holders", {})
        self._behind: dict[str, int] = context.params.get("dispatchers", {})
        self._beside_bytes = 0  # size of the store's other files, as of the last measurement
        self._measure_at_ms = 0
        self._last_round: dict[str, Any] | None = None
        self._overrode: dict[str, Any] | None = None
        self._told: dict[str, Any] = {}
        self._complained = ""

    def _take_settings(self, config: NodeConfig) -> None:
        self._retention = retention = config.retention
        self.rules = Rules(
            keep_ms=retention.hours * 3_600_000,
            hours=retention.hours_of_day,
            clean_ratio=retention.clean_ratio,
            forced_ratio=retention.forced_ratio,
            forcibly=retention.clean_forcibly,
            store_bytes=retention.store_bytes,
            keep_unconsumed=retention.keep_unconsumed,
            batch_files=retention.batch_files,
        )

    @property
    def interval_ms(self) -> int:
        """The pause between two looks."""
        return self._retention.check_interval_ms

    # ------------------------------------------------------------ the present state

    @property
    def min_offset(self) -> int:
        return self._control.get(Word.MIN_OFFSET)

    def delete_leftovers(self) -> int:
        """Delete segments below the minimum: a predecessor was killed, or the system refused. Returns how many."""
        bases = expiry.list_bases(self._layout.commit_log)
        below = [base for base in bases if base + self._segment_bytes <= self.min_offset]
        self._unlink([(base, 0) for base in below], patient=False)
        return len(below)

    def _limit(self) -> Claim:
        """The upper bound of a deletion: the segment written to stays, and what a start after a crash needs."""
        control = self._control
        written = control.get(Word.WRITTEN)
        tail = max(0, written - 1)
        claims = [
            Claim(tail - tail % self._segment_bytes, "the writer: it is the last segment"),
            Claim(control.get(Word.FLUSHED), "the flush, which is behind"),
            Claim(control.dispatcher(0, DispatcherWord.DISPATCHED), "the ConsumeQueues, which are behind"),
            Claim(
                control.dispatcher(0, DispatcherWord.DURABLE), "the ConsumeQueues, which are not synced up to its end"
            ),
        ]
        return min(claims, key=lambda claim: claim.offset)

    def _wanted_from(self) -> Claim | None:
        """The lowest position that the node's other dispatchers still have to read."""
        claims = [
            Claim(self._control.dispatcher(slot, DispatcherWord.DISPATCHED), f"dispatcher {name}, which is behind")
            for name, slot in self._behind.items()
        ]
        return min(claims, key=lambda claim: claim.offset, default=None)

    def situation(self, by_hand: ManualCleanup | None = None) -> tuple[RetentionState, DiskUse]:
        """Everything that :func:`decide` needs, except the groups' positions."""
        segments = expiry.look_at_segments(self._layout.commit_log, self._segment_bytes, wall_ms())
        segments = tuple(one for one in segments if one.end > self.min_offset)
        disk = self._watch.look(monotonic_ms(), self.rules.clean_ratio)
        now_ms = self._clock.now_ms()
        situation = RetentionState(
            now_ms=now_ms,
            hour=local_hour(now_ms),
            segments=segments,
            limit=self._limit(),
            used_ratio=disk.ratio,
            disk_bytes=disk.disk_bytes,
            store_bytes=self._store_bytes(sum(one.disk_bytes for one in segments)),
            wanted_from=self._wanted_from(),
        )
        if by_hand is None:
            return situation, disk
        if by_hand.before_ms is None and by_hand.keep_bytes is None:
            return replace(situation, at_any_hour=True), disk
        return replace(situation, until=self._until(situation, by_hand)), disk

    def _until(self, situation: RetentionState, by_hand: ManualCleanup) -> int:
        ends = []
        if by_hand.keep_bytes is not None:
            ends.append(self._control.get(Word.WRITTEN) - by_hand.keep_bytes)
        if by_hand.before_ms is not None:
            log = CommitLog(self._layout.commit_log, self._segment_bytes, max_mapped=2)
            try:
                ends.append(expiry.offset_before(log, situation.segments, by_hand.before_ms))
            finally:
                log.close()
        return min(ends)

    def _store_bytes(self, segments_bytes: int) -> int:
        """The store's bytes on the disk. Files other than segments are measured once a minute: there may be many."""
        if not self.rules.store_bytes:
            return segments_bytes
        now = monotonic_ms()
        if now >= self._measure_at_ms:
            self._measure_at_ms = now + min(_MEASURE_MS, 6 * self._retention.check_interval_ms)
            folder = self._layout.commit_log
            self._beside_bytes = expiry.store_bytes(self._layout.root) - expiry.store_bytes(folder)
        return segments_bytes + self._beside_bytes

    def plan(self, situation: RetentionState) -> Plan:
        """The segments to delete now. The groups are asked only if there is something to delete."""
        plan = decide(self.rules, situation)
        if plan.segments and self.rules.keep_unconsumed:
            plan = decide(self.rules, replace(situation, slowest_group=self._slowest_group()))
        return plan

    def _slowest_group(self) -> Claim | None:
        sizes = self._context.config.consume_queue
        layout = self._layout
        finder = UnitFinder(layout.consume_queue, sizes.file_bytes, layout.batch_consume_queue, sizes.batch_file_bytes)
        try:
            return slowest(finder, group_positions(self._context), self.min_offset)
        except CommitMQError as error:
            return Claim(0, f"the consumer groups, whose positions cannot be found out ({error})")
        finally:
            finder.close()

    # ------------------------------------------------------------ a round

    def look(self) -> None:
        """One look at age, disk and budget, followed by the deletions it finds."""
        try:
            self.delete_leftovers()
            situation, disk = self.situation()
            plan = self.plan(situation)
            if plan.segments:
                self.carry_out(plan)
                situation, disk = self.situation()
            self._tell(situation, disk, plan)
            self._complained = ""
            self._context.room.found(_EXPIRY)
        except (StoreError, OSError) as error:
            lacks_room = self._context.room.lacked(_EXPIRY, error)
            if str(error) != self._complained:
                self._complained = str(error)
                if not lacks_room:
                    self._log.error("expired segments cannot be deleted", error=str(error))
                self._context.tell(expiry={**self._told, "error": str(error)})

    def carry_out(self, plan: Plan) -> None:
        """Delete the segments of ``plan``. When it raises StoreError, the deletion may have begun or not."""
        self._say_loudly(plan)
        self._wait_for_producers(plan.min_offset)
        if failpoints.ACTIVE:
            failpoints.hit("cleanup.before_publish")
        try:
            self._durable.write(plan.min_offset)
        except StoreError as error:
            if Reason.FORCED not in plan.reasons:
                raise
            # A disk without a free byte: without the durable minimum a crash at this moment may bring back the segments
            # deleted now. The record of where the log began is removed, so that no start takes that for a loss.
            self._log.warning("the new minimum is not durable", error=str(error))
            queue_ends.forget(self._layout.queue_ends)
        self._control.put(Word.MIN_OFFSET, plan.min_offset)
        if failpoints.ACTIVE:
            failpoints.hit("cleanup.after_publish")
        self._wait_for_holders(plan.min_offset)
        self._unlink([(one.base, one.disk_bytes) for one in plan.segments], patient=True)
        reasons = sorted(set(plan.reasons))
        self._last_round = {
            "at_ms": wall_ms(),
            "segments": len(plan.segments),
            "disk_bytes": plan.disk_bytes,
            "reasons": reasons,
        }
        self._log.info(
            "deleted segments",
            count=len(plan.segments),
            first=segment_name(plan.segments[0].base),
            min_offset=plan.min_offset,
            disk_bytes=plan.disk_bytes,
            why=",".join(reasons),
        )

    def _say_loudly(self, plan: Plan) -> None:
        for claim in plan.overridden:
            lost = [one for one in plan.segments if one.end > claim.offset]
            self._log.error(
                "the disk is so full that needed segments are deleted",
                needed_by=claim.who,
                segments=len(lost),
                first=segment_name(lost[0].base),
                from_offset=claim.offset,
            )
            self._overrode = {
                "at_ms": wall_ms(),
                "needed_by": claim.who,
                "from_offset": claim.offset,
                "segments": len(lost),
            }

    def _wait_for_producers(self, minimum: int) -> None:
        """Wait until the writer has saved a snapshot of its producer table, because the log will not have those records
        any more. Raises StoreError when it does not, except on a full disk, where the snapshot may wait for this
        deletion.
        """
        control = self._control
        control.put(Word.PRODUCERS_WANTED, minimum)
        self._context.ringer("writer").ring()
        deadline = monotonic_ms() + PRODUCERS_MS
        while control.get(Word.PRODUCERS_KNOWN) < minimum:
            if monotonic_ms() >= deadline or self._context.stopping:
                sentence = "the snapshot of idempotent producers does not reach the new minimum"
                if not control.get(Word.DISK_FLAGS):
                    raise StoreError(f"{sentence}: nothing is deleted before it does", path=self._layout.producers)
                self._log.error(f"{sentence}: messages that are sent again may be stored again", min_offset=minimum)
                return
            self._pause(20)

    def _wait_for_holders(self, minimum: int) -> None:
        """Give all workers that map segments the time to unmap them, so that unlinking frees the space at once."""
        for role in self._holders:
            if role.startswith("reader-"):
                self._context.ringer(role).ring()
        deadline = monotonic_ms() + HOLDERS_MS
        while monotonic_ms() < deadline and not self._context.stopping:
            waiting = [
                role
                for role, slot in self._holders.items()
                if self._control.worker(slot, WorkerWord.PID)
                and self._control.worker(slot, WorkerWord.RELEASED) < minimum
            ]
            if not waiting:
                return
            self._pause(20)

    def _unlink(self, segments: list[tuple[int, int]], *, patient: bool) -> None:
        """Unlink ``(base, bytes on disk)``, with pauses if ``patient``; without pauses once the node stops."""
        for base, disk_bytes in segments:
            free = self._watch.free_bytes()
            file = expiry.delete_segment(self._layout, base)
            if patient and file is not None:
                self._pause(self._retention.delete_interval_ms)
                self._watch.deleted(file, disk_bytes, free, monotonic_ms())
        if segments:
            sync_folder(self._layout.commit_log)

    def _pause(self, pause_ms: int) -> None:
        """Sleep, still listening to the supervisor. Requests that come in the meantime wait in their socket."""
        end = monotonic_ms() + pause_ms
        while not self._context.stopping and (left := end - monotonic_ms()) > 0:
            self._context.wait(0)
            time.sleep(min(left, _NAP_MS) / 1000)

    # ------------------------------------------------------------ manually

    def expire(self, by_hand: ManualCleanup) -> dict[str, Any]:
        """Delete all segments that ``by_hand`` allows, at once. Returns the report for an operator."""
        names: list[str] = []
        disk_bytes = 0
        while True:
            situation, disk = self.situation(by_hand)
            if by_hand.dry_run:
                plan = self._whole_plan(situation)
            else:
                plan = self.plan(situation)
            names += [segment_name(one.base) for one in plan.segments]
            disk_bytes += plan.disk_bytes
            if by_hand.dry_run or not plan.segments or self._context.stopping:
                break
            self.carry_out(plan)
        if not by_hand.dry_run:
            self._tell(situation, disk, plan)
        kept = plan.kept
        if kept == "not expired" and situation.until is not None:
            kept = "newer than was asked for"
        return {
            "segments": names,
            "disk_bytes": disk_bytes,
            "min_offset": plan.min_offset if by_hand.dry_run and plan.segments else self.min_offset,
            "kept": kept,
            "dry_run": by_hand.dry_run,
        }

    def _whole_plan(self, situation: RetentionState) -> Plan:
        plan = decide(self.rules, situation, bounded=False)
        if plan.segments and self.rules.keep_unconsumed:
            plan = decide(self.rules, replace(situation, slowest_group=self._slowest_group()), bounded=False)
        return plan

    # ------------------------------------------------------------ status

    def _tell(self, situation: RetentionState, disk: DiskUse, plan: Plan) -> None:
        """Let ``status`` show why nothing is deleted, the time of the next deletion, and the last deletion."""
        oldest = situation.segments[0] if situation.segments else None
        next_ms = None
        if oldest is not None and oldest.end <= situation.limit.offset:
            next_ms = next_by_age(self.rules, oldest, situation.now_ms)
        told = {
            "oldest_segment": segment_name(oldest.base) if oldest else None,
            "kept_because": plan.kept,
            "next_by_age_ms": next_ms,
            "disk_used": round(disk.raw_ratio, 3),
            "held_bytes": disk.held_bytes,
            "held_by": [f"{one.name} ({one.pid})" for one in disk.holders],
            "store_bytes": situation.store_bytes if self.rules.store_bytes else None,
            "last_round": self._last_round,
            "overrode": self._overrode,
            "error": None,
        }
        if told != self._told:
            self._told = told
            self._context.tell(expiry=told)


def run(context: WorkerContext) -> None:
    """The loop: a look at each interval, requests as they come."""
    cleaner = Cleaner(context)
    try:
        cleaner.delete_leftovers()
    except StoreError as error:
        context.log.error("segments below the log's minimum cannot be deleted", error=str(error))
    requests = expiry_socket(context, cleaner.expire)
    context.ready(endpoints=requests.endpoints)
    interval_ms = cleaner.interval_ms
    next_look_ms = monotonic_ms() + _FIRST_LOOK_INTERVALS * interval_ms
    while not context.stopping:
        readable = context.wait(max(0, min(_HEARTBEAT_MS, next_look_ms - monotonic_ms())))
        if requests.router in readable:
            requests.serve()
        if cleaner.interval_ms != interval_ms:
            interval_ms = cleaner.interval_ms
            next_look_ms = min(next_look_ms, monotonic_ms() + interval_ms)
        if monotonic_ms() >= next_look_ms:
            cleaner.look()
            next_look_ms = monotonic_ms() + interval_ms
