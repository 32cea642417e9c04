"""DataVersion: says whether a table changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commitmq_plugins.rocketmq.remoting.fastjson import as_int, as_object


@dataclass(frozen=True, slots=True)
class DataVersion:
    """``timestamp`` in ms is the time of the last change, ``counter`` the number of changes."""

    timestamp: int = 0
    counter: int = 0
    state_version: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}

    @classmethod
    def from_json(cls, value: Any) -> DataVersion:
        if value is None:
            return cls()
        members = as_object(value, "a data version")
        return cls(
            as_int(members.get("timestamp", 0), "timestamp"),
            as_int(members.get("counter", 0), "counter"),
            as_int(members.get("stateVersion", 0), "stateVersion"),
        )
