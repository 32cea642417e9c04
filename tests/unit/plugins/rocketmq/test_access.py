"""Goal: each request of RocketMQ's protocol needs what it should of a user, and nothing is forgotten.

Method: the table of rights beside the requests that the server answers; single requests with users in a file.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, cast

import pytest

import commitmq_plugins.rocketmq.broker as broker
from commitmq.log import get_log
from commitmq.security.access_file import AccessFile, AccessTable, LiveAccess
from commitmq.security.native_rights import PUB
from commitmq.security.policy import (
    ACCESS_KEY,
    SIGNATURE,
    Policies,
    PolicyEntry,
    Resource,
    ResourceType,
    Secret,
    User,
    sign,
)
from commitmq_plugins.rocketmq.broker.rights import Access, needs_of
from commitmq_plugins.rocketmq.remoting.codes import V4_9_3, VERSION, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import BodyError, Command

CLUSTER = "DefaultCluster"
SECRET = "the-secret-of-ann"


def served() -> set[RequestCode]:
    """The requests that a module of the server answers: the keys of its ``handlers``."""
    found: set[RequestCode] = set()
    for path in Path(broker.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "self.handlers":
                assert isinstance(node.value, ast.Dict), path
                found |= {RequestCode[cast("ast.Attribute", key).attr] for key in node.value.keys}
    return found


def test_every_request_that_is_answered_has_its_rights() -> None:
    codes = served()
    assert len(codes) > 60, "the search for handlers finds them"
    supers = {code for code in codes if needs_or_none(code) is None}
    assert supers == {code for code in RequestCode if code.name.startswith("AUTH_")}


def needs_or_none(code: RequestCode) -> Any:
    try:
        return needs_of(Command(int(code), body=b"{}"), CLUSTER)
    except BodyError:
        return ()


def needs(code: RequestCode, fields: dict[str, str] | None = None, body: Any = None) -> list[str]:
    found = needs_of(Command(int(code), ext_fields=fields or {}, body=b"" if body is None else dumps(body)), CLUSTER)
    assert found is not None
    return [f"{resource} {'|'.join(sorted(actions))}" for resource, actions in found]


@pytest.mark.parametrize(
    ("code", "fields", "body", "expected"),
    [
        (RequestCode.SEND_MESSAGE, {"topic": "t"}, None, ["Topic:t Pub"]),
        (RequestCode.SEND_MESSAGE_V2, {"b": "t", "a": "pg"}, None, ["Topic:t Pub"]),
        (RequestCode.SEND_BATCH_MESSAGE, {"b": "%RETRY%g"}, None, ["Group:g Sub"]),
        (RequestCode.PULL_MESSAGE, {"topic": "t", "consumerGroup": "g"}, None, ["Topic:t Sub", "Group:g Sub"]),
        (RequestCode.PULL_MESSAGE, {"topic": "SCHEDULE_TOPIC_XXXX"}, None, ["Cluster:* Update"]),
        (RequestCode.QUERY_MESSAGE, {"topic": "rmq_sys_wheel_timer"}, None, ["Cluster:* Update"]),
        (RequestCode.PULL_MESSAGE, {"topic": "%RETRY%x", "consumerGroup": "g"}, None, ["Group:x Sub", "Group:g Sub"]),
        (
            RequestCode.PULL_MESSAGE,
            {"topic": "%DLQ%x", "consumerGroup": "g"},
            None,
            ["Topic:%DLQ%x Sub", "Group:g Sub"],
        ),
        (RequestCode.ACK_MESSAGE, {"topic": "%RETRY%g_t", "consumerGroup": "g"}, None, ["Topic:t Sub", "Group:g Sub"]),
        (RequestCode.ACK_MESSAGE, {"topic": "%RETRY%g+t", "consumerGroup": "g"}, None, ["Topic:t Sub", "Group:g Sub"]),
        (RequestCode.ACK_MESSAGE, {"topic": "%RETRY%g", "consumerGroup": "g"}, None, ["Group:g Sub", "Group:g Sub"]),
        (RequestCode.ACK_MESSAGE, {"topic": "%RETRY%x", "consumerGroup": "g"}, None, ["Group:x Sub", "Group:g Sub"]),
        (
            RequestCode.POP_MESSAGE,
            {"topic": "%RETRY%g_t", "consumerGroup": "g"},
            None,
            ["Group:g_t Sub", "Group:g Sub"],
        ),
        (RequestCode.UPDATE_AND_CREATE_TOPIC, {"topic": "%RETRY%g"}, None, ["Group:g Create"]),
        (RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "%RETRY%g"}, None, ["Group:g Delete"]),
        (RequestCode.SEND_MESSAGE, {"topic": "%RETRY%g"}, None, ["Group:g Sub"]),
        (RequestCode.ACK_MESSAGE, {"topic": "t", "consumerGroup": "g"}, None, ["Topic:t Sub", "Group:g Sub"]),
        (RequestCode.END_TRANSACTION, {}, None, []),
        (RequestCode.END_TRANSACTION, {"topic": "t"}, None, ["Topic:t Pub"]),
        (RequestCode.VIEW_MESSAGE_BY_ID, {"topic": "t"}, None, ["Topic:* Get|Sub"]),
        (
            RequestCode.HEART_BEAT,
            {},
            {
                "clientID": "c",
                "consumerDataSet": [
                    {
                        "groupName": "g",
                        "subscriptionDataSet": [
                            {"topic": "t", "subString": "*"},
                            {"topic": "%RETRY%g", "subString": "*"},
                        ],
                    }
                ],
                "producerDataSet": [{"groupName": "pg"}],
            },
            ["Group:g Sub", "Topic:t Sub", "Group:g Sub"],
        ),
        (
            RequestCode.LOCK_BATCH_MQ,
            {},
            {"consumerGroup": "g", "clientId": "c", "mqSet": [{"topic": "t", "brokerName": "b", "queueId": 0}]},
            ["Group:g Sub", "Topic:t Sub"],
        ),
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, {"groupName": "g"}, ["Group:g Create|Update"]),
        (
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
            {},
            {"topicConfigList": [{"topicName": "t"}, {"topicName": "%RETRY%g"}]},
            ["Topic:* Create", "Topic:t Create", "Group:g Create"],
        ),
        (
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
            {},
            {"groupConfigList": [{"groupName": "g"}]},
            ["Group:* Create|Update", "Group:g Create|Update"],
        ),
        (RequestCode.GET_BROKER_CONFIG, {}, None, ["Cluster:DefaultCluster Get"]),
        (RequestCode.UPDATE_BROKER_CONFIG, {}, None, ["Cluster:DefaultCluster Update"]),
    ],
)
def test_what_a_request_needs(code: RequestCode, fields: dict[str, str], body: Any, expected: list[str]) -> None:
    assert needs(code, fields, body) == expected


@pytest.mark.parametrize("code", [RequestCode.AUTH_CREATE_USER, RequestCode.ADD_BROKER, 99_999])
def test_everything_else_is_for_super_users(code: int) -> None:
    assert needs_of(Command(int(code)), CLUSTER) is None


class Peer:
    peer = ("10.1.2.3", 40_000)
    name = "10.1.2.3:40000"
    user = ""

    def __init__(self) -> None:
        self.memo: dict[str, str] = {}


def access(folder: Path, *entries: str, **user: bool) -> Access:
    folder.mkdir(exist_ok=True)

    def apply(table: AccessTable) -> None:
        table.users["ann"] = User("ann", Secret(SECRET), user.get("is_super", False), user.get("is_enabled", True))
        found = []
        for text in entries:
            resource, actions = text.split(" ")
            found.append(
                PolicyEntry.from_json({"resource": resource, "actions": actions.split("|"), "decision": "Allow"})
            )
        table.policies["ann"] = Policies(tuple(found))

    file = AccessFile(folder)
    file.change(apply)
    return Access(LiveAccess(file, get_log("test")), CLUSTER, get_log("test"))


def signed(
    code: int, fields: dict[str, str], secret: str = SECRET, version: int = VERSION, name: str = "ann"
) -> Command:
    fields = {**fields, ACCESS_KEY: name}
    return Command(
        int(code), version=version, ext_fields={**fields, SIGNATURE: sign(fields, b"body", secret)}, body=b"body"
    )


def refused(found: Access, command: Command) -> str | None:
    answer = found.refusal(cast("Any", Peer()), command)
    if answer is None:
        return None
    assert answer.code == ResponseCode.NO_PERMISSION
    assert answer.remark
    return answer.remark


SEND = {"b": "orders", "a": "pg"}


def test_a_node_without_users_asks_nobody(tmp_path: Path) -> None:
    found = Access(LiveAccess(AccessFile(tmp_path), get_log("test")), CLUSTER, get_log("test"))
    assert refused(found, Command(int(RequestCode.SEND_MESSAGE_V2), ext_fields=SEND)) is None


def test_a_right_signature_and_a_right_are_needed(tmp_path: Path) -> None:
    found = access(tmp_path, "Topic:orders Pub")
    assert refused(found, signed(RequestCode.SEND_MESSAGE_V2, SEND)) is None
    assert "allows Pub on Topic:other" in str(refused(found, signed(RequestCode.SEND_MESSAGE_V2, {"b": "other"})))
    assert "only super users" in str(refused(found, signed(99_999, {})))
    assert "no AccessKey" in str(refused(found, Command(int(RequestCode.SEND_MESSAGE_V2), ext_fields=SEND)))


def test_unknown_users_and_wrong_signatures_get_one_answer(tmp_path: Path) -> None:
    found = access(tmp_path, "* All")
    wrong = refused(found, signed(RequestCode.SEND_MESSAGE_V2, SEND, "another-secret"))
    unknown = refused(found, signed(RequestCode.SEND_MESSAGE_V2, SEND, name="bob"))
    assert wrong == unknown == "check signature failed"


def test_super_users_may_send_everything_and_disabled_ones_nothing(tmp_path: Path) -> None:
    assert refused(access(tmp_path / "a", is_super=True), signed(99_999, {})) is None
    found = access(tmp_path / "b", "* All", is_super=True, is_enabled=False)
    assert refused(found, signed(RequestCode.SEND_MESSAGE_V2, SEND)) == "user ann is disabled"
    assert refused(found, signed(RequestCode.SEND_MESSAGE_V2, SEND, "another-secret")) == "check signature failed"


def test_a_connection_has_one_user(tmp_path: Path) -> None:
    """What waits on a connection, or is pushed over it, is judged by its user: the rights of another must not come to it."""
    found = access(tmp_path, "Topic:orders Pub", is_super=True)

    def bob(table: AccessTable) -> None:
        table.users["bob"] = User("bob", Secret(SECRET))
        table.policies["bob"] = table.policies["ann"]

    AccessFile(tmp_path).change(bob)
    found = Access(LiveAccess(AccessFile(tmp_path), get_log("test")), CLUSTER, get_log("test"))
    peer = cast("Any", Peer())
    send = signed(RequestCode.SEND_MESSAGE_V2, SEND, name="bob")
    assert found.refusal(peer, send) is None
    answer = found.refusal(peer, signed(RequestCode.SEND_MESSAGE_V2, SEND))
    assert answer is not None
    assert (answer.code, peer.user) == (ResponseCode.NO_PERMISSION, "bob")
    assert "another user's" in str(answer.remark)
    assert found.refusal(peer, send) is None


def test_a_disabled_super_user_has_no_rights_to_what_is_pushed(tmp_path: Path) -> None:
    peer = cast("Any", Peer())
    peer.user = "ann"
    assert access(tmp_path / "a", is_super=True).may(peer, "orders", PUB)
    found = access(tmp_path / "b", "* All", is_super=True, is_enabled=False)
    assert found.asks(peer)
    assert not found.may(peer, "orders", PUB)


def test_clients_up_to_4_9_3_add_a_field_after_they_have_signed(tmp_path: Path) -> None:
    found = access(tmp_path, "Topic:orders Get")
    for version, expected in ((V4_9_3, None), (V4_9_3 + 2, "check signature failed")):
        command = signed(RequestCode.QUERY_MESSAGE, {"topic": "orders"}, version=version)
        command.ext_fields["_UNIQUE_KEY_QUERY"] = "true"
        assert refused(found, command) == expected


def test_the_cluster_is_a_resource_by_its_name() -> None:
    assert needs(RequestCode.GET_BROKER_RUNTIME_INFO) == [f"{Resource(ResourceType.CLUSTER, CLUSTER)} Get"]
