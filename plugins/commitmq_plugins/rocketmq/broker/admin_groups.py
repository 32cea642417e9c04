"""Administration of groups: requests 200, 201, 207, 225, 352 and 353 (remoting 1.9).

Settings are the coordinator's. What a group must not read is kept here too, because every pull asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq_plugins.rocketmq.broker.codes import refusal_of
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

_READ: Final = 1 << 2
_SYSTEM_PREFIX: Final = "CID_RMQ_SYS_"
_SYSTEM_GROUPS: Final = frozenset(
    ("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY", "CID_ONSAPI_PULL",
     "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER")
)  # fmt: skip
_FOUND_S: Final = 5.0
_MOST_FOUND: Final = 10_000
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

    def __init__(self, node: Node, offsets: Offsets) -> None:
        self._node, self._offsets = node, offsets
        self.forbidden: dict[str, set[str]] = {}
        """Group: topics that it must not read."""
        self.disabled: set[str] = set()
        """Groups whose consumeEnable a tool has switched off: their pulls are refused."""
        self.offsets_gone: list[Callable[[str], None]] = []
        """Hear of a group whose offsets were deleted."""
        self.settings_changed: list[Callable[[str], None]] = [self._forget]
        """Hear of a group whose settings changed, or which was deleted."""
        self._found: dict[str, float] = {}
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self.update_list,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.all,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self.one,
            RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: self.forbid,
        }

    async def everything(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any]]:
        """Settings of all groups by name, what they must not read, and the version of both. Raises ProtocolError."""
        groups: dict[str, dict[str, Any]] = {}
        forbidden: dict[str, Any] = {}
        after: str | None = None
        while True:
            answer = await self._node.ask("coordinator", "group.configs", after=after)
            groups |= {one["groupName"]: one for one in answer["configs"]}
            forbidden |= answer["forbidden"]
            if answer["next"] is None:
                return groups, forbidden, answer["version"]
            after = str(answer["next"])

    async def load(self) -> None:
        """Learn what groups must not read, and which must not read at all. Raises ProtocolError."""
        groups, forbidden, _ = await self.everything()
        self.disabled = {name for name, one in groups.items() if one.get("consumeEnable") is False}
        self.forbidden = {
            group: {topic for topic, bits in topics.items() if bits & _READ} for group, topics in forbidden.items()
        }

    def may_be_missing(self, group: str) -> bool:
        """Whether :meth:`is_missing` has to be asked. Where groups are made by themselves none is missing, and RocketMQ's own
        never are (spec 1.5).
        """
        if self._node.config.groups.auto_create or group in _SYSTEM_GROUPS or group.startswith(_SYSTEM_PREFIX):
            return False
        return time.monotonic() - self._found.get(group, -_FOUND_S) >= _FOUND_S

    async def is_missing(self, group: str) -> bool:
        """Whether there is no such group. One that was found counts as there for some seconds (spec 9.4)."""
        try:
            await self._node.ask("coordinator", "group.config", group=group)
        except ProtocolError as error:
            return error.code in ("GROUP_NOT_EXIST", "INVALID_PARAMETER")
        if len(self._found) >= _MOST_FOUND:
            self._found.clear()
        self._found[group] = time.monotonic()
        return False

    def _forget(self, group: str) -> None:
        self._found.pop(group, None)

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
        except ProtocolError as error:
            return command.answer(*refusal_of(error))
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
        (self.disabled.discard if wanted["consumeEnable"] else self.disabled.add)(group["groupName"])
        for hear in self.settings_changed:
            hear(group["groupName"])

    async def all(self, connection: Connection, command: Command) -> Command:
        """Request 201. All groups and their number: a client that asks for pages then has them all with the first."""
        try:
            groups, forbidden, version = await self.everything()
        except ProtocolError as error:
            return command.answer(*refusal_of(error))
        body = {"dataVersion": version, "forbiddenTable": forbidden, "subscriptionGroupTable": groups}
        return command.answer(ext_fields={"totalGroupNum": str(len(groups))}, body=dumps(body))

    async def one(self, connection: Connection, command: Command) -> Command:
        """Request 352. Where groups are made by themselves, an unknown one is made."""
        group = GroupRequestHeader.decode(command.ext_fields).group
        fields: dict[str, Any] = {"set": {}} if self._node.config.groups.auto_create else {}
        try:
            answer = await self._node.ask("coordinator", "group.config", group=group, **fields)
        except ProtocolError as error:
            if error.code == "GROUP_NOT_EXIST":
                return command.answer(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "No group in this broker")
            return command.answer(*refusal_of(error))
        return command.answer(body=dumps(answer["config"]))

    async def delete(self, connection: Connection, command: Command) -> Command:
        """Request 207: the settings of a group, and its offsets if asked."""
        header = DeleteSubscriptionGroupRequestHeader.decode(command.ext_fields)
        try:
            await self._node.ask("coordinator", "group.delete", group=header.group_name)
            self.forbidden.pop(header.group_name, None)
            self.disabled.discard(header.group_name)
            for hear in self.settings_changed:
                hear(header.group_name)
            if header.clean_offset:
                await self._offsets.settle(header.group_name)
                await self._node.ask("coordinator", "offset.forget", group=header.group_name)
                for hear in self.offsets_gone:
                    hear(header.group_name)
        except ProtocolError as error:
            return command.answer(*refusal_of(error))
        return command.answer()

    async def forbid(self, connection: Connection, command: Command) -> Command:
        """Request 353: whether a group may read a topic; without ``readable`` only the answer."""
        header = UpdateGroupForbiddenRequestHeader.decode(command.ext_fields)
        fields: dict[str, Any] = {} if header.readable is None else {"readable": header.readable}
        try:
            answer = await self._node.ask(
                "coordinator", "group.forbid", group=header.group, topic=header.topic, **fields
            )
        except ProtocolError as error:
            return command.answer(*refusal_of(error))
        readable = not int(answer["forbidden"]) & _READ
        topics = self.forbidden.setdefault(header.group, set())
        if readable:
            topics.discard(header.topic)
        else:
            topics.add(header.topic)
        if not topics:
            del self.forbidden[header.group]
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
