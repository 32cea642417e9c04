"""The puller of a consumer: it keeps a long poll under way for each queue. Only the thread that polls uses it.

From the answer to a pull to the messages in it: records are decoded, checked, and inner batches are taken apart.

The compressed bodies of the messages that a poll is about to return: which of them can be decoded?

Like RocketMQ's node this one does not look into bodies, so a sender may mark any body as compressed. Only an attempt to decode
it shows whether it is. A poll returns a message with a bad body alone, so it must decode before it makes a batch.

The connections of one consumer to the node's reader processes, and the mapped segments that belong to them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import zmq

from commitmq.client.receiving.assignment import Assignment, BatchPortion, Chunk, Gap, QueueState, TakenBatch
from commitmq.client.receiving.batch import MessageBatch
from commitmq.client.receiving.part import RecordBatch, SegmentMaps, cut_parts, parts_of_records, parts_of_units
from commitmq.client.receiving.record_check import check_bytes, check_places
from commitmq.client.receiving.settings import ConsumerSettings
from commitmq.client.selector import MessageSelector
from commitmq.client.sending.inner_batch import expand, is_light, renumber
from commitmq.errors import CorruptRecordError, NodeUnavailableError, ProtocolError, RequestError, UndecodableBodyError
from commitmq.format.constants import SysFlag
from commitmq.log import get_log
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory, Metadata
from commitmq.store.queues.tag_filter import TagFilter


class AnswerDecoder:
    """Decodes the answers for one consumer."""

    def __init__(self, settings: ConsumerSettings) -> None:
        # The node does not filter inner batches without a tag of their own, so their messages are filtered here.
        self._tags = _wanted_tags(settings.selector)
        self._unfiltered = settings.unfiltered_topic
        self._check_crc = settings.check_crc

    def decode(
        self, state: QueueState, frames: list[memoryview], count: int, next_offset: int, segments: SegmentMaps | None
    ) -> list[RecordBatch]:
        """The messages in an answer of ``count`` records; ``segments`` if the answer has units of mapped segments.

        Raises CorruptRecordError, and OSError when a segment cannot be mapped.
        """
        if segments is not None:
            parts = parts_of_units(state.topic, state.queue_id, frames[0], segments)
        else:
            parts = parts_of_records(state.topic, state.queue_id, frames)
        got = sum(map(len, parts))
        if got != count:
            raise CorruptRecordError(f"the node promised {count} records and sent {got}")
        for part in parts:
            check_places(part, state.position, next_offset)
            if self._check_crc:
                check_bytes(part)
        if is_light(state.topic):
            return [renumber(part) for part in parts]
        return expand(parts, state.position, None if state.topic == self._unfiltered else self._tags)


def _wanted_tags(selector: MessageSelector) -> frozenset[str] | None:
    """The tags that ``selector`` names; None for all tags, and for a filter that the node refuses for inner batches."""
    if selector.type != "TAG":
        return None
    try:
        parsed = TagFilter.parse(selector.expression)
    except ValueError:
        return None
    return None if parsed is None else frozenset(parsed.tags)


# Decoded bodies are kept up to this size, so most bodies are decoded once. The others are decoded twice.
_KEPT_BYTES: Final = 32 * 1024 * 1024


def decodable(parts: Sequence[RecordBatch], most: int) -> int:
    """The number of messages, at most ``most``, before the first one in ``parts`` whose body cannot be decoded."""
    count, kept = 0, 0
    for part in parts:
        size = min(len(part), most - count)
        for index in np.flatnonzero(part.heads["sys_flag"][:size] & SysFlag.COMPRESSED).tolist():
            body = part.body_of(index)
            if part.decoded is None:
                part.decoded = {}
            if isinstance(body, UndecodableBodyError):
                part.decoded[int(part.positions[index])] = body
                return count + index
            kept += len(body)
            if kept <= _KEPT_BYTES:
                part.decoded[int(part.positions[index])] = body
        count += size
        if count == most:
            break
    return count


class Link(NamedTuple):
    """The connection to one reader. With ``ranges`` messages are read from ``segments``, the files of this reader's node."""

    channel: Channel
    segments: SegmentMaps
    ranges: bool


class ReaderLinks:
    """``links`` has a :class:`Link` for each connected reader, by the reader's index."""

    def __init__(self, directory: Directory, mode: str) -> None:
        self.links: dict[int, Link] = {}
        self.segments: dict[tuple[Any, ...], SegmentMaps] = {}  # one entry at most: the store of the connected node
        self._directory = directory
        self._mode = mode

    def connect(self, index: int, deadline: float, patience_s: float) -> Link:
        """Connect to reader ``index``. ``patience_s`` bounds the question what the node is."""
        channel, _ = self._directory.connect("reader", deadline, index=index)
        try:
            metadata = self._directory.metadata(timeout_s=patience_s)
            if self._mode == "ranges" and not metadata.same_host:
                raise ProtocolError(
                    "INVALID_PARAMETER",
                    "mode ranges needs the node on the same host, with a store folder that can be read",
                )
            # Asked again: the directory may still know the node that had this address before.
            ranges = self._mode == "ranges" or (self._mode == "auto" and metadata.is_same_host_still())
            link = self.links[index] = Link(channel, self._maps_of(metadata), ranges)
        except BaseException:
            if index not in self.links:
                channel.close()
            raise
        return link

    def _maps_of(self, metadata: Metadata) -> SegmentMaps:
        """The segments of this store in this epoch of its node.

        Another store may be served under the same address later. Its log has other messages at the same offsets, so it never
        shares mappings with this one.
        """
        identity = (metadata.store, metadata.store_id, metadata.epoch, metadata.segment_bytes)
        found = self.segments.get(identity)
        if found is None:
            found = SegmentMaps(metadata.store, metadata.segment_bytes)
            self.segments = {identity: found}
        return found

    def drop(self, index: int) -> None:
        """Close the connection to reader ``index``, if there is one."""
        link = self.links.pop(index, None)
        if link is not None:
            link.channel.close()

    def drop_deleted_segments(self) -> None:
        """Forget the mappings of deleted segments."""
        for segments in self.segments.values():
            segments.drop_deleted()

    def close_segments(self) -> None:
        """Forget all mappings."""
        for segments in self.segments.values():
            segments.close()


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


class Puller:
    """The pulls of all queues of one assignment.

    An exception such as Ctrl-C may come between any two steps here. A pull that was under way is then sent again, and
    messages that had come are delivered later; see :class:`~commitmq.client.receiving.assignment.Assignment`.
    """

    def __init__(
        self,
        directory: Directory,
        assignment: Assignment,
        settings: ConsumerSettings,
    ) -> None:
        self.gaps: deque[Gap] = deque(maxlen=1000)
        self._directory = directory
        self._assignment = assignment
        self._filter = settings.selector.header()
        self._unfiltered = settings.unfiltered_topic
        self._group = {} if settings.group is None else {"group": settings.group}
        self._decoder = AnswerDecoder(settings)
        self._max_bytes = settings.max_pull_bytes
        # The program named its queues, so a queue that never existed is a mistake of the program.
        self._asks_for_queues = settings.queues is not None
        self._readers = ReaderLinks(directory, settings.mode)
        self._pulls: dict[tuple[int, int], QueueState] = {}  # by reader and request id
        self._retry_connect_at = 0.0
        self._problem: tuple[QueueState, RequestError | CorruptRecordError] | None = None
        self._look_at_maps_at = self._look_at_links_at = 0.0
        self.misses_queue = False  # a reader does not know an assigned queue: the consumer must look at the topic again

    def close(self) -> None:
        for index in list(self._readers.links):
            self._drop_link(index)
        self._readers.close_segments()

    # ------------------------------------------------------------ asking

    def ask(self, deadline: float) -> None:
        """Send a pull for every queue without a pull under way and without an answer that waits.

        Waits for a node that is away until ``deadline`` (``time.monotonic()``), but never for long.
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
                link = self._readers.links.get(index)
                if link is None:
                    link = self._readers.connect(index, time.monotonic() + patience_s, _RECONNECT_S)
                self._pull(index, link, state, now)
        except RequestError as error:
            if not isinstance(error, NodeUnavailableError) and error.code != "CLIENT_ERROR":
                raise
            # The node is restarting, or this program has no descriptor left. Polls return empty batches until there is one.
            self._retry_connect_at = time.monotonic() + _RECONNECT_S
            _log.debug("the reader does not answer", error=error.message)

    def _pull(self, index: int, link: Link, state: QueueState, now: float) -> None:
        ranges = link.ranges and not state.use_bytes
        position = state.position
        # With a filter the node may skip many messages and then wait, and its answer tells of the skipped ones only at the
        # end of the wait. So the pull does not wait before the queue's end.
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
            "log_generation": state.log_generation,
            "max_bytes": _RANGES_BYTES if ranges else self._max_bytes,
            "wait_ms": 0 if catching_up else _WAIT_MS,
            "mode": "ranges" if ranges else "bytes",
            **wanted,
            **self._group,
        }
        if position < state.careful_until:
            header["max_messages"] = 1
        if state.incarnation >= 0:
            header["incarnation"] = state.incarnation
        try:
            # The time runs from here: with 10,000 queues ``now`` is long ago for the last of them.
            link.channel.put([orjson.dumps(header)], time.monotonic() + _RECONNECT_S)
        except NodeUnavailableError:
            self._drop_link(index)
            raise
        state.channel = index
        state.answer_by = now + _WAIT_MS / 1000 + _ANSWER_GRACE_S
        # The entry comes first: the answer to a request without an entry is dropped, and the queue would wait for ever.
        self._pulls[index, identity] = state
        state.request = identity

    # ------------------------------------------------------------ answers

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer, the assignment's bell or ``timeout_s``. Takes all answers that are there."""
        poller = zmq.Poller()
        poller.register(self._assignment.bell.fd, zmq.POLLIN)
        for link in self._readers.links.values():
            poller.register(link.channel.socket, zmq.POLLIN)
        events = dict(poller.poll(int(max(min(timeout_s, _TICK_S), 0) * 1000)))
        now = time.monotonic()
        if now >= self._look_at_maps_at:
            self._look_at_maps_at = now + _MAPS_S
            self._readers.drop_deleted_segments()
        if self._assignment.bell.fd in events:
            self._assignment.bell.clear()
        for index, link in list(self._readers.links.items()):
            if link.channel.socket in events:
                self._receive(index, link)
        # This look comes even while one reader sends without a pause: another reader may be gone.
        if now >= self._look_at_links_at:
            self._look_at_links_at = now + _TICK_S
            for index, link in list(self._readers.links.items()):
                if link.channel.lost() or self._overdue(index, now):
                    self._lose(index, link)

    def _overdue(self, index: int, now: float) -> bool:
        return any(key[0] == index and state.answer_by < now for key, state in self._pulls.items())

    def _lose(self, index: int, link: Link) -> None:
        _log.warning("the connection to a reader ended, connecting again", endpoint=link.channel.endpoint)
        self._drop_link(index)

    def _receive(self, index: int, link: Link) -> None:
        if link.channel.lost():
            # ZeroMQ has connected again by itself, maybe to another node, so its answers belong to no pull of ours.
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
                # Any other answer is of a queue that was returned, or that seek moved.
                self._pulls.pop(key, None)
        except RequestError as error:
            _log.warning("a reader's answer cannot be understood, connecting again", error=str(error))
            self._drop_link(index)
        except BaseException:
            # The rest of a half-read answer would be read as the next answer.
            self._drop_link(index)
            raise

    def _refused(self, state: QueueState, answer: dict[str, Any]) -> None:
        error = wire.refusal(answer)
        state.retry_at = time.monotonic() + max((error.retry_after_ms or 0) / 1000, _QUIET_S)
        if error.code in ("TOPIC_NOT_EXIST", "SYSTEM_BUSY", "SERVICE_NOT_AVAILABLE"):
            _log.debug("pull refused for now", topic=state.topic, queue=state.queue_id, error=str(error))
            return
        if "read_queues" in answer:
            # The topic has lost queues, or it has new queues and the reader has not heard of them yet.
            self.misses_queue = True
            if state.end >= 0 or not self._asks_for_queues:
                _log.debug(
                    "a reader does not know the queue", topic=state.topic, queue=state.queue_id, error=str(error)
                )
                return
        state.retry_at += 1.0
        self._problem = (state, error)

    def _answered(self, link: Link, state: QueueState, answer: dict[str, Any], frames: list[memoryview]) -> None:
        next_offset = int(answer["next_offset"])
        count = int(answer["count"])
        state.end = int(answer["max_offset"])
        state.log_generation = int(answer.get("log_generation", -1))
        if not count:
            self._empty(state, str(answer["status"]), next_offset)
            return
        try:
            if answer.get("mode") == "bytes":
                state.use_bytes = True  # a memory topic: only the node reads its files
            segments = link.segments if link.ranges and not state.use_bytes else None
            parts = self._decoder.decode(state, frames, count, next_offset, segments)
        except OSError as error:
            # The segment is deleted, or this process may not read it. The node can still send the bytes.
            _log.warning("cannot map a segment, asking for bytes", topic=state.topic, error=str(error))
            state.use_bytes = True
            return
        except CorruptRecordError as error:
            if count > 1:
                # The records before the damaged one are good, so they are pulled one by one.
                state.careful_until = next_offset
                return
            state.retry_at = time.monotonic() + 1.0
            problem = CorruptRecordError(
                f"{error}; the consumer stops at queue offset {state.position} of queue {state.queue_id} of {state.topic!r},"
                " and seek() skips it",
                offset=error.offset,
            )
            self._problem = (state, problem)
            return
        with self._assignment.lock:
            state.is_proven = True
            if not parts:
                # The inner batches have no message of a wanted tag, so the consumer is done with them.
                state.move_to(next_offset)
                return
            # "Ready" comes first: take() skips a ready queue without messages, but never looks at one that is not
            # ready.
            self._assignment.ready[state.key] = state
            state.chunks.append(Chunk(parts, sum(map(len, parts)), next_offset))

    def _empty(self, state: QueueState, status: str, next_offset: int) -> None:
        before = state.position
        if next_offset == before:
            state.is_proven = state.is_proven or next_offset <= state.end
            # The node answers other pulls at once, because no new message can change the answer. So pause before the next.
            if status != "OFFSET_OVERFLOW_ONE" and (before or status not in _EMPTY_QUEUE):
                state.retry_at = time.monotonic() + _QUIET_S
            return
        if status not in ("NO_MATCHED_MESSAGE", "OFFSET_OVERFLOW_ONE"):
            # The segment that could not be mapped may be an expired one. The messages behind the gap are in other segments.
            state.use_bytes = False
            gap = Gap(state.topic, state.queue_id, before, next_offset, status)
            self.gaps.append(gap)
            _log.warning("a gap: the consumer jumped to the nearest message", **gap._asdict())
            if next_offset < before:
                self._assignment.restart(state, next_offset)
                return
        with self._assignment.lock:
            # No message between the two offsets is for this consumer, so it is done with them.
            state.move_to(next_offset)
            state.is_proven = True

    # ------------------------------------------------------------ handing out

    def raise_problem(self) -> None:
        """Raise the error of a failed pull, once, if its queue is still assigned."""
        problem, self._problem = self._problem, None
        if problem is None:
            return
        state, error = problem
        if self._assignment.owned.get(state.key) is state and not state.revoked_at:
            raise error

    def take(self, max_messages: int) -> TakenBatch:
        """A batch of up to ``max_messages`` messages that have come; the queues take turns.

        :class:`Assignment` says when the batch counts as delivered. A message whose body cannot be decoded is a batch
        of its own. So a program that fails at it and polls on skips this message and no other.
        """
        parts: list[RecordBatch] = []
        portions: list[BatchPortion] = []
        count = 0
        assignment = self._assignment
        with assignment.lock:
            idle: list[QueueState] = []
            for state in assignment.ready.values():
                if count >= max_messages:
                    break
                if not state.chunks or assignment.owned.get(state.key) is not state:
                    idle.append(state)  # it was returned, or seek moved it: its messages are not for this batch
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
                    portions.append(BatchPortion(state, chunk))
                    continue
                cut = cut_parts(chunk.parts, 0, room)
                parts += cut
                count += room
                chunk.is_taken = False
                rest = Chunk(cut_parts(chunk.parts, room, chunk.count), chunk.count - room, chunk.next_offset)
                portions.append(BatchPortion(state, chunk, rest, int(cut[-1].heads["queue_offset"][-1]) + 1))
            for state in idle:
                if assignment.ready.get(state.key) is state:
                    del assignment.ready[state.key]
            taken = assignment.making = TakenBatch(MessageBatch(parts), portions)
        return taken

    def _drop_link(self, index: int) -> None:
        """Close the connection to a reader and give its pulls up.

        After an interruption in here this is called again, or the garbage collector closes a connection that nobody uses.
        """
        for key, state in [(key, state) for key, state in self._pulls.items() if key[0] == index]:
            if state.request == key[1] and state.channel == index:
                state.request = -1
            del self._pulls[key]
        self._readers.drop(index)
