"""A server of RocketMQ's protocol as the doctor meets it: every wait has an end, and a refusal has a name.

Has the lines of its report, what is wrong with addresses that a name server gives to clients, the names of versions,
whether a server takes TLS beside, or instead of, plain connections, and which brokers and topics name servers know.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from commitmq.security.policy import ACCESS_KEY, SIGNATURE, Secret, sign
from commitmq_plugins.rocketmq.remoting.bodies import PERM_READ, PERM_WRITE, BrokerData, ClusterInfo, TopicRouteData
from commitmq_plugins.rocketmq.remoting.client import NEXT_ADDRESS_S, RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import as_list, as_text, load_object, loads
from commitmq_plugins.rocketmq.remoting.frame import BodyError, Command, PeerSilentError, RemotingError
from commitmq_plugins.rocketmq.remoting.headers import TopicRequestHeader
from commitmq_plugins.rocketmq.remoting.tls import anybody

_LONGEST: Final = 400
_MARKS: Final = {"ok": "ok", "warning": "??", "failed": "FAILED", "unknown": "-"}


class CheckState(StrEnum):
    """How a check ended. ``UNKNOWN``: it could not be made."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``check`` is the same word in every report, ``where`` the server, broker or topic; ``advice`` what to do."""

    state: CheckState
    check: str
    where: str
    detail: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: plain(str(value)) for name, value in asdict(self).items()}

    def line(self) -> str:
        """One line for people."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{_MARKS[self.state]:8}" + plain(f"{self.check} {self.where}: {self.detail}{advice}")


Report = Callable[[CheckResult], None]
"""Takes each finding as soon as it is there."""


def plain(text: str) -> str:
    """``text`` on one line. Servers' texts are anybody's: no control characters, and not endless."""
    shown = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in " ".join(text.split()))
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"


NAMESRV_PORT: Final = 9876
_CONTAINERS: Final = ipaddress.ip_network("172.16.0.0/12")
_SAME_NETWORK_BITS: Final = 16
ADVICE: Final = "set the address for clients: plugins.rocketmq.advertised_host, in RocketMQ brokerIP1"

Judgement = tuple[CheckState, str]
_IP = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressError(RemotingError):
    """A text that is no ``host:port``."""


def parse_address(text: str, port: int | None = None) -> tuple[str, int]:
    """Host and port; ``port`` is for a text without one. Raises AddressError."""
    host, colon, digits = text.strip().rpartition(":")
    if not colon and port is not None:
        host, digits = digits, str(port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not digits.isdecimal() or not digits.isascii() or not 0 < int(digits[:6]) <= 65_535:
        raise AddressError(f"{text!r:.100} is no address host:port")
    return host, int(digits)


def parse_all(text: str) -> list[tuple[str, int]]:
    """Name servers, with semicolons or commas between them. Raises AddressError."""
    return [parse_address(one, NAMESRV_PORT) for one in text.replace(",", ";").split(";") if one.strip()]


def judge_address(host: str, seen: str | None) -> Judgement:
    """Whether clients can use ``host``, a broker's address. ``seen`` is the IP at which the name server was reached."""
    try:
        address = _plain(ipaddress.ip_address(host))
    except ValueError:
        return CheckState.WARNING, f"{host} is a host name: message ids hold an IP, so look-ups by id may go elsewhere"
    place = None if seen is None else _plain(ipaddress.ip_address(seen.partition("%")[0]))
    if address.is_unspecified:
        return CheckState.FAILED, f"{host} is no address: clients on other machines connect to themselves"
    if address.is_loopback:
        if place is None or place.is_loopback:
            return CheckState.OK, f"{host} is for clients on this machine only"
        return CheckState.FAILED, f"{host} leads each client to its own machine"
    if address.is_link_local:
        return CheckState.WARNING, f"{host} is valid on one network link only"
    if address in _CONTAINERS and (place is None or not _are_neighbours(address, place)):
        return CheckState.WARNING, f"{host} looks like an address inside of a container or a virtual network"
    if address.is_private and place is not None and place.is_global:
        return CheckState.WARNING, f"{host} is private, and the name server's address {seen} is public"
    return CheckState.OK, f"{host} is an address that clients elsewhere may use"


def _plain(address: _IP) -> _IP:
    """An IPv4 address that is mapped into IPv6 counts as IPv4."""
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def _are_neighbours(one: _IP, other: _IP) -> bool:
    shift = one.max_prefixlen - _SAME_NETWORK_BITS
    return one.version == other.version and int(one) >> shift == int(other) >> shift


_FIRST: Final = 212
"""The number of V4_0_0_SNAPSHOT. From there on each release has two numbers, its snapshot's first."""


def version_text(number: int) -> str:
    """``V5_4_0`` for 493."""
    if number < _FIRST:
        return f"a version before V4_0_0 (number {number})"
    steps = number - _FIRST
    major, minor, patch = 4 + steps // 200, steps % 200 // 20, steps % 20 // 2
    return f"V{major}_{minor}_{patch}{'' if steps % 2 else '_SNAPSHOT'}"


Texts = Mapping[str, str]


class PeerRefusedError(RemotingError):
    """The server answers with another code than SUCCESS; ``code`` is a ResponseCode's number."""

    def __init__(self, code: int, remark: str | None) -> None:
        try:
            name = ResponseCode(code).name
        except ValueError:
            name = f"code {code}"
        super().__init__(f"{name}: {remark.strip().splitlines()[0]}" if remark and remark.strip() else name)
        self.code = code


@dataclass(frozen=True, slots=True)
class SessionCredentials:
    """What a client signs its requests with: a user's name and secret."""

    access_key: str
    secret: Secret

    def sign(self, command: Command) -> None:
        """Put both fields of a signed request into ``command``, whose other fields and body stay as they are then."""
        command.ext_fields[ACCESS_KEY] = self.access_key
        command.ext_fields[SIGNATURE] = sign(command.ext_fields, command.body, self.secret.reveal())


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """How the doctor speaks to servers. ``timeout_s`` is the longest wait for a connection, and for an answer. ``tls``:
    connections are encrypted. ``keys``: requests are signed.
    """

    timeout_s: float = 3.0
    tls: bool = False
    keys: SessionCredentials | None = None


class Peer:
    """A server of RocketMQ's protocol as the doctor meets it. Connects at the first request."""

    def __init__(self, host: str, port: int, terms: PeerOptions) -> None:
        self.host, self.port, self.terms = host, port, terms
        self._client = RemotingClient(host, port, connect_s=terms.timeout_s, tls=anybody() if terms.tls else None)
        self.took_s = 0.0
        """How long the last answer took."""

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def ask(
        self, code: RequestCode, fields: Texts | None = None, body: bytes = b"", *, wait_s: float = 0.0
    ) -> Command:
        """The answer with SUCCESS. ``wait_s``: the server itself may wait so long. Raises PeerRefusedError, RemotingError."""
        answer = await self.answer(code, fields, body, wait_s=wait_s)
        if answer.code != ResponseCode.SUCCESS:
            raise PeerRefusedError(answer.code, answer.remark)
        return answer

    async def answer(
        self, code: RequestCode, fields: Texts | None = None, body: bytes = b"", *, wait_s: float = 0.0
    ) -> Command:
        """Any answer. Raises RemotingError."""
        began = time.monotonic()
        command = Command(int(code), ext_fields=dict(fields or {}), body=body)
        assert not command.flag & FLAG_ONEWAY
        if self.terms.keys is not None:
            self.terms.keys.sign(command)
        answer = await self._client.request(command, self.terms.timeout_s + wait_s)
        self.took_s = time.monotonic() - began
        return answer

    async def object(self, code: RequestCode, fields: Texts | None = None, body: bytes = b"") -> dict[str, Any]:
        """The JSON object in the answer's body. Raises PeerRefusedError, BodyError, RemotingError."""
        return load_object((await self.ask(code, fields, body)).body)

    async def ip(self) -> str | None:
        """The IP behind the host's name; None when it has none."""
        try:
            async with asyncio.timeout(self.terms.timeout_s):
                found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port)
        except (OSError, UnicodeError, TimeoutError):
            return None
        return str(found[0][4][0]) if found else None

    async def tls_version(self) -> str:
        """The version of TLS that the server speaks, on a connection of its own. Raises OSError, PeerSilentError."""
        try:
            async with asyncio.timeout(self.terms.timeout_s):
                _, writer = await asyncio.open_connection(
                    self.host, self.port, ssl=anybody(), happy_eyeballs_delay=NEXT_ADDRESS_S
                )
        except TimeoutError as error:
            raise PeerSilentError(f"no handshake within {self.terms.timeout_s:g} s") from error
        version = writer.get_extra_info("ssl_object").version()
        writer.transport.abort()
        return str(version)

    async def close(self) -> None:
        await self._client.close()


async def examine_tls(peer: Peer, report: Report) -> None:
    """Report it. With TLS everything else is encrypted already."""
    if peer.terms.tls:
        report(
            CheckResult(
                CheckState.OK, "TLS", peer.address, "this connection is encrypted; its certificate is not checked"
            )
        )
        return
    try:
        version = await peer.tls_version()
    except (OSError, RemotingError):
        report(CheckResult(CheckState.OK, "TLS", peer.address, "plain connections only"))
        return
    report(CheckResult(CheckState.OK, "TLS", peer.address, f"plain connections, and {version}"))


_ZEROMQ = f"claims {int.from_bytes(bytes((255, 0, 0, 0)), 'big', signed=True)} bytes"
"""What the greeting of ZeroMQ looks like, taken for a frame."""
TEMPLATE = "TBW102"
"""RocketMQ's template of new topics: it has a route while sends may make topics."""


class NameServers:
    """Those that answer. ``peers`` and ``info`` are there after :meth:`examine`."""

    def __init__(self, peers: list[Peer], report: Report) -> None:
        self._all, self._report = peers, report
        self.peers: list[Peer] = []
        self.info = ClusterInfo()

    async def examine(self) -> None:
        """Ask each for its clusters. ``info`` has what the first that answers knows."""
        known: list[tuple[Peer, ClusterInfo]] = []
        for peer in self._all:
            info = await self._ask(peer)
            if info is not None:
                known.append((peer, info))
                self.peers.append(peer)
        if not known:
            return
        self.info = known[0][1]
        self._clusters()
        for peer, info in known[1:]:
            self._compare(known[0][0], peer, info)

    async def _ask(self, peer: Peer) -> ClusterInfo | None:
        where = peer.address
        try:
            answer = await peer.answer(RequestCode.GET_BROKER_CLUSTER_INFO)
        except RemotingError as error:
            own = (
                "this is a port of CommitMQ's own clients: RocketMQ's are served at others (commitmq start --rocketmq)"
            )
            advice = own if _ZEROMQ in str(error) else await _wrong_end(peer)
            self._report(CheckResult(CheckState.FAILED, "name server", where, str(error), advice))
            return None
        version = version_text(answer.version)
        if answer.code:
            refusal = PeerRefusedError(answer.code, answer.remark)
            detail = f"{version} refuses to list brokers: {refusal}"
            self._report(CheckResult(CheckState.FAILED, "name server", where, detail, await _no_name_server(peer)))
            return None
        try:
            info = ClusterInfo.from_json(loads(answer.body))
        except BodyError as error:
            self._report(
                CheckResult(CheckState.FAILED, "name server", where, f"its list of brokers cannot be read: {error}")
            )
            return None
        self._report(
            CheckResult(CheckState.OK, "name server", where, f"answers in {peer.took_s * 1000:.0f} ms, {version}")
        )
        await examine_tls(peer, self._report)
        return info

    def _clusters(self) -> None:
        names = self.info.cluster_addr_table
        if not self.info.broker_addr_table:
            advice = "brokers register every 30 s: look at namesrvAddr (plugins.rocketmq.namesrv), and at their logs"
            self._report(CheckResult(CheckState.FAILED, "clusters", "", "the name server knows no broker", advice))
            return
        for name in sorted(names):
            brokers = ", ".join(sorted(names[name]))
            self._report(CheckResult(CheckState.OK, "cluster", name, f"{len(names[name])} brokers: {brokers}"))
        lost = sorted(self.info.broker_addr_table.keys() - {one for brokers in names.values() for one in brokers})
        if lost:
            self._report(CheckResult(CheckState.WARNING, "clusters", "", f"in no cluster: {', '.join(lost)}"))

    def _compare(self, first: Peer, peer: Peer, info: ClusterInfo) -> None:
        ours, theirs = _addresses(self.info), _addresses(info)
        if ours == theirs:
            self._report(CheckResult(CheckState.OK, "name servers agree", peer.address, f"with {first.address}"))
            return
        only = [f"only {one.address} has {', '.join(sorted(found))}"
                for one, found in ((first, ours - theirs), (peer, theirs - ours)) if found]  # fmt: skip
        advice = "each broker must register with every name server that its clients have"
        self._report(CheckResult(CheckState.WARNING, "name servers agree", peer.address, "; ".join(only), advice))

    # ------------------------------------------------------------ routes

    async def topics(self, prefix: str) -> list[str]:
        """Topics whose names begin with ``prefix``, as the first name server has them. Raises RemotingError."""
        found = await self.peers[0].object(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        names = [as_text(one, "a topic") for one in as_list(found.get("topicList"), "topicList")]
        return [name for name in names if name.startswith(prefix)]

    async def route(self, peer: Peer, topic: str) -> TopicRouteData | None:
        """The route of ``topic``, None when there is none. Raises RemotingError."""
        answer = await peer.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequestHeader(topic).encode())
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        if answer.code:
            raise PeerRefusedError(answer.code, answer.remark)
        return TopicRouteData.from_json(loads(answer.body))

    async def examine_template(self) -> None:
        """Whether sends may make topics."""
        where = self.peers[0].address
        try:
            route = await self.route(self.peers[0], TEMPLATE)
        except RemotingError as error:
            self._report(CheckResult(CheckState.UNKNOWN, "topics by sends", where, str(error)))
            return
        if route is None:
            detail = "off: a send to a topic that does not exist fails; `mqadmin updateTopic` makes topics"
        else:
            detail = f"on, at {', '.join(sorted(one.broker_name for one in route.queue_datas))}"
        self._report(CheckResult(CheckState.OK, "topics by sends", where, detail))

    async def examine_topic(self, topic: str) -> None:
        """The route of a topic: its queues at each broker, and whether they can be sent to and read."""
        for peer in self.peers:
            where = f"{topic} at {peer.address}"
            try:
                route = await self.route(peer, topic)
            except RemotingError as error:
                self._report(CheckResult(CheckState.FAILED, "route", where, str(error)))
                continue
            if route is None or not route.queue_datas:
                self._report(CheckResult(CheckState.FAILED, "route", where, "no broker has this topic"))
                continue
            brokers = {one.broker_name: one for one in route.broker_datas}
            for data in sorted(route.queue_datas, key=lambda one: one.broker_name):
                detail = (
                    f"{data.broker_name} has {data.read_queue_nums} queues to read and {data.write_queue_nums} to write"
                )
                wrong = _wrong_route(brokers.get(data.broker_name), data.perm)
                state = CheckState.WARNING if wrong else CheckState.OK
                self._report(CheckResult(state, "route", where, "; ".join([detail, *wrong])))


def _wrong_route(broker: BrokerData | None, perm: int) -> list[str]:
    wrong = []
    if broker is None or not broker.broker_addrs:
        wrong.append("the broker has no address")
    elif 0 not in broker.broker_addrs:
        wrong.append("its master is away, so nothing can be sent")
    if not perm & PERM_READ:
        wrong.append("it cannot be read")
    if not perm & PERM_WRITE:
        wrong.append("nothing can be sent to it (wipeWritePerm, or the topic's permission)")
    return wrong


def _addresses(info: ClusterInfo) -> set[str]:
    return {f"{name}/{number} {address}" for name, broker in info.broker_addr_table.items()
            for number, address in broker.broker_addrs.items()}  # fmt: skip


async def _no_name_server(peer: Peer) -> str:
    """What to do about a server that knows no clusters."""
    try:
        answer = await peer.answer(RequestCode.GET_BROKER_RUNTIME_INFO)
    except RemotingError:
        return ""
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        return ""
    return f"this is a broker: name its name server, whose port is usually {NAMESRV_PORT}"


async def _wrong_end(peer: Peer) -> str:
    """What to do about a name server that does not answer."""
    if not peer.terms.tls:
        try:
            version = await peer.tls_version()
        except (OSError, RemotingError):
            return "is it running, and is this its address?"
        return f"it speaks {version}: try again with --tls"
    return "is it running, and does it speak TLS?"
