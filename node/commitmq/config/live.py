"""Settings that a running node takes with another value: those marked ``live`` in :mod:`commitmq.config.schema`.

A setting is live only if its process re-reads it safely. None of them names a file, a program, an address or a listener:
whoever may change settings must not reach more than a node's limits and intervals (CVE-2023-33246 was such a verb).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

from commitmq.config.schema import NodeConfig, from_mapping, validated


@cache
def live_keys() -> frozenset[str]:
    """``section.key`` of each live setting."""
    config = NodeConfig()
    sections = [one.name for one in fields(config) if is_dataclass(getattr(config, one.name))]
    return frozenset(
        f"{name}.{key.name}" for name in sections for key in fields(getattr(config, name)) if key.metadata.get("live")
    )


def live_values(config: NodeConfig) -> dict[str, dict[str, Any]]:
    """``{section: {key: value}}`` of all live settings, for :func:`with_live_values` in another process."""
    values: dict[str, dict[str, Any]] = {}
    for name in sorted(live_keys()):
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = getattr(getattr(config, section), key)
    return values


def with_live_values(config: NodeConfig, values: Mapping[str, Mapping[str, Any]]) -> NodeConfig:
    """``config`` with ``values``, checked. Raises ConfigError."""
    return replace(validated(from_mapping(values, base=config)), given=config.given, sources=config.sources)
