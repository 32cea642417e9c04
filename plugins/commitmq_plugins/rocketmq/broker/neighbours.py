"""The queues that other brokers of the cluster have of a topic, as the name servers know them (remoting 7.1).

Clients of RocketMQ share out the queues of all brokers by one rule (remoting 6.1). The node's coordinator knows the node's own
queues only, so for a topic that is spread over several brokers it would give them to other clients than the rule does.

    * The groups of a topic that is spread have no members at the coordinator for it. Their clients alone share it out.
    * A topic stays spread for a minute after its last other broker went, because clients hear of that up to 30 s later.
    * The file ``neighbours.json`` has the spread topics. A name server that starts with the node knows other brokers half a
      minute later only, and their clients work on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commitmq.files import atomic_file
from commitmq.log import Log
from commitmq_plugins.rocketmq.remoting.bodies import PERM_READ, ClusterInfo, TopicRouteData
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import MessageQueue, as_list, as_text, dumps, load_object, loads
from commitmq_plugins.rocketmq.remoting.frame import Command, PeerSilentError, RemotingError, request
from commitmq_plugins.rocketmq.remoting.headers import TopicRequestHeader

_MASTER_ID: Final = 0
_PERIOD_S: Final = 3.0
_ROUTE_S: Final = 10.0
_REMEMBER_S: Final = 60.0
_PATIENCE_S: Final = 2.0
_MOST_QUEUES: Final = 65_536
"""Queues that one broker may claim for a topic; the rest is left out."""


@dataclass(slots=True)
class _Topic:
    asked_s: float = 0.0
    seen_s: float | None = None
    """When another broker last had it."""
    queues: list[MessageQueue] = field(default_factory=list)


class Neighbours:
    """See the module. Asks a name server with which the broker is registered; without other brokers once a few seconds."""

    def __init__(self, servers: list[RemotingClient], own_name: str, path: Path, log: Log) -> None:
        """``path`` is the file. One that cannot be read counts as none: what it has is found again."""
        self._servers, self._own_name, self._path, self._log = servers, own_name, path, log
        now_s = time.monotonic()
        self._known: dict[str, _Topic] = {topic: _Topic(seen_s=now_s) for topic in self._load()}
        self._others: frozenset[str] | None = None
        self._task: asyncio.Task[None] | None = None
        self.topics: Callable[[], Iterable[str]] = lambda: ()
        """The topics that groups subscribe to."""
        self.changed: Callable[[set[str]], None] = lambda topics: None
        """Is told the topics that are spread now, and were not, or the other way round."""
        self.found_own: Callable[[str | None], None] = lambda address: None
        """Is told at each look which address a name server has for the broker's own name."""

    def start(self) -> None:
        if self._servers:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def is_spread(self, topic: str) -> bool:
        """Whether other brokers have the topic too, or had it a moment ago."""
        found = self._known.get(topic)
        return found is not None and found.seen_s is not None

    def queues(self, topic: str) -> list[MessageQueue]:
        """The queues of the topic at other brokers."""
        found = self._known.get(topic)
        return [] if found is None else found.queues

    async def learn(self, topics: set[str]) -> None:
        """Ask about topics that nobody asked about before. Waits for a moment at most."""
        new = topics - self._known.keys()
        if not new or not self._servers:
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                if self._others is None:
                    await self._look_at_cluster()
                if self._others:
                    await self._look(new, time.monotonic())
        except (RemotingError, TimeoutError) as error:
            self._log.debug("the other brokers of a topic are not known", error=str(error))

    # ------------------------------------------------------------ looks

    async def _run(self) -> None:
        while True:
            try:
                await self._look_at_cluster()
                await self._round(time.monotonic())
            except RemotingError as error:
                self._log.debug("the other brokers are not known", error=str(error))
            await asyncio.sleep(_PERIOD_S)

    async def _round(self, now_s: float) -> None:
        wanted = set(self.topics())
        for topic in self._known.keys() - wanted:
            seen_s = self._known[topic].seen_s
            if seen_s is None or now_s - seen_s > _REMEMBER_S:
                del self._known[topic]
        if self._others:
            due = {
                topic for topic in wanted if topic not in self._known or now_s >= self._known[topic].asked_s + _ROUTE_S
            }
            await self._look(due, now_s)
        else:
            self._tell({topic for topic in self._known if self._take(topic, [], now_s)})

    def _tell(self, topics: set[str]) -> None:
        if topics:
            self._store()
            self.changed(topics)

    # ------------------------------------------------------------ the file

    def _load(self) -> list[str]:
        try:
            found = load_object(self._path.read_bytes()).get("spreadTopics")
            return [as_text(topic, "a topic") for topic in as_list(found, "spreadTopics")]
        except FileNotFoundError:
            return []
        except (OSError, RemotingError) as error:
            self._log.warning("the topics of several brokers are not known yet", path=str(self._path), error=str(error))
            return []

    def _store(self) -> None:
        spread = sorted(topic for topic, one in self._known.items() if one.seen_s is not None)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.replace(self._path, dumps({"spreadTopics": spread}), "rocketmq.neighbours")
        except OSError as error:
            self._log.warning("the topics of several brokers are not kept", path=str(self._path), error=str(error))

    async def _look_at_cluster(self) -> None:
        answer = await self._ask(request(RequestCode.GET_BROKER_CLUSTER_INFO))
        table = ClusterInfo.from_json(loads(answer.body)).broker_addr_table
        self._others = frozenset(name for name, one in table.items() if name != self._own_name and one.broker_addrs)
        own = table.get(self._own_name)
        self.found_own(None if own is None else own.broker_addrs.get(_MASTER_ID))

    async def _look(self, topics: set[str], now_s: float) -> None:
        """Ask for the routes of ``topics``, and tell which of them are spread now and were not, or the other way round."""
        changed = set()
        try:
            for topic in topics:
                if self._take(topic, await self._elsewhere(topic), now_s):
                    changed.add(topic)
        finally:
            self._tell(changed)

    async def _elsewhere(self, topic: str) -> list[MessageQueue]:
        """The queues of the topic at other brokers that live and that can be read."""
        answer = await self._ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequestHeader(topic).encode()))
        route = TopicRouteData() if answer.code else TopicRouteData.from_json(loads(answer.body))
        away = {one.broker_name for one in route.broker_datas if not one.broker_addrs}
        return [
            MessageQueue(topic, data.broker_name, queue)
            for data in route.queue_datas
            if data.broker_name != self._own_name and data.broker_name not in away and data.perm & PERM_READ
            for queue in range(min(data.read_queue_nums, _MOST_QUEUES))
        ]

    def _take(self, topic: str, queues: list[MessageQueue], now_s: float) -> bool:
        """Whether the topic's being spread changed."""
        known = self._known.setdefault(topic, _Topic())
        was_spread = known.seen_s is not None
        known.asked_s, known.queues = now_s, queues
        if queues:
            known.seen_s = now_s
        elif known.seen_s is not None and now_s - known.seen_s > _REMEMBER_S:
            known.seen_s = None
        return was_spread != (known.seen_s is not None)

    async def _ask(self, command: Command) -> Command:
        """The answer of the first name server that answers. Raises RemotingError."""
        for server in self._servers:
            if not server.is_connected:
                continue
            try:
                answer = await server.request(command, _PATIENCE_S)
            except RemotingError:
                continue
            if answer.code in (ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST):
                return answer
        raise PeerSilentError("no name server answers")
