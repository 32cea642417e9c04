"""Goal: a tool asks RocketMQ's consumers for their stacks, and to handle one message, and every wait has an end.

Method: a real node; connections of the test are clients that answer, refuse, or are silent; the command as a process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from commitmq import Admin, Consumer, Producer
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command
from nodes import Node, start_node
from rocketmq_client import served
from rocketmq_peer import connected, heartbeat, served_node

Run = Callable[..., Awaitable[str]]
STACK = 'Thread "ConsumeMessageThread_cooks_1"\n  java.lang.Thread.sleep'
# (A key of mqTable is an object, as fastjson writes it.)
INFO = b'{"jstack":%s,"mqTable":{{"brokerName":"b","queueId":0,"topic":"orders"}:{"locked":false}},"properties":{}}'
HANDLED = {"autoCommit": True, "consumeResult": "CR_SUCCESS", "order": False, "spentTimeMills": 12}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, int]]:
    with served_node(tmp_path_factory.mktemp("questions")) as (node, port, _):
        served(port)
        with Admin(node.address) as admin:
            admin.topic_create("orders", 1)
        yield node, port


async def run(node: Node, *words: str, code: int = 0, by: str | None = None, secret: str = "") -> str:
    """What a verb writes, or with another ``code`` what it complains of."""
    command = [sys.executable, "-m", "commitmq.cli.entry", *words, "--node", by or node.address]
    pipe = asyncio.subprocess.PIPE
    ended = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = (one.decode() for one in await ended.communicate(secret.encode()))
    assert ended.returncode == code, out + err
    return out if code == 0 else err


async def listed(node: Node, *ids: str) -> None:
    for _ in range(100):
        clients = json.loads(await run(node, "client", "list", "--json"))["clients"]
        if set(ids) <= {one["id"] for one in clients if one["gateway"] == "rocketmq"}:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{ids} are not listed")


def answers(seen: list[Command]) -> Callable[[Command], Command | None]:
    def answer(command: Command) -> Command | None:
        if command.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
            assert command.ext_fields["jstackEnable"] == "true"
            return command.answer(body=INFO % dumps(STACK))
        if command.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
            seen.append(command)
            return command.answer(body=dumps(HANDLED))
        return None

    return answer


def refuses(command: Command) -> Command | None:
    if command.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
        return command.answer(body=dumps({**HANDLED, "consumeResult": "CR_LATER", "remark": "too busy"}))
    if command.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
        return command.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "not here")
    return None


def test_consumers_tell_their_stacks_and_handle_a_message(serving: tuple[Node, int]) -> None:
    node, port = serving
    with Producer(node.address) as producer:
        message = producer.send("orders", b"one espresso").msg_id
    seen: list[Command] = []

    async def talk() -> None:
        async with connected(port, answers(seen)) as cook, connected(port, refuses) as waiter:
            await cook.until(heartbeat("10.1.2.3@77", "cooks", "orders"))
            await waiter.until(heartbeat("10.1.2.4@78", "waiters", "orders"))
            await listed(node, "10.1.2.3@77", "10.1.2.4@78")
            assert f"client 10.1.2.3@77\n{STACK}\n" in await run(node, "group", "members", "cooks", "--stack")
            told = json.loads(await run(node, "group", "members", "cooks", "--stack", "--json"))
            assert told == {
                "group": "cooks",
                "clients": [{"client": "10.1.2.3@77", "gateway": "rocketmq", "stack": STACK, "error": None}],
            }
            refused = await run(node, "group", "members", "waiters", "--stack", code=1)
            assert "client 10.1.2.4@78: REQUEST_CODE_NOT_SUPPORTED: not here" in refused

            verify = ("client", "verify", "10.1.2.3@77", message)
            assert await run(node, *verify) == "client 10.1.2.3@77 of group cooks: CR_SUCCESS in 12 ms\n"
            found: dict[str, Any] = json.loads(await run(node, *verify, "--json"))
            assert (found["group"], found["result"], found["spent_ms"]) == ("cooks", "CR_SUCCESS", 12)
            assert b"one espresso" in bytes(seen[-1].body)
            assert "CR_SUCCESS" in await run(node, *verify, "--tls")
            assert seen[-1].ext_fields["consumerGroup"] == "cooks"
            await run(node, "client", "verify", "10.1.2.4@78", message, code=1)
            assert "no client 'nobody'" in await run(node, "client", "verify", "nobody", message, code=1)
            assert "has 32 or 56 hex digits" in await run(node, "client", "verify", "10.1.2.3@77", "key", code=2)
            refused = await run(node, *verify, "--group", "others", code=1)
            assert "The Consumer <others> <10.1.2.3@77> not online" in refused

            await cook.until(heartbeat("10.1.2.3@77", "cooks", "orders"))
            secret = json.loads(await run_store(node, "user", "add", "root", "--super", "--json"))["secret"]
            for _ in range(100):
                if "NO_PERMISSION" in (refused := await run_any(node, "group", "members", "cooks", "--stack")):
                    break
            assert "--access-key signs the request" in refused
            stacked = await run(node, "group", "members", "cooks", "--stack", "--access-key", "root", secret=secret)
            assert STACK in stacked

    asyncio.run(talk())


async def run_store(node: Node, *words: str) -> str:
    ended = await asyncio.to_thread(node.run, *words, "--store", str(node.store))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


async def run_any(node: Node, *words: str) -> str:
    ended = await asyncio.to_thread(node.run, *words, "--node", node.address)
    return ended.stdout + ended.stderr


def test_a_silent_client_and_one_that_cannot_be_asked_are_named(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with served_node(tmp_path_factory.mktemp("silent")) as (node, port, _):
        served(port)
        with Admin(node.address) as admin:
            admin.topic_create("orders", 1)

        async def talk() -> None:
            async with connected(port) as silent:
                await silent.until(heartbeat("10.1.2.5@79", "cooks", "orders"))
                await listed(node, "10.1.2.5@79")
                complaint = await run(node, "group", "members", "cooks", "--stack", code=1)
                assert "client 10.1.2.5@79: CONSUME_MSG_TIMEOUT: consumer <cooks> <10.1.2.5@79> Timeout" in complaint

        asyncio.run(talk())
        with Consumer("orders", group="kitchen", node=node.address) as consumer:
            consumer.poll(0.5)
            complaint = asyncio.run(run(node, "group", "members", "kitchen", "--stack", code=1))
            assert "it speaks the node's own protocol" in complaint
            (member,) = json.loads(asyncio.run(run(node, "group", "members", "kitchen", "--json")))["members"]
            words = ("client", "verify", member["member"], "0" * 32)
            assert "it speaks the node's own protocol" in asyncio.run(run(node, *words, code=1))
            assert "are for --stack" in asyncio.run(run(node, "group", "members", "kitchen", "--tls", code=2))


def test_a_node_without_a_rocketmq_server_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    from commitmq.cli.client_questions import Questions

    with start_node(tmp_path_factory.mktemp("plain")) as node, Admin(node.address) as admin:
        with pytest.raises(SystemExit) as ended:
            Questions(admin, node.address, access_key=None, tls=False, timeout_s=1.0)
        assert ended.value.code == 1
