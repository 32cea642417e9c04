"""How long the node took to store runs of messages, in the classes and shares of RocketMQ's tools (remoting 1.10). Pure.

A time is that from the hand-over of a run to the writer until its answer, so it includes the wait for the disk. RocketMQ's is
that of the store alone, each for one message or batch. The classes and shares are of the last whole minute, as in RocketMQ.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Final

_CLASSES: Final = ("<=0ms", "0~10ms", "10~50ms", "50~100ms", "100~200ms", "200~500ms", "500ms~1s", "1~2s", "2~3s", "3~4s",
                   "4~5s", "5~10s", "10s~")  # fmt: skip
_CLASS_BEGINS_MS: Final = (1, 10, 50, 100, 200, 500, 1_000, 2_000, 3_000, 4_000, 5_000, 10_000)
_STEPS: Final = ((1, 20), (2, 15), (5, 10), (10, 10), (50, 6), (100, 5), (1_000, 9))
"""Width in ms and number of the classes from which shares are told; a last one has everything longer."""
_ENDS_MS: Final = tuple(accumulate(width for width, count in _STEPS for _ in range(count)))
_MINUTE_S: Final = 60.0


class PutTimes:
    """See the module."""

    def __init__(self, now_s: float) -> None:
        self.longest_ms = self.failed = 0
        self._began_s = now_s
        self._now = [0] * (len(_ENDS_MS) + 1), [0] * len(_CLASSES)
        self._last = [0] * (len(_ENDS_MS) + 1), [0] * len(_CLASSES)

    def add(self, took_s: float, now_s: float) -> None:
        """A run was stored."""
        if now_s - self._began_s >= _MINUTE_S:
            self._turn(now_s)
        took_ms = int(took_s * 1_000)
        if took_ms > self.longest_ms:
            self.longest_ms = took_ms
        self._now[0][bisect_left(_ENDS_MS, took_ms)] += 1
        self._now[1][bisect_right(_CLASS_BEGINS_MS, took_ms)] += 1

    def classes(self, now_s: float) -> str:
        """``[<=0ms]:3 [0~10ms]:5 …``"""
        self._turn(now_s)
        return "".join(f"[{name}]:{count} " for name, count in zip(_CLASSES, self._last[1], strict=True))

    def share_ms(self, share: float, now_s: float) -> float:
        """The time within which this ``share`` of the runs was stored; 0 without any. Within a class it is interpolated."""
        self._turn(now_s)
        counts = self._last[0]
        wanted, passed = int(sum(counts) * share), 0
        for at, count in enumerate(counts):
            if wanted <= passed + count:
                begin = _ENDS_MS[at - 1] if at else 0
                end = _ENDS_MS[at] if at < len(_ENDS_MS) else begin
                return begin + (end - begin) * (wanted - passed) / count if count else float(begin)
            passed += count
        return 0.0

    def _turn(self, now_s: float) -> None:
        """Begin another minute, if this one is over."""
        passed_s = now_s - self._began_s
        if passed_s < _MINUTE_S:
            return
        empty = [0] * (len(_ENDS_MS) + 1), [0] * len(_CLASSES)
        self._last = self._now if passed_s < 2 * _MINUTE_S else ([0] * len(empty[0]), [0] * len(empty[1]))
        self._now = empty
        self._began_s = now_s - passed_s % _MINUTE_S
