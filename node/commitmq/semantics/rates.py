"""Rates: token buckets that bound what one client, topic, group or user may send or read in a second.

A bucket holds the tokens of ``burst_s`` seconds, by default :data:`BURST_S`. A request passes while its buckets hold a
token, whatever its size, and its cost is taken afterwards; so a bucket may go below zero, and one large run needs no large
bucket. Later requests are refused until the debt is paid. RocketMQ has no such rates; its brokers bound the time in a
queue instead.

The memory is bounded whatever names clients choose: ``limit`` buckets are kept. The least recently used one gives way, and
a bucket in debt gives way only to others in debt.

How much a gateway tells the coordinator of one client, and of how many at once (PROTOCOL.md, ``client.heard``).

A client chooses its id and its groups, so each limit holds whatever a client says of itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

MAX_CLIENTS_A_REQUEST: Final = 200
MAX_NAMES: Final = 32
"""Names in one list of a client: of groups that it consumes in, of groups that it produces in, of topics."""
MAX_CHARACTERS: Final = 2_048
"""Of all texts of one client together."""
FORGET_MS: Final = 150_000
"""A client of which nobody told for so long is forgotten. Clients of RocketMQ end after 120 s without a heartbeat."""


def shortened(spent: int, *lists: Iterable[str]) -> tuple[list[list[str]], int]:
    """Of each list, in the order of its names, what the limits leave room for, and how many names were omitted.
    ``spent``: characters of the client's other texts.
    """
    kept: list[list[str]] = []
    left_out = 0
    for names in lists:
        kept.append([])
        for name in sorted(names):
            if len(kept[-1]) < MAX_NAMES and spent + len(name) <= MAX_CHARACTERS:
                kept[-1].append(name)
                spent += len(name)
            else:
                left_out += 1
    return kept, left_out


BURST_S: Final = 1.0
LEAST_WAIT_MS: Final = 10
LONGEST_WAIT_MS: Final = 60_000
_EVICTION_LOOKS: Final = 8


@dataclass(slots=True)
class _Bucket:
    """Tokens at the time ``at_s``: messages and bytes, and how many of both come in a second."""

    messages: float
    size_bytes: float
    at_s: float
    messages_per_s: int
    bytes_per_s: int


class RateLimiter:
    """The buckets of one kind of name. A rate of 0 bounds nothing."""

    def __init__(
        self,
        kind: str,
        messages_per_s: int,
        bytes_per_s: int,
        limit: int,
        rates_of: Callable[[object], tuple[int, int]] | None = None,
        *,
        burst_s: float = BURST_S,
    ) -> None:
        """``kind`` is the noun of the names, for the sentence of a refusal. ``rates_of``: the two rates of a name, where not
        all names have the same; they do not change.
        """
        self.kind, self._rates_of, self._burst_s = kind, rates_of, burst_s
        self._messages_per_s, self._bytes_per_s = messages_per_s, bytes_per_s
        self._limit = limit
        self._buckets: OrderedDict[object, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def is_bounded(self) -> bool:
        return bool(self._messages_per_s or self._bytes_per_s or self._rates_of)

    def continue_from(self, before: RateLimiter) -> None:
        """Begin with what the buckets of ``before`` hold, at most a burst. A rate that ``before`` did not have begins full."""
        for name, old in before._buckets.items():
            messages_per_s, bytes_per_s = self._of(name)
            messages, size_bytes = messages_per_s * self._burst_s, bytes_per_s * self._burst_s
            if old.messages_per_s:
                messages = min(messages, old.messages)
            if old.bytes_per_s:
                size_bytes = min(size_bytes, old.size_bytes)
            if (messages_per_s or bytes_per_s) and len(self._buckets) < self._limit:
                self._buckets[name] = _Bucket(messages, size_bytes, old.at_s, messages_per_s, bytes_per_s)

    def wait_ms(self, name: object, now_s: float) -> int:
        """0 when a request of ``name`` may pass at ``now_s`` (monotonic), else the time after which it may."""
        bucket = self._buckets.get(name)
        if bucket is None:
            return 0
        self._fill(bucket, now_s)
        debt_s = 0.0
        if bucket.messages_per_s and bucket.messages <= 0:
            debt_s = (1 - bucket.messages) / bucket.messages_per_s
        if bucket.bytes_per_s and bucket.size_bytes <= 0:
            debt_s = max(debt_s, (1 - bucket.size_bytes) / bucket.bytes_per_s)
        return min(max(int(debt_s * 1000) + 1, LEAST_WAIT_MS), LONGEST_WAIT_MS) if debt_s else 0

    def take(self, name: object, messages: int, size_bytes: int, now_s: float) -> None:
        """Take the cost of a request that passed."""
        bucket = self._buckets.get(name)
        if bucket is None:
            messages_per_s, bytes_per_s = self._of(name)
            if not messages_per_s and not bytes_per_s:
                return
            if len(self._buckets) >= self._limit:
                self._evict(now_s)
            most_s = self._burst_s
            bucket = _Bucket(messages_per_s * most_s, bytes_per_s * most_s, now_s, messages_per_s, bytes_per_s)
            self._buckets[name] = bucket
        else:
            self._fill(bucket, now_s)
            self._buckets.move_to_end(name)
        bucket.messages -= messages
        bucket.size_bytes -= size_bytes

    def sentence(self, name: object, shown: str) -> str:
        """Why a request of ``name``, which the sentence calls ``shown``, is refused."""
        messages_per_s, bytes_per_s = self._of(name)
        parts = []
        if messages_per_s:
            parts.append(f"{messages_per_s} messages/s")
        if bytes_per_s:
            parts.append(f"{bytes_per_s} bytes/s")
        return f"{self.kind} {shown} is over its rate of {' and '.join(parts)}"

    def _of(self, name: object) -> tuple[int, int]:
        return (self._messages_per_s, self._bytes_per_s) if self._rates_of is None else self._rates_of(name)

    def _fill(self, bucket: _Bucket, now_s: float) -> None:
        passed_s = max(0.0, now_s - bucket.at_s)
        bucket.at_s = now_s
        messages_per_s, bytes_per_s, most_s = bucket.messages_per_s, bucket.bytes_per_s, self._burst_s
        bucket.messages = min(bucket.messages + passed_s * messages_per_s, messages_per_s * most_s)
        bucket.size_bytes = min(bucket.size_bytes + passed_s * bytes_per_s, bytes_per_s * most_s)

    def _evict(self, now_s: float) -> None:
        """Drop the least recently used bucket without a debt, of the first few; else the least recently used one."""
        for name in [name for name, _ in zip(self._buckets, range(_EVICTION_LOOKS), strict=False)]:
            if not self.wait_ms(name, now_s):
                del self._buckets[name]
                return
        self._buckets.popitem(last=False)
