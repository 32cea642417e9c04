"""Goal: a node that was started with --rocketmq serves the protocol of RocketMQ: sends, pulls, commits, members, deaths.

Method: a real node on free ports, spoken to by the frames of the protocol; the node's own clients at the other end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Producer, Reader
from commitmq.format.client_batch import BatchElement, encode_client_batch
from commitmq.format.record import decode_record
from commitmq.store.layout import StoreLayout
from commitmq.supervision.exit_codes import CliExit
from commitmq.testing.node_process import eventually
from commitmq_plugins.rocketmq.remoting.bodies import (
    RegisterBrokerBody,
    RemotingDataVersion,
    RemotingTopicConfig,
    TopicConfigSerializeWrapper,
)
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps, load_object
from commitmq_plugins.rocketmq.remoting.frame import Command, PeerSilentError, encode, request
from nodes import Node, free_port, free_ports, start_node
from rocketmq_client import PULL, SEND, ask, send, served


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Node]:
    found = Node(
        tmp_path_factory.mktemp("rocketmq") / "store",
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv_port={free_port()}",
        f"network.store_port={port}",
    )
    assert found.start().returncode == 0
    yield found
    found.end()


def test_what_a_client_of_rocketmq_sends_all_can_read(node: Node, port: int) -> None:
    served(port)

    async def talk(client: RemotingClient) -> tuple[list[Command], bytes]:
        sent = await asyncio.gather(*(send(client, b"body %d" % one, f"KEY{one}") for one in range(20)))
        found, at = b"", "0"
        while at != "20":  # the last ones may be readable a moment later
            pulled = await client.request(request(RequestCode.PULL_MESSAGE, {**PULL, "queueOffset": at}), 10)
            assert pulled.remark == "FOUND"
            found, at = found + bytes(pulled.body), pulled.ext_fields["nextBeginOffset"]
        return sent, found

    sent, found = ask(port, talk)
    assert [answer.code for answer in sent] == [0] * 20
    assert sorted(int(answer.ext_fields["queueOffset"]) for answer in sent) == list(range(20))
    assert {answer.ext_fields["MSG_REGION"] for answer in sent} == {"DefaultRegion"}
    records = records_of(found)
    by_id = {record.offset_msg_id: record for record in records}
    for number, answer in enumerate(sent):
        record = by_id[answer.ext_fields["msgId"]]
        assert record.body == b"body %d" % number
        assert record.queue_offset == int(answer.ext_fields["queueOffset"])
        assert record.properties["UNIQ_KEY"] == answer.ext_fields["transactionId"] == f"KEY{number}"
        assert record.born_host.ip == "127.0.0.1"
        assert record.born_host.port > 0  # the client's own port: a run keeps the addresses of its senders
    with Reader("orders", node=node.address) as reader:
        bodies: list[bytes] = []
        for batch in reader:
            bodies += [message.body for message in batch]
            if len(bodies) >= 20:
                break
    assert sorted(bodies) == sorted(record.body for record in records)


def test_a_topic_that_a_send_makes_has_a_route_when_the_send_is_answered(node: Node, port: int) -> None:
    [names] = node.row("worker-rocketmq_namesrv")["endpoints"]

    async def talk(client: RemotingClient) -> list[int]:
        server = RemotingClient("127.0.0.1", int(names.rpartition(":")[2]))
        codes = []
        for number in range(20):
            fields = {**SEND, "topic": f"new{number}", "e": "0", "b": f"new{number}"}
            answer = await client.request(Command(RequestCode.SEND_MESSAGE_V2, 1, ext_fields=fields, body=b"x"), 10)
            assert answer.code == 0, answer.remark
            route = await server.request(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": f"new{number}"}), 10)
            codes.append(route.code)
        await server.close()
        return codes

    assert ask(port, talk) == [0] * 20


def test_the_topic_of_the_brokers_name_has_the_queues_that_are_registered(node: Node, port: int) -> None:
    """Producers that saw more queues after a while would use them."""
    with Admin(node.address) as admin:
        for name in ("commitmq", "DefaultCluster"):
            fields = {**SEND, "topic": name, "e": "0", "b": name}
            command = Command(RequestCode.SEND_MESSAGE_V2, 1, ext_fields=fields, body=b"x")
            assert ask(port, partial(RemotingClient.request, command=command, timeout_s=10)).code == 0
            assert admin.topic(name).write_queues == 1


def test_a_name_server_that_never_answers_holds_no_client_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        broker = free_port()
        more = (
            "plugins.rocketmq.enable=true",
            "plugins.rocketmq.vip_port=false",
            "plugins.rocketmq.namesrv_port=0",
            f"plugins.rocketmq.namesrv=127.0.0.1:{silent.getsockname()[1]}",
            f"network.store_port={broker}",
        )
        with start_node(tmp_path, *more):

            async def talk(client: RemotingClient) -> float:
                began = time.monotonic()
                for number in range(3):
                    fields = {**SEND, "topic": f"new{number}", "e": "0", "b": f"new{number}"}
                    answer = await client.request(
                        Command(RequestCode.SEND_MESSAGE_V2, 1, ext_fields=fields, body=b"x"), 10
                    )
                    assert answer.code == 0, answer.remark
                return time.monotonic() - began

            assert ask(broker, talk) < 3, "three waits of half a second at most"


def test_a_group_that_may_not_consume_gets_nothing(node: Node, port: int) -> None:
    async def talk(client: RemotingClient) -> list[tuple[int, str]]:
        sent = await send(client, b"x", "disabled")
        await pull_all(client, "orders", int(sent.ext_fields["queueOffset"]) + 1)  # it is in the ConsumeQueue
        seen = []
        for enabled in (True, False, True):
            group = {"groupName": "disabled", "consumeEnable": enabled}
            await client.request(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, dumps(group)), 10)
            pull = {**PULL, "consumerGroup": "disabled", "suspendTimeoutMillis": "0", "sysFlag": "4"}
            answer = await client.request(request(RequestCode.PULL_MESSAGE, pull), 10)
            seen.append((answer.code, answer.ext_fields.get("forbiddenType", "")))
        return seen

    (first, _), second, (third, _) = ask(port, talk)
    assert first == third == ResponseCode.SUCCESS
    assert second == (ResponseCode.NO_PERMISSION, "2")


def test_a_group_that_our_own_tool_has_switched_off_gets_nothing(node: Node, port: int) -> None:
    pull = {**PULL, "consumerGroup": "switched", "suspendTimeoutMillis": "0", "sysFlag": "4"}

    async def pulls(client: RemotingClient) -> int:
        return (await client.request(request(RequestCode.PULL_MESSAGE, pull), 10)).code

    async def begin(client: RemotingClient) -> None:
        sent = await send(client, b"x", "switched")
        await pull_all(client, "orders", int(sent.ext_fields["queueOffset"]) + 1)

    ask(port, begin)
    with Admin(node.address) as admin:
        for enabled in (True, False, True):
            admin.group_config("switched", {"consumeEnable": enabled})
            wanted = ResponseCode.SUCCESS if enabled else ResponseCode.NO_PERMISSION
            assert ask(port, pulls) == wanted


def test_a_pull_that_waits_is_judged_again_when_there_is_a_message(node: Node, port: int) -> None:
    async def talk(client: RemotingClient) -> int:
        sent = await send(client, b"x", "there")
        end = str(int(sent.ext_fields["queueOffset"]) + 1)
        await pull_all(client, "orders", int(end))  # a pull beyond the end of the ConsumeQueue does not wait
        fields = {
            **PULL,
            "consumerGroup": "waiting",
            "suspendTimeoutMillis": "15000",
            "sysFlag": "6",
            "queueOffset": end,
        }
        waiting = asyncio.create_task(client.request(request(RequestCode.PULL_MESSAGE, fields), 30))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        with Admin(node.address) as admin:
            admin.group_config("waiting", {"consumeEnable": False})
        await send(client, b"y", "waited for")
        return (await waiting).code

    assert ask(port, talk) == ResponseCode.NO_PERMISSION


def test_a_message_that_cannot_go_back_is_not_taken_for_one_that_went(node: Node, port: int) -> None:
    """A client drops a message whose send-back succeeded."""

    async def talk(client: RemotingClient) -> list[int]:
        sent = await send(client, b"x", "back")
        record = (await pull_all(client, "orders", int(sent.ext_fields["queueOffset"]) + 1))[-1]
        fields = {"offset": str(record.physical_offset), "group": "back", "delayLevel": "1", "originMsgId": "x",
                  "originTopic": "orders", "unitMode": "false"}  # fmt: skip
        codes = []
        for perm, queues in ((6, 1), (4, 1), (4, 0)):
            group = {"groupName": "back", "retryQueueNums": queues}
            await client.request(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, dumps(group)), 10)
            if perm == 4:
                topic = {"topic": "%RETRY%back", "defaultTopic": "TBW102", "readQueueNums": "1", "writeQueueNums": "1",
                         "perm": "4", "topicFilterType": "SINGLE_TAG"}  # fmt: skip
                answer = await client.request(request(RequestCode.UPDATE_AND_CREATE_TOPIC, topic), 10)
                assert answer.code == 0, answer.remark
            back = request(RequestCode.CONSUMER_SEND_MSG_BACK, fields)
            codes.append((await client.request(back, 10)).code)
        return codes

    assert ask(port, talk) == [ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION, ResponseCode.SUCCESS]


def test_the_progress_of_all_groups_is_computed_once_for_all_who_ask(node: Node, port: int) -> None:
    async def talk(client: RemotingClient) -> list[bytes]:
        for number in range(200):
            fields = {"groupName": f"progress{number}"}
            await client.request(request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, dumps(fields)), 10)
        began = time.monotonic()
        command = request(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})
        await client.request(command, 30)
        alone_s = time.monotonic() - began
        began = time.monotonic()
        commands = [request(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}) for _ in range(100)]
        answers = await asyncio.gather(*(client.request(one, 30) for one in commands))
        assert time.monotonic() - began < 10 * alone_s + 1, f"one takes {alone_s:.2f} s"
        return [bytes(one.body) for one in answers]

    answers = ask(port, talk)
    assert all(b'"progress199"' in one for one in answers)


@pytest.mark.parametrize("taken", ["plugins.rocketmq.namesrv_port", "network.store_port", "vip"])
def test_a_start_without_its_ports_is_refused(tmp_path: Path, taken: str) -> None:
    first = free_ports(8)
    ports = {"plugins.rocketmq.namesrv_port": first, "network.store_port": first + 5}
    with socket.create_server(("127.0.0.1", first + 3 if taken == "vip" else ports[taken])) as other:
        node = Node(
            tmp_path / "store", "plugins.rocketmq.enable=true", *(f"{key}={port}" for key, port in ports.items())
        )
        done = node.start()
        number = other.getsockname()[1]
        assert done.returncode == CliExit.ADDRESS_IN_USE
        assert f"port {number} is in use by process {os.getpid()} " in done.stderr
        key = "network.store_port" if taken == "vip" else taken
        assert f"choose another port with --set {key}=PORT" in done.stderr
    done = node.start()
    assert done.returncode == 0
    assert f"rocketmq_namesrv is at 127.0.0.1:{first}\nrocketmq_broker is at 127.0.0.1:{first + 5}\n" in done.stdout
    node.end()


def records_of(data: bytes) -> list[Any]:
    found, at = [], 0
    while at < len(data):
        found.append(decode_record(data, at))
        at += found[-1].total_size
    return found


async def pull_all(client: RemotingClient, topic: str, count: int) -> list[Any]:
    """All records of queue 0, which gets ``count`` messages."""
    found, at = b"", "0"
    while at != str(count):
        pulled = await client.request(
            request(RequestCode.PULL_MESSAGE, {**PULL, "topic": topic, "queueOffset": at}), 10
        )
        assert pulled.remark == "FOUND"
        found, at = found + bytes(pulled.body), pulled.ext_fields["nextBeginOffset"]
    return records_of(found)


def test_a_batch_is_stored_as_its_messages(node: Node, port: int) -> None:
    served(port)
    elements = [BatchElement(b"%d" % one * 300, b"UNIQ_KEY\x01B%d\x02" % one, one) for one in range(100)]

    async def talk(client: RemotingClient) -> tuple[Command, list[Any]]:
        fields = {**SEND, "b": "batches", "i": "WAIT\x01true\x02", "m": "true"}
        body = encode_client_batch(elements)
        sent = await client.request(request(RequestCode.SEND_BATCH_MESSAGE, fields, body), 10)
        return sent, await pull_all(client, "batches", 100)

    sent, records = ask(port, talk)
    assert (sent.code, sent.ext_fields["queueOffset"]) == (0, "0")
    assert sent.ext_fields["msgId"].split(",") == [record.offset_msg_id for record in records]
    assert [(one.body, one.flag, one.properties["UNIQ_KEY"]) for one in records] == [
        (one.body, one.flag, f"B{number}") for number, one in enumerate(elements)
    ]


def test_no_client_is_refused_because_of_the_message_of_another_one(node: Node, port: int) -> None:
    served(port)

    async def talk(client: RemotingClient) -> tuple[list[Command], list[Any]]:
        await send(client, b"first", "K", b="shared")  # it makes the topic
        bad = {"i": "UNIQ_KEY\x01BAD\x02INNER_NUM\x012\x02"}  # only the node may set that
        found = await asyncio.gather(
            *(send(client, b"%d" % one, f"K{one}", b="shared", **(bad if one == 4 else {})) for one in range(9))
        )
        return found, await pull_all(client, "shared", 9)

    answers, records = ask(port, talk)
    assert [answer.code for answer in answers] == [
        ResponseCode.MESSAGE_ILLEGAL if one == 4 else ResponseCode.SUCCESS for one in range(9)
    ]
    assert {record.body for record in records} == {b"first", *(b"%d" % one for one in range(9) if one != 4)}


def test_a_lone_sender_takes_the_writers_local_socket(node: Node, port: int) -> None:
    served(port)

    async def talk(client: RemotingClient) -> list[int]:
        counts = []
        for number in range(6):
            sent = await send(client, b"lone", f"K{number}", b="lone")
            assert sent.ext_fields["queueOffset"] == str(number)
            counts.append(local_connections(node))
        return counts

    counts = ask(port, talk)
    assert counts[-1] > 0
    # When it is gone (its end by the kernel is that of a dead writer), messages go on.
    writer = node.pids()["writer"]
    os.kill(writer, signal.SIGKILL)
    eventually(lambda: node.healed("writer", writer), "another writer")

    async def again(client: RemotingClient) -> list[int]:
        return [(await send(client, b"after", f"L{number}", b="lone")).code for number in range(4)]

    assert ask(port, again) == [0] * 4


def local_connections(node: Node) -> int:
    """How many sockets of the broker server are connected to the writer's local socket."""
    path = str(StoreLayout(node.store).local_socket)
    listed = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    return sum(line.endswith(path) for line in listed) - 1  # the listening one


def test_refusals_have_rocketmqs_codes(node: Node, port: int) -> None:
    served(port)

    async def talk(client: RemotingClient) -> list[int]:
        assert (await send(client, b"x", "K0")).code == 0
        answers = [
            await client.request(request(RequestCode.PULL_MESSAGE, {**PULL, "topic": "nothing"})),
            await client.request(request(RequestCode.PULL_MESSAGE, {**PULL, "queueId": "99"})),
            await client.request(
                request(RequestCode.PULL_MESSAGE, {**PULL, "sysFlag": "2", "consumerGroup": "unknown"})
            ),
            await client.request(request(RequestCode.PULL_MESSAGE, {**PULL, "queueOffset": "-1"})),
            await send(client, b"x", "K", b="absent", c="no-template"),
            await send(client, b"x", "K", e="99"),
            await send(client, b"x", "K", b="a b"),
            await client.request(request(RequestCode.SEND_MESSAGE_V2, {"a": "pg"}, b"x")),
            await client.request(Command(31_415)),
        ]
        return [answer.code for answer in answers]

    assert ask(port, talk) == [
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.PULL_OFFSET_MOVED,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
    ]


def heartbeat(client_id: str, group: str, topic: str) -> Command:
    subscription = {"topic": topic, "subString": "*", "subVersion": 1, "expressionType": "TAG"}
    consumer = {"groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [subscription]}  # fmt: skip
    return request(RequestCode.HEART_BEAT, body=dumps({"clientID": client_id, "consumerDataSet": [consumer]}))


def test_a_client_s_first_trace_makes_the_topic_of_traces(node: Node, port: int) -> None:
    """With as many queues as the client has seen in the template of topics, and picked one of."""
    served(port)
    fields = {"b": "RMQ_SYS_TRACE_TOPIC", "d": "4", "e": "3"}
    answer = ask(port, lambda client: send(client, b"trace", "TRACE", **fields))
    assert (answer.code, answer.ext_fields["queueId"]) == (0, "3")


def test_the_last_offsets_of_a_consumer_that_leaves_are_stored(node: Node, port: int) -> None:
    served(port)
    with Producer(node.address) as producer:
        for number in range(6):
            producer.send("parcels", b"%d" % number, queue=0)
        producer.send("parcels", b"6", queue=1)

    async def talk(client: RemotingClient) -> tuple[list[str], str]:
        assert (await client.request(heartbeat("one@1", "post", "parcels"))).code == 0
        listed = await client.request(request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "post"}))
        await asyncio.sleep(1.0)  # it is a member of the group by now
        queue = {"consumerGroup": "post", "topic": "parcels", "queueId": "0"}
        with suppress(PeerSilentError):  # one-way, as in RocketMQ's client
            commit = request(RequestCode.UPDATE_CONSUMER_OFFSET, {**queue, "commitOffset": "5"}, oneway=True)
            await client.request(commit, 0.02)
        last = request(RequestCode.UPDATE_CONSUMER_OFFSET, {**queue, "queueId": "1", "commitOffset": "1"}, oneway=True)
        await asyncio.gather(
            client.request(request(RequestCode.UNREGISTER_CLIENT, {"clientID": "one@1", "consumerGroup": "post"})),
            client.request(last, 0.02),  # it may overtake, or be overtaken
            return_exceptions=True,
        )
        await asyncio.sleep(1.0)
        late = await client.request(request(RequestCode.QUERY_CONSUMER_OFFSET, {**queue, "queueId": "1"}))
        assert late.ext_fields["offset"] == "1"
        answer = await client.request(request(RequestCode.QUERY_CONSUMER_OFFSET, queue))
        return load_object(listed.body)["consumerIdList"], answer.ext_fields["offset"]

    assert ask(port, talk) == (["one@1"], "5")


def test_a_client_that_is_gone_before_its_heartbeat_was_handled_is_no_member(node: Node, port: int) -> None:
    served(port)

    async def talk(client: RemotingClient) -> list[str]:
        for number in range(5):  # each group is new, so the server has to ask the node first
            with socket.create_connection(("127.0.0.1", port)) as gone:
                gone.sendall(encode(heartbeat(f"gone@{number}", f"ghosts{number}", "ghosts")))
        await asyncio.sleep(1.0)
        found = []
        for number in range(5):
            assert (await client.request(heartbeat("here@1", f"ghosts{number}", "ghosts"))).code == 0
            group = {"consumerGroup": f"ghosts{number}"}
            listed = await client.request(request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, group))
            found += load_object(listed.body)["consumerIdList"]
        return found

    assert ask(port, talk) == ["here@1"] * 5


def names_of(admin: Admin) -> tuple[set[str], set[str]]:
    """The topics, without those of processes that start when they are needed first; and the groups."""
    topics = {one.name for one in admin.topics() if not one.name.startswith("rmq_sys_")}
    return topics, {one["name"] for one in admin.groups()}


def test_the_doctor_finds_nothing_wrong_and_leaves_nothing(node: Node, port: int) -> None:
    served(port)
    names = next(one for one in node.settings if "namesrv_port" in one).partition("=")[2]
    with Admin(node.address) as admin:
        before = names_of(admin)
        ended = node.run("rocketmq", "doctor", f"127.0.0.1:{names}", "--write", "--json", "--timeout", "20")
        after = names_of(admin)
    report = json.loads(ended.stdout)
    assert [one for one in report["findings"] if one["state"] != "ok"] == []
    assert ended.returncode == 0
    checks = [one["check"] for one in report["findings"]]
    assert {"send", "pull", "commit an offset", "pull with a SQL filter", "POP and acknowledge"} <= set(checks)
    assert before == after


def test_a_topic_of_several_brokers_is_shared_out_by_the_clients_alone(node: Node, port: int) -> None:
    """By the rule of RocketMQ's clients, over all queues of all brokers, the second one has all queues of this broker."""
    served(port)
    names = int(next(one for one in node.settings if "namesrv_port" in one).partition("=")[2])
    with Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create("spread", queues=2)
        for number in range(10):
            producer.send("spread", b"%d" % number, queue=number % 2)
    table = {"spread": RemotingTopicConfig("spread", 2, 2), "other": RemotingTopicConfig("other", 1, 1)}
    body = RegisterBrokerBody(TopicConfigSerializeWrapper(table, RemotingDataVersion(1, 1))).encode()
    fields = {"brokerName": "another", "brokerAddr": "127.0.0.1:1", "clusterName": "DefaultCluster", "brokerId": "0"}

    async def talk(first: RemotingClient) -> dict[str, str]:
        name_server, second = RemotingClient("127.0.0.1", names), RemotingClient("127.0.0.1", port)
        try:
            registered = await name_server.request(request(RequestCode.REGISTER_BROKER, fields, body))
            assert registered.code == 0, registered.remark
            await asyncio.sleep(4)  # the server looks for other brokers every 3 s
            for client, name in ((first, "one@1"), (second, "two@2")):
                assert (await client.request(heartbeat(name, "sharers", "spread"))).code == 0
            await asyncio.sleep(1)
            found = {}
            for queue in ("0", "1"):
                place = {"consumerGroup": "sharers", "topic": "spread", "queueId": queue}
                commit = request(RequestCode.UPDATE_CONSUMER_OFFSET, {**place, "commitOffset": "5"})
                assert (await second.request(commit)).code == 0
                answer = await second.request(request(RequestCode.QUERY_CONSUMER_OFFSET, place))
                found[queue] = answer.ext_fields["offset"]
            listed = await first.request(request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "sharers"}))
            assert load_object(listed.body)["consumerIdList"] == ["one@1", "two@2"]
            return found
        finally:
            await name_server.close()
            await second.close()

    assert ask(port, talk) == {"0": "5", "1": "5"}


def test_a_dead_server_is_replaced_and_loses_nothing(node: Node, port: int) -> None:
    served(port)
    assert ask(port, lambda client: send(client, b"before", "K1", b="deaths")).code == 0
    pid = node.pids()["worker-rocketmq_broker"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: node.healed("worker-rocketmq_broker", pid), "another broker server")
    served(port)
    assert ask(port, lambda client: send(client, b"after", "K2", b="deaths")).ext_fields["queueOffset"] == "1"


def test_what_its_clients_do_is_in_the_metrics(tmp_path: Path) -> None:
    port = free_port()
    settings = ["plugins.rocketmq.enable=true", "plugins.rocketmq.vip_port=false", "plugins.rocketmq.namesrv_port=0"]
    settings += [f"network.store_port={port}", "metrics.enable=true", "metrics.port=0", "metrics.age_ms=0"]
    with start_node(tmp_path, *settings) as node:
        served(port)

        async def talk(client: RemotingClient) -> None:
            assert (await client.request(heartbeat("one@1", "post", "orders"))).code == ResponseCode.SUCCESS
            assert (await send(client, b"counted", "k")).code == ResponseCode.SUCCESS
            eventually(lambda: 'language="java",version="v5_4_0",consume_mode="push"' in metrics(node), "it is counted")

        ask(port, talk)
        own = 'cluster="DefaultCluster",node_type="broker",node_id="commitmq",'
        count = f'rocketmq_rpc_latency_milliseconds_count{{{own}protocol_type="remoting",request_code='
        sent = f'{count}"send_message_v2",response_code="success",is_long_polling="false",result="success"}} 1'
        begun = f'{count}"heart_beat",response_code="success"'
        wanted = {f"rocketmq_messages_in_total{{{own}", sent, begun}
        eventually(lambda: all(one in metrics(node) for one in wanted), "all of it is counted")


def metrics(node: Node) -> str:
    """The answer to a scrape."""
    [address] = eventually(lambda: node.row("worker-metrics").get("endpoints"), "metrics are served")
    with urllib.request.urlopen(f"{address}/metrics", timeout=20) as answer:
        return str(answer.read().decode())
