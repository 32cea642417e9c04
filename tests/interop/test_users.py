"""Goal: users and policies mean what they mean to RocketMQ: its own classes decide the same, its clients sign, and mqadmin's
requests change them.

Method: 2,000 generated policies, decided by RocketMQ's AclAuthorizationHandler and by ours; Java clients with AclClientRPCHook
of a node whose users the command line and RocketMQ's admin client make.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq.security.access_file import AccessTable
from commitmq.security.policy import (
    Action,
    Policies,
    Resource,
    ResourcePattern,
    Secret,
    User,
    parse_actions,
    parse_address,
)
from nodes import Node, environment, eventually, free_ports

pytestmark = pytest.mark.slow
NAMES = ("orders", "orders-eu", "order", "billing", "ord")
CASES = 2_000


class UserTool:
    """The Java program UserTool."""

    def __init__(self, class_path: str, home: Path, *arguments: str) -> None:
        command = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", f"-Duser.home={home}"]
        command += [f"-Dinterop.log={home / 'users.log'}", f"-Djava.io.tmpdir={home}", "-cp", class_path]
        self._process = subprocess.Popen(
            [*command, "commitmq.interop.UserTool", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the program ended")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


OpenTool = Callable[..., UserTool]


@pytest.fixture
def user_tool(_class_path: str, tmp_path: Path) -> Iterator[OpenTool]:
    opened: list[UserTool] = []

    def start(*arguments: str) -> UserTool:
        opened.append(UserTool(_class_path, tmp_path, *arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def generated(chance: random.Random) -> dict[str, Any]:
    def resource() -> str:
        kind, name = chance.choice(("Topic", "Topic", "Group", "Cluster")), chance.choice(NAMES)
        return chance.choice(("*", f"{kind}:*", f"{kind}:{name}", f"{kind}:{name[: chance.randint(1, 4)]}*"))

    def entry() -> dict[str, Any]:
        actions = [one.value for one in Action if one is not Action.ANY]
        networks = chance.choice(
            ([], [], ["10.0.0.0/8"], ["10.1.2.3"], ["10.9.9.9/30", "192.168.0.0/16"], ["fd00::/8"])
        )
        return {
            "resource": resource(),
            "actions": chance.sample(actions, chance.randint(1, 3)),
            "from": networks,
            "decision": chance.choice(("Allow", "Allow", "Deny")),
        }

    kinds = chance.choice((["Custom"], ["Default"], ["Custom", "Default"], []))
    return {
        "user": "ann",
        "ip": chance.choice(("10.1.2.3", "192.168.7.7", "172.16.0.1")),
        "resource": f"{chance.choice(('Topic', 'Group'))}:{chance.choice(NAMES)}",
        "wanted": chance.choice((["Pub"], ["Sub"], ["Sub", "Get"], ["Pub", "Sub", "Get"], ["Update"], ["Any"])),
        "policies": {kind: [entry() for _ in range(chance.randint(1, 6))] for kind in kinds},
    }


def ours(case: dict[str, Any]) -> tuple[bool, bool]:
    """Our decision, and whether equally exact entries disagree."""
    members = {kind.lower(): entries for kind, entries in case["policies"].items()}
    policies = Policies.from_json(members)
    pattern = ResourcePattern.parse(case["resource"])
    resource = Resource(pattern.type, pattern.name)
    wanted = [Action.ANY] if case["wanted"] == ["Any"] else sorted(parse_actions(case["wanted"]))
    table = AccessTable({"ann": User("ann", Secret("a-secret-of-ann"))}, {"ann": policies})
    decision = table.decide("ann", resource, wanted, case["ip"])
    if decision.entry is None:
        return decision.allowed, False
    address = parse_address(case["ip"])
    part = policies.custom if decision.entry in policies.custom else policies.default
    equals = {
        one.allow
        for one in part
        if one.pattern.rank == decision.entry.pattern.rank
        and one.pattern.matches(resource)
        and one.does(wanted)
        and one.comes_from(address)
    }
    return decision.allowed, len(equals) > 1


def test_rocketmqs_own_classes_decide_the_same(user_tool: OpenTool) -> None:
    tool, chance = user_tool("decide"), random.Random(20_261_126)
    allowed = disagreements = 0
    for _ in range(CASES):
        case = generated(chance)
        decision, disagree = ours(case)
        assert decision == tool.ask(**case)["allowed"], case
        disagreements += disagree
        allowed += decision
    assert CASES // 10 < allowed < CASES * 9 // 10, "the cases show both"
    assert disagreements > 5, "some have entries that disagree"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    first = free_ports(4)
    found = Node(
        tmp_path / "store",
        "plugins.rocketmq.enable=true",
        f"plugins.rocketmq.namesrv_port={first}",
        "plugins.rocketmq.vip_port=false",
        f"network.store_port={first + 2}",
    )
    found.names, found.broker = f"127.0.0.1:{first}", f"127.0.0.1:{first + 2}"  # type: ignore[attr-defined]
    assert found.start().returncode == 0
    yield found
    found.end()


def verb(node: Node, *words: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "commitmq.cli.main", *words, "--store", str(node.store)],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_clients_that_sign(node: Node, user_tool: OpenTool) -> None:
    names, broker = node.names, node.broker  # type: ignore[attr-defined]
    nobody = user_tool("talk", names, "", "")
    eventually(
        lambda: nobody.ask(op="send", topic="orders", body="0").get("ok") == "SEND_OK", "without users all may send", 60
    )

    verb(node, "user", "add", "root", "--super", "--secret-stdin", stdin="the-secret-of-root\n")
    verb(node, "user", "add", "ann", "--secret-stdin", stdin="the-secret-of-ann\n")
    eventually(
        lambda: nobody.ask(op="send", topic="orders", body="1").get("code") == 16, "now nobody may without a name"
    )

    ann, wrong = user_tool("talk", names, "ann", "the-secret-of-ann"), user_tool("talk", names, "ann", "another-secret")
    root = user_tool("talk", names, "root", "the-secret-of-root")
    refused = wrong.ask(op="send", topic="orders", body="2")
    assert refused["code"] == 16
    assert "check signature failed" in refused["refused"]
    refused = ann.ask(op="send", topic="orders", body="3")
    assert refused["code"] == 16
    assert "no entry of user ann allows Pub on Topic:orders" in refused["refused"]
    assert root.ask(op="send", topic="orders", body="of root") == {"ok": "SEND_OK"}

    verb(node, "acl", "allow", "ann", "Topic:orders", "Pub,Sub")
    eventually(lambda: ann.ask(op="send", topic="orders", body="of ann") == {"ok": "SEND_OK"}, "ann may send now")
    assert ann.ask(op="receive", group="readers", topic="orders", ms=3_000)["ok"] == [], (
        "ann may not be in the group yet"
    )
    verb(node, "acl", "allow", "ann", "Group:readers", "Sub")
    found = ann.ask(op="receive", group="readers", topic="orders", ms=30_000)["ok"]
    assert found
    assert set(found) <= {"0", "1", "of root", "of ann"}, "1 may have come before the server knew of users"

    assert ann.ask(op="topics", broker=broker)["code"] == 16
    assert root.ask(op="topics", broker=broker) == {"ok": True}
    assert ann.ask(op="createUser", broker=broker, name="eve", password="secret-of-eve", type="Super")["code"] == 16

    assert root.ask(op="createUser", broker=broker, name="bob", password="secret-of-bob", type="Normal") == {"ok": True}
    shown = root.ask(op="getUser", broker=broker, name="bob")["ok"]
    assert shown["username"] == "bob"
    assert "secret-of-bob" not in json.dumps(shown)
    assert [one["username"] for one in root.ask(op="listUsers", broker=broker)["ok"]] == ["root", "ann", "bob"]
    assert root.ask(
        op="createAcl", broker=broker, name="bob", resources=["Topic:ord*"], actions=["Pub"], **{"from": ["127.0.0.1"]},
        decision="Allow",
    ) == {"ok": True}  # fmt: skip
    (policy,) = root.ask(op="getAcl", broker=broker, name="bob")["ok"]["policies"]
    assert policy["entries"][0]["resource"] == "Topic:ord*"
    bob = user_tool("talk", names, "bob", "secret-of-bob")
    eventually(lambda: bob.ask(op="send", topic="orders", body="of bob") == {"ok": "SEND_OK"}, "bob may send")
    assert root.ask(op="deleteAcl", broker=broker, name="bob", resource="Topic:ord*") == {"ok": True}
    eventually(lambda: bob.ask(op="send", topic="orders", body="x").get("code") == 16, "bob may not any more")
    assert "bob" in verb(node, "user", "list")
    assert root.ask(op="deleteUser", broker=broker, name="bob") == {"ok": True}
    assert "bob" not in verb(node, "user", "list")
    log = (node.store / "commitmq" / "node.log").read_text()
    assert "a request was refused" in log
    assert not [one for one in ("the-secret-of", "secret-of-bob") if one in log]
