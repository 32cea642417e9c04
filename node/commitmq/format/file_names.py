"""Names of the files of an offset space: each file's name is the offset of its first byte (spec 1.2)."""

from __future__ import annotations


def segment_name(base_offset: int) -> str:
    """Name of the file that begins at ``base_offset`` bytes: 20 decimal digits."""
    return f"{base_offset:020d}"
