"""Administration of groups: requests 200, 201, 207, 225, 352 and 353 (remoting 1.9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq_plugins.rocketmq.broker.group_reads import READ, GroupReads, all_settings
from commitmq_plugins.rocketmq.broker.names import group_refusal
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import BodyError
from commitmq_plugins.rocketmq.remoting.fastjson import as_list, as_object, dumps, load_object
from commitmq_plugins.rocketmq.remoting.headers.groups import (
    DeleteSubscriptionGroupRequestHeader,
    GroupRequestHeader,
    UpdateGroupForbiddenRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_DEFAULTS: Final[dict[str, Any]] = {
    "consumeEnable": True,
    "consumeFromMinEnable": True,
    "consumeBroadcastEnable": True,
    "consumeMessageOrderly": False,
    "retryQueueNums": 1,
    "retryMaxTimes": 16,
    "brokerId": 0,
    "whichBrokerWhenConsumeSlowly": 1,
    "notifyConsumerIdsChangedEnable": True,
    "groupSysFlag": 0,
    "consumeTimeoutMinute": 15,
    "groupRetryPolicy": {"type": "CUSTOMIZED"},
}
"""What a group gets for members that a request leaves out."""


class AdminGroups:
    """See the module."""

    def __init__(self, node: Node, offsets: Offsets, reads: GroupReads) -> None:
        self._node, self._offsets, self._reads = node, offsets, reads
        self.offsets_gone: list[Callable[[str], None]] = []
        """Hear of a group whose offsets were deleted."""
        self.settings_changed: list[Callable[[str], None]] = [reads.forget]
        """Hear of a group whose settings changed, or which was deleted."""
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self.update_list,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.all,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self.one,
            RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: self.forbid,
        }

    async def update(self, connection: Connection, command: Command) -> Command:
        """Request 200."""
        return (
            await self._update(connection, command, [load_object(command.body)]) if command.body else command.answer()
        )

    async def update_list(self, connection: Connection, command: Command) -> Command:
        """Request 225."""
        wanted = as_list(load_object(command.body).get("groupConfigList"), "groupConfigList")
        return await self._update(connection, command, [as_object(one, "a group") for one in wanted])

    async def _update(self, connection: Connection, command: Command, groups: list[dict[str, Any]]) -> Command:
        for group in groups:
            name = group.get("groupName")
            refused = group_refusal(name if isinstance(name, str) else "")
            if refused is not None:
                return command.answer(ResponseCode.INVALID_PARAMETER, refused)
        try:
            for group in groups:
                await self._put(connection, group)
            await self._reads.sync()
        except BodyError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        await self._node.expect("pop")
        return command.answer()

    async def _put(self, connection: Connection, group: dict[str, Any]) -> None:
        """Raises ProtocolError, BodyError."""
        wanted = {name: group.get(name, default) for name, default in _DEFAULTS.items()}
        wanted = {name: _DEFAULTS[name] if value is None else value for name, value in wanted.items()}
        changes = as_object(group.get("attributes") or {}, "attributes")
        if changes:
            known: dict[str, Any] = {}
            try:
                known = (await self._node.ask("coordinator", "group.config", group=group["groupName"]))["config"]
            except ProtocolError as error:
                if error.code != "GROUP_NOT_EXIST":
                    raise
            wanted["attributes"] = _edited(known.get("attributes") or {}, changes)
        most = self._node.config.groups.max_group_settings_bytes
        if (size := len(dumps(wanted))) > most + len(dumps(_DEFAULTS)):  # not even worth a request to the coordinator
            raise BodyError(f"the settings of a group have {size} bytes (groups.max_group_settings_bytes: {most})")
        more = self._node.on_behalf_of("group.config", connection.user, connection.peer[0])
        await self._node.ask("coordinator", "group.config", group=group["groupName"], set=wanted, **more)
        for hear in self.settings_changed:
            hear(group["groupName"])

    async def all(self, connection: Connection, command: Command) -> Command:
        """Request 201. All groups and their number: a client that asks for pages then has them all with the first."""
        groups, forbidden, version = await all_settings(self._node)
        body = {"dataVersion": version, "forbiddenTable": forbidden, "subscriptionGroupTable": groups}
        return command.answer(ext_fields={"totalGroupNum": str(len(groups))}, body=dumps(body))

    async def one(self, connection: Connection, command: Command) -> Command:
        """Request 352. Where groups are made by themselves, an unknown one is made."""
        group = GroupRequestHeader.decode(command.ext_fields).group
        fields: dict[str, Any] = {}
        if self._node.config.groups.auto_create:
            fields = {"set": {}, **self._node.on_behalf_of("group.config", connection.user, connection.peer[0])}
        try:
            answer = await self._node.ask("coordinator", "group.config", group=group, **fields)
        except ProtocolError as error:
            if error.code == "GROUP_NOT_EXIST":
                return command.answer(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "No group in this broker")
            raise
        return command.answer(body=dumps(answer["config"]))

    async def delete(self, connection: Connection, command: Command) -> Command:
        """Request 207: the settings of a group, and its offsets if asked."""
        header = DeleteSubscriptionGroupRequestHeader.decode(command.ext_fields)
        await self._node.ask("coordinator", "group.delete", group=header.group_name)
        await self._reads.sync()
        for hear in self.settings_changed:
            hear(header.group_name)
        if header.clean_offset:
            await self._offsets.settle(header.group_name)
            await self._node.ask("coordinator", "offset.forget", group=header.group_name)
            for hear in self.offsets_gone:
                hear(header.group_name)
        return command.answer()

    async def forbid(self, connection: Connection, command: Command) -> Command:
        """Request 353: whether a group may read a topic; without ``readable`` only the answer."""
        header = UpdateGroupForbiddenRequestHeader.decode(command.ext_fields)
        fields: dict[str, Any] = {} if header.readable is None else {"readable": header.readable}
        answer = await self._node.ask("coordinator", "group.forbid", group=header.group, topic=header.topic, **fields)
        await self._reads.sync()
        readable = not int(answer["forbidden"]) & READ
        return command.answer(body=dumps({"group": header.group, "readable": readable, "topic": header.topic}))


def _edited(known: dict[str, Any], changes: dict[str, Any]) -> dict[str, str]:
    """The attributes after changes whose names have a sign in front; one without a sign is added."""
    found = {str(name): str(value) for name, value in known.items()}
    for name, value in changes.items():
        if name.startswith("-"):
            found.pop(name[1:], None)
        else:
            found[name.removeprefix("+")] = str(value)
    return found
