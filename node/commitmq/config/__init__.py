"""The node's configuration: keys, profiles, units, and how they fit a store that exists."""

from __future__ import annotations

from commitmq.config.loading import load
from commitmq.config.schema import (
    MEMORY_LEAST_SEGMENTS,
    DispatchConfig,
    FilterConfig,
    GroupsConfig,
    MetricsConfig,
    NetworkConfig,
    NodeConfig,
    PopConfig,
    ReaderConfig,
    from_mapping,
    section_from,
    setting,
    validated,
)

__all__ = [
    "MEMORY_LEAST_SEGMENTS",
    "DispatchConfig",
    "FilterConfig",
    "GroupsConfig",
    "MetricsConfig",
    "NetworkConfig",
    "NodeConfig",
    "PopConfig",
    "ReaderConfig",
    "from_mapping",
    "load",
    "section_from",
    "setting",
    "validated",
]
