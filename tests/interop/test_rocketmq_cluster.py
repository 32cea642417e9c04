"""Goal: a broker of RocketMQ and a node are one cluster. Producers spread over both, consumers read both, and either may be
killed: sends go on with the other one, nothing acknowledged is lost, and each group has everything.

Method: RocketMQ's own broker, a real node, and RocketMQ's producer with two push consumers of one group, behind RocketMQ's
name server and behind the node's own. All processes of the node are killed at one moment and started again, then the broker.
At the end the group's offset is the end of each queue, at both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from broker import Broker, ClusterTool

from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.fastjson import loads
from commitmq_plugins.rocketmq.remoting.frame import RemotingError, request
from nodes import Node, eventually, free_ports, started

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(300)]

TOPIC, GROUP, QUEUES = "Spread", "Readers", 4
OURS, THEIRS = "commitmq", "b0"
ENOUGH = 40
PATIENCE_S = 60.0


def ask(port: int, code: RequestCode, **fields: str) -> Any:
    """A request to a broker or a name server; its answer has SUCCESS."""

    async def run() -> Any:
        client = RemotingClient("127.0.0.1", port)
        try:
            answer = await client.request(request(code, fields), 10)
            assert answer.code == 0, answer.remark
            return answer
        finally:
            await client.close()

    return asyncio.run(run())


class Cluster:
    """The name server listens on ``first``, the node on the second next port, RocketMQ's broker six behind."""

    def __init__(
        self, folder: Path, names: str, open_broker: Callable[..., Broker], open_tool: Callable[..., ClusterTool]
    ):
        first = free_ports(8)
        self.names, self.ours, self.theirs = first, first + 2, first + 6
        self.address = f"127.0.0.1:{self.names}"
        self.is_ours = names == "ours"
        self._folder, self._open_broker, self._open_tool = folder, open_broker, open_tool
        own = f"plugins.rocketmq.namesrv_port={self.names}"
        other = ("plugins.rocketmq.namesrv_port=0", f"plugins.rocketmq.namesrv={self.address}")
        self.node = Node(
            folder / "node" / "store",
            "plugins.rocketmq.enable=true",
            "plugins.rocketmq.vip_port=false",
            f"network.store_port={self.ours}",
            *((own,) if self.is_ours else other),
        )
        self.node.store.parent.mkdir()
        self.tool: ClusterTool
        self.broker: Broker

    def start_broker(self) -> None:
        self.broker = self._open_broker(
            self._folder / "theirs",
            namesrvAddr=self.address,
            listenPort=self.theirs,
            brokerName=THEIRS,
            brokerClusterName="DefaultCluster",
            registerNameServerPeriod=10_000,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.is_ours:
                stack.enter_context(started(self.node))
            self.tool = self._open_tool(self._folder, self.address, serves=not self.is_ours)
            stack.callback(self.tool.kill)
            if not self.is_ours:
                stack.enter_context(started(self.node))
            self.start_broker()
            stack.callback(lambda: self.broker.kill())
            eventually(lambda: self.known() == {OURS, THEIRS}, "both are registered", PATIENCE_S)
            yield

    def known(self) -> set[str]:
        """The brokers that the name server knows, none while it is away."""
        try:
            return set(loads(ask(self.names, RequestCode.GET_BROKER_CLUSTER_INFO).body)["brokerAddrTable"])
        except RemotingError:
            return set()

    def sent(self, broker: str) -> list[str]:
        return list(self.tool.ask("sent").get(broker, []))

    def sends_go_to(self, *brokers: str) -> None:
        """More messages are acknowledged by these."""
        before = {broker: len(self.sent(broker)) for broker in brokers}
        for broker, count in before.items():
            eventually(partial(self._has, broker, count + ENOUGH), f"{broker} takes messages", PATIENCE_S)

    def _has(self, broker: str, count: int) -> bool:
        return len(self.sent(broker)) >= count

    def got_all_of(self, broker: str) -> bool:
        """The group has everything that the broker acknowledged."""
        return set(self.sent(broker)) <= set(self.tool.ask("got", GROUP).get(broker, ()))

    def lags(self) -> dict[tuple[str, int], tuple[int, int]]:
        """By broker and queue, the group's offset and the end, where they differ."""
        found = {}
        for name, port in ((OURS, self.ours), (THEIRS, self.theirs)):
            for queue in range(QUEUES):
                fields = {"topic": TOPIC, "queueId": str(queue)}
                end = int(ask(port, RequestCode.GET_MAX_OFFSET, **fields).ext_fields["offset"])
                answer = ask(port, RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup=GROUP, **fields)
                offset = int(answer.ext_fields["offset"])
                if offset != end:
                    found[name, queue] = offset, end
        return found


@pytest.mark.parametrize("names", ["ours", pytest.param("rocketmq", marks=pytest.mark.long)])
def test_either_may_die(
    names: str,
    tmp_path: Path,
    rocketmq_broker: Callable[..., Broker],
    cluster_tool: Callable[..., ClusterTool],
) -> None:
    cluster = Cluster(tmp_path, names, rocketmq_broker, cluster_tool)
    with cluster.running():
        topic = {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": str(QUEUES), "writeQueueNums": str(QUEUES),
                 "perm": "6", "topicFilterType": "SINGLE_TAG"}  # fmt: skip
        for port in (cluster.ours, cluster.theirs):
            ask(port, RequestCode.UPDATE_AND_CREATE_TOPIC, **topic)
        tool = cluster.tool
        tool.ask("consume", GROUP, TOPIC)
        tool.ask("consume", GROUP, TOPIC)
        tool.ask("begin", TOPIC, 10)
        cluster.sends_go_to(OURS, THEIRS)
        eventually(lambda: min(tool.ask("share", GROUP)) > 0, "both consumers have messages", PATIENCE_S)

        cluster.node.kill_all()
        cluster.sends_go_to(THEIRS)
        assert cluster.node.start().returncode == 0
        eventually(lambda: cluster.known() == {OURS, THEIRS}, "both are registered again", PATIENCE_S)
        cluster.sends_go_to(OURS, THEIRS)

        cluster.broker.kill()
        cluster.sends_go_to(OURS)
        cluster.start_broker()
        eventually(lambda: cluster.known() == {OURS, THEIRS}, "both are registered once more", PATIENCE_S)
        cluster.sends_go_to(OURS, THEIRS)

        tool.ask("end")
        for broker in (OURS, THEIRS):
            eventually(partial(cluster.got_all_of, broker), f"the group has all messages of {broker}", PATIENCE_S)
        eventually(lambda: cluster.lags() == {}, "the group's offsets are the ends of all queues", PATIENCE_S)
        tool.ask("stop", GROUP)
        assert cluster.lags() == {}
