"""Deletes a topic and a group of the doctor, and looks whether they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from commitmq_plugins.rocketmq.doctor.names import NameServers
from commitmq_plugins.rocketmq.doctor.peer import Peer
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.errors import RemotingError
from commitmq_plugins.rocketmq.remoting.headers.groups import DeleteSubscriptionGroupRequestHeader
from commitmq_plugins.rocketmq.remoting.headers.namesrv import DeleteTopicFromNamesrvRequestHeader
from commitmq_plugins.rocketmq.remoting.headers.topics import TopicRequestHeader

_ROUNDS: Final = 3
_PAUSE_S: Final = 0.3
_Result = TypeVar("_Result")


async def finished(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of ``work``, which is not interrupted: a cancellation meanwhile is raised after its end."""
    task = asyncio.ensure_future(work)
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            interrupted = error
        except Exception:
            break
    if interrupted is not None:
        task.exception()
        raise interrupted
    return task.result()


class Removal:
    """A registration that was under way may bring a topic back, so a topic that is still there is deleted again."""

    def __init__(self, names: NameServers, broker: Peer, name: str) -> None:
        self._names, self._broker, self._name = names, broker, name

    async def run(self) -> list[str]:
        """What is left, and why; empty when everything is gone. Raises nothing."""
        left: list[str] = []
        for round_number in range(_ROUNDS):
            if round_number:
                await asyncio.sleep(_PAUSE_S)
            left = await self._delete()
            if not left:
                break
        return left

    async def _delete(self) -> list[str]:
        left = []
        # A group may have topics of its own as soon as it is used.
        topics = [self._name, f"%RETRY%{self._name}", f"%DLQ%{self._name}"]
        group = DeleteSubscriptionGroupRequestHeader(self._name, clean_offset=True).encode()
        try:
            for topic in topics:
                await self._broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequestHeader(topic).encode())
            await self._broker.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, group)
            for topic in topics:
                answer = await self._broker.answer(RequestCode.GET_TOPIC_CONFIG, TopicRequestHeader(topic).encode())
                if answer.code == ResponseCode.SUCCESS:
                    left.append(f"{self._broker.address} still has topic {topic}")
        except RemotingError as error:
            left.append(f"{self._broker.address}: {error}")
        for peer in self._names.peers:
            left += await self._forgotten(peer, topics)
        return left

    async def _forgotten(self, peer: Peer, topics: list[str]) -> list[str]:
        """Let a name server forget the topics. Returns what it keeps."""
        left = []
        try:
            for topic in topics:
                header = DeleteTopicFromNamesrvRequestHeader(topic)
                await peer.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, header.encode())
                if await self._names.route(peer, topic) is not None:
                    left.append(f"{peer.address} still has topic {topic}")
        except RemotingError as error:
            left.append(f"{peer.address}: {error}")
        return left
