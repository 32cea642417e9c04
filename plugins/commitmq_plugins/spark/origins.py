"""The sources of messages: a store folder, or a node by its address. Both offer a plan the same methods.

A node on this host is read like a folder, through its mapped files; a node elsewhere sends its records, which
:class:`RecordPuller` gets over ZeroMQ. An origin is a snapshot of the messages that were flushed when it was created. Create
a new one to see more.

Options become the wanted slice of each queue here, and missing messages of the requested range are reported.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from commitmq.client.admin import Admin
from commitmq.errors import ConfigError, CorruptRecordError, NodeUnavailableError, ProtocolError, StoreError
from commitmq.format.constants import MIN_RECORD_BYTES
from commitmq.format.units import UNIT
from commitmq.kernels import compiled
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH, STORAGE_MEMORY, STORAGE_TYPE
from commitmq.store.recovery.cut_history import NO_CUT, CutHistory, LogCut
from commitmq_plugins.spark.columns import Bytes, Numbers
from commitmq_plugins.spark.options import EARLIEST, LATEST, Bound, SourceOptions, UnreadableRange
from commitmq_plugins.spark.plan import FilePartition, Partition, PullPartition, cut, cut_evenly, parts_of
from commitmq_plugins.spark.stores import OpenStore, Slice, check_generation

PATIENCE_S: Final = 60.0
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 15.0
_MAX_BYTES: Final = 8 * 1024 * 1024

Pulled = tuple[Bytes, Numbers, Numbers, Numbers, list[tuple[int, int]]]
"""Memory, positions of records in it, their sizes and physical offsets, and the missing queue offsets before them."""


class RecordPuller:
    """One connection to a reader of the node at ``address``; the node filters by ``tags``. Not thread-safe."""

    def __init__(self, address: str, tags: str = "") -> None:
        self._directory = Directory(address)
        self._filter = {"filter": tags} if tags else {}
        self._channel: Channel | None = None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._directory.close()

    def records(self, one: Slice) -> Iterator[Pulled]:
        """All records of a slice, some at a time. Inner batches may begin before it or end behind it. An unreachable
        node is waited for a minute. Raises NodeUnavailableError, or ProtocolError when it refuses.
        """
        at = one.first
        while at < one.end:
            answer, frames = self._pull(one, at)
            following = int(answer["next_offset"])
            missing: list[tuple[int, int]] = []
            if not int(answer["count"]):
                skipped = following > at
                if not skipped:
                    following = one.end
                # Messages skipped by a filter are not lost; all others that were skipped are.
                if str(answer["status"]) != "NO_MATCHED_MESSAGE":
                    missing = [(at, min(following, one.end))]
                at = following
                if missing:
                    none = np.empty(0, np.int64)
                    yield np.empty(0, np.uint8), none, none, none, missing
                continue
            for frame in frames:
                data = np.frombuffer(frame.buffer, np.uint8)
                yield (*_split(data), [])
            at = following

    def within_bytes(self, one: Slice, budget: int) -> int:
        """The queue offset up to which the slice's records take ``budget`` bytes at most, by its units."""
        at = one.first
        while at < one.end:
            answer, frames = self._pull(one, at, mode="ranges")
            if not int(answer["count"]):
                return at if int(answer["next_offset"]) <= at else min(int(answer["next_offset"]), one.end)
            sizes = np.frombuffer(frames[0].buffer, UNIT)["size"].astype(np.int64)
            fitting = int(np.searchsorted(np.cumsum(sizes), budget, side="right"))
            if fitting < len(sizes):
                # The messages of an inner batch count only all together.
                return at if one.is_batch else min(at + fitting, one.end)
            budget -= int(sizes.sum())
            at = int(answer["next_offset"])
        return min(at, one.end)

    def offset_at(self, one: Slice, physical: int) -> int:
        """The slice's first queue offset whose record begins at or behind ``physical``; its end without one."""

        def is_behind(offset: int) -> bool:
            answer, frames = self._pull(replace(one, end=offset + 1), offset, mode="ranges")
            return (
                bool(answer["count"]) and int(np.frombuffer(frames[0].buffer, UNIT)["physical_offset"][0]) >= physical
            )

        return bisect_left(range(one.end), True, one.first, one.end, key=is_behind)

    def _pull(self, one: Slice, at: int, mode: str = "bytes") -> tuple[dict[str, Any], list[Any]]:
        deadline = time.monotonic() + PATIENCE_S
        fields: dict[str, Any] = {
            "topic": one.topic,
            "queue": one.queue_id,
            "offset": at,
            "max_messages": one.end - at,
            "max_bytes": _MAX_BYTES,
            "mode": mode,
            **self._filter,
        }
        if one.incarnation.isdecimal():
            fields["incarnation"] = int(one.incarnation)
        while True:
            try:
                if self._channel is None:
                    self._channel, _ = self._directory.connect("reader", time.monotonic() + _CONNECT_S)
                return self._channel.request("pull", fields, timeout_s=_ANSWER_S)
            except ProtocolError as error:
                # A node with rates ([flow]) says when to ask again. That is no failure, however long it takes.
                if error.code != "SYSTEM_BUSY" or error.retry_after_ms is None:
                    raise
                time.sleep(error.retry_after_ms / 1000)
                deadline = time.monotonic() + PATIENCE_S
            except NodeUnavailableError:
                if self._channel is not None:
                    self._channel.close()
                    self._channel = None
                if time.monotonic() > deadline:
                    raise


def cuts_of(admin: Admin) -> CutHistory:
    """The cuts of a node's log: generations and ends."""
    node = admin.status()["node"]
    return CutHistory(
        generation=node["generation"], cuts=[LogCut(generation, 0, "", end) for generation, end in node["log_ends"]]
    )


def _split(data: Bytes) -> tuple[Bytes, Numbers, Numbers, Numbers]:
    room = len(data) // MIN_RECORD_BYTES + 1
    positions, sizes, physical = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    count = compiled.split(data, positions, sizes, physical)
    if count < 0:
        raise CorruptRecordError("the answer of the node does not hold whole records")
    return data, positions[:count], sizes[:count], physical[:count]


_FLUSH_WAIT_S: Final = 30.0
_LOOK_S: Final = 0.05
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class SourceTopic:
    """A topic in a store's configuration; for one that is not, ``queues`` counts the queues that have files."""

    queues: int
    in_memory: bool = False


class Origin(Protocol):
    """One store, as of the moment this object was created."""

    @property
    def name(self) -> str:
        """The store's name in the column ``store`` and in offsets: as the user wrote it."""
        ...

    @property
    def identity(self) -> str:
        """The id that tells the store from others. It is the same under every name of the store."""
        ...

    @property
    def generation(self) -> int:
        """Of the store; it grows whenever the log ended earlier than it may have been seen. 0: unknown."""
        ...

    def is_cut_since(self, generation: int) -> bool:
        """Whether the log was cut since the store had this ``generation``."""
        ...

    def kept(self, queue: Slice, generation: int) -> int:
        """The offset below which ``queue`` has what it had in this ``generation``; its end without a cut since."""
        ...

    def topics(self) -> dict[str, SourceTopic]: ...

    def slices(self, wants: Callable[[str], bool]) -> list[Slice]:
        """The readable range of every queue of the wanted topics, empty queues included."""
        ...

    def lost(self, wants: Callable[[str], bool]) -> list[UnreadableRange]:
        """Messages of the wanted topics that are known to exist and cannot be read."""
        ...

    def offset_by_time(self, queue: Slice, timestamp: int) -> int:
        """First queue offset stored at ``timestamp`` (ms) or later, within the slice; its end when all is older."""
        ...

    def within_bytes(self, queue: Slice, budget: int) -> int:
        """The queue offset up to which the slice's records take at most ``budget`` bytes of log together."""
        ...

    def parts_of(self, slices: Sequence[Slice], *, least: int, max_bytes: int) -> int:
        """The number of partitions for the slices: ``least``, or more if one would hold over ``max_bytes`` of log."""
        ...

    def partitions(self, slices: Sequence[Slice], parts: int) -> list[Partition]:
        """The slices cut into about ``parts`` for Spark, by both alone, not by later records of the log."""
        ...

    def close(self) -> None: ...


class FolderOrigin:
    """A store folder, or the folder of a node on this host."""

    def __init__(self, name: str, root: Path, *, node: str = "", token: str = "") -> None:
        """Raises StoreError when the folder is no store."""
        self.name = name
        self._node = node
        self._token = token
        self._store = OpenStore(root)
        self._cuts = CutHistory.load(self._store.layout)
        self.generation = self._cuts.generation
        self._is_live = self._store.is_live
        self._floor, self._bound = self._store.span()
        self._crc_from = self._store.crc_from()

    @property
    def identity(self) -> str:
        return self._store.identity()

    def topics(self) -> dict[str, SourceTopic]:
        found = {name: SourceTopic(count) for name, count in self._store.queue_counts().items()}
        for name, topic in self._store.configured_topics().items():
            in_memory = topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY
            found[name] = SourceTopic(max(topic.read_queues, topic.write_queues), in_memory)
        return found

    def slices(self, wants: Callable[[str], bool]) -> list[Slice]:
        found = self._store.slices(self._floor, self._bound, wants)
        check_generation(self._store, self.generation, self._bound)
        return found

    def is_cut_since(self, generation: int) -> bool:
        return self._cuts.end_since(generation) != NO_CUT

    def kept(self, queue: Slice, generation: int) -> int:
        end = self._cuts.end_since(generation)
        return queue.end if end == NO_CUT else self._store.offset_at(queue, end, self._bound)

    def lost(self, wants: Callable[[str], bool]) -> list[UnreadableRange]:
        # A running node puts every record into its queues before readers may see it.
        if self._is_live:
            return []
        why = "in the log, but not in its queue: start the node once, or run commitmq store rebuild"
        return [
            UnreadableRange(self.name, topic, queue, offset, offset + 1, why)
            for topic, queue, offset in self._store.unqueued(self._bound)
            if wants(topic)
        ]

    def offset_by_time(self, queue: Slice, timestamp: int) -> int:
        return self._store.offset_by_time(queue, timestamp, self._bound)

    def within_bytes(self, queue: Slice, budget: int) -> int:
        return self._store.within_bytes(queue, budget, self._bound)

    def parts_of(self, slices: Sequence[Slice], *, least: int, max_bytes: int) -> int:
        return parts_of(self._store, slices, self._bound, least=least, max_bytes=max_bytes)

    def partitions(self, slices: Sequence[Slice], parts: int) -> list[Partition]:
        root = str(self._store.layout.root)
        return [
            FilePartition(
                self.name,
                part,
                root,
                self._store.sizes,
                self._bound,
                self.generation,
                self._crc_from,
                self._node,
                self._token,
            )
            for part in cut(self._store, slices, self._bound, parts)
        ]

    def close(self) -> None:
        self._store.close()


class NodeOrigin:
    """A node whose files are not on this host: it answers requests, and sends its records."""

    def __init__(self, name: str, admin: Admin, identity: str) -> None:
        self.name = name
        self.identity = identity
        self._admin = admin
        self._log_bytes = 0
        self._puller = RecordPuller(name)
        self._cuts = cuts_of(admin)
        self.generation = self._cuts.generation

    def topics(self) -> dict[str, SourceTopic]:
        return {one.name: SourceTopic(max(one.read_queues, one.write_queues)) for one in self._admin.topics()}

    def slices(self, wants: Callable[[str], bool]) -> list[Slice]:
        found = []
        for topic in self._admin.topics():
            name = topic.name
            if wants(name):
                is_batch = topic.attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH
                try:
                    bounds = self._admin.offsets(name, incarnation=topic.incarnation)
                except ProtocolError as error:
                    if error.code != "TOPIC_NOT_EXIST":
                        raise
                    continue  # it was deleted in the meantime
                found += [
                    Slice(name, queue, is_batch, low, max(low, high), incarnation=str(topic.incarnation))
                    for queue, low, high, _ in bounds
                ]
        self._wait_until_flushed()
        if cuts_of(self._admin).generation != self.generation:
            raise StoreError(f"the log of the node {self.name} was cut while it was looked at: look again")
        return sorted(found, key=lambda one: (one.topic, one.queue_id))

    def is_cut_since(self, generation: int) -> bool:
        return self._cuts.end_since(generation) != NO_CUT

    def kept(self, queue: Slice, generation: int) -> int:
        end = self._cuts.end_since(generation)
        return queue.end if end == NO_CUT else self._puller.offset_at(queue, end)

    def lost(self, wants: Callable[[str], bool]) -> list[UnreadableRange]:
        del wants
        return []

    def _wait_until_flushed(self) -> None:
        """In asynchronous mode a node shows what a power cut may take back: wait until it is flushed."""
        positions = self._admin.status()["positions"]
        self._log_bytes = positions["written"] - positions["min_offset"]
        deadline = time.monotonic() + _FLUSH_WAIT_S
        written = positions["written"]
        while positions["flushed"] < written:
            if time.monotonic() > deadline:
                raise NodeUnavailableError(f"the node {self.name} does not flush: is its disk full or broken?")
            time.sleep(_LOOK_S)
            positions = self._admin.status()["positions"]

    def offset_by_time(self, queue: Slice, timestamp: int) -> int:
        found = next(
            (at for number, _, _, at in self._admin.offsets(queue.topic, timestamp) if number == queue.queue_id), None
        )
        return queue.end if found is None else min(max(found, queue.first), queue.end)

    def within_bytes(self, queue: Slice, budget: int) -> int:
        return self._puller.within_bytes(queue, budget)

    def parts_of(self, slices: Sequence[Slice], *, least: int, max_bytes: int) -> int:
        # The slices' share of the log is unknown here; the whole log is the upper bound.
        return min(max(least, -(-self._log_bytes // max_bytes)), sum(one.count for one in slices))

    def partitions(self, slices: Sequence[Slice], parts: int) -> list[Partition]:
        return [
            PullPartition(self.name, part, self.name, self.generation) for part in cut_evenly(slices, max(1, parts))
        ]

    def close(self) -> None:
        self._puller.close()
        self._admin.close()


def require_topics(origins: Sequence[Origin], wanted: Iterable[str], *, advice: str = "") -> None:
    """Raise ConfigError for a topic that none of ``origins`` has, and for one whose messages cannot be read there.
    ``advice`` for a missing topic ends its sentence.
    """
    wanted = list(wanted)
    if not wanted:
        return
    known = [(origin.name, origin.topics()) for origin in origins]
    for topic in wanted:
        of = [(name, topics[topic]) for name, topics in known if topic in topics]
        if not of:
            others = {one for _, topics in known for one in topics}
            places = ", ".join(name for name, _ in known)
            raise ConfigError(f"there is no topic {topic!r} in {places}; {_others(topic, others)}{advice}")
        in_memory = [name for name, one in of if one.in_memory]
        if in_memory:
            raise ConfigError(
                f"the topic {topic!r} of {in_memory[0]} is kept in memory, not in files: read it from the running node, with "
                "option node and option transfer=pull"
            )


def _others(topic: str, others: Collection[str]) -> str:
    """Topics with a name similar to one that does not exist, else some of the existing topics."""
    if similar := get_close_matches(topic, sorted(others), _SHOWN):
        return f"similar topics are: {', '.join(similar)}"
    # Topics of the system and of consumer groups come last.
    names = sorted(others, key=lambda one: (one.startswith(("%", "RMQ_SYS")), one))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"topics there are: {', '.join(names[:_SHOWN]) or 'none'}{more}"


def existing(origins: Sequence[Origin], wanted: Iterable[str]) -> list[str]:
    """Those of ``wanted`` that one of ``origins`` has."""
    known = {one for origin in origins for one in origin.topics()}
    return [one for one in wanted if one in known]


def queues_of(origin: Origin, topics: Iterable[str]) -> list[int]:
    """The number of queues of each of ``topics`` in ``origin``, empty queues included; 0 for a topic it does not have."""
    known = origin.topics()
    return [known[topic].queues if topic in known else 0 for topic in topics]


def open_origins(options: SourceOptions) -> list[Origin]:
    """Every store and node of ``options``, as it is. Raises StoreError, NodeUnavailableError or ConfigError."""
    found: list[Origin] = []
    try:
        for folder in options.stores:
            found.append(FolderOrigin(folder, Path(folder)))
        for address in options.nodes:
            found.append(_of_node(address, options.transfer))
        _refuse_twice(found)
    except BaseException:
        for origin in found:
            origin.close()
        raise
    return found


def _refuse_twice(origins: Sequence[Origin]) -> None:
    """Raise ConfigError when a store is named twice: its messages would count twice."""
    names: dict[str, str] = {}
    for origin in origins:
        if origin.identity in names:
            other = names[origin.identity]
            raise ConfigError(
                f"{other} and {origin.name} are the same store, or a copy of it ({origin.identity}): each message would "
                "be read twice. Name it once"
            )
        names[origin.identity] = origin.name


def _of_node(address: str, transfer: str) -> Origin:
    admin = Admin(address)
    try:
        metadata: dict[str, Any] = admin.metadata()
        root = Path(str(metadata["store"]))
        if transfer != "pull" and is_here(root, str(metadata["token"])):
            origin = FolderOrigin(address, root, node=address, token=str(metadata["token"]))
            admin.close()
            return origin
        if transfer == "files":
            raise ConfigError(f"option transfer: the files of the node {address} cannot be read from this host")
        return NodeOrigin(address, admin, str(metadata["store_id"]))
    except BaseException:
        admin.close()
        raise


def is_here(root: Path, token: str) -> bool:
    """Whether the store in ``root`` belongs to the node that gave ``token``: same host, same file system."""
    try:
        return bool(token) and (root / "run" / "token").read_text(encoding="ascii").strip() == token
    except (OSError, UnicodeDecodeError):
        return False


ANEW: Final = "the topic was deleted and recreated"
EXPIRED: Final = "expired"
GONE: Final = "the queue is gone"
SHORT: Final = "the queue ends before"
CUT: Final = "it was there, and the log has it no more: the log was cut, or is another one"


def chosen(origin: Origin, options: SourceOptions, gaps: list[UnreadableRange]) -> list[Slice]:
    """The slices that ``options`` select. Missing parts of them are added to ``gaps``."""
    found = origin.slices(options.wants)
    if options.end == Bound(LATEST):
        gaps += origin.lost(options.wants)
    result = []
    for one in found:
        first = position(origin, one, options.start, gaps)
        end = position(origin, one, options.end, gaps)
        result.append(replace(one, first=min(first, end), end=end))
    for bound in (options.start, options.end):
        gaps += unknown_queues(origin, bound, found)
    return result


def position(origin: Origin, one: Slice, bound: Bound, gaps: list[UnreadableRange]) -> int:
    """The queue offset of ``bound``, within the slice. An offset outside the slice is a gap."""
    if bound.timestamp is not None:
        return origin.offset_by_time(one, bound.timestamp)
    wanted = bound.of(origin.name, one.topic, one.queue_id)
    if wanted == EARLIEST:
        return one.first
    if wanted == LATEST:
        return one.end
    offset = int(wanted)
    if offset < one.first:
        gaps.append(UnreadableRange(origin.name, one.topic, one.queue_id, offset, one.first, EXPIRED))
    if offset > one.end:
        gaps.append(UnreadableRange(origin.name, one.topic, one.queue_id, one.end, offset, SHORT))
    return min(max(offset, one.first), one.end)


def resumed(
    origin: Origin,
    store: str,
    one: Slice,
    known: int | None,
    was: str | None,
    generation: int,
    gaps: list[UnreadableRange],
) -> int:
    """The queue offset at which a job continues in a queue that it has read up to ``known``, when its topic had the
    incarnation ``was`` and the store this ``generation``; None for a new queue. What it cannot read any more, and what
    it has read and the log has not any more, is added to ``gaps``.

    A new queue is read from its first message, and so is one of a topic recreated. Where the log was cut below
    ``known``, the queue is read from the cut on.
    """
    if known is None:
        return one.first
    if was != one.incarnation:
        gaps.append(UnreadableRange(store, one.topic, one.queue_id, max(known - 1, 0), max(known, 1), ANEW))
        return one.first
    kept = origin.kept(one, generation)
    gaps.append(UnreadableRange(store, one.topic, one.queue_id, known, one.first, EXPIRED))
    gaps.append(UnreadableRange(store, one.topic, one.queue_id, kept, known, CUT))
    return max(min(known, kept), one.first)


def cut_off(
    origin: Origin,
    store: str,
    found: Iterable[Slice],
    known: Iterable[tuple[str, int, int]],
    generations: Mapping[str, int],
) -> list[UnreadableRange]:
    """What a job has read of queues of which a cut of the log left nothing; ``known`` are topic, queue and position,
    ``generations`` those of the positions by topic.
    """
    there = {(one.topic, one.queue_id) for one in found}
    gone = [
        UnreadableRange(store, topic, queue, 0, at, CUT)
        for topic, queue, at in known
        if (topic, queue) not in there and origin.is_cut_since(generations.get(topic, 0))
    ]
    topics = origin.topics() if gone else {}
    return [gap for gap in gone if gap.topic in topics]


def remaining(
    origin: Origin, wanted: Slice, found: Mapping[tuple[str, int], Slice], generation: int, gaps: list[UnreadableRange]
) -> Slice | None:
    """The part of ``wanted`` that can still be read; it was chosen when the store had this ``generation``. ``found`` are the
    present queues by topic and number. What is missing is added to ``gaps``.
    """
    if wanted.count <= 0:
        return None
    one = found.get((wanted.topic, wanted.queue_id))

    def miss(first: int, end: int, reason: str) -> None:
        gaps.append(UnreadableRange(origin.name, wanted.topic, wanted.queue_id, first, end, reason))

    if one is None or one.incarnation != wanted.incarnation:
        miss(wanted.first, wanted.end, GONE if one is None else ANEW)
        return None
    kept = origin.kept(one, generation)
    miss(wanted.first, min(one.first, wanted.end), EXPIRED)
    miss(max(wanted.first, kept), wanted.end, CUT)
    left = replace(one, first=max(wanted.first, one.first), end=min(wanted.end, kept))
    return left if left.count > 0 else None


def unknown_queues(origin: Origin, bound: Bound, found: Sequence[Slice]) -> list[UnreadableRange]:
    """Queues that ``bound`` names with an offset above 0 and that do not exist."""
    known = {(one.topic, one.queue_id) for one in found}
    topics = (bound.offsets or {}).get(origin.name) or (bound.offsets or {}).get("") or {}
    return [
        UnreadableRange(origin.name, topic, queue, 0, offset, "there is no such queue")
        for topic, queues in topics.items()
        for queue, offset in queues.items()
        if (topic, queue) not in known and isinstance(offset, int) and offset > 0
    ]
