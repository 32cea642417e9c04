"""Goal: whatever moment the servers of RocketMQ's clients die at, clients go on, and what was acknowledged holds.

Method: one node whose servers die by kill -9 at a table of failpoints, each once, on both sides of each step: a request read,
a question handed to the node, its answer, the client's answer. Meanwhile clients that speak the protocol send, consume and
commit, end transactions, pop and ack, send back, lock queues, join and leave groups, and ask for routes. They repeat what has
no answer. Then: every acknowledged message is there; no offset that was read went back; transactions ended as they were told;
every popped message was acknowledged after all; what was sent back is in the retry topic; no queue was locked by two clients;
and no group has a member that is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from commitmq import Admin
from commitmq.semantics.pop import ReceiptHandle, parse_info
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps, load_object
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from delays import everything
from nodes import Node, eventually
from rocketmq_peer import Peer, has_code, heartbeat, is_pulled, pull, records, send, served_node

pytestmark = pytest.mark.timeout(400)
SETTINGS = ("supervisor.restart_backoff_max_ms=200", "topics.default_queues=2")
LONGEST_S = 240.0
HALF = 4
HALF_MARKS = {"TRAN_MSG": "true", "PGROUP": "dealers"}
COMMIT, ROLL_BACK = 8, 12
POP = {"consumerGroup": "workers", "topic": "jobs", "queueId": "-1", "maxMsgNums": "8", "invisibleTime": "2000",
       "pollTime": "300", "initMode": "0", "order": "false"}  # fmt: skip

SOME = (
    "rocketmq.read.SEND_MESSAGE_V2=kill@9",
    "rocketmq.asked.append=kill@12",
    "rocketmq.asked.offset.commit=kill@3",
    "rocketmq.asked.transaction.end=kill@2",
    "rocketmq.asked.pop=kill@3",
    "rocketmq.ask.ack:after=kill@3",
    "rocketmq.done.LOCK_BATCH_MQ=kill@5",
    "namesrv.read.GET_ROUTEINFO_BY_TOPIC=kill@6",
)
SENDS = (
    "rocketmq.ask.append:before=kill@11",
    "rocketmq.ask.append:after=kill@15",
    "remoting.answer:before=kill@60",
    "remoting.answer:after=kill@70",
    "rocketmq.read.CONSUMER_SEND_MSG_BACK=kill@2",
    "rocketmq.ask.send_back:before=kill@2",
    "rocketmq.ask.send_back:after=kill@3",
    "rocketmq.asked.send_back=kill@2",
    "rocketmq.register:before=kill@1",
    "rocketmq.register:after=kill@1",
    "namesrv.read.REGISTER_BROKER=kill@1",
    "namesrv.done.REGISTER_BROKER=kill@2",
    "namesrv.done.GET_ROUTEINFO_BY_TOPIC=kill@9",
)
GROUPS = (
    "rocketmq.read.HEART_BEAT=kill@2",
    "rocketmq.ask.group.retry_topics:before=kill@1",
    "rocketmq.ask.group.retry_topics:after=kill@1",
    "rocketmq.ask.group.join:before=kill@1",
    "rocketmq.ask.group.join:after=kill@1",
    "rocketmq.asked.group.join=kill@1",
    "rocketmq.ask.group.heartbeats:after=kill@1",
    "rocketmq.asked.group.heartbeats=kill@1",
    "rocketmq.read.UPDATE_CONSUMER_OFFSET=kill@4",
    "rocketmq.ask.offset.commit:before=kill@4",
    "rocketmq.ask.offset.commit:after=kill@5",
    "rocketmq.asked.offset.fetch=kill@3",
)
LOCKS = (
    "rocketmq.read.LOCK_BATCH_MQ=kill@3",
    "rocketmq.done.LOCK_BATCH_MQ=kill@4",
    "rocketmq.done.HEART_BEAT=kill@3",
    "rocketmq.done.UPDATE_CONSUMER_OFFSET=kill@5",
    "rocketmq.done.ACK_MESSAGE=kill@3",
    "rocketmq.done.UNREGISTER_CLIENT=kill@1",
    "rocketmq.ask.group.leave:before=kill@1",
    "rocketmq.ask.group.leave:after=kill@2",
    "rocketmq.asked.group.leave=kill@1",
)
MOVERS = (
    "rocketmq.read.END_TRANSACTION=kill@2",
    "rocketmq.ask.transaction.end:before=kill@3",
    "rocketmq.ask.transaction.end:after=kill@2",
    "rocketmq.read.POP_MESSAGE=kill@4",
    "rocketmq.ask.pop:before=kill@3",
    "rocketmq.ask.pop:after=kill@4",
    "rocketmq.read.ACK_MESSAGE=kill@4",
    "rocketmq.ask.ack:before=kill@4",
    "rocketmq.asked.ack=kill@3",
)


class Load:
    """All clients of one run. ``is_done`` ends them; each then finishes what it has begun."""

    def __init__(self, port: int, namesrv_port: int) -> None:
        self.port, self.namesrv_port = port, namesrv_port
        self.is_done = False
        self.sent: dict[str, set[bytes]] = {}
        """Topic: bodies whose sends were acknowledged."""
        self.committed: set[bytes] = set()
        self.rolled_back: set[bytes] = set()
        self.acked: set[bytes] = set()
        self.sent_back: set[bytes] = set()
        self.offset = self.locked = 0
        self.turns: dict[str, int] = {}
        self.deaths = 0

    async def run(self, fired: Callable[[], bool]) -> None:
        """Until every failpoint has fired, and a moment longer."""
        loads = (self._send, self._consume, self._transact, self._pop, self._send_back, self._ask_routes, self._lock,
                 self._come_and_go)  # fmt: skip
        async with asyncio.TaskGroup() as group:
            for load in loads:
                group.create_task(self._with_peer(load))
            deadline = time.monotonic() + LONGEST_S
            while not fired():
                if time.monotonic() > deadline:
                    raise AssertionError("not every failpoint fired")
                await asyncio.sleep(0.1)
            before = dict(self.turns)
            while any(self.turns.get(one, 0) < count + 3 for one, count in before.items()):  # all of them went on
                await asyncio.sleep(0.1)
            self.is_done = True

    async def _with_peer(self, load: Callable[[Peer], Awaitable[None]]) -> None:
        peer = Peer(self.namesrv_port if load == self._ask_routes else self.port)
        try:
            await load(peer)
        finally:
            self.deaths += peer.deaths
            await peer.close()

    def _turn(self, name: str) -> bool:
        self.turns[name] = self.turns.get(name, 0) + 1
        return not self.is_done

    async def _sent(self, peer: Peer, topic: str, body: bytes) -> Command:
        answer = await peer.until(send(topic, body, {"UNIQ_KEY": f"{topic}-{body.decode()}"}))
        self.sent.setdefault(topic, set()).add(body)
        return answer

    async def _send(self, peer: Peer) -> None:
        for number in itertools.count():
            await self._sent(peer, "orders", b"order-%d" % number)
            if not self._turn("send"):
                return
            await asyncio.sleep(0.02)

    async def _consume(self, peer: Peer) -> None:
        """A member of a group reads, commits, and asks for what is committed."""
        group, topic, beat_s = "readers", "orders", 0.0
        queue = {"consumerGroup": group, "topic": topic, "queueId": "0"}
        at = deaths = 0
        while self._turn("consume"):
            if peer.deaths != deaths or time.monotonic() > beat_s:
                deaths, beat_s = peer.deaths, time.monotonic() + 1.0
                await peer.until(heartbeat("reader@1", group, topic))
            answer = await peer.until(pull(group, topic, at), is_pulled)
            at = int(answer.ext_fields["nextBeginOffset"])
            fields = {**queue, "commitOffset": str(at)}
            await peer.until(request(RequestCode.UPDATE_CONSUMER_OFFSET, fields))
            known = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)
            found = await peer.until(request(RequestCode.QUERY_CONSUMER_OFFSET, queue), has_code(*known))
            offset = int(found.ext_fields.get("offset", 0))
            assert self.offset <= offset <= at, "an offset went back, or was never committed"
            self.offset = offset
            await asyncio.sleep(0.05)

    async def _transact(self, peer: Peer) -> None:
        for number in itertools.count():
            if not self._turn("transact"):
                return
            body = b"deal-%d" % number
            answer = await peer.until(send("deals", body, dict(HALF_MARKS, UNIQ_KEY=body.decode()), sys_flag=HALF))
            fields = {
                "producerGroup": "dealers",
                "tranStateTableOffset": answer.ext_fields["queueOffset"],
                "commitLogOffset": str(int(answer.ext_fields["msgId"][16:], 16)),
                "commitOrRollback": str(ROLL_BACK if number % 3 == 0 else COMMIT),
                "msgId": body.decode(),
                "transactionId": body.decode(),
            }
            # One whose answer was lost is told the same again, and answered as before.
            await peer.until(request(RequestCode.END_TRANSACTION, fields))
            (self.rolled_back if number % 3 == 0 else self.committed).add(body)
            await asyncio.sleep(0.1)

    async def _pop(self, peer: Peer) -> None:
        """Sends, pops and acks, until everything that was sent is acknowledged."""
        left: set[bytes] = set()
        numbers = itertools.count()
        while self._turn("pop") or left:
            if not self.is_done:
                body = b"job-%d" % next(numbers)
                await self._sent(peer, "jobs", body)
                left.add(body)
            fields = {**POP, "bornTime": str(time.time_ns() // 1_000_000)}
            answered = (ResponseCode.SUCCESS, ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND)
            answer = await peer.until(request(RequestCode.POP_MESSAGE, fields), has_code(*answered))
            if answer.code:
                continue
            starts = parse_info(answer.ext_fields["startOffsetInfo"])
            for record in records(answer.body):
                handle = record.properties.get("POP_CK") or str(
                    ReceiptHandle(
                        int(starts[f"0@{record.queue_id}"]),
                        int(answer.ext_fields["popTime"]),
                        int(answer.ext_fields["invisibleTime"]),
                        int(answer.ext_fields["reviveQid"]),
                        0,
                        "commitmq",
                        record.queue_id,
                        record.queue_offset,
                    )
                )
                ack = {"consumerGroup": "workers", "topic": "jobs", "queueId": str(record.queue_id),
                       "extraInfo": handle, "offset": str(record.queue_offset)}  # fmt: skip
                await peer.until(request(RequestCode.ACK_MESSAGE, ack))
                self.acked.add(record.body)
                left.discard(record.body)

    async def _send_back(self, peer: Peer) -> None:
        """Sends messages and sends each back to the retry topic of a group."""
        for number in itertools.count():
            if not self._turn("send_back"):
                return
            body = b"toy-%d" % number
            answer = await self._sent(peer, "toys", body)
            fields = {"offset": str(int(answer.ext_fields["msgId"][16:], 16)), "group": "menders", "delayLevel": "1",
                      "originMsgId": answer.ext_fields["msgId"], "originTopic": "toys", "maxReconsumeTimes": "16"}  # fmt: skip
            await peer.until(request(RequestCode.CONSUMER_SEND_MSG_BACK, fields))
            self.sent_back.add(body)
            await asyncio.sleep(0.1)

    async def _ask_routes(self, peer: Peer) -> None:
        """The name server has the route again soon after its own death, and after the broker server's."""
        while self._turn("route"):
            answer = await peer.until(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}))
            assert load_object(answer.body)["queueDatas"][0]["brokerName"] == "commitmq"
            await asyncio.sleep(0.1)

    async def _lock(self, peer: Peer) -> None:
        """A client locks both queues again and again, as it must. Another one asks for them in between."""
        other, deaths = Peer(self.port), -1
        try:
            while self._turn("lock"):
                if peer.deaths != deaths:
                    await peer.until(heartbeat("walker@1", "walkers", "orders"))
                deaths = peer.deaths
                answer = await peer.until(lock("walker@1"))
                mine, others_deaths = locked(answer), other.deaths
                theirs = locked(await other.until(lock("walker@2")))
                await asyncio.sleep(0.05)  # the end of a connection is seen by then
                if (peer.deaths, other.deaths) == (deaths, others_deaths):  # one life of the server
                    assert not mine & theirs, "two clients have locked one queue"
                    self.locked += len(mine)
                if theirs:  # after a death, which forgets all locks
                    await other.until(lock("walker@2", RequestCode.UNLOCK_BATCH_MQ))
        finally:
            await other.close()

    async def _come_and_go(self, peer: Peer) -> None:
        """A consumer joins its group, becomes a member at the node, and leaves."""
        while self._turn("come_and_go"):
            await peer.until(heartbeat("passer@1", "passers", "orders"))
            await asyncio.sleep(0.3)
            fields = {"clientID": "passer@1", "consumerGroup": "passers"}
            await peer.until(request(RequestCode.UNREGISTER_CLIENT, fields))
            await asyncio.sleep(0.1)


def lock(client_id: str, code: RequestCode = RequestCode.LOCK_BATCH_MQ) -> Command:
    """A client of ``walkers`` locks both queues of ``orders``, or unlocks them."""
    queues = [{"topic": "orders", "brokerName": "commitmq", "queueId": queue} for queue in range(2)]
    return request(code, body=dumps({"consumerGroup": "walkers", "clientId": client_id, "mqSet": queues}))


def locked(answer: Command) -> set[int]:
    """The queues that the client has."""
    return {int(one["queueId"]) for one in load_object(answer.body)["lockOKMQSet"]}


def members(node: Node) -> list[str]:
    """The members of all groups at the node."""
    with Admin(node.address) as admin:
        return [one for name in ("readers", "walkers", "passers") for one in admin.group(name)["members"]]


def check(node: Node, load: Load) -> None:
    """What was acknowledged is there."""
    eventually(lambda: members(node) == [], "no group has a member that is gone", timeout_s=30)
    assert load.locked > 0
    for topic, bodies in load.sent.items():
        assert bodies <= {one.body for one in everything(node, topic)}, f"acknowledged messages of {topic} are lost"
    assert load.committed, "no transaction was committed"
    eventually(
        lambda: load.committed <= {one.body for one in everything(node, "deals")}, "committed messages are there"
    )
    assert not load.rolled_back & {one.body for one in everything(node, "deals")}
    assert load.acked >= load.sent["jobs"]
    assert load.offset > 0, "nothing was committed"
    assert load.sent_back
    eventually(
        lambda: load.sent_back <= {one.body for one in everything(node, "%RETRY%menders")},
        "what was sent back comes again",
        timeout_s=30,
    )


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(SOME, id="some"),
        pytest.param(SENDS, id="sends", marks=pytest.mark.slow),
        pytest.param(GROUPS, id="groups", marks=pytest.mark.slow),
        pytest.param(MOVERS, id="movers", marks=pytest.mark.long),
        pytest.param(LOCKS, id="locks", marks=pytest.mark.long),
    ],
)
def test_clients_survive_the_deaths_of_both_servers(tmp_path: Path, points: tuple[str, ...]) -> None:
    (fired := tmp_path / "fired").mkdir()
    extra = {"COMMITMQ_FAILPOINTS": ";".join(points), "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with served_node(tmp_path, *SETTINGS, **extra) as (node, port, namesrv_port):
        load = Load(port, namesrv_port)
        asyncio.run(load.run(lambda: len(list(fired.iterdir())) == len(points)))
        restarts = {row["role"]: row["restarts"] for row in node.report()["processes"]}
        servers = restarts["worker-rocketmq_broker"], restarts["worker-rocketmq_namesrv"]
        assert sum(servers) == len(points)
        assert load.deaths > 0
        check(node, load)
