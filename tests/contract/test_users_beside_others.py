"""Goal: what a user asks of the node, or leaves there, gives another user no right: neither its signature, nor its names.

Method: a real node with keys and users, which serves RocketMQ's clients too, a thief with a topic and a group of its own, and
an owner who asks about the thief's client. What the thief gets is looked at, and what it asks for is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import commitmq
from commitmq import ProtocolError
from commitmq.protocol.channel import Channel
from commitmq.protocol.node_address import load_profile
from commitmq.security.policy import ACCESS_KEY, SIGNATURE
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from nodes import eventually
from robbed import Robbed, robbed_node
from rocketmq_peer import connected, heartbeat

TOPIC = {"topicName": "secrets", "readQueueNums": 1, "writeQueueNums": 1, "perm": 4}
DENIED = ResponseCode.NO_PERMISSION


@pytest.fixture(scope="module")
def robbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robbed]:
    with robbed_node(tmp_path_factory.mktemp("robbed")) as found:
        for name in ("maker", "getter", "cloner"):
            found.add_signer(name)
        for resource in ("Topic:*", "Group:*"):
            found.store("acl", "allow", "maker", resource, "Create,Update")
        found.store("acl", "allow", "cloner", "Group:*", "All")
        found.store("acl", "deny", "maker", "Topic:secrets", "All")
        found.store("acl", "deny", "maker", "Group:vault", "All")
        found.store("acl", "allow", "getter", "Group:*", "Get")
        found.store("user", "alter", "getter", "--quota", "groups=1")
        with commitmq.Admin(found.ipc) as admin:
            for group in ("vault", "source"):
                admin.group_create(group)
            admin.set_offsets("source", [("secrets", 0, 0)])
        yield found


def test_a_client_that_is_asked_does_not_learn_the_signature(robbed: Robbed) -> None:
    handed: list[Command] = []

    def takes(command: Command) -> Command | None:
        if command.code not in (RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY):
            return None
        handed.append(command)
        return command.answer(body=b"{}")

    async def talk() -> None:
        async with connected(robbed.port, takes) as robber, connected(robbed.port) as owner:
            await robber.until(robbed.signed(heartbeat("10.1.2.3@77", "thieves", "mine")))
            fields = {"consumerGroup": "thieves", "clientId": "10.1.2.3@77", "jstackEnable": "true", "more": "text"}
            answer = await owner.ask(robbed.signed(request(RequestCode.GET_CONSUMER_RUNNING_INFO, fields), "owner"))
            assert answer.code == 0, answer.remark
            sent = await owner.until(robbed.signed(request(RequestCode.SEND_MESSAGE_V2, _mine()), "owner"))
            fields["msgId"] = sent.ext_fields["msgId"]
            answer = await owner.ask(robbed.signed(request(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields), "owner"))
            assert answer.code == 0, answer.remark

    asyncio.run(talk())
    info, direct = handed
    assert info.ext_fields == {"consumerGroup": "thieves", "clientId": "10.1.2.3@77", "jstackEnable": "true"}
    assert not {ACCESS_KEY, SIGNATURE, "more"} & direct.ext_fields.keys()
    assert direct.ext_fields["brokerName"]


def _mine() -> dict[str, str]:
    from rocketmq_peer import SEND

    return {**SEND, "b": "mine"}


async def _ask(robbed: Robbed, name: str, code: RequestCode, fields: dict[str, str], body: object = None) -> Command:
    async with connected(robbed.port) as peer:
        data = b"" if body is None else dumps(body)
        return await peer.ask(robbed.signed(request(code, fields, data), name), 20)


def test_an_entry_that_denies_one_holds_for_lists(robbed: Robbed) -> None:
    async def talk() -> None:
        for name in ("secrets", "%RETRY%vault"):
            body = {"topicConfigList": [{**TOPIC, "topicName": "free"}, {**TOPIC, "topicName": name}]}
            answer = await _ask(robbed, "maker", RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, body)
            assert answer.code == DENIED, answer.remark
        body = {"groupConfigList": [{"groupName": "vault", "consumeEnable": False}]}
        answer = await _ask(robbed, "maker", RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, {}, body)
        assert answer.code == DENIED, answer.remark
        body = {"topicConfigList": [{**TOPIC, "topicName": "free", "perm": 6}]}
        answer = await _ask(robbed, "maker", RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, body)
        assert answer.code == 0, answer.remark

    asyncio.run(talk())
    with commitmq.Admin(robbed.ipc) as admin:
        assert admin.topic("secrets").perm == 6
        assert admin.topic("free").perm == 6


def test_offsets_of_topics_without_a_right(robbed: Robbed) -> None:
    async def talk() -> None:
        for fields in ({"consumerGroup": "source"}, {"consumerGroup": "source", "topicList": "secrets"}):
            answer = await _ask(robbed, "getter", RequestCode.GET_CONSUME_STATS, fields)
            assert answer.code == 0, answer.remark
            assert b"secrets" not in bytes(answer.body)
            answer = await _ask(robbed, "owner", RequestCode.GET_CONSUME_STATS, {**fields, "topicList": "secrets"})
            assert b"secrets" in bytes(answer.body)
        fields = {"srcGroup": "source", "destGroup": "copied", "topic": "", "offline": "true"}
        answer = await _ask(robbed, "cloner", RequestCode.CLONE_GROUP_OFFSET, fields)
        assert answer.code == DENIED, answer.remark
        assert "Topic:secrets" in str(answer.remark)
        answer = await _ask(robbed, "owner", RequestCode.CLONE_GROUP_OFFSET, fields)
        assert answer.code == 0, answer.remark

    asyncio.run(talk())


def test_looking_at_groups_makes_no_more_than_the_quota(robbed: Robbed) -> None:
    names = (f"looked-at-{number}" for number in range(1_000))

    def look() -> Command:
        return asyncio.run(_ask(robbed, "getter", RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": next(names)}))

    assert look().code == 0
    eventually(lambda: look().code != 0, "the quota, which acts within a second, is there")
    told = [look() for _ in range(3)]
    assert all("user getter has made" in str(answer.remark) for answer in told), [one.remark for one in told]


def test_a_topic_takes_no_other_groups_retries_with_it(robbed: Robbed) -> None:
    with commitmq.Admin(robbed.ipc) as admin:
        for topic in ("c", "d"):
            admin.topic_create(topic, 1)
        for topic in ("%RETRY%a_c", "%RETRY%a_d"):
            admin.topic_create(topic, 1)
        admin.group_create("a_c")
        admin.set_offsets("a", [("c", 0, 0), ("d", 0, 0)])

        async def talk() -> None:
            for topic in ("c", "d"):
                answer = await _ask(robbed, "owner", RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic})
                assert answer.code == 0, answer.remark

        asyncio.run(talk())
        left = {one.name for one in admin.topics()}
    assert "%RETRY%a_c" in left, "the retry topic of the group a_c"
    assert not {"c", "d", "%RETRY%a_d"} & left


@pytest.mark.parametrize("profile", ["root", None], ids=["a user's", "the owner's"])
def test_a_name_in_a_group_stays_with_its_user(robbed: Robbed, profile: str | None) -> None:
    with commitmq.connect(robbed.ipc if profile is None else None, profile=profile) as connection:
        consumer = connection.consumer("mine", group="thieves")
        consumer.poll(0.5)
        with commitmq.Admin(robbed.ipc) as admin:
            eventually(lambda: admin.group("thieves")["members"], "the consumer is in the group")
            (member,) = admin.group("thieves")["members"]
        coordinator = Channel(robbed.node.endpoints()["coordinator"], keys=load_profile("thief"))
        fields = {"group": "thieves", "topics": ["mine"]}
        try:
            with pytest.raises(ProtocolError, match=r"FENCED.*another user's"):
                coordinator.request("group.join", {**fields, "member": member["member"]}, (), timeout_s=8)
            for _ in range(2):  # one of its own it may take again
                coordinator.request("group.join", {**fields, "member": "own"}, (), timeout_s=8)
            coordinator.request("group.leave", {"group": "thieves", "member": "own"}, (), timeout_s=8)
        finally:
            coordinator.close()
        consumer.poll(1.5)  # it goes on
        consumer.close()
