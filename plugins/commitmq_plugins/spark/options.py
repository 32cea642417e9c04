"""What may be said with ``.option(name, value)``. Names are compared without case, as Spark does.

Each kind of value has one reader here; a name that nobody knows is refused, because a misspelt ``endingOffsets`` would
otherwise read everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from commitmq.errors import ConfigError

_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")
DEFAULT_PARTITION_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of ``read`` and ``readStream``, checked. Sizes in bytes."""

    stores: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    min_partitions: int | None = None
    max_bytes_per_partition: int = DEFAULT_PARTITION_BYTES
    include_properties: bool = True
    decompress: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Raises ConfigError with the option's name and what it may be."""
        values = {name.lower(): value for name, value in options.items()}
        known = {name.lower() for name in _NAMES}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"there is no option {unknown[0]!r}; options are {', '.join(_NAMES)}")
        stores = tuple(_words(values.get("store", values.get("path", ""))))
        if not stores:
            raise ConfigError("option store: say which store folder to read")
        return cls(
            stores=stores,
            topics=tuple(_words(values.get("topics", ""))),
            min_partitions=_positive("minPartitions", values),
            max_bytes_per_partition=_positive("maxBytesPerPartition", values) or DEFAULT_PARTITION_BYTES,
            include_properties=_flag("includeProperties", values, True),
            decompress=_flag("decompress", values, False),
        )


_NAMES: Final = (
    "store", "path", "topics", "minPartitions", "maxBytesPerPartition", "includeProperties", "decompress",
)  # fmt: skip


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _flag(name: str, values: Mapping[str, str], default: bool) -> bool:
    text = values.get(name.lower())
    if text is None:
        return default
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise ConfigError(f"option {name}: it is true or false, not {text!r}")


def _positive(name: str, values: Mapping[str, str]) -> int | None:
    text = values.get(name.lower())
    if text is None:
        return None
    if not text.strip().isdecimal() or not int(text):
        raise ConfigError(f"option {name}: it is a number above 0, not {text!r}")
    return int(text)
