"""The options of ``df.write.format("commitmq")`` and ``writeStream``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from commitmq.errors import ConfigError
from commitmq.format.producer_mark import is_producer_id

_NAMES: Final = ("node", "topic", "sinkId", "epoch", "ack", "timeoutSeconds", "idempotent")
_ALSO_GIVEN: Final = ("path", "checkpointlocation")  # Spark's own
_MAX_SINK_ID: Final = 56
_DEFAULT_TIMEOUT_S: Final = 120


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options of ``write`` and ``writeStream``, checked. ``sink_id`` is empty when it is absent."""

    node: str | None = None
    topic: str = ""
    sink_id: str = ""
    epoch: int = 0
    ack: str = "flushed"
    timeout_s: int = _DEFAULT_TIMEOUT_S
    idempotent: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Raises ConfigError with the option's name and its possible values."""
        values = {name.lower(): value for name, value in options.items()}
        unknown = sorted(set(values) - {name.lower() for name in _NAMES} - set(_ALSO_GIVEN))
        if unknown:
            raise ConfigError(f"there is no option {unknown[0]!r} for writing; options are {', '.join(_NAMES)}")
        sink_id = values.get("sinkid", "")
        if sink_id and (not is_producer_id(sink_id) or len(sink_id) > _MAX_SINK_ID):
            raise ConfigError(f"option sinkId: it is 1 to {_MAX_SINK_ID} letters, digits and ._-/@+=, not {sink_id!r}")
        if (ack := values.get("ack", "flushed")) not in ("flushed", "memory"):
            raise ConfigError(f"option ack: it is flushed or memory, not {ack!r}")
        if (once := values.get("idempotent", "true").strip().lower()) not in ("true", "false"):
            raise ConfigError(f"option idempotent: it is true or false, not {once!r}")
        return cls(
            values.get("node") or values.get("path") or None,
            values.get("topic", ""),
            sink_id,
            _number("epoch", values, 0),
            ack,
            max(1, _number("timeoutSeconds", values, _DEFAULT_TIMEOUT_S)),
            once == "true",
        )


def _number(name: str, values: Mapping[str, str], default: int) -> int:
    text = values.get(name.lower(), str(default)).strip()
    if not text.isdecimal():
        raise ConfigError(f"option {name}: it is a number from 0 on, not {text!r}")
    return int(text)
