"""Pulling: one long poll per queue under way, answers decoded where they lie. Used by the thread that polls, only."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final, NamedTuple

import orjson
import zmq

from commitmq.client.receiving.assignment import Assignment, Chunk, Gap, Portion, QueueState, Taken
from commitmq.client.receiving.batch import MessageBatch, Part, cut_parts, parts_of_records, parts_of_units
from commitmq.client.receiving.bodies import decodable
from commitmq.client.receiving.record_check import check_bytes, check_places
from commitmq.client.receiving.segments import SegmentMaps
from commitmq.client.selector import MessageSelector
from commitmq.client.sending.inner_batch import expand
from commitmq.client.sending.light_queue import is_light, renumber
from commitmq.errors import CorruptRecordError, NodeUnavailableError, ProtocolError, RequestError
from commitmq.format.constants import RETRY_PREFIX
from commitmq.log import get_log
from commitmq.protocol import wire
from commitmq.protocol.connection import Channel, Directory, Metadata
from commitmq.store.queues.tag_filter import TagFilter

_WAIT_MS: Final = 15_000
_ANSWER_GRACE_S: Final = 10.0
_RECONNECT_S: Final = 0.3
_QUIET_S: Final = 0.2
_RANGES_BYTES: Final = 16 * 1024 * 1024
_TICK_S: Final = 0.2
_MAPS_S: Final = 2.0
_LEAST_PATIENCE_S: Final = 0.05
_EMPTY_QUEUE: Final = ("NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE")

_log = get_log("consumer")


class _Link(NamedTuple):
    """A connection to a reader, and the files of the node that it was made to. ``ranges``: messages are read from these."""

    channel: Channel
    segments: SegmentMaps
    ranges: bool


class Puller:
    """The readers' channels, and the pulls of all queues of one assignment.

    An exception may come from outside between any two steps here (Ctrl-C). What is under way is then asked for anew, or
    handed out later; see :class:`~commitmq.client.receiving.assignment.Assignment`.
    """

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
        asks_for_queues: bool = False,
    ) -> None:
        """``asks_for_queues``: the program named its queues, so one that was never there is a mistake."""
        self.gaps: deque[Gap] = deque(maxlen=1000)
        self._directory = directory
        self._assignment = assignment
        self._filter = selector.header()
        self._unfiltered = None if group is None else RETRY_PREFIX + group  # as in RocketMQ
        # The node passes inner batches that have no tag of their own: their messages are looked at here.
        self._tags = _wanted_tags(selector)
        if group is not None and selector.type != "TAG":
            self._filter["group"] = group
        self._mode = mode
        self._max_bytes = max_bytes
        self._check_crc = check_crc
        self._asks_for_queues = asks_for_queues
        self._links: dict[int, _Link] = {}
        self._pulls: dict[tuple[int, int], QueueState] = {}  # (reader, request id) -> queue
        self._segments: dict[tuple[Any, ...], SegmentMaps] = {}  # at most one: of the node we are connected to
        self._retry_connect_at = 0.0
        self._problem: tuple[QueueState, RequestError | CorruptRecordError] | None = None
        self._look_at_maps_at = self._look_at_links_at = 0.0
        self.misses_queue = False  # a reader does not know a queue that we were given: look what there is

    def close(self) -> None:
        for index in list(self._links):
            self._drop_link(index)
        for segments in self._segments.values():
            segments.close()

    # ------------------------------------------------------------ asking

    def ask(self, deadline: float) -> None:
        """Send a pull for every queue that has neither one under way nor an answer waiting.

        Waits for a node that is away until ``deadline`` (``time.monotonic()``), but not long.
        """
        now = time.monotonic()
        with self._assignment.lock:
            idle = [
                state
                for state in self._assignment.owned.values()
                if state.request < 0
                and (not state.chunks or (len(state.chunks) == 1 and state.chunks[0].is_taken))
                and not state.revoked_at
                and not state.is_paused
                and (state.room is None or state.room.messages)
                and state.retry_at <= now
            ]
        if not idle or now < self._retry_connect_at:
            return
        patience_s = max(min(_RECONNECT_S, deadline - now), _LEAST_PATIENCE_S)
        try:
            readers = max(self._directory.metadata(timeout_s=patience_s).count("reader"), 1)
            for state in idle:
                index = hash(state.key) % readers
                link = self._links.get(index)
                if link is None:
                    link = self._connect(index, time.monotonic() + patience_s)
                self._pull(index, link, state, now)
        except NodeUnavailableError as error:
            # The node is restarting; polls go on and return nothing until it is back.
            self._retry_connect_at = time.monotonic() + _RECONNECT_S
            _log.debug("the reader does not answer", error=error.message)

    def _connect(self, index: int, deadline: float) -> _Link:
        channel, _ = self._directory.connect("reader", deadline, index=index)
        try:
            metadata = self._directory.metadata(timeout_s=_RECONNECT_S)
            if self._mode == "ranges" and not metadata.same_host:
                raise ProtocolError(
                    "INVALID_PARAMETER",
                    "mode ranges needs the node on the same host, with a store folder that can be read",
                )
            # Asked again: what the directory knows may be of the node that was here before.
            ranges = self._mode == "ranges" or (self._mode == "auto" and metadata.is_same_host_still())
            link = self._links[index] = _Link(channel, self._maps_of(metadata), ranges)
        except BaseException:
            if index not in self._links:
                channel.close()
            raise
        return link

    def _maps_of(self, metadata: Metadata) -> SegmentMaps:
        """The files of this store, as this start of the node has them: under the same address another store may be served, in
        whose log other messages lie at the same places.
        """
        identity = (metadata.store, metadata.store_id, metadata.epoch, metadata.segment_bytes)
        found = self._segments.get(identity)
        if found is None:
            found = SegmentMaps(metadata.store, metadata.segment_bytes)
            self._segments = {identity: found}
        return found

    def _pull(self, index: int, link: _Link, state: QueueState, now: float) -> None:
        ranges = link.ranges and not state.use_bytes
        position = state.position
        # With a filter the node may skip much and then wait, without telling how far it is; so until the end is
        # reached it is not asked to wait.
        wanted = {} if state.topic == self._unfiltered else self._filter
        catching_up = bool(wanted) and (state.end < 0 or position < state.end)
        identity = link.channel.next_id()
        header: dict[str, Any] = {
            "v": wire.PROTOCOL_VERSION,
            "op": "pull",
            "id": identity,
            "topic": state.topic,
            "queue": state.queue_id,
            "offset": position,
            "max_bytes": _RANGES_BYTES if ranges else self._max_bytes,
            "wait_ms": 0 if catching_up else _WAIT_MS,
            "mode": "ranges" if ranges else "bytes",
            **wanted,
        }
        if position < state.careful_until:
            header["max_messages"] = 1
        if state.incarnation >= 0:
            header["incarnation"] = state.incarnation
        try:
            # From now on, not from when the asking began: with 10,000 queues that is long ago for the last of them.
            link.channel.put([orjson.dumps(header)], time.monotonic() + _RECONNECT_S)
        except NodeUnavailableError:
            self._drop_link(index)
            raise
        state.channel = index
        state.answer_by = now + _WAIT_MS / 1000 + _ANSWER_GRACE_S
        # In this order: a request without an entry would be waited for for ever.
        self._pulls[index, identity] = state
        state.request = identity

    # ------------------------------------------------------------ answers

    def wait(self, timeout_s: float) -> None:
        """Wait for answers, the assignment's bell or the time; take what is there."""
        poller = zmq.Poller()
        poller.register(self._assignment.bell.fd, zmq.POLLIN)
        for link in self._links.values():
            poller.register(link.channel.socket, zmq.POLLIN)
        events = dict(poller.poll(int(max(min(timeout_s, _TICK_S), 0) * 1000)))
        now = time.monotonic()
        if now >= self._look_at_maps_at:
            self._look_at_maps_at = now + _MAPS_S
            for segments in self._segments.values():
                segments.drop_deleted()
        if self._assignment.bell.fd in events:
            self._assignment.bell.clear()
        for index, link in list(self._links.items()):
            if link.channel.socket in events:
                self._receive(index, link)
        # However much comes from one reader, that another one is gone must be noticed.
        if now >= self._look_at_links_at:
            self._look_at_links_at = now + _TICK_S
            for index, link in list(self._links.items()):
                if link.channel.lost() or self._overdue(index, now):
                    self._lose(index, link)

    def _overdue(self, index: int, now: float) -> bool:
        return any(key[0] == index and state.answer_by < now for key, state in self._pulls.items())

    def _lose(self, index: int, link: _Link) -> None:
        _log.warning("the connection to a reader ended, connecting again", endpoint=link.channel.endpoint)
        self._drop_link(index)

    def _receive(self, index: int, link: _Link) -> None:
        if link.channel.lost():
            # ZeroMQ has connected again by itself, maybe to another node: what comes now is not what was asked of this one.
            self._lose(index, link)
            return
        sock = link.channel.socket
        try:
            while True:
                try:
                    header = sock.recv(zmq.DONTWAIT)
                except zmq.Again:
                    return
                frames = [frame.buffer for frame in link.channel.rest()]
                answer = wire.parse_answer(header)
                key = (index, answer.get("id", -1))
                state = self._pulls.get(key)
                if state is not None and state.request == key[1] and state.channel == index:
                    if answer["ok"]:
                        self._answered(link, state, answer, frames)
                    else:
                        self._refused(state, answer)
                    state.request = -1
                # Otherwise of a queue that was given back, or moved by seek.
                self._pulls.pop(key, None)
        except RequestError as error:
            _log.warning("a reader's answer cannot be understood, connecting again", error=str(error))
            self._drop_link(index)
        except BaseException:
            # Half an answer was read; the other half would be taken for the next one.
            self._drop_link(index)
            raise

    def _refused(self, state: QueueState, answer: dict[str, Any]) -> None:
        error = wire.refusal(answer)
        state.retry_at = time.monotonic() + max((error.retry_after_ms or 0) / 1000, _QUIET_S)
        if error.code in ("TOPIC_NOT_EXIST", "SYSTEM_BUSY", "SERVICE_NOT_AVAILABLE"):
            _log.debug("pull refused for now", topic=state.topic, queue=state.queue_id, error=str(error))
            return
        if "read_queues" in answer:
            # The topic has fewer queues than it had, or the reader has not heard yet that it has more.
            self.misses_queue = True
            if state.end >= 0 or not self._asks_for_queues:
                _log.debug(
                    "a reader does not know the queue", topic=state.topic, queue=state.queue_id, error=str(error)
                )
                return
        state.retry_at += 1.0
        self._problem = (state, error)

    def _answered(self, link: _Link, state: QueueState, answer: dict[str, Any], frames: list[memoryview]) -> None:
        next_offset = int(answer["next_offset"])
        count = int(answer["count"])
        state.end = int(answer["max_offset"])
        if not count:
            self._empty(state, str(answer["status"]), next_offset)
            return
        try:
            if answer.get("mode") == "bytes":
                state.use_bytes = True  # a memory topic: its files are the node's alone
            parts = self._decode(link, state, frames, count, next_offset)
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
            problem = CorruptRecordError(
                f"{error}; met at queue offset {state.position} of queue {state.queue_id} of {state.topic!r}, from which the "
                f"consumer does not go on by itself: seek() passes over it",
                offset=error.offset,
            )
            self._problem = (state, problem)
            return
        with self._assignment.lock:
            state.is_proven = True
            if not parts:
                # Inner batches without a message of a wanted tag: nothing of them is for us, so it counts as handed out.
                state.move_to(next_offset)
                return
            # In this order: a queue that is ready without a reason is passed over, one that is not would stand still.
            self._assignment.ready[state.key] = state
            state.chunks.append(Chunk(parts, sum(map(len, parts)), next_offset))

    def _decode(
        self, link: _Link, state: QueueState, frames: list[memoryview], count: int, following: int
    ) -> list[Part]:
        """The messages in an answer of ``count`` records. Raises CorruptRecordError, OSError for a missing segment."""
        if link.ranges and not state.use_bytes:
            parts = parts_of_units(state.topic, state.queue_id, frames[0], link.segments)
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
        return expand(parts, state.position, None if state.topic == self._unfiltered else self._tags)

    def _empty(self, state: QueueState, status: str, next_offset: int) -> None:
        before = state.position
        if next_offset == before:
            state.is_proven = state.is_proven or next_offset <= state.end
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
        with self._assignment.lock:
            # Nothing between was for us, so it counts as handed out.
            state.move_to(next_offset)
            state.is_proven = True

    # ------------------------------------------------------------ handing out

    def raise_problem(self) -> None:
        """Raise what went wrong with a pull of a queue that is still ours, once."""
        problem, self._problem = self._problem, None
        if problem is None:
            return
        state, error = problem
        if self._assignment.owned.get(state.key) is state and not state.revoked_at:
            raise error

    def take(self, max_messages: int) -> Taken:
        """A batch of up to ``max_messages`` of what is there, in turn from all queues; see :class:`Assignment` for when it
        counts as handed out.

        A message whose body cannot be decoded comes alone. A program that stumbles over it, and polls on, has then passed
        over this one and none of its neighbours.
        """
        parts: list[Part] = []
        portions: list[Portion] = []
        count = 0
        assignment = self._assignment
        with assignment.lock:
            idle: list[QueueState] = []
            for state in assignment.ready.values():
                if count >= max_messages:
                    break
                if not state.chunks or assignment.owned.get(state.key) is not state:
                    idle.append(
                        state
                    )  # given back, or moved by seek: its messages are another's, or will be asked for anew
                    continue
                if state.revoked_at or state.is_paused:
                    continue
                chunk = state.chunks[0]
                most = max_messages - count
                if state.room is not None:
                    if not state.room.messages:
                        continue
                    most = min(most, state.room.messages_of(chunk.parts))
                room = decodable(chunk.parts, most)
                if not room:
                    if parts:
                        continue
                    room = max_messages = 1
                if chunk.count <= room:
                    parts += chunk.parts
                    count += chunk.count
                    chunk.is_taken = True
                    portions.append(Portion(state, chunk))
                    continue
                cut = cut_parts(chunk.parts, 0, room)
                parts += cut
                count += room
                chunk.is_taken = False
                rest = Chunk(cut_parts(chunk.parts, room, chunk.count), chunk.count - room, chunk.next_offset)
                portions.append(Portion(state, chunk, rest, int(cut[-1].heads["queue_offset"][-1]) + 1))
            for state in idle:
                if assignment.ready.get(state.key) is state:
                    del assignment.ready[state.key]
            taken = assignment.making = Taken(MessageBatch(parts), portions)
        return taken

    def _drop_link(self, index: int) -> None:
        """Whoever is interrupted in here does it again, or leaves a connection to the garbage collector that nobody uses."""
        for key, state in [(key, state) for key, state in self._pulls.items() if key[0] == index]:
            if state.request == key[1] and state.channel == index:
                state.request = -1
            del self._pulls[key]
        link = self._links.pop(index, None)
        if link is not None:
            link.channel.close()


def _wanted_tags(selector: MessageSelector) -> frozenset[str] | None:
    """The tags that ``selector`` names; None for all, and for what the node will refuse for inner batches."""
    if selector.type != "TAG":
        return None
    try:
        parsed = TagFilter.parse(selector.expression)
    except ValueError:
        return None
    return None if parsed is None else frozenset(parsed.tags)
