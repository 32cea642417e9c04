"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

_LONGEST: Final = 400
_MARKS: Final = {"ok": "ok", "warning": "??", "failed": "FAILED", "unknown": "-"}


class State(StrEnum):
    """How a check ended. ``UNKNOWN``: it could not be made."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """``check`` is the same word in every report, ``where`` the server, broker or topic; ``advice`` what to do."""

    state: State
    check: str
    where: str
    detail: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: plain(str(value)) for name, value in asdict(self).items()}

    def line(self) -> str:
        """One line for people."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{_MARKS[self.state]:8}" + plain(f"{self.check} {self.where}: {self.detail}{advice}")


Report = Callable[[Finding], None]
"""Takes each finding as soon as it is there."""


def plain(text: str) -> str:
    """``text`` on one line. Servers' texts are anybody's: no control characters, and not endless."""
    shown = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in " ".join(text.split()))
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
