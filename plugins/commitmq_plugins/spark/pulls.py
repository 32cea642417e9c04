"""Pulls records of a node on another host over ZeroMQ, as whole records, and finds their positions with a kernel."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from commitmq.client.admin import Admin
from commitmq.errors import CorruptRecordError, NodeUnavailableError, ProtocolError
from commitmq.format.constants import MIN_RECORD_BYTES
from commitmq.format.units import UNIT
from commitmq.kernels import compiled
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory
from commitmq.store.recovery.cut_history import CutHistory, LogCut
from commitmq_plugins.spark.columns import Bytes, Numbers
from commitmq_plugins.spark.stores import Slice

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
        """End the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._directory.close()

    def records(self, one: Slice) -> Iterator[Pulled]:
        """All records of a slice, some at a time. Inner batches may begin before it or end behind it.

        An unreachable node is waited for a minute. Raises NodeUnavailableError, or ProtocolError when it refuses.
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
        """The queue offset up to which the slice's records take at most ``budget`` bytes together, according to its
        units.
        """
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
        """The first queue offset in the slice whose record begins at or behind ``physical``; the slice's end when there is
        none.
        """

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
