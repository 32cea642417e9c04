"""What RocketMQ's clients and tools leave in the node's audit log: changes, refusals, and first uses.

A request that only reads or sends costs nothing here but on a node with users. What the node's own processes do for a change
has lines of theirs too, without the user.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from commitmq.plugin import Actor, AuditLog, Event
from commitmq.security.resource import Resource
from commitmq.security.signature import ACCESS_KEY
from commitmq_plugins.rocketmq.broker.rights import needs_of
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import RemotingError
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

PROTOCOL: Final = "rocketmq"
_RC = RequestCode
CHANGES: Final = frozenset(
    (
        _RC.UPDATE_AND_CREATE_TOPIC,
        _RC.UPDATE_AND_CREATE_TOPIC_LIST,
        _RC.DELETE_TOPIC_IN_BROKER,
        _RC.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        _RC.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        _RC.DELETE_SUBSCRIPTIONGROUP,
        _RC.INVOKE_BROKER_TO_RESET_OFFSET,
        _RC.CLONE_GROUP_OFFSET,
        _RC.UPDATE_AND_GET_GROUP_FORBIDDEN,
        _RC.RESUME_CHECK_HALF_MESSAGE,
        _RC.SET_MESSAGE_REQUEST_MODE,
        _RC.UPDATE_BROKER_CONFIG,
        _RC.CLEAN_EXPIRED_CONSUMEQUEUE,
        _RC.CLEAN_UNUSED_TOPIC,
        _RC.DELETE_EXPIRED_COMMITLOG,
    )
)
"""Requests that change the node. Those about users are not among them: the file of users writes its changes down itself."""
_SHOWN: Final = (
    "topic",
    "readQueueNums",
    "writeQueueNums",
    "perm",
    "order",
    "topicFilterType",
    "attributes",
    "group",
    "groupName",
    "srcGroup",
    "destGroup",
    "timestamp",
    "offset",
    "queueId",
    "isForce",
    "readable",
    "msgId",
)
"""Fields of a change that the audit log shows."""
_NAMES: Final = {int(one): one.name for one in RequestCode}


def name_of(code: int) -> str:
    """RocketMQ's name of a request."""
    return _NAMES.get(code) or str(code)


def actor_of(connection: Connection, command: Command) -> Actor:
    """Who sends a request: the user that has signed it."""
    return Actor(command.ext_fields.get(ACCESS_KEY, ""), PROTOCOL, connection.peer[0])


class Auditing:
    """See the module."""

    def __init__(self, audit: AuditLog, cluster: str) -> None:
        self._audit, self._cluster = audit, cluster

    def refused(self, connection: Connection, command: Command, reason: str, resource: str = "") -> None:
        """Write that a request was refused."""
        actor = actor_of(connection, command)
        self._audit.refused(actor, name_of(command.code), resource, reason, command.opaque)

    def used(self, connection: Connection, command: Command, user: str, resource: Resource) -> None:
        """Write the first use of a resource by a user in an hour."""
        operation = name_of(command.code)
        if self._audit.is_first(user, operation, resource.name) and command.code not in CHANGES:
            self._audit.used(Event(actor_of(connection, command), operation, str(resource), request=command.opaque))

    def of_change(self, handler: Handler) -> Handler:
        """``handler`` of a request in CHANGES, which goes to the audit log first."""

        def handle(connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
            event = self._event(connection, command)
            self._audit.change(event)
            try:
                found = handler(connection, command)
            except Exception as error:
                self._audit.failed(event, f"{error}")
                raise
            if found is None or isinstance(found, Command):
                return self._judged(event, found)
            return self._later(event, found)

        return handle

    async def _later(self, event: Event, found: Awaitable[Command | None]) -> Command | None:
        try:
            return self._judged(event, await found)
        except Exception as error:
            self._audit.failed(event, f"{error}")
            raise

    def _judged(self, event: Event, answer: Command | None) -> Command | None:
        if answer is not None and answer.code != ResponseCode.SUCCESS:
            self._audit.failed(event, answer.remark or f"code {answer.code}")
        return answer

    def _event(self, connection: Connection, command: Command) -> Event:
        try:
            needs = needs_of(command, self._cluster) or []
        except RemotingError:
            needs = []
        fields = {name: command.ext_fields[name][:200] for name in _SHOWN if name in command.ext_fields}
        resource = ",".join(str(one) for one, _ in needs)
        actor = actor_of(connection, command)
        return Event(actor, name_of(command.code), resource, request=command.opaque, after=fields or None)
