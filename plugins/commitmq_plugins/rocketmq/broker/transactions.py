"""Transactions: END_TRANSACTION of producers, and the checks of transactions without an end (remoting 3.9, 8.4).

The transaction process of the node keeps all state. While it runs, this server tells it every few seconds which producer
groups are connected, user by user; its checks go to one producer of the group each. A death on either side costs a check,
which comes again.

A check shows a half message. Nobody asks for a right to a producer group, as at RocketMQ: so a check goes to a connection
whose user may send to the topic of the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from commitmq.errors import CorruptRecordError, ProtocolError
from commitmq.format.constants import Property
from commitmq.format.record import decode_record
from commitmq.log import Log
from commitmq.security.native_rights import PUB
from commitmq.semantics.transaction import HALF_TOPIC
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.node import SERVICE_NOT_AVAILABLE, NodeClient, response_code
from commitmq_plugins.rocketmq.broker.rights import Access
from commitmq_plugins.rocketmq.broker.sending import stored_record
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from commitmq_plugins.rocketmq.remoting.headers import (
    CheckTransactionStateRequestHeader,
    EndTransactionRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

_PERIOD_S: Final = 5.0
_LOOK_S: Final = 0.5
_GROUPS_A_REQUEST: Final = 500
_END_TIMEOUT_S: Final = 10.0
_DECISIONS: Final = {8: "commit", 12: "rollback"}


class EndTransactionProcessor:
    """The ends and checks of transactions."""

    def __init__(
        self,
        node: NodeClient,
        clients: ClientManager,
        loop: asyncio.AbstractEventLoop,
        log: Log,
        counting: Counting,
        access: Access,
    ) -> None:
        self._node, self._clients, self._log, self._counting = node, clients, log, counting
        self._access = access
        self._broker_name = node.config.network.broker_name
        self._new: set[str] = set()
        self._line_number = 0
        node.on_check = self._check
        clients.producers_changed.append(self._changed)
        self._registering = loop.create_task(self._register())
        self.handlers: dict[RequestCode, Handler] = {RequestCode.END_TRANSACTION: self.end}

    def close(self) -> None:
        self._registering.cancel()

    async def end(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 37. UNKNOWN leaves the transaction open: a check will ask again.

        Rights belong to the topic that the request names, so the transaction must be of it. Older clients name none.
        """
        header = EndTransactionRequestHeader.decode(command.ext_fields)
        decision = _DECISIONS.get(header.commit_or_rollback)
        if decision is None:
            return command.answer()
        fields: dict[str, Any] = {
            "group": header.producer_group,
            "queue_offset": header.tran_state_table_offset,
            "physical_offset": header.commit_log_offset,
            "decision": decision,
        }
        if header.from_transaction_check:
            fields["from_check"] = True
        named = header.topic if header.topic != HALF_TOPIC else None
        try:
            if self._access.asks(connection):
                if named:
                    fields["topic"] = named
                elif (refused := await self._lacks(connection, command, header.commit_log_offset)) is not None:
                    return refused
            await self._node.mover("transaction", "transaction.end", timeout_s=_END_TIMEOUT_S, **fields)
        except ProtocolError as error:
            self._log.info("a transaction is not ended", group=header.producer_group, id=header.msg_id,
                           decision=decision, code=error.code, error=error.message)  # fmt: skip
            code = response_code(error.code)
            return command.answer(
                ResponseCode.SYSTEM_ERROR if error.code == "TRANSACTION_ENDED" else code, error.message
            )
        if decision == "commit" and named:
            self._counting.stored(named, 1, 0)
        return command.answer()

    async def _lacks(self, connection: RemotingConnection, command: Command, physical_offset: int) -> Command | None:
        """The answer when the user may not end the transaction of the half message there; None also where there is none."""
        half = await stored_record(self._node, physical_offset)
        topic = None if half is None else half.properties.get(Property.REAL_TOPIC)
        return None if topic is None else self._access.lacks(connection, command, (topic,), PUB)

    # ------------------------------------------------------------ checks

    def _changed(self, group: str) -> None:
        if group in self._clients.registry.producers:
            self._new.add(group)

    async def _register(self) -> None:
        """Tell the transaction process of the groups, while it runs: it begins with the first half message."""
        socket = self._node.layout.sockets / "transaction.ipc"
        due = 0.0
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            producers = self._clients.registry.producers
            if not producers or not socket.exists():
                continue
            connections = self._node.line("transaction").connections
            if loop.time() >= due or connections != self._line_number:
                due, self._line_number = loop.time() + _PERIOD_S, connections
                groups: Iterable[str] = producers
            else:
                groups = self._new & producers.keys()
            self._new = set()
            for user, names in self._by_user(groups).items():
                if not await self._tell(user, sorted(names)):
                    break

    def _by_user(self, groups: Iterable[str]) -> dict[str, set[str]]:
        """The users whose connections produce in ``groups``, and in which of them."""
        found: dict[str, set[str]] = {}
        for group in groups:
            for link in self._clients.registry.producers[group]:
                found.setdefault(link.user, set()).add(group)
        return found

    async def _tell(self, user: str, groups: list[str]) -> bool:
        """Register the groups of a user. What is refused stands in nobody's way. False when the process does not answer."""
        op = "transaction.register"
        behalf = self._node.on_behalf_of(op, user)
        for at in range(0, len(groups), _GROUPS_A_REQUEST):
            try:
                await self._node.ask("transaction", op, groups=groups[at : at + _GROUPS_A_REQUEST], **behalf)
            except ProtocolError as error:
                self._log.debug("producer groups are not registered", user=user, code=error.code, error=error.message)
                if error.code == SERVICE_NOT_AVAILABLE:
                    return False
        return True

    def _check(self, check: dict[str, Any], frames: list[bytes]) -> None:
        """Pass a check on to one producer of its group. Without one, a later check asks again."""
        group = str(check["group"])
        if not frames or (topic := _topic_of(frames[0])) is None:
            return
        link = self._clients.registry.producer(group, lambda one: self._access.may(one, topic, PUB))
        if link is None:
            if group in self._clients.registry.producers:
                self._log.info(
                    "no producer of the group may send to the topic of its half message", group=group, topic=topic
                )
            return
        unique = str(check["unique_id"])
        header = CheckTransactionStateRequestHeader(
            tran_state_table_offset=int(check["queue_offset"]),
            commit_log_offset=int(check["physical_offset"]),
            topic=HALF_TOPIC,
            msg_id=unique,
            transaction_id=unique,
            offset_msg_id=str(check["offset_msg_id"]),
            broker_name=self._broker_name,
        )
        link.send(request(RequestCode.CHECK_TRANSACTION_STATE, header.encode(), frames[0], oneway=True))


def _topic_of(record: bytes) -> str | None:
    """The topic of the message of a check; None for no message."""
    try:
        return decode_record(record, with_body=False).topic
    except (CorruptRecordError, ValueError):
        return None
