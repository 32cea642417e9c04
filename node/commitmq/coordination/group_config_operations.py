"""The operation ``group.config``: the settings of a group in ``subscriptionGroup.json``, under RocketMQ's names."""

from __future__ import annotations

from commitmq.coordination import requests
from commitmq.coordination.answers import Answer, Operations
from commitmq.coordination.group_settings import check_name
from commitmq.coordination.groups import Groups
from commitmq.coordination.requests import Header
from commitmq.errors import ProtocolError
from commitmq.log import get_log


class GroupConfigOperations:
    """See the module; :attr:`operations` has it by name."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._log = get_log("coordinator")
        self.operations: Operations = {"group.config": self._config}

    def _config(self, header: Header, now_ms: int) -> Answer:
        """Without ``set`` the settings of a group that exists. With it they are changed, and a group may be made so; the
        answer comes when the file has them.
        """
        name = requests.text(header, "group")
        check_name(name)
        changes = header.get("set")
        if changes is None:
            known = self._groups.table.groups.get(name)
            if known is None:
                raise ProtocolError("GROUP_NOT_EXIST", f"there is no group {name!r}")
            fields = {"config": known.to_json()}
            return Answer(lambda: fields)
        if type(changes) is not dict:
            raise requests.refuse("set", "an object of settings", changes)
        self._groups.configure(name, changes)
        self._log.info("group configured", group=name, **{str(key)[:100]: value for key, value in changes.items()})
        fields = {"config": self._groups.config_of(name).to_json()}
        return Answer(lambda: fields, "groups")
