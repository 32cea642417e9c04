"""The version number of a peer as RocketMQ names it."""

from __future__ import annotations

from typing import Final

_FIRST: Final = 212
"""The number of V4_0_0_SNAPSHOT. From there on each release has two numbers, its snapshot's first."""


def version_text(number: int) -> str:
    """``V5_4_0`` for 493."""
    if number < _FIRST:
        return f"a version before V4_0_0 (number {number})"
    steps = number - _FIRST
    major, minor, patch = 4 + steps // 200, steps % 200 // 20, steps % 20 // 2
    return f"V{major}_{minor}_{patch}{'' if steps % 2 else '_SNAPSHOT'}"
