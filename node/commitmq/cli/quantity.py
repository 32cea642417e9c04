"""Options that are sizes or times: plain numbers count what the option says, others have a unit (:mod:`commitmq.units`)."""

from __future__ import annotations

from typing import Any

import click

from commitmq import units


class Quantity(click.ParamType):  # type: ignore[type-arg]
    """A number of ``unit`` (a name that :func:`commitmq.units.unit_of` gives), from ``low`` to ``high``."""

    def __init__(self, unit: str, *, low: float = 0, high: float | None = None, whole: bool = True) -> None:
        self.unit, self.low, self.high, self.whole = unit, low, high, whole
        self.name = "size" if unit in ("bytes", "mib", "gib") else "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found: float = value if not isinstance(value, str) else self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found < self.low or (self.high is not None and found > self.high):
            most = "" if self.high is None else f" and at most {self.high:g}"
            self.fail(
                f"{value} is out of range: at least {self.low:g}{most}, in {units.word_of(self.unit)}", param, ctx
            )
        return found

    def _parse(self, text: str) -> float:
        return units.parse(text, self.unit) if self.whole else units.parse_float(text, self.unit)


def seconds(low: float = 0) -> Quantity:
    """Seconds, or any time."""
    return Quantity("s", low=low, whole=False)
