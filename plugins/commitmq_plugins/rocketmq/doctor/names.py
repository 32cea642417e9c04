"""What the doctor asks name servers: whether they answer, which brokers and which topics they know."""

from __future__ import annotations

from commitmq_plugins.rocketmq.doctor.addresses import NAMESRV_PORT
from commitmq_plugins.rocketmq.doctor.finding import Finding, Report, State
from commitmq_plugins.rocketmq.doctor.peer import Peer, PeerRefusedError
from commitmq_plugins.rocketmq.doctor.tls import examine_tls
from commitmq_plugins.rocketmq.doctor.versions import version_text
from commitmq_plugins.rocketmq.remoting.bodies.routes import BrokerData, ClusterInfo, TopicRouteData
from commitmq_plugins.rocketmq.remoting.bodies.topic_config import PERM_READ, PERM_WRITE
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.errors import BodyError, RemotingError
from commitmq_plugins.rocketmq.remoting.fastjson import as_list, as_text, loads
from commitmq_plugins.rocketmq.remoting.headers.topics import TopicRequestHeader

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
            self._report(Finding(State.FAILED, "name server", where, str(error), advice))
            return None
        version = version_text(answer.version)
        if answer.code:
            refusal = PeerRefusedError(answer.code, answer.remark)
            detail = f"{version} refuses to list brokers: {refusal}"
            self._report(Finding(State.FAILED, "name server", where, detail, await _no_name_server(peer)))
            return None
        try:
            info = ClusterInfo.from_json(loads(answer.body))
        except BodyError as error:
            self._report(Finding(State.FAILED, "name server", where, f"its list of brokers cannot be read: {error}"))
            return None
        self._report(Finding(State.OK, "name server", where, f"answers in {peer.took_s * 1000:.0f} ms, {version}"))
        await examine_tls(peer, self._report)
        return info

    def _clusters(self) -> None:
        names = self.info.cluster_addr_table
        if not self.info.broker_addr_table:
            advice = "brokers register every 30 s: look at namesrvAddr (plugins.rocketmq.namesrv), and at their logs"
            self._report(Finding(State.FAILED, "clusters", "", "the name server knows no broker", advice))
            return
        for name in sorted(names):
            brokers = ", ".join(sorted(names[name]))
            self._report(Finding(State.OK, "cluster", name, f"{len(names[name])} brokers: {brokers}"))
        lost = sorted(self.info.broker_addr_table.keys() - {one for brokers in names.values() for one in brokers})
        if lost:
            self._report(Finding(State.WARNING, "clusters", "", f"in no cluster: {', '.join(lost)}"))

    def _compare(self, first: Peer, peer: Peer, info: ClusterInfo) -> None:
        ours, theirs = _addresses(self.info), _addresses(info)
        if ours == theirs:
            self._report(Finding(State.OK, "name servers agree", peer.address, f"with {first.address}"))
            return
        only = [f"only {one.address} has {', '.join(sorted(found))}"
                for one, found in ((first, ours - theirs), (peer, theirs - ours)) if found]  # fmt: skip
        advice = "each broker must register with every name server that its clients have"
        self._report(Finding(State.WARNING, "name servers agree", peer.address, "; ".join(only), advice))

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
            self._report(Finding(State.UNKNOWN, "topics by sends", where, str(error)))
            return
        if route is None:
            detail = "off: a send to a topic that does not exist fails; `mqadmin updateTopic` makes topics"
        else:
            detail = f"on, at {', '.join(sorted(one.broker_name for one in route.queue_datas))}"
        self._report(Finding(State.OK, "topics by sends", where, detail))

    async def examine_topic(self, topic: str) -> None:
        """The route of a topic: its queues at each broker, and whether they can be sent to and read."""
        for peer in self.peers:
            where = f"{topic} at {peer.address}"
            try:
                route = await self.route(peer, topic)
            except RemotingError as error:
                self._report(Finding(State.FAILED, "route", where, str(error)))
                continue
            if route is None or not route.queue_datas:
                self._report(Finding(State.FAILED, "route", where, "no broker has this topic"))
                continue
            brokers = {one.broker_name: one for one in route.broker_datas}
            for data in sorted(route.queue_datas, key=lambda one: one.broker_name):
                detail = (
                    f"{data.broker_name} has {data.read_queue_nums} queues to read and {data.write_queue_nums} to write"
                )
                wrong = _wrong_route(brokers.get(data.broker_name), data.perm)
                state = State.WARNING if wrong else State.OK
                self._report(Finding(state, "route", where, "; ".join([detail, *wrong])))


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
