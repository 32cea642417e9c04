"""Missing messages: the error that lists them, or a report when reading continues."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from commitmq.errors import CommitMQError
from commitmq.files import atomic_file
from commitmq.log import get_log

_SHOWN: Final = 10
_log = get_log("spark")


@dataclass(frozen=True, slots=True)
class Gap:
    """Queue offsets ``[first, end)`` of one queue that cannot be read, and why."""

    store: str
    topic: str
    queue_id: int
    first: int
    end: int
    reason: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.queue_id} [{self.first}, {self.end}) of {self.store}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class DataLossError(CommitMQError):
    """Requested messages are missing; ``gaps`` lists them."""

    def __init__(self, gaps: Iterable[Gap]) -> None:
        self.gaps = list(gaps)
        shown = "; ".join(map(str, self.gaps[:_SHOWN]))
        more = f"; and {len(self.gaps) - _SHOWN} more" if len(self.gaps) > _SHOWN else ""
        super().__init__(f"messages are missing: {shown}{more}. With failOnDataLoss=false they are passed over")

    def __reduce__(self) -> tuple[type[DataLossError], tuple[list[Gap]]]:
        return (DataLossError, (self.gaps,))


@dataclass(frozen=True, slots=True)
class GapPolicy:
    """``fail``: raise. Otherwise gaps are logged, and written to a file of their own in ``folder`` unless that is empty."""

    fail: bool = True
    folder: str = ""

    def take(self, gaps: Iterable[Gap]) -> None:
        """Handle the gaps found at one time. Raises DataLossError."""
        found = coalesced(gaps)
        if not found:
            return
        if self.fail:
            raise DataLossError(found)
        for gap in found:
            _log.warning("messages are missing and were passed over", **gap.to_json())
        if self.folder:
            folder = Path(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            name = f"gaps-{secrets.token_hex(8)}.jsonl"
            text = "".join(json.dumps(gap.to_json()) + "\n" for gap in found)
            # Hidden, so that a program that reads the whole folder finds only complete files.
            atomic_file.replace(folder / name, text.encode(), "gaps", durable=False, mode=0o666, hidden=True)


def coalesced(gaps: Iterable[Gap]) -> list[Gap]:
    """``gaps`` by queue and offset, neighbours with one reason merged, empty ones left out."""
    result: list[Gap] = []
    for gap in sorted(gaps, key=lambda one: (one.store, one.topic, one.queue_id, one.first)):
        if gap.first >= gap.end:
            continue
        last = result[-1] if result else None
        if (
            last is not None
            and (last.store, last.topic, last.queue_id, last.reason) == (gap.store, gap.topic, gap.queue_id, gap.reason)
            and last.end >= gap.first
        ):
            result[-1] = Gap(last.store, last.topic, last.queue_id, last.first, max(last.end, gap.end), last.reason)
        else:
            result.append(gap)
    return result
