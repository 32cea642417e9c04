"""Goal: what RocketMQ's broker refuses or leaves out when a setting is off, the node does too: filters by properties, groups
that make themselves, stored replies (spec 9.4, 12.4, 12.8).

Method: one node with all three off, spoken to by the frames of the protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from commitmq_plugins.rocketmq.broker.broker_config import parse_properties
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from pop_answers import pop
from rocketmq_peer import (
    SEND,
    asked,
    bound,
    connected,
    fill,
    has_code,
    heartbeat,
    make_group,
    pull,
    records,
    served_node,
)

AT_ONCE = "4"
OFF = ("filter.sql_enabled=false", "groups.auto_create=false", "plugins.rocketmq.store_reply_message_enable=false")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """It has the group ``known``."""
    with served_node(tmp_path_factory.mktemp("off"), *OFF) as (_, found, _):
        assert asked(found, make_group("known"))[0].code == 0
        yield found


def test_without_filters_by_properties_every_request_that_names_one_has_1(port: int) -> None:
    fill(port, "priced", b"a")
    body = {"clientId": "one@1", "group": "known", "subscriptionData": {"topic": "priced", "subString": "price > 1",
            "expressionType": "SQL92", "subVersion": 1}}  # fmt: skip

    async def talk() -> list[Command]:
        async with connected(port) as peer:
            return [
                await peer.ask(
                    pull("known", "priced", 0, sysFlag=AT_ONCE, subscription="price > 1", expressionType="SQL92")
                ),
                await peer.ask(request(RequestCode.CHECK_CLIENT_CONFIG, body=dumps(body))),
                await peer.until(
                    pop("known", "priced", 0, 1, exp="price > 1", expType="SQL92"),
                    lambda answer: answer.code != ResponseCode.SERVICE_NOT_AVAILABLE,
                ),
            ]

    answers = asyncio.run(talk())
    remark = "The broker does not support consumer to filter message by SQL92"
    assert [(one.code, one.remark) for one in answers] == [(ResponseCode.SYSTEM_ERROR, remark)] * 3
    shown = asked(port, request(RequestCode.GET_BROKER_CONFIG))[0]
    assert parse_properties(bytes(shown.body).decode())["enablePropertyFilter"] == "false"


def test_a_group_that_is_not_there_has_26_in_every_request_of_a_consumer(port: int) -> None:
    fill(port, "closed", b"a")
    place = {"topic": "closed", "queueId": "0", "commitOffset": "1"}

    async def talk(group: str) -> list[Command]:
        async with connected(port) as peer:
            read = await peer.ask(pull(group, "closed", 0, sysFlag=AT_ONCE))
            back = {"offset": "0", "group": group, "delayLevel": "1", "originMsgId": "x", "originTopic": "closed"}
            commit = {**place, "consumerGroup": group}
            return [
                read,
                await peer.until(pop(group, "closed", 0, 1), has_code(0, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)),
                await peer.ask(request(RequestCode.CONSUMER_SEND_MSG_BACK, back)),
                await peer.ask(request(RequestCode.UPDATE_CONSUMER_OFFSET, commit)),
            ]

    missing = asyncio.run(talk("stranger"))
    assert [one.code for one in missing] == [ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST] * 4
    assert str(missing[0].remark).startswith("subscription group [stranger] does not exist")
    assert [one.code for one in asyncio.run(talk("known"))] == [0] * 4


def test_a_pull_of_a_group_that_was_deleted_has_26_and_one_of_rocketmqs_own_groups_never(port: int) -> None:
    fill(port, "leaving", b"a")
    gone = request(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "leaver"})
    read = pull("leaver", "leaving", 0, sysFlag=AT_ONCE)
    _, before, _, after, tool = asked(
        port, make_group("leaver"), read, gone, read, pull("TOOLS_CONSUMER", "leaving", 0, sysFlag=AT_ONCE)
    )
    assert [one.code for one in (before, after, tool)] == [0, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, 0]


def test_a_reply_that_is_not_to_be_stored_is_pushed_and_has_the_id_0(port: int) -> None:
    pushed: list[bytes] = []

    def take(command: Command) -> Command | None:
        if command.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return None
        pushed.append(bytes(command.body))
        return command.answer()

    topic = "DefaultCluster_REPLY_TOPIC"
    marks = "CORRELATION_ID\x01c1\x02REPLY_TO_CLIENT\x01asker@1\x02MSG_TYPE\x01reply\x02UNIQ_KEY\x01R\x02"
    reply = request(RequestCode.SEND_REPLY_MESSAGE_V2, {**SEND, "b": topic, "i": marks}, b"yes")

    async def talk() -> list[Command]:
        async with connected(port, take) as requester, connected(port) as responder:
            assert (await requester.ask(heartbeat("asker@1", "known", producers=("askers",)))).code == 0
            return [await responder.ask(reply)]

    (answer,) = asyncio.run(talk())
    fill(port, topic, b"a plain message")  # it would lie behind the reply
    first, end = asked(port, pull("known", topic, 0, sysFlag=AT_ONCE), bound(topic))
    assert (answer.code, answer.ext_fields["msgId"], pushed) == (0, "0", [b"yes"])
    assert ([one.body for one in records(first.body)], end.ext_fields["offset"]) == ([b"a plain message"], "1")
