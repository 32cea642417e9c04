"""The operation ``group.broadcast``: a consumer of a group that broadcasts asks whether it may (remoting 4.2, step 7).

Such a consumer is no member: it reads all queues, and keeps its positions itself.
"""

from __future__ import annotations

from commitmq.coordination import requests
from commitmq.coordination.answers import Answer, Operations
from commitmq.coordination.groups import Groups
from commitmq.coordination.requests import Header
from commitmq.errors import ProtocolError


class BroadcastOperations:
    """See the module; :attr:`operations` has it by name."""

    def __init__(self, groups: Groups, broker_name: str) -> None:
        self._groups, self._broker_name = groups, broker_name
        self.operations: Operations = {"group.broadcast": self._broadcast}

    def _broadcast(self, header: Header, now_ms: int) -> Answer:
        group = requests.text(header, "group")
        self._groups.use(group)
        if not self._groups.config_of(group).settings.get("consumeBroadcastEnable", True):
            raise ProtocolError("NO_PERMISSION", f"group {group} may not broadcast: its consumeBroadcastEnable is off")
        return Answer(lambda: {"broker": self._broker_name})
