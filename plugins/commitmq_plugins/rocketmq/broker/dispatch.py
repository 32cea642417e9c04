"""Which part of the broker server answers which request.

Failpoints of a request: ``rocketmq.read.SEND_MESSAGE_V2`` (it was read), ``rocketmq.ask.append:before`` and ``:after`` (a
question to a process of the node, here of its operation append), ``rocketmq.asked.append`` (the answer came),
``rocketmq.done.LOCK_BATCH_MQ`` (what it asks for is done, and its answer is made), ``remoting.answer:before`` and ``:after``
(the answer to the client).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Protocol

from commitmq.errors import CommitMQError, ProtocolError
from commitmq.log import Log
from commitmq.plugin import failpoints
from commitmq_plugins.rocketmq.broker.access import Access
from commitmq_plugins.rocketmq.broker.auditing import CHANGES, Auditing
from commitmq_plugins.rocketmq.broker.codes import refusal_of
from commitmq_plugins.rocketmq.broker.server_counts import ServerCounts
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.errors import RemotingError
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler


class Part(Protocol):
    """A part of the server: the requests that it answers."""

    @property
    def handlers(self) -> Mapping[RequestCode, Handler]: ...


class Dispatch:
    """All parts. Raises ValueError when two of them answer one request."""

    def __init__(
        self,
        parts: Iterable[Part],
        access: Access,
        log: Log,
        counts: ServerCounts | None = None,
        auditing: Auditing | None = None,
    ) -> None:
        self._access, self._log, self._counts = access, log, counts
        self._handlers: dict[int, Handler] = {}
        for part in parts:
            for code, handler in part.handlers.items():
                if code in self._handlers:
                    raise ValueError(f"two parts answer request {code}")
                written = auditing is not None and code in CHANGES
                self._handlers[int(code)] = auditing.of_change(handler) if written and auditing else handler

    def handle(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """The answer to one request, or what will give it."""
        if self._counts is None:
            return self._handled(connection, command)
        began_ns = self._counts.began()
        found = self._handled(connection, command)
        if found is None or isinstance(found, Command):
            self._counts.answered(began_ns, command, found)
            return found
        return self._counted(self._counts, began_ns, command, found)

    @staticmethod
    async def _counted(
        counts: ServerCounts, began_ns: int, command: Command, found: Awaitable[Command | None]
    ) -> Command | None:
        answer = await found
        counts.answered(began_ns, command, answer)
        return answer

    def _handled(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        try:
            refusal = self._access.refusal(connection, command)
            if refusal is not None:
                return refusal
            handler = self._handlers.get(command.code)
            if handler is None:
                return command.not_supported()
            if failpoints.ACTIVE:
                failpoints.hit(f"rocketmq.read.{RequestCode(command.code).name}")
            found = handler(connection, command)
        except Exception as error:
            return self._failed(command, error)
        if found is None or isinstance(found, Command):
            return self._done(command, found)
        return self._later(command, found)

    async def _later(self, command: Command, found: Awaitable[Command | None]) -> Command | None:
        try:
            return self._done(command, await found)
        except Exception as error:
            return self._failed(command, error)

    @staticmethod
    def _done(command: Command, answer: Command | None) -> Command | None:
        """The answer. (A send answers by itself: ``rocketmq.asked.append`` is where it is done.)"""
        if failpoints.ACTIVE and answer is not None:
            failpoints.hit(f"rocketmq.done.{RequestCode(command.code).name}")
        return answer

    def _failed(self, command: Command, error: Exception) -> Command:
        """The answer to an exception: the code that RocketMQ has for what the node refused, else what RocketMQ answers, the
        exception's class and its message (remoting 1.1).
        """
        if isinstance(error, ProtocolError):
            return command.answer(*refusal_of(error))
        if not isinstance(error, CommitMQError):
            self._log.exception("a request failed", code=command.code, error=repr(error))
        elif isinstance(error, RemotingError):
            self._log.debug("a request is wrong", code=command.code, error=str(error))
        return command.answer(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}, {error}")
