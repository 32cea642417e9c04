"""Goal: the audit log of a real node has each change with its user, each refusal and first uses, and never a secret; the
verb shows it, and says where it was changed. A node without keys and users writes changes only.

Method: one node with keys and users that clients of both protocols use and misuse, with marks in every secret, body and
property; then its files, byte by byte, and `commitmq audit`. Another node without keys, whose folder is taken away.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import commitmq
from commitmq import NodeUnavailableError, ProtocolError, SendError
from commitmq.protocol.node_address import Profile
from commitmq.security.policy import ACCESS_KEY, SIGNATURE, sign
from commitmq.supervision.exit_codes import CliExit
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from keyed_node import KeyedNode, keyed
from nodes import Node, eventually, free_port, start_node
from nodes import commitmq as command
from rocketmq_client import ask

CANARY = "canary-4711-never-shown"
SECRET = f"{CANARY}-of-root"


class Audited(KeyedNode):
    """It also serves RocketMQ's clients."""

    def __init__(self, folder: Path) -> None:
        self.profiles: dict[str, Profile] = {}
        self.secrets: list[str] = []
        self.port = free_port()
        super().__init__(
            folder,
            "plugins.rocketmq.enable=true",
            "plugins.rocketmq.vip_port=false",
            f"plugins.rocketmq.namesrv_port={free_port()}",
            f"network.store_port={self.port}",
        )

    def lines(self, *options: str) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in self.store("audit", "--json", "--last", "0", *options).splitlines()]

    def sign(self, name: str, secret: str, code: RequestCode, fields: dict[str, str], body: bytes = b"") -> Command:
        signed = {**fields, ACCESS_KEY: name}
        return request(code, {**signed, SIGNATURE: sign(signed, body, secret)}, body)

    def asked(self, command_: Command) -> int:
        answer: Command = ask(self.port, lambda client: client.request(command_, 10))
        return answer.code


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    with keyed(Audited(tmp_path_factory.mktemp("audit"))) as found:
        found.profiles = {"root": found.add("root", "--super"), "shop": found.add("shop")}
        found.store("acl", "allow", "shop", "Topic:orders", "Pub,Sub")
        use(found)
        use_rocketmq(found)
        yield found


def use(audited: Audited) -> None:
    with commitmq.connect(profile="root") as connection, connection.admin() as admin:
        admin.topic_create("orders", queues=2)
        admin.topic_create("private", queues=1)
        with connection.producer() as producer:
            producer.send("orders", CANARY.encode(), keys=CANARY, properties={"p": CANARY})
        admin.reset_offsets("billing", "orders", 0)
        admin.topic_delete("private")
    with commitmq.connect(profile="shop") as connection:
        with connection.producer() as producer:
            for _ in range(3):
                producer.send("orders", CANARY.encode(), keys=CANARY, properties={"p": CANARY})
            with pytest.raises(SendError, match="NO_PERMISSION"):
                producer.send("secret", CANARY.encode())
        with pytest.raises(ProtocolError, match="NO_PERMISSION"):
            connection.admin().topic_delete("orders")
    audited.run("config", "set", "log.level", "DEBUG", "--node", f"ipc://{audited.node.store}")
    audited.run("config", "unset", "log.level", "--node", f"ipc://{audited.node.store}")
    forge(audited.node)


def forge(node: Node) -> None:
    """The node's own account claims to ask on behalf of somebody, with proofs that it cannot know."""
    told = {"user": "ann", "protocol": "dashboard", "address": "10.1.2.3", "proof": "0" * 64}
    with commitmq.Admin(f"ipc://{node.store}") as admin:
        admin._request("coordinator", "topic.create", {"topic": "forged", "queues": 1, "on_behalf_of": told})
    with commitmq.connect(profile="shop") as connection, pytest.raises(ProtocolError, match="only super users"):
        connection.admin()._request("coordinator", "topic.describe", {"topic": "orders", "on_behalf_of": told})


def use_rocketmq(audited: Audited) -> None:
    secret = orjson.loads(audited.store("user", "alter", "root", "--new-secret", "--json"))["secret"]
    audited.secrets = [secret]

    def signs(code: RequestCode, fields: dict[str, str], body: bytes = b"") -> Command:
        return audited.sign("root", secret, code, fields, body)

    topic = {"topic": "made", "readQueueNums": "2", "writeQueueNums": "2", "perm": "6", "topicFilterType": "SINGLE_TAG"}
    create = RequestCode.UPDATE_AND_CREATE_TOPIC
    eventually(lambda: audited.asked(signs(create, topic)) == ResponseCode.SUCCESS, "root makes a topic", 30)
    assert audited.asked(signs(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "TBW102"})) != ResponseCode.SUCCESS
    wrong = audited.sign("root", CANARY, create, {**topic, "topic": "other"})
    assert audited.asked(wrong) == ResponseCode.NO_PERMISSION
    user = orjson.dumps({"password": f"{CANARY}-password", "userType": "Normal"})
    made = signs(RequestCode.AUTH_CREATE_USER, {"username": "ann"}, user)
    assert audited.asked(made) == ResponseCode.SUCCESS


def only(lines: list[dict[str, Any]], **members: Any) -> list[dict[str, Any]]:
    return [one for one in lines if all(one.get(name) == value for name, value in members.items())]


def test_changes_have_their_user_and_what_was_before(audited: Audited) -> None:
    lines = audited.lines()
    (created,) = only(lines, op="topic.create", resource="Topic:orders")
    key = audited.profiles["root"].public_key
    assert (created["user"], created["key"], created["protocol"], created["address"], created["role"]) == (
        "root",
        key[:12],
        "native",
        "127.0.0.1",
        "coordinator",
    )
    assert created["after"]["queues"] == 2
    assert "before" not in created
    (deleted,) = only(lines, op="topic.delete", resource="Topic:private")
    assert (deleted["user"], deleted["before"]["write_queues"]) == ("root", 1)
    (reset,) = only(lines, op="group.reset", resource="Group:billing")
    assert (reset["user"], sorted(reset["after"]["offsets"])) == ("root", [["orders", 0, 0], ["orders", 1, 0]])
    changed, unset = only(lines, resource="Setting:log.level")
    assert (changed["op"], changed["before"], changed["after"]) == (
        "config.set",
        {"value": "INFO"},
        {"value": "DEBUG"},
    )
    assert (unset["op"], unset["before"], changed["address"]) == ("config.unset", {"value": "DEBUG"}, "local")
    assert re.fullmatch(r"uid \d+", changed["user"])


def test_nobody_else_speaks_on_behalf_of_a_user(audited: Audited) -> None:
    (forged,) = only(audited.lines(), resource="Topic:forged")
    assert (forged["user"], forged["protocol"], forged["address"]) == (f"uid {os.getuid()}", "native", "local")
    assert only(audited.lines(), user="ann", op="topic.create") == []


def test_users_and_policies_have_no_secrets(audited: Audited) -> None:
    lines = only(audited.lines(), role="users")
    assert [(one["op"], one["resource"]) for one in lines] == [
        ("user.add", "User:root"),
        ("user.add", "User:shop"),
        ("acl.change", "User:shop"),
        ("user.alter", "User:root"),
        ("user.add", "User:ann"),
    ]
    assert [len(one) for one in lines[1]["after"]["keys"]] == [12], "a new user's first key is of the same change"
    assert lines[2]["after"]["custom"][0]["resource"] == "Topic:orders"
    assert lines[3]["after"]["secret"] == "another"
    assert (lines[4]["user"], lines[4]["protocol"], lines[0]["protocol"]) == ("root", "rocketmq", "file")


def test_refusals_and_first_uses(audited: Audited) -> None:
    lines = audited.lines()
    refused = only(lines, decision="refused", user="shop")
    assert {(one["op"], one.get("resource")) for one in refused} >= {
        ("send", "Topic:secret"),
        ("topic.delete", "Topic:orders"),
    }, f"{only(lines, decision='refused')}\n{audited.node.log()}"
    assert "no entry of user shop allows Pub" in only(refused, op="send")[0]["reason"]
    # Three sends, one line; the process that refuses is the one that was asked.
    used = only(lines, user="shop", resource="Topic:orders", decision="allowed", role="writer")
    assert len(used) == len({one["op"] for one in used}) >= 1
    assert len(only(lines, op="connect", user="shop", role="writer")) == 1


def test_rocketmqs_requests(audited: Audited) -> None:
    lines = only(audited.lines(), role="worker-rocketmq_broker")
    made = only(lines, op="UPDATE_AND_CREATE_TOPIC", decision="allowed")[0]
    assert (made["user"], made["protocol"], made["resource"]) == ("root", "rocketmq", "Topic:made")
    assert made["after"]["readQueueNums"] == "2"
    assert [one["decision"] for one in only(lines, op="DELETE_TOPIC_IN_BROKER")] == ["allowed", "failed"]
    wrong = only(lines, decision="refused", reason="check signature failed")
    assert wrong
    assert {one["user"] for one in wrong} == {"root"}


def test_no_secret_body_or_property_is_in_it(audited: Audited) -> None:
    folder = audited.node.store / "commitmq" / "audit"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    data = b""
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        data += path.read_bytes()
    assert len(data) > 4_000
    secrets = [CANARY, *audited.secrets, *(one.secret_key for one in audited.profiles.values())]
    assert [one for one in secrets if one.encode() in data] == []


def test_the_verb_filters(audited: Audited) -> None:
    assert {one["user"] for one in audited.lines("--user", "shop")} == {"shop"}
    topics = {one["op"] for one in audited.lines("--op", "topic")}
    assert (
        {"topic.create", "topic.delete"} <= topics <= {"topic.create", "topic.delete", "topic.describe", "topic.route"}
    )
    assert {one["decision"] for one in audited.lines("--refused")} == {"refused"}
    assert audited.lines("--since", "0s") == []
    assert len(audited.lines("--since", "1h")) == len(audited.lines())
    times = [one["time"] for one in audited.lines()]
    assert times == sorted(times)
    shown = audited.store("audit", "--op", "topic.delete", "--user", "root")
    assert "root@127.0.0.1  allowed  topic.delete  Topic:private" in shown
    assert len(audited.store("audit", "--last", "2").splitlines()) == 2


def test_the_verb_verifies_a_running_node_and_sees_a_cut(audited: Audited, tmp_path: Path) -> None:
    found = orjson.loads(audited.store("audit", "--verify", "--json"))
    assert found["whole"]
    assert {one["role"] for one in found["chains"]} >= {"coordinator", "writer", "users", "worker-rocketmq_broker"}
    copy = tmp_path / "store"
    (copy / "commitlog").mkdir(parents=True)
    shutil.copytree(audited.node.store / "commitmq" / "audit", copy / "commitmq" / "audit")
    path = copy / "commitmq" / "audit" / "coordinator.jsonl"
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, *rest]))
    ended = command("audit", "--store", str(copy), "--verify")
    assert ended.returncode == CliExit.DAMAGE_FOUND
    assert "coordinator.jsonl, byte" in ended.stdout
    assert "lines 2 to 2 are missing" in ended.stdout
    path.write_bytes(b"".join([first, second.replace(b'"root"', b'"shop"'), *rest]))
    assert command("audit", "--store", str(copy), "--verify").returncode == CliExit.DAMAGE_FOUND


def test_a_node_without_users_writes_changes_and_goes_on_without_its_folder(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        folder = node.store / "commitmq" / "audit"
        with commitmq.Admin(node.address) as admin, commitmq.Producer(node.address) as producer:
            admin.topic_create("orders", queues=1)
            for _ in range(10):
                producer.send("orders", b"x")
            with commitmq.Consumer("orders", group="g", node=node.address) as consumer:
                consumer.poll(5)
                consumer.commit()
            shutil.rmtree(folder)
            folder.write_text("in the way")
            admin.topic_create("lost")
            (sentence,) = node.report()["node"]["audit_faults"]
            assert "cannot write the audit log" in sentence
            assert sentence in command("status", "--store", str(node.store)).stdout
            assert node.log().count("cannot write the audit log") == 1
            folder.unlink()
            eventually(lambda: node.report()["node"]["audit_faults"] == [], "the fault has passed")
            admin.topic_create("found")
        shown = command("audit", "--store", str(node.store), "--json")
        lines = [orjson.loads(line) for line in shown.stdout.splitlines()]
        shown_of_each = [(one["op"], one.get("resource"), one.get("lost")) for one in lines]
        assert shown_of_each == [("audit.lost", None, 1), ("topic.create", "Topic:found", None)]
        # A client of this machine comes over the local socket, where the kernel knows its account.
        assert (lines[1]["user"], lines[1]["address"]) == (f"uid {os.getuid()}", "local")
    # Lines that were there are not any more, and that is seen.
    assert command("audit", "--store", str(node.store), "--verify").returncode == CliExit.DAMAGE_FOUND


def test_only_changes_open_the_log(tmp_path: Path) -> None:
    with start_node(tmp_path, "audit.enable=false") as node, commitmq.Admin(node.address) as admin:
        admin.topic_create("orders")
    assert not (node.store / "commitmq" / "audit").exists()


def test_a_disabled_user_is_refused_by_name(audited: Audited) -> None:
    # The line said that no user has the key, and an operator looked for a wrong profile.
    audited.add("lazy")
    audited.store("user", "alter", "lazy", "--disable")
    with pytest.raises(NodeUnavailableError), commitmq.connect(profile="lazy") as connection:
        connection.admin().status()

    def line() -> dict[str, Any] | None:
        found = only(audited.lines(), op="connect", user="lazy", decision="refused")
        return found[0] if found else None

    assert eventually(line, "its line")["reason"] == "the user is disabled"
