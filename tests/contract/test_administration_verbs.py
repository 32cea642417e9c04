"""Goal: the verbs of an administrator say who is connected, print metrics, show users, and carry
settings from node to node.

Method: one real node that serves RocketMQ's clients too; a connection of the test is such a client.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Consumer, Producer
from commitmq_plugins.rocketmq.remoting.client import RemotingClient
from commitmq_plugins.rocketmq.remoting.codes import LanguageCode, RequestCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps
from commitmq_plugins.rocketmq.remoting.frame import Command
from dashboard_client import Visitor, texts
from nodes import Node, eventually, free_port, free_ports, start_node
from rocketmq_client import ask, served

PORT = free_port()
V5_4_0 = 493


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("administration")
    tokens = folder / "tokens"
    tokens.write_text("a-token-of-thirty-two-characters\n")
    tokens.chmod(0o600)
    settings = (
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        "metrics.enable=true",
        "metrics.port=0",
        "metrics.token_file=" + str(tokens),
        "plugins.rocketmq.namesrv_port=0",
        "plugins.dashboard.enable=true",
        f"plugins.dashboard.port={free_ports(1)}",
        "plugins.dashboard.history_s=0",
        f"network.store_port={PORT}",
    )
    with start_node(folder / "node", *settings) as made:
        with Admin(made.address) as admin:
            admin.topic_create("orders", 2)
        with Producer(made.address) as producer:
            producer.send("orders", b"one")
        yield made


def ran(node: Node, *words: str, code: int = 0) -> str:
    ended = node.run(*words, "--node", node.address)
    assert ended.returncode == code, ended.stderr + ended.stdout
    return ended.stdout if code == 0 else ended.stderr


def heartbeat(client_id: str, produces: list[str], consumes: str) -> Command:
    subscription = {"topic": "orders", "subString": "*", "subVersion": 1, "expressionType": "TAG"}
    consumer = {"groupName": consumes, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [subscription]}  # fmt: skip
    producers = [{"groupName": one} for one in produces]
    body = dumps({"clientID": client_id, "consumerDataSet": [consumer], "producerDataSet": producers})
    return Command(RequestCode.HEART_BEAT, 1, language=LanguageCode.GO, version=V5_4_0, body=body)


@pytest.fixture(scope="module")
def visitor(node: Node) -> Visitor:
    def endpoints() -> list[str]:
        return list(node.row("worker-dashboard").get("endpoints") or ())

    eventually(lambda: bool(endpoints()), "the dashboard is ready")
    return Visitor(int(endpoints()[0].rpartition(":")[2]))


def test_clients_of_both_protocols_are_listed_and_shown(node: Node, visitor: Visitor) -> None:
    served(PORT)

    async def talk(client: RemotingClient) -> None:
        await client.request(heartbeat("10.1.2.3@77", ["waiters"], "cooks"), 10)
        # Until the gateway tells of it, the member of the group stands there as one of the node's own protocol.
        eventually(
            lambda: "rocketmq" in ran(node, "client", "list", "--group", "cooks", "--json"), "the client is listed"
        )
        listed: dict[str, Any] = json.loads(ran(node, "client", "list", "--topic", "orders", "--json"))
        assert listed["complete"]
        assert "not known" in listed["note"]
        rows = {one["gateway"]: one for one in listed["clients"]}
        assert sorted(one["gateway"] for one in listed["clients"]) == ["native", "rocketmq"]
        known = {name: rows["rocketmq"][name] for name in ("language", "version", "consumes", "produces", "topics")}
        assert known == {
            "language": "go", "version": "5.4.0", "consumes": ["cooks"], "produces": ["waiters"],
            "topics": ["orders"],
        }  # fmt: skip
        assert rows["rocketmq"]["address"].startswith("127.0.0.1:")
        assert (rows["native"]["consumes"], rows["native"]["queues"]) == (["kitchen"], 2)
        assert rows["native"]["address"]
        shown = ran(node, "client", "show", "10.1.2.3@77")
        assert "language   go 5.4.0" in shown
        assert "produces   waiters" in shown
        assert ran(node, "client", "list", "--user", "nobody").startswith("no clients")
        os.kill(node.pids()["coordinator"], signal.SIGKILL)
        eventually(lambda: node.row("coordinator")["restarts"] == 1, "the coordinator is killed")
        eventually(
            lambda: "10.1.2.3@77" in ran(node, "client", "list", "--group", "waiters"), "the new one knows the client"
        )
        (connected,) = visitor.read("/clients?q=waiters")["connections"]
        assert (connected["gateway"], connected["language"], connected["produces"]) == ("rocketmq", "go", ["waiters"])
        assert {"10.1.2.3@77", "go", "5.4.0"} <= set(texts(visitor.get("/clients").text).split())

    with Consumer("orders", group="kitchen", node=node.address, start="earliest") as consumer:
        assert len(consumer.poll(10))
        ask(PORT, talk)
    eventually(
        lambda: "10.1.2.3@77" not in ran(node, "client", "list", "--group", "waiters"), "it is gone with its connection"
    )
    assert "no client '10.1.2.3@77' is connected" in ran(node, "client", "show", "10.1.2.3@77", code=1)


def test_settings_go_to_a_file_and_from_it_to_a_node(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    with Admin(node.address) as admin:
        admin.topic_create("gone", 3, attributes={"message.type": "FIFO"})
        admin.group_config("pastry", {"retryMaxTimes": 3})
        admin.commit_offsets("pastry", [("orders", 0, 1)])
        told = json.loads(ran(node, "export", "config", "--to", str(file), "--offsets", "--json"))
        assert told["topics"] >= 2
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "is there already" in ran(node, "export", "config", "--to", str(file), code=1)
        assert ran(node, "import", "config", str(file)) == "nothing differs\n"

        admin.topic_delete("gone")
        admin.topic_update("orders", perm=4)
        admin.group_config("pastry", {"retryMaxTimes": 9})
        before = ran(node, "import", "config", str(file), "--dry-run")
        assert "WOULD BE" in before
        assert admin.topic("orders").perm == 4
        done = json.loads(ran(node, "import", "config", str(file), "--json"))
        assert done["applied"]
        changes = {(one["kind"], one["name"]): (one["before"], one["after"], one["error"]) for one in done["changes"]}
        gone = {"read_queues": 3, "write_queues": 3, "perm": 6, "attributes": {"message.type": "FIFO"}}
        assert changes == {
            ("topic", "gone"): (None, gone, None),
            ("topic", "orders"): ({"perm": 4}, {"perm": 6}, None),
            ("group", "pastry"): ({"retryMaxTimes": 9}, {"retryMaxTimes": 3}, None),
        }
        made = admin.topic("gone")
        assert (made.write_queues, made.attributes["message.type"], admin.topic("orders").perm) == (3, "FIFO", 6)

        document = json.loads(file.read_bytes())
        document["topics"] = []
        document["groups"] = [{"name": "bakers", "settings": {"consumeEnable": False}}]
        rows = [{"group": "bakers", "topic": "orders", "queue": 0, "offset": 1}]
        document["offsets"] = rows
        file.write_text(json.dumps(document))
        ran(node, "import", "config", str(file), "--offsets")
        assert admin.group_config("bakers")["consumeEnable"] is False
        assert [list(one) for one in admin.group("bakers")["offsets"]] == [["orders", 0, 1]]

        rows[0]["offset"], document["groups"][0]["settings"]["consumeEnable"] = 99, True
        document["topics"] = [{**gone, "name": "gone", "attributes": {"queue.type": "BatchCQ"}}]
        file.write_text(json.dumps(document))
        refused = ran(node, "import", "config", str(file), "--offsets", code=1)
        assert "which ends at" in refused
        assert "topic gone has queue.type SimpleCQ, not BatchCQ, and that never changes" in refused
        assert refused.endswith("nothing was changed\n")
        assert admin.group_config("bakers")["consumeEnable"] is False

    for text, wanted in (
        ("{\n  nothing", "line 2, column 3"),
        (json.dumps({**document, "version": 2}), "version must be 1"),
    ):
        file.write_text(text)
        complaint = ran(node, "import", "config", str(file), code=1)
        assert wanted in complaint
        assert "nothing was changed; correct the file" in complaint


def test_metrics_are_printed_and_taken_apart(node: Node) -> None:
    tokens = str(node.store.parent.parent / "tokens")
    assert "asks for a token (metrics.token_file)" in ran(node, "metrics", code=1)
    lines = ran(node, "metrics", "--match", "rocketmq_topic", "--token-file", tokens).splitlines()
    assert lines
    assert all(line.startswith("rocketmq_topic") for line in lines)
    (found,) = json.loads(
        ran(node, "metrics", "--match", "rocketmq_messages_in_total.*orders", "--token-file", tokens, "--json")
    )["samples"]
    assert (found["name"], found["labels"]["topic"], found["value"]) == ("rocketmq_messages_in_total", "orders", 1)
    ended = node.run("metrics", "--match", "nothing_begins_so", "--token-file", tokens, "--node", node.address)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "samples begins with 'nothing_begins_so'" in ended.stderr
    assert "is no regular expression" in ran(node, "metrics", "--match", "(", code=2)


def of_store_of(node: Node) -> Callable[..., str]:
    def of_store(*words: str, code: int = 0) -> str:
        ended = node.run(*words, "--store", str(node.store))
        assert ended.returncode == code, ended.stderr + ended.stdout
        return ended.stdout if code == 0 else ended.stderr

    return of_store


def test_a_user_is_shown_and_its_entries_go_to_another(node: Node) -> None:
    """With the first user, here, RocketMQ's clients must sign; so tests with these come before."""
    of_store = of_store_of(node)
    for name in ("shop", "kiosk"):
        of_store("user", "add", name)
    of_store("acl", "allow", "shop", "Topic:orders", "Pub,Sub", "--from", "10.1.0.0/16")
    of_store("acl", "deny", "kiosk", "Topic:orders", "Pub")
    of_store("acl", "allow", "kiosk", "Topic:news", "Sub")
    copied = json.loads(of_store("acl", "copy", "shop", "kiosk", "--json"))
    assert {one["resource"]: (one["actions"], one["decision"]) for one in copied["kiosk"]["custom"]} == {
        "Topic:news": (["Sub"], "Allow"),
        "Topic:orders": (["Pub", "Sub"], "Allow"),
    }
    shown = json.loads(of_store("user", "show", "kiosk", "--json"))
    assert (shown["type"], shown["keys"], shown["quotas"], shown["policies"]) == ("Normal", [], {}, copied["kiosk"])
    text = of_store("user", "show", "kiosk")
    assert "Topic:orders" in text
    assert "secret" not in text
    assert "there is no user 'nobody'" in of_store("acl", "copy", "nobody", "kiosk", code=1)
    assert "there is no user 'nobody'" in of_store("user", "show", "nobody", code=1)

    of_store("user", "alter", "shop", "--disable", "--quota", "connections=3")
    made = json.loads(of_store("user", "copy", "shop", "stall", "--json"))
    assert len(made.pop("secret")) == 32
    assert made == {"name": "stall", "type": "Normal", "status": "disable", "quotas": {"connections": 3}}
    shown, like = (json.loads(of_store("user", "show", one, "--json")) for one in ("stall", "shop"))
    assert shown == {**like, "name": "stall"}
    secrets = json.loads((node.store / "config" / "security" / "acl.json").read_bytes())["users"]
    assert secrets["stall"]["secret"] != secrets["shop"]["secret"]
    assert "there is a user kiosk already" in of_store("user", "copy", "shop", "kiosk", code=2)
    assert "there is no user 'nobody'" in of_store("user", "copy", "nobody", "other", code=1)


def test_users_go_to_a_file_and_from_it_to_a_node_without_secrets(node: Node, tmp_path: Path) -> None:
    of_store, file = of_store_of(node), tmp_path / "node.json"
    secret = json.loads(of_store("user", "add", "till", "--json"))["secret"]
    of_store("acl", "allow", "till", "Topic:orders", "Pub")
    of_store("user", "key", "add", "till", "k" * 40)
    told = json.loads(of_store("export", "config", "--users", "--to", str(file), "--json"))
    assert told["users"] >= 1
    assert secret not in file.read_text()
    assert '"secret"' not in file.read_text()
    assert of_store("import", "config", str(file), "--users") == "nothing differs\n"
    assert "--users needs --store" in ran(node, "import", "config", str(file), "--users", code=2)
    without = node.run("import", "config", str(file), "--node", node.address)
    assert (without.returncode, without.stdout) == (0, "nothing differs\n"), "without --users they are left alone"
    assert f"{told['users']} users of {file} were omitted; --users takes them too" in without.stderr
    assert "omitted" not in node.run("import", "config", str(file), "--users", "--store", str(node.store)).stderr

    of_store("user", "alter", "till", "--disable")
    of_store("user", "key", "remove", "till", "k" * 40, "--yes")
    planned = of_store("import", "config", str(file), "--users", "--dry-run")
    assert "user  till  status=disable" in planned
    assert "WOULD BE" in planned
    users = node.store / "config" / "security" / "acl.json"
    before = json.loads(users.read_bytes())["users"]["till"]
    assert (before["status"], before["secret"]) == ("disable", secret)
    done = json.loads(of_store("import", "config", str(file), "--users", "--json"))
    assert done["changes"] == [
        {"kind": "user", "name": "till", "before": {"status": "disable"}, "after": {"status": "enable"}, "error": None}
    ]
    assert (done["applied"], done["keys_kept"]) == (True, ["till"])
    after = json.loads(users.read_bytes())["users"]["till"]
    assert after == {**before, "status": "enable"}, "its secret and its keys stay"

    of_store("user", "delete", "till", "--yes")
    assert "\n  Topic:orders Allow Pub\n" in of_store("import", "config", str(file), "--users", "--dry-run")
    imported = node.run("import", "config", str(file), "--users", "--store", str(node.store))
    assert (imported.returncode, "the store has no node keys" in imported.stderr) == (0, True)
    made = json.loads(users.read_bytes())
    assert made["users"]["till"]["secret"] != secret
    assert (made["users"]["till"]["keys"], len(made["policies"]["till"]["custom"])) == (["k" * 40], 1)

    document = json.loads(file.read_bytes())
    row = next(one for one in document["users"] if one["name"] == "till")
    document["users"].append({**row, "name": "thief"})
    document["topics"].append({"name": "loot", "read_queues": 1, "write_queues": 1, "perm": 6, "attributes": {}})
    file.write_text(json.dumps(document))
    refused = of_store("import", "config", str(file), "--users", code=1)
    assert "user thief has a key that user till has already" in refused
    with Admin(node.address) as admin:
        assert "loot" not in [one.name for one in admin.topics()], "nothing was changed"
    row["secret"] = "a-secret-of-an-export"
    file.write_text(json.dumps(document))
    assert "a user has no member 'secret'" in of_store("import", "config", str(file), "--users", code=1)


def test_rocketmqs_users_are_taken_over_with_their_secrets(node: Node, tmp_path: Path) -> None:
    of_store, file = of_store_of(node), tmp_path / "users.txt"
    file.write_text(
        "#UserName #Password #UserType #UserStatus\nmigrated 0123canary Normal enable\n"
        "migrated-admin canary-of-admin Super enable\n"
        "#Subject #PolicyType #Resource #Actions #SourceIp #Decision\n"
        "User:migrated Default Group:* [Sub] null Allow\nUser:migrated Custom Topic:orders [Pub,Sub] null Allow\n"
    )
    users = node.store / "config" / "security" / "acl.json"
    before = json.loads(users.read_bytes()) if users.exists() else None
    planned = json.loads(of_store("acl", "import", str(file), "--dry-run", "--json"))
    assert (planned["dry_run"], planned["applied"], planned["conflicts"]) == (True, False, [])
    assert "WOULD BE" in of_store("acl", "import", str(file), "--dry-run")
    assert (json.loads(users.read_bytes()) if users.exists() else None) == before

    ended = node.run("acl", "import", str(file), "--store", str(node.store))
    assert (ended.returncode, "canary" in ended.stdout + ended.stderr) == (0, False)
    assert "Topic:orders" in ended.stdout
    made = json.loads(users.read_bytes())
    assert {one: made["users"][one]["secret"] for one in ("migrated", "migrated-admin")} == {
        "migrated": "0123canary",
        "migrated-admin": "canary-of-admin",
    }
    assert made["policies"]["migrated"] == planned["changes"][0]["policies"]
    assert "allowed" in of_store("acl", "test", "migrated", "Sub", "Group:whichever")
    assert of_store("acl", "import", str(file)) == "nothing differs\n"
    lines = [one for one in of_store("audit", "--json").splitlines() if "migrated" in one]
    assert {json.loads(one)["op"] for one in lines} == {"user.add", "acl.change"}
    assert not any("canary" in one for one in lines)

    listed = tmp_path / "more.txt"
    listed.write_text("#UserName #Password #UserType #UserStatus\nnew canary-of-new Normal enable\n")
    file.write_text(file.read_text().replace("canary-of-admin", "canary-of-other"))
    refused = of_store("acl", "import", str(file), str(listed), code=1)
    assert "user migrated-admin is there already, with another secret" in refused
    assert "nothing was changed" in refused
    assert "there is no user 'new'" in of_store("user", "show", "new", code=1)
    file.write_text("accounts:\n- accessKey: shop\n  secretKey 0123canary\n")
    assert f"{file}: it is no output of mqadmin" in of_store("acl", "import", str(file), code=1)
    of_store("acl", "import", str(listed))
    assert "Normal, enable" in of_store("user", "show", "new")


def test_a_key_may_begin_with_a_dash(node: Node) -> None:
    of_store, key = of_store_of(node), "-" + "h" * 39
    of_store("user", "add", "dashed")
    of_store("user", "key", "add", "dashed", key)
    assert of_store("user", "key", "list", "dashed") == key + "\n"
    of_store("user", "key", "remove", "dashed", key, "--yes")
    assert of_store("user", "key", "list", "dashed") == ""
