"""Names of files whose place in an offset space is their name (spec 1.2)."""

from __future__ import annotations


def segment_name(base_offset: int) -> str:
    """Name of the file that begins at ``base_offset`` bytes: 20 decimal digits."""
    return f"{base_offset:020d}"
