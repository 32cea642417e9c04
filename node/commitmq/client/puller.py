"""Pulling: one long poll per queue under way, answers decoded where they lie. Used by the thread that polls, only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import orjson
import zmq

from commitmq.client import wire
from commitmq.client.assignment import Assignment, Chunk, Gap, QueueState
from commitmq.client.batch import Part, cut_parts, parts_of_records, parts_of_units
from commitmq.client.connection import Channel, Directory
from commitmq.client.inner_batch import expand
from commitmq.client.light_queue import is_light, renumber
from commitmq.client.record_check import check_bytes, check_places
from commitmq.client.segments import SegmentMaps
from commitmq.client.selector import MessageSelector
from commitmq.errors import CorruptRecordError, NodeUnavailableError, ProtocolError
from commitmq.log import get_log
from commitmq.store.tag_filter import TagFilter

_WAIT_MS: Final = 15_000
_ANSWER_GRACE_S: Final = 10.0
_RECONNECT_S: Final = 0.3
_QUIET_S: Final = 0.2
_RANGES_BYTES: Final = 16 * 1024 * 1024
_TICK_S: Final = 0.2
_MAPS_S: Final = 2.0
_EMPTY_QUEUE: Final = ("NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE")

_log = get_log("consumer")


class Puller:
    """The readers' channels, and the pulls of all queues of one assignment."""

    def __init__(
        self,
        directory: Directory,
        assignment: Assignment,
        *,
        selector: MessageSelector,
        group: str | None,
        mode: str,
        max_bytes: int,
        check_crc: bool = True,
    ) -> None:
        self.gaps: deque[Gap] = deque(maxlen=1000)
        self._directory = directory
        self._assignment = assignment
        self._filter = selector.header()
        # The node passes inner batches that have no tag of their own: their messages are looked at here.
        self._tags = _wanted_tags(selector)
        if group is not None and selector.type != "TAG":
            self._filter["group"] = group
        self._mode = mode
        self._max_bytes = max_bytes
        self._check_crc = check_crc
        self._channels: dict[int, Channel] = {}
        self._pulls: dict[tuple[int, int], QueueState] = {}  # (reader, request id) -> queue
        self._ready: deque[QueueState] = deque()
        self._segments: SegmentMaps | None = None
        self._retry_connect_at = 0.0
        self._problem: ProtocolError | CorruptRecordError | None = None
        self._look_at_maps_at = 0.0

    def close(self) -> None:
        for index in list(self._channels):
            self._drop_channel(index)
        if self._segments is not None:
            self._segments.close()

    # ------------------------------------------------------------ asking

    def ask(self) -> None:
        """Send a pull for every queue that has neither one under way nor an answer waiting."""
        now = time.monotonic()
        with self._assignment.lock:
            idle = [
                state
                for state in self._assignment.owned.values()
                if state.request < 0 and state.chunk is None and not state.revoked_at and state.retry_at <= now
            ]
        if not idle or now < self._retry_connect_at:
            return
        try:
            metadata = self._directory.metadata(timeout_s=_RECONNECT_S)
            readers = max(metadata.count("reader"), 1)
            for state in idle:
                index = hash(state.key) % readers
                channel = self._channels.get(index)
                if channel is None:
                    channel = self._connect(index)
                self._pull(index, channel, state, now)
        except NodeUnavailableError as error:
            # The node is restarting; polls go on and return nothing until it is back.
            self._retry_connect_at = time.monotonic() + _RECONNECT_S
            _log.debug("the reader does not answer", error=error.message)

    def _connect(self, index: int) -> Channel:
        channel, _ = self._directory.connect("reader", time.monotonic() + _RECONNECT_S, index=index)
        metadata = self._directory.metadata(timeout_s=_RECONNECT_S)
        self._channels[index] = channel
        if self._mode == "ranges" and not metadata.same_host:
            raise ProtocolError(
                "INVALID_PARAMETER", "mode ranges needs the node on the same host, with a store folder that can be read"
            )
        if self._segments is None or self._segments.segment_bytes != metadata.segment_bytes:
            self._segments = SegmentMaps(metadata.store, metadata.segment_bytes)
        self._ranges = self._mode == "ranges" or (self._mode == "auto" and metadata.same_host)
        return channel

    def _pull(self, index: int, channel: Channel, state: QueueState, now: float) -> None:
        ranges = self._ranges and not state.use_bytes
        # With a filter the node may skip much and then wait, without telling how far it is; so until the end is
        # reached it is not asked to wait.
        catching_up = bool(self._filter) and (state.end < 0 or state.position < state.end)
        identity = channel.next_id()
        header: dict[str, Any] = {
            "v": wire.PROTOCOL_VERSION,
            "op": "pull",
            "id": identity,
            "topic": state.topic,
            "queue": state.queue_id,
            "offset": state.position,
            "max_bytes": _RANGES_BYTES if ranges else self._max_bytes,
            "wait_ms": 0 if catching_up else _WAIT_MS,
            "mode": "ranges" if ranges else "bytes",
            **self._filter,
        }
        if state.position < state.careful_until:
            header["max_messages"] = 1
        try:
            # From now on, not from when the asking began: with 10,000 queues that is long ago for the last of them.
            channel.put([orjson.dumps(header)], time.monotonic() + _RECONNECT_S)
        except NodeUnavailableError:
            self._drop_channel(index)
            raise
        state.request = identity
        state.channel = index
        state.answer_by = now + _WAIT_MS / 1000 + _ANSWER_GRACE_S
        self._pulls[index, identity] = state

    # ------------------------------------------------------------ answers

    def wait(self, timeout_s: float) -> None:
        """Wait for answers, the assignment's bell or the time; take what is there."""
        poller = zmq.Poller()
        poller.register(self._assignment.bell, zmq.POLLIN)
        for channel in self._channels.values():
            poller.register(channel.socket, zmq.POLLIN)
        events = dict(poller.poll(int(max(min(timeout_s, _TICK_S), 0) * 1000)))
        if self._segments is not None and time.monotonic() >= self._look_at_maps_at:
            self._look_at_maps_at = time.monotonic() + _MAPS_S
            self._segments.drop_deleted()
        if self._assignment.bell in events:
            self._assignment.clear_bell()
        for index, channel in list(self._channels.items()):
            if channel.socket in events:
                self._receive(index, channel)
            elif not events and (channel.lost() or self._overdue(index)):
                _log.warning("the connection to a reader ended, connecting again", endpoint=channel.endpoint)
                self._drop_channel(index)

    def _overdue(self, index: int) -> bool:
        now = time.monotonic()
        return any(key[0] == index and state.answer_by < now for key, state in self._pulls.items())

    def _receive(self, index: int, channel: Channel) -> None:
        while True:
            try:
                header = channel.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            frames = [frame.buffer for frame in channel.rest()]
            answer = wire.parse_answer(header)
            state = self._pulls.pop((index, answer.get("id", -1)), None)
            if state is None or state.request != answer.get("id"):
                continue  # of a queue that was given back, or moved by seek
            state.request = -1
            if not answer["ok"]:
                self._refused(state, answer)
            else:
                self._answered(state, answer, frames)

    def _refused(self, state: QueueState, answer: dict[str, Any]) -> None:
        error = wire.refusal(answer)
        state.retry_at = time.monotonic() + max((error.retry_after_ms or 0) / 1000, _QUIET_S)
        if error.code in ("TOPIC_NOT_EXIST", "SYSTEM_BUSY", "SERVICE_NOT_AVAILABLE"):
            _log.debug("pull refused for now", topic=state.topic, queue=state.queue_id, error=str(error))
            return
        state.retry_at += 1.0
        self._problem = error

    def _answered(self, state: QueueState, answer: dict[str, Any], frames: list[memoryview]) -> None:
        next_offset = int(answer["next_offset"])
        count = int(answer["count"])
        state.end = int(answer["max_offset"])
        if not count:
            self._empty(state, str(answer["status"]), next_offset)
            return
        try:
            if answer.get("mode") == "bytes":
                state.use_bytes = True  # a memory topic: its files are the node's alone
            parts = self._decode(state, frames, count, next_offset)
        except OSError as error:
            # The segment is gone, or may not be read by us: the node can still send the bytes.
            _log.warning("cannot map a segment, asking for bytes", topic=state.topic, error=str(error))
            state.use_bytes = True
            return
        except CorruptRecordError as error:
            if count > 1:
                # One by one from here on: those before the damaged one are good.
                state.careful_until = next_offset
                return
            state.retry_at = time.monotonic() + 1.0
            self._problem = CorruptRecordError(
                f"{error}; met at queue offset {state.position} of queue {state.queue_id} of {state.topic!r}, from which the "
                f"consumer does not go on by itself: seek() passes over it",
                offset=error.offset,
            )
            return
        if not parts:
            # Inner batches without a message of a wanted tag: nothing of them is for us, so it counts as handed out.
            state.position = state.delivered = next_offset
            return
        state.chunk = Chunk(parts, sum(map(len, parts)), next_offset)
        state.position = next_offset
        self._ready.append(state)

    def _decode(self, state: QueueState, frames: list[memoryview], count: int, following: int) -> list[Part]:
        """The messages in an answer of ``count`` records. Raises CorruptRecordError, OSError for a missing segment."""
        if self._ranges and not state.use_bytes:
            assert self._segments is not None
            parts = parts_of_units(state.topic, state.queue_id, frames[0], self._segments)
        else:
            parts = parts_of_records(state.topic, state.queue_id, frames)
        got = sum(map(len, parts))
        if got != count:
            raise CorruptRecordError(f"the node promised {count} records and sent {got}")
        for part in parts:
            check_places(part, state.position, following)
            if self._check_crc:
                check_bytes(part)
        if is_light(state.topic):
            return [renumber(part) for part in parts]
        return expand(parts, state.position, self._tags)

    def _empty(self, state: QueueState, status: str, next_offset: int) -> None:
        before = state.position
        if next_offset == before:
            # The node waits with an answer only where a new message can change it: elsewhere, do not ask in a loop.
            if status != "OFFSET_OVERFLOW_ONE" and (before or status not in _EMPTY_QUEUE):
                state.retry_at = time.monotonic() + _QUIET_S
            return
        if status not in ("NO_MATCHED_MESSAGE", "OFFSET_OVERFLOW_ONE"):
            # A segment that could not be mapped may have been an expired one; what is behind the gap is not.
            state.use_bytes = False
            gap = Gap(state.topic, state.queue_id, before, next_offset, status)
            self.gaps.append(gap)
            _log.warning("a gap: the consumer could not read on where it stood", **gap._asdict())
        state.position = next_offset
        # Nothing between was for us, so it counts as handed out.
        state.delivered = next_offset

    # ------------------------------------------------------------ handing out

    def raise_problem(self) -> None:
        """Raise what went wrong with a pull, once."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def take(self, max_messages: int) -> list[Part]:
        """Parts with up to ``max_messages`` of what is there, in turn from all queues; next pulls are sent at once."""
        parts: list[Part] = []
        count = 0
        with self._assignment.lock:
            for _ in range(len(self._ready)):
                if count >= max_messages:
                    break
                state = self._ready.popleft()
                chunk = state.chunk
                if chunk is None or state.revoked_at or self._assignment.owned.get(state.key) is not state:
                    continue  # given back, or moved by seek: its messages are another's, or will be asked for anew
                room = max_messages - count
                if chunk.count <= room:
                    parts += chunk.parts
                    count += chunk.count
                    state.delivered = chunk.next_offset
                    state.chunk = None
                    continue
                cut = cut_parts(chunk.parts, 0, room)
                parts += cut
                count += room
                state.delivered = int(cut[-1].heads["queue_offset"][-1]) + 1
                state.chunk = Chunk(cut_parts(chunk.parts, room, chunk.count), chunk.count - room, chunk.next_offset)
                self._ready.append(state)
        if parts:
            self.ask()
        return parts

    def forget(self, states: Iterable[QueueState]) -> None:
        """What was pulled for these is not wanted any more."""
        for state in states:
            state.request = -1
            state.chunk = None

    def _drop_channel(self, index: int) -> None:
        channel = self._channels.pop(index, None)
        if channel is not None:
            channel.close()
        for key in [key for key in self._pulls if key[0] == index]:
            state = self._pulls.pop(key)
            if state.request == key[1] and state.channel == index:
                state.request = -1


def _wanted_tags(selector: MessageSelector) -> frozenset[str] | None:
    """The tags that ``selector`` names; None for all, and for what the node will refuse for inner batches."""
    if selector.type != "TAG":
        return None
    try:
        parsed = TagFilter.parse(selector.expression)
    except ValueError:
        return None
    return None if parsed is None else frozenset(parsed.tags)
