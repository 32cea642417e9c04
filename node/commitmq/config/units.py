"""Sizes and times with units: ``64MiB``, ``1GB``, ``500ms``, ``3d``. The one parser of configuration, ``--set`` and
CLI.

A setting's name says its unit (``segment_bytes``, ``flush_interval_ms``, ``hours``), and a plain number counts that
unit. A number with another unit is converted, and refused unless the result is a whole number: ``500ms`` is not a whole
number of seconds. Sizes: ``B``, ``KB MB GB TB`` are powers of 1000, ``KiB MiB GiB TiB`` of 1024. Times: ``us ms s min h
d w``. Case does not matter.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

SIZES: Final = {"B": 1, **{f"{prefix}B": 1000**at for at, prefix in enumerate("KMGT", 1)},
                **{f"{prefix}iB": 1024**at for at, prefix in enumerate("KMGT", 1)}}  # fmt: skip
# In microseconds, the smallest unit that any setting counts.
TIMES: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_SIZES_OF_NAMES: Final = {"bytes": 1, "mib": 1 << 20, "gib": 1 << 30}
_TIMES_OF_NAMES: Final = {"us": 1, "ms": 1_000, "s": 1_000_000, "hours": 3_600_000_000}
_TEXT: Final = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_WORDS: Final = {
    "bytes": "bytes", "mib": "MiB", "gib": "GiB", "us": "microseconds", "ms": "milliseconds", "s": "seconds",
    "hours": "hours",
}  # fmt: skip


def unit_of(name: str) -> str:
    """The unit that the numbers of the setting ``name`` count, as the end of its name says; "" for a plain number."""
    last = name.rpartition("_")[2]
    return last if last in _WORDS else ""


def word_of(unit: str) -> str:
    """``unit`` in words: "bytes", "milliseconds"."""
    return _WORDS[unit]


def accepted(unit: str) -> str:
    """Part of an error message: how a value that counts ``unit`` may be written."""
    table = SIZES if unit in _SIZES_OF_NAMES else TIMES
    example = "64MiB" if table is SIZES else "500ms" if unit in ("us", "ms") else "3d"
    return f"a number of {_WORDS[unit]}, or one with a unit ({', '.join(table)}), as in {example}"


def parse(text: str, unit: str) -> int:
    """``text`` as a whole number of ``unit`` (see :func:`unit_of`). Raises ValueError with the accepted forms."""
    exact = _exact(text, unit)
    if exact.denominator != 1:
        raise ValueError(f"{text!r} is no whole number of {_WORDS[unit]}; write {accepted(unit)}")
    return int(exact)


def parse_float(text: str, unit: str) -> float:
    """``text`` as a number of ``unit``; it need not be a whole number. Raises ValueError."""
    return float(_exact(text, unit))


def _exact(text: str, unit: str) -> Fraction:
    table, base = (SIZES, _SIZES_OF_NAMES) if unit in _SIZES_OF_NAMES else (TIMES, _TIMES_OF_NAMES)
    found = _TEXT.fullmatch(text.strip())
    factor = None
    if found is not None:
        wanted = found[2].lower()
        factor = (
            base[unit] if not wanted else next((value for name, value in table.items() if name.lower() == wanted), None)
        )
    if found is None or factor is None:
        raise ValueError(f"{text!r} is not {accepted(unit)}")
    return Fraction(found[1].replace("_", "")) * factor / base[unit]


def human(count: int) -> str:
    """``count`` bytes as a setting writes them, exactly: ``64MiB``, ``131072``."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % SIZES[name] == 0:
            return f"{count // SIZES[name]}{name}"
    return str(count)
