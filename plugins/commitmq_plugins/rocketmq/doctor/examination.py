"""The whole examination: name servers, then brokers, then a topic, then trials."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from commitmq_plugins.rocketmq.doctor.broker import Broker
from commitmq_plugins.rocketmq.doctor.finding import Finding, Report, State
from commitmq_plugins.rocketmq.doctor.names import NameServers
from commitmq_plugins.rocketmq.doctor.peer import Peer, Terms
from commitmq_plugins.rocketmq.doctor.removal import Removal, finished
from commitmq_plugins.rocketmq.doctor.trial import PREFIX, Trial, age_s
from commitmq_plugins.rocketmq.remoting.errors import RemotingError

_AT_A_TIME: Final = 8
_OLD_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """``topics``: routes to look at. ``write``: try each master with a topic of the doctor's own. ``most``: of the brokers."""

    name_servers: list[tuple[str, int]]
    topics: tuple[str, ...] = ()
    write: bool = False
    most: int = 64
    terms: Terms = field(default_factory=Terms)


class Examination:
    """Tells ``report`` each finding as soon as it has it, in the same order each time."""

    def __init__(self, wanted: Wanted, report: Report) -> None:
        self._wanted, self._report = wanted, report
        self.reached = False
        """Whether a name server answered."""

    async def run(self) -> None:
        """Raises nothing of the servers' making."""
        peers = [Peer(host, port, self._wanted.terms) for host, port in self._wanted.name_servers]
        names = NameServers(peers, self._report)
        brokers: list[Broker] = []
        try:
            await names.examine()
            if not names.peers:
                return
            self.reached = True
            await self._brokers(names, brokers)
            await names.examine_template()
            for topic in self._wanted.topics:
                await names.examine_topic(topic)
            masters = [one for one in brokers if one.number == 0 and one.peer is not None]
            await self._remains(names, masters)
            if self._wanted.write:
                for broker in masters:
                    await Trial(names, broker, self._report).run()
        finally:
            await finished(_close([*peers, *brokers]))

    async def _brokers(self, names: NameServers, brokers: list[Broker]) -> None:
        """Examine the brokers, several at a time."""
        table = names.info.broker_addr_table
        places = [(name, number, table[name].broker_addrs[number])
                  for name in sorted(table) for number in sorted(table[name].broker_addrs)]  # fmt: skip
        seen = await names.peers[0].ip()
        limit = asyncio.Semaphore(_AT_A_TIME)

        async def examine(place: tuple[str, int, str]) -> list[Finding]:
            found: list[Finding] = []
            broker = Broker(*place, self._wanted.terms, found.append)
            brokers.append(broker)
            async with limit:
                await broker.examine(seen)
            return found

        tasks = [asyncio.ensure_future(examine(place)) for place in places[: self._wanted.most]]
        try:
            for task in tasks:
                for finding in await task:
                    self._report(finding)
        finally:
            for task in tasks:
                task.cancel()
        for broker in brokers:
            broker.report_to(self._report)
        brokers.sort(key=lambda one: (one.name, one.number))
        if len(places) > self._wanted.most:
            detail = f"{len(places) - self._wanted.most} of {len(places)} were not looked at"
            self._report(Finding(State.WARNING, "brokers", "", detail, "--most names a greater number"))

    async def _remains(self, names: NameServers, masters: list[Broker]) -> None:
        """Topics of doctors that were killed. With ``write`` they are deleted, if no doctor can be using them."""
        try:
            topics = await names.topics(PREFIX)
        except RemotingError:
            return
        for topic in topics:
            age = age_s(topic)
            if age is None or age < _OLD_S:
                continue
            left = [f"a doctor was killed {age / 60:.0f} minutes ago and left it"]
            if self._wanted.write:
                left = [why for broker in masters if broker.peer is not None
                        for why in await finished(Removal(names, broker.peer, topic).run())]  # fmt: skip
            if left:
                advice = "" if self._wanted.write else "--write deletes it"
                self._report(Finding(State.WARNING, "remains of a trial", topic, "; ".join(left), advice))
            else:
                self._report(Finding(State.OK, "remains of a trial", topic, "deleted"))


async def _close(connections: list[Peer | Broker]) -> None:
    for one in connections:
        await one.close()
