"""Profiles: sets of defaults for machines of different sizes. A profile sets only the sizes of a *new* store, and the
memory and disk space taken in advance. An existing store keeps its sizes, and every given key overrides the profile.

    key                              dev      small (default)   server
    commit_log.segment_bytes         16 MiB   64 MiB            1 GiB        RocketMQ's own default is server's
    commit_log.preallocate_segments  1        1                 2
    commit_log.warm_ahead_bytes      8 MiB    32 MiB            64 MiB
    index.hash_slots                 50,000   1,000,000         5,000,000
    index.max_items                  200,000  4,000,000         20,000,000
    memory.budget_bytes              32 MiB   0 (75 % of the available memory)
    memory.segment_bytes             4 MiB    16 MiB            16 MiB
    disk after the first message     40 MiB   140 MiB           3.1 GiB

RocketMQ opens a store only with the sizes of its own configuration: the sizes of ``server`` are its defaults; for
another profile its configuration needs them (``mappedFileSizeCommitLog``, ``maxHashSlotNum``, ``maxIndexNum``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

DEFAULT_PROFILE: Final = "small"

PROFILES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "dev": {
        "commit_log": {"segment_bytes": 16 << 20, "preallocate_segments": 1, "warm_ahead_bytes": 8 << 20},
        "index": {"hash_slots": 50_000, "max_items": 200_000},
        "memory": {"budget_bytes": 32 << 20, "segment_bytes": 4 << 20},
    },
    # The defaults of commitmq.config themselves.
    DEFAULT_PROFILE: {},
    "server": {
        "commit_log": {"segment_bytes": 1 << 30, "preallocate_segments": 2, "warm_ahead_bytes": 64 << 20},
        "index": {"hash_slots": 5_000_000, "max_items": 20_000_000},
    },
}
