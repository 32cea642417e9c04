"""Goal: no program that reaches the ports of RocketMQ's clients can end, fill or stall the servers behind them.

Method: mutated frames of every request kind, from a fixed seed, in a process of their own, which checks the answers. Meanwhile
well-behaved clients send to the broker server, ask the name server for routes, and produce as the node's own. Looked at are
their times, memory and lives of all processes, and the lines in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Producer
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command, encode, request
from nodes import Node, environment, eventually, halted
from rocketmq_peer import LostError, connected, heartbeat, is_pulled, pull, send, served_node

SCRIPT = Path(__file__).parents[1] / "support" / "mutated_frames.py"
SEED = 17_05
SETTINGS = (
    "plugins.rocketmq.max_frame_bytes=1048576",
    "plugins.rocketmq.max_groups_per_connection=20",
    "plugins.rocketmq.max_topics_per_connection=20",
    "reader.max_wait_ms=200",
    "pop.max_wait_ms=200",
    "commit_log.flush_mode=async",
    "topics.max_topics=3000",
    "plugins.rocketmq.max_new_names_per_second=0",
)
FEW = (
    "plugins.rocketmq.max_new_names_per_second=1",
    "plugins.rocketmq.max_memberships_per_connection=30",
    "plugins.rocketmq.max_waiting_pulls_per_connection=4",
    "plugins.rocketmq.max_waiting_pops_per_connection=4",
    "plugins.rocketmq.max_connections_per_address=12",
)
ELSEWHERE = "127.0.0.2"
"""The address of the greedy client."""
SERVERS = ("worker-rocketmq_broker", "worker-rocketmq_namesrv")
MOST_BYTES = 400_000_000
QUIET_S = 2.0
POP = {"consumerGroup": "waiters", "topic": "nothing", "queueId": "-1", "maxMsgNums": "8", "invisibleTime": "60000",
       "pollTime": "1500", "initMode": "1", "order": "false"}  # fmt: skip
FLOOR_S = 0.5
"""Times below this prove nothing on a machine that does other things as well."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, int, int]]:
    with served_node(tmp_path_factory.mktemp("hostile"), *SETTINGS) as found:
        node = found[0]
        with Admin(node.address) as admin:
            for name in ("calm", "native", "mutated"):
                admin.topic_create(name, 1)
        # The broker server sees a topic that another client made a moment later.
        assert eventually(lambda: asyncio.run(has_route(found[2], "calm")), "the name server has the topics")
        yield found


async def has_route(namesrv_port: int, topic: str) -> bool:
    async with connected(namesrv_port) as names:
        return (await names.ask(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}), 30)).code == 0


class Neighbours:
    """Well-behaved clients, each at its own rate, and how long each request took."""

    def __init__(self, node: Node, port: int, namesrv_port: int) -> None:
        self._node, self._ports = node, (port, namesrv_port)
        self.took: dict[str, list[float]] = {"send": [], "route": [], "native": []}
        self.failures: list[str] = []
        self.largest: dict[str, int] = {}
        self._end = threading.Event()
        self._threads = [threading.Thread(target=one) for one in (self._speak, self._produce, self._watch)]

    def __enter__(self) -> Neighbours:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for one in self._threads:
            one.join()

    def _speak(self) -> None:
        asyncio.run(self._exchange())

    async def _exchange(self) -> None:
        async with connected(self._ports[0]) as broker, connected(self._ports[1]) as names:
            asked = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "calm"})
            while not self._end.is_set():
                for name, peer, command in (("send", broker, send("calm", b"x")), ("route", names, asked)):
                    began = time.monotonic()
                    try:
                        answer = await peer.ask(command, 30)
                        if answer.code:
                            self.failures.append(f"{name}: {answer.code} {answer.remark}")
                    except LostError as error:
                        self.failures.append(f"{name}: {error}")
                    self.took[name].append(time.monotonic() - began)
                await asyncio.sleep(0.01)

    def _produce(self) -> None:
        with Producer(self._node.address) as producer:
            while not self._end.wait(0.01):
                began = time.monotonic()
                producer.send("native", b"x")
                self.took["native"].append(time.monotonic() - began)

    def _watch(self) -> None:
        pids = self._node.pids()
        while not self._end.wait(0.1):
            for role, pid in pids.items():
                self.largest[role] = max(self.largest.get(role, 0), private_bytes(pid))

    def p99(self) -> dict[str, float]:
        return {name: sorted(took)[int(len(took) * 0.99)] for name, took in self.took.items()}


def private_bytes(pid: int) -> int:
    """Memory of a process without the files that it has mapped; 0 for one that is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * 4_096


def server_lines(node: Node) -> list[str]:
    """What the servers wrote into the log."""
    return [line for line in node.log().splitlines() if "rocketmq" in (line.split(" ", 3) + [""] * 3)[2]]


@pytest.mark.parametrize(
    "count",
    [5_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(7_200)])],
)
def test_mutated_frames_harm_nobody(served: tuple[Node, int, int], count: int) -> None:
    node, port, namesrv_port = served
    pids, before = node.pids(), len(server_lines(node))
    with Neighbours(node, port, namesrv_port) as quiet:
        time.sleep(QUIET_S if count <= 5_000 else 10 * QUIET_S)
    command = [sys.executable, str(SCRIPT), str(port), str(namesrv_port), "--count", str(count), "--seed", str(SEED)]
    with Neighbours(node, port, namesrv_port) as busy:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=7_000)
    assert done.returncode == 0, done.stderr[-3_000:]
    counts = json.loads(done.stdout)
    memory = {one: busy.largest[one] for one in SERVERS}
    sys.stdout.write(f"{counts} p99 quiet {quiet.p99()} busy {busy.p99()} memory {memory}\n")
    assert counts["ended"] > 0
    assert counts["kept"] > 0
    assert counts["answered"] > count * 0.7, "most mutations can be read"
    assert len(counts) > 8, "answers of many kinds"
    assert quiet.failures == busy.failures == []
    now = node.pids()
    assert {role: now.get(role) for role in pids} == pids, "a process was started anew"
    assert max(busy.largest.values()) < MOST_BYTES
    for name, limit in quiet.p99().items():
        assert busy.p99()[name] <= max(3 * limit, FLOOR_S), (name, limit, busy.p99()[name])
    lines = server_lines(node)[before:]
    assert [line for line in lines if "a request failed" in line] == [], (
        "a mistake of a client is no failure of the server"
    )
    assert len(lines) < 300 + counts["seconds"] * 20


def test_the_settings_of_a_group_are_bounded(served: tuple[Node, int, int]) -> None:
    async def put(size: int) -> Command:
        body = dumps({"groupName": "fat", "attributes": {"+fat": "x" * size}})
        async with connected(served[1]) as peer:
            return await peer.ask(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body), 30)

    for size in (70_000, 700_000):
        answer = asyncio.run(put(size))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "the settings of a group have" in str(answer.remark)
    assert asyncio.run(put(1_000)).code == 0


def test_a_client_makes_no_more_groups_and_topics_than_it_may(served: tuple[Node, int, int]) -> None:
    node, port, _ = served

    async def talk() -> tuple[list[int], list[int], int]:
        async with connected(port) as greedy, connected(port) as other:
            groups = [
                (await greedy.ask(heartbeat("greedy@1", f"greedy{number}", "calm"), 30)).code for number in range(25)
            ]
            topics = [(await greedy.ask(send(f"greedy{number}", b"x"), 30)).code for number in range(25)]
            fine = (await other.ask(heartbeat("other@1", "others", "calm"), 30)).code
            return groups, topics, fine

    groups, topics, fine = asyncio.run(talk())
    assert groups == [0] * 20 + [1] * 5
    assert topics == [0] * 20 + [1] * 5
    assert fine == 0
    with Admin(node.address) as admin:
        names = {one.name for one in admin.topics()}
    assert "%RETRY%greedy24" not in names


def test_idle_and_half_open_peers_cost_a_well_behaved_one_nothing(served: tuple[Node, int, int]) -> None:
    _, port, _ = served

    async def talk() -> list[float]:
        hostile = []
        for number in range(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if number % 3 == 1:
                writer.write(b"\x00\x00\x10\x00\x00")  # a frame that never gets on
            elif number % 3 == 2:
                reading: Any = writer.transport
                reading.pause_reading()
                writer.writelines(
                    encode(request(RequestCode.GET_ALL_TOPIC_CONFIG)) for _ in range(200)
                )  # answers that nobody reads
            hostile.append((reader, writer))
        took = []
        async with connected(port) as peer:
            await peer.until(send("calm", b"x"))
            for number in range(100):
                if number % 10 == 0:
                    for one, (_, writer) in enumerate(hostile):
                        if one % 3 == 1:
                            writer.write(b"\x00")  # slowly
                began = time.monotonic()
                assert (await peer.ask(send("calm", b"x"), 10)).code == 0
                took.append(time.monotonic() - began)
        for _, writer in hostile:
            writer.transport.abort()
        return took

    took = asyncio.run(talk())
    assert sorted(took)[50] < 0.2


def test_a_server_that_starts_waits_for_an_absent_coordinator(tmp_path: Path) -> None:
    with served_node(tmp_path, "supervisor.hang_timeout_s=60") as (node, port, _):
        broker, coordinator = (node.pids()[one] for one in ("worker-rocketmq_broker", "coordinator"))
        with halted(coordinator):
            os.kill(broker, signal.SIGKILL)
            time.sleep(7.0)  # longer than a question to the coordinator may take
        eventually(lambda: node.healed("worker-rocketmq_broker", broker), "the server runs again", timeout_s=60)

        async def talk() -> int:
            async with connected(port) as peer:
                return (await peer.until(heartbeat("one@1", "late", "calm"))).code

        assert asyncio.run(talk()) == 0
        assert node.row("worker-rocketmq_broker")["restarts"] == 1


def test_a_client_that_connects_again_and_again_takes_its_share(tmp_path: Path) -> None:
    with served_node(tmp_path, *FEW) as (node, port, _):
        with Admin(node.address) as admin:
            admin.topic_create("calm", 1)
            admin.topic_create("nothing", 1)
        began = time.monotonic()
        codes, good = asyncio.run(_flood_with_groups(port))
        took_s = time.monotonic() - began
        made = codes.count(ResponseCode.SUCCESS)
        assert 60 <= made <= 62 + took_s
        assert codes.count(ResponseCode.SYSTEM_BUSY) == len(codes) - made > 30
        assert good == [0] * 10
        with Admin(node.address) as admin:
            names = {one.name for one in admin.topics()}
        assert sum(name.startswith("%RETRY%greedy") for name in names) == made
        assert asyncio.run(_too_many(port)) == {"memberships": 1, "left": True, "connections": 0}


async def _flood_with_groups(port: int) -> tuple[list[int], list[int]]:
    """The codes that heartbeats of a greedy client get, and those of a well-behaved one beside it."""
    codes: list[int] = []
    good: list[int] = []
    async with connected(port) as other:
        for number in range(100):
            async with connected(port, source=ELSEWHERE) as greedy:
                codes.append((await greedy.ask(heartbeat("greedy@1", f"greedy{number}", "calm"), 30)).code)
            if number % 10 == 0:
                good.append((await other.ask(heartbeat("good@1", f"good{number}", "calm"), 30)).code)
    return codes, good


async def _too_many(port: int) -> dict[str, Any]:
    """What a greedy client gets beyond its share."""
    found: dict[str, Any] = {}
    async with connected(port, source=ELSEWHERE) as greedy:
        names = [{"groupName": f"p{number}"} for number in range(31)]
        body = dumps({"clientID": "greedy@1", "producerDataSet": names, "consumerDataSet": []})
        found["memberships"] = (await greedy.ask(request(RequestCode.HEART_BEAT, {}, body), 30)).code
        body = dumps({"clientID": "greedy@1", "producerDataSet": names[:30], "consumerDataSet": []})
        assert (await greedy.ask(request(RequestCode.HEART_BEAT, {}, body), 30)).code == 0
    async with asyncio.TaskGroup() as group, connected(port, source=ELSEWHERE) as greedy, connected(port) as other:
        await greedy.ask(send("calm", b"x"))
        await greedy.until(pull("g", "calm", 0), is_pulled)
        pulls = [group.create_task(greedy.ask(pull("g", "calm", 1, suspendTimeoutMillis="3000"), 30)) for _ in range(9)]
        fine = group.create_task(other.ask(pull("g", "calm", 1, suspendTimeoutMillis="3000"), 30))
        done, waiting = await asyncio.wait(pulls, timeout=1.0)
        assert [one.result().code for one in done] == [ResponseCode.FLOW_CONTROL] * 5
        await greedy.ask(send("calm", b"y"))
        assert [(await one).code for one in (*waiting, fine)] == [0] * 5
        fields = {**POP, "bornTime": str(time.time_ns() // 1_000_000)}
        pops = [group.create_task(greedy.ask(request(RequestCode.POP_MESSAGE, fields), 30)) for _ in range(9)]
        done, waiting = await asyncio.wait(pops, timeout=1.0)
        assert [one.result().code for one in done] == [ResponseCode.POLLING_FULL] * 5
        assert {(await one).code for one in waiting} == {ResponseCode.POLLING_TIMEOUT}
    async with contextlib.AsyncExitStack() as many:
        for _ in range(12):
            peer = await many.enter_async_context(connected(port, source=ELSEWHERE))
            assert (await peer.ask(send("calm", b"x"))).code == 0
        try:
            await (await many.enter_async_context(connected(port, source=ELSEWHERE))).ask(send("calm", b"x"))
        except LostError:
            found["left"] = True
        found["connections"] = (await (await many.enter_async_context(connected(port))).ask(send("calm", b"x"))).code
    return found
