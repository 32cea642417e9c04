"""``commitmq rocketmq``: verbs about clusters of RocketMQ's protocol.

The whole examination: name servers, then brokers, then a topic, then trials.

What a tool asks single clients through a broker: their stacks (request 307), and to handle one message (request 309).

The broker passes both on to the client, and waits 10 s for it. Every wait here has an end too.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import click

from commitmq.cli.output import fail, json_option, print_json
from commitmq.cli.quantity import seconds
from commitmq.cli.secret_input import read_secret
from commitmq.supervision.exit_codes import CliExit
from commitmq_plugins.rocketmq.doctor.broker import Broker
from commitmq_plugins.rocketmq.doctor.peer import (
    Finding,
    Keys,
    NameServers,
    Peer,
    PeerRefusedError,
    Report,
    State,
    Terms,
)
from commitmq_plugins.rocketmq.doctor.trial import PREFIX, Removal, Trial, age_s, finished
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import load_object
from commitmq_plugins.rocketmq.remoting.frame import PeerGoneError, RemotingError

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


__all__ = ["Keys", "Terms", "handled", "stacks"]

_CLIENT_S: Final = 10.0
"""So long a broker waits for a client."""
_AT_ONCE: Final = 16


async def stacks(
    host: str, port: int, group: str, client_ids: Sequence[str], terms: Terms
) -> list[tuple[str | None, str | None]]:
    """For each of these consumers of ``group`` the stack of its threads; or None, and the reason why there is none."""
    peer, gate = Peer(host, port, terms), asyncio.Semaphore(_AT_ONCE)

    async def one(client_id: str) -> tuple[str | None, str | None]:
        fields = {"consumerGroup": group, "clientId": client_id, "jstackEnable": "true"}
        async with gate:
            try:
                found = await _object(peer, RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
            except RemotingError as error:
                return None, str(error)
        stack = found.get("jstack")
        return (stack, None) if isinstance(stack, str) and stack else (None, "the client's answer has no stack")

    try:
        return list(await asyncio.gather(*map(one, client_ids)))
    finally:
        await peer.close()


async def handled(
    host: str, port: int, group: str, client_id: str, message_id: str, terms: Terms
) -> tuple[str, str | None, int | None]:
    """Let a consumer of ``group`` handle one message now: its result as RocketMQ names it, remark, milliseconds.

    Raises RemotingError.
    """
    peer = Peer(host, port, terms)
    fields = {"consumerGroup": group, "clientId": client_id, "msgId": message_id}
    try:
        found = await _object(peer, RequestCode.CONSUME_MESSAGE_DIRECTLY, fields)
    finally:
        await peer.close()
    remark, spent_ms = found.get("remark"), found.get("spentTimeMills")
    return str(found.get("consumeResult")), None if remark is None else str(remark), _number(spent_ms)


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


async def _object(peer: Peer, code: RequestCode, fields: dict[str, str]) -> dict[str, Any]:
    """The object in the answer's body. Raises RemotingError, whose text says what to do."""
    try:
        return load_object((await peer.ask(code, fields, wait_s=_CLIENT_S)).body)
    except PeerRefusedError as error:
        if error.code == ResponseCode.NO_PERMISSION and peer.terms.keys is None:
            raise RemotingError(f"{error}; --access-key signs the request as a user") from None
        raise
    except PeerGoneError as error:
        raise RemotingError(f"{error}; a server with tls_mode=enforcing needs --tls") from None


@click.group()
def rocketmq() -> None:
    """Examine a cluster of RocketMQ's protocol."""


@rocketmq.command()
@click.argument("namesrv")
@click.option("--topic", "topics", metavar="TOPIC", multiple=True, help="Also look at this topic's route; repeatable.")
@click.option(
    "--write", is_flag=True, help="Also send, receive and commit on a topic of the doctor's own; it is deleted."
)
@click.option(
    "--timeout", "timeout_s", type=seconds(0.05), default=3.0, show_default=True, help="Seconds of each wait."
)
@click.option("--tls", is_flag=True, help="Connect with TLS. Certificates are not checked.")
@click.option("--access-key", metavar="USER", help="Sign each request as this user; standard input has the secret.")
@click.option("--most", type=click.IntRange(1, 10_000), default=64, show_default=True, help="Most brokers to look at.")
@json_option
def doctor(
    namesrv: str,
    topics: tuple[str, ...],
    write: bool,
    timeout_s: float,
    tls: bool,
    access_key: str | None,
    most: int,
    as_json: bool,
) -> None:
    """Connect as a client does, and say what works.

    NAMESRV is one name server or several, as HOST:PORT;HOST:PORT, of CommitMQ or of RocketMQ. Without --write nothing is
    changed. Exit code 0: everything works, perhaps with warnings; 1: something does not; 69: no name server answers.
    """
    from commitmq_plugins.rocketmq.doctor.peer import AddressError, Keys, State, Terms, parse_all

    try:
        places = parse_all(namesrv)
    except AddressError as error:
        raise click.BadParameter(str(error), param_hint="NAMESRV") from error
    if not places:
        raise click.BadParameter("it names no server", param_hint="NAMESRV")
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            click.echo(finding.line())

    wanted = Wanted(
        places, topics, write, most, Terms(timeout_s, tls, Keys(access_key, read_secret()) if access_key else None)
    )
    examination = Examination(wanted, report)
    interrupted = not _ran(examination.run())
    works = not interrupted and examination.reached and all(one.state != State.FAILED for one in findings)
    if as_json:
        print_json({"works": works, "findings": [one.to_json() for one in findings]})
    if interrupted:
        raise SystemExit(int(CliExit.INTERRUPTED))
    if not examination.reached:
        fail(f"no name server answers at {namesrv}", CliExit.NODE_UNAVAILABLE)
    if not works:
        raise SystemExit(int(CliExit.FAILURE))


def _ran(work: Any) -> bool:
    """False when Ctrl-C or SIGTERM ended ``work``, which has cleaned up by then."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return False
    return True
