"""Options that are numbers: sizes and times, where plain numbers count what the option says and others have a unit
(:mod:`commitmq.config.units`); queues and offsets, which the files of a store keep in 32 and 64 bits.
"""

from __future__ import annotations

from typing import Any, Final

import click

from commitmq.config import units

MAX_INT: Final = (1 << 31) - 1
MAX_LONG: Final = (1 << 63) - 1
_MAX_S: Final = 1_000_000_000  # more than any call of the system's takes is no time to wait


class Quantity(click.ParamType):  # type: ignore[type-arg]
    """A number of ``unit`` (a name that :func:`commitmq.config.units.unit_of` gives), from ``low`` to ``high``."""

    def __init__(self, unit: str, *, low: float = 0, high: float | None = None, whole: bool = True) -> None:
        self.unit, self.low, self.high, self.whole = unit, low, high, whole
        self.name = "size" if unit in ("bytes", "mib", "gib") else "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found: float = value if not isinstance(value, str) else self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found < self.low or (self.high is not None and found > self.high):
            most = "" if self.high is None else f" and at most {self.high:.15g}"
            self.fail(
                f"{value} is out of range: at least {self.low:g}{most}, in {units.word_of(self.unit)}", param, ctx
            )
        return found

    def _parse(self, text: str) -> float:
        return units.parse(text, self.unit) if self.whole else units.parse_float(text, self.unit)


def seconds(low: float = 0) -> Quantity:
    """Seconds, or any time."""
    return Quantity("s", low=low, high=_MAX_S, whole=False)


def long(digits: str, option: str) -> int:
    """The offset or time in ms that ``digits`` are. Raises BadParameter for what no store can have."""
    # Not more digits than that: Python refuses thousands of them with words of its own.
    if len(digits.lstrip("0")) > len(str(MAX_LONG)) or int(digits) > MAX_LONG:
        shown = digits if len(digits) <= 40 else f"{digits[:40]}…"
        raise click.BadParameter(f"{shown} is too large: the largest is {MAX_LONG}", param_hint=option)
    return int(digits)
