"""Goal: a visitor who is a user of the node sees and does what the node's policies allow, and nothing else; the audit log of
the node names him; who was deleted or has another secret is out at once.

Method: a real node with keys and users, visited by HTTP as the store's account, as a super user and as a lesser one; the
answers, the topics of the node, and the lines of `commitmq audit`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Producer
from dashboard_client import Answer, Visitor, texts
from keyed_node import KeyedNode, keyed
from nodes import eventually, free_ports

pytestmark = pytest.mark.timeout(120)


class Shown(KeyedNode):
    """It has a dashboard."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1)
        self.ids: dict[str, str] = {}
        self.secret = ""
        super().__init__(
            folder,
            "plugins.dashboard.enable=true",
            f"plugins.dashboard.port={self.port}",
            "plugins.dashboard.age_ms=0",
            "topics.default_queues=1",
            "groups.auto_create=true",
        )

    def link(self, *options: str) -> str:
        return self.run("dashboard", *options, "--node", self.ipc).strip().partition(f":{self.port}")[2]

    def visitor(self, *options: str) -> Visitor:
        """Logged in by a link."""
        found = Visitor(self.port)
        answer = found.get(self.link(*options))
        assert answer.status == 303, answer.text
        return found

    def lines(self, **members: Any) -> list[dict[str, Any]]:
        """Lines of the audit log with these members."""
        lines = map(json.loads, self.store("audit", "--json", "--last", "0").splitlines())
        return [one for one in lines if all(one.get(name) == value for name, value in members.items())]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with keyed(Shown(tmp_path_factory.mktemp("shown"))) as found:
        found.store("user", "add", "root", "--super")
        found.secret = json.loads(found.store("user", "add", "shop", "--json"))["secret"]
        found.store("acl", "allow", "shop", "Topic:orders", "Pub,Sub")
        found.store("acl", "allow", "shop", "Group:desk", "Sub")
        eventually(lambda: found.node.row("worker-dashboard").get("state") == "ready", "the dashboard is ready")
        with Admin(found.ipc) as admin, Producer(found.ipc) as producer:
            for topic in ("orders", "ledger"):
                admin.topic_create(topic, 1)
                found.ids[topic] = str(producer.send(topic, f"of {topic}".encode(), keys="k").msg_id)
            for group, topic in (("desk", "orders"), ("auditors", "ledger")):
                admin.commit_offsets(group, [(topic, 0, 0)])
            eventually(lambda: len(admin.query("ledger", key="k")) == 1, "the index has all")
        yield found


@pytest.fixture(scope="module")
def shop(shown: Shown) -> Visitor:
    return shown.visitor("--user", "shop")


def test_a_user_sees_what_the_policies_allow(shown: Shown, shop: Visitor) -> None:
    home = shop.get("/")
    assert (home.status, home.headers["location"]) == (303, "/topics")
    page = texts(shop.get("/topics").text)
    assert "You are shop" in page
    assert "orders" in page
    for hidden in ("ledger", "Create a topic", "Users", "Processes", "Overview"):
        assert hidden not in page, hidden
    assert [one["name"] for one in shop.read("/topics?all=1")["topics"]] == ["orders"]
    assert [one["name"] for one in shop.read("/groups")["groups"]] == ["desk"]
    assert [one["preview"] for one in shop.read("/topics/orders/messages")["messages"]] == ["of orders"]
    assert [one["name"] for one in shop.read("/topics/orders")["groups"]] == ["desk"]
    assert shop.read(f"/messages/{shown.ids['orders']}")["groups"][0]["group"] == "desk"
    group = shop.get("/groups/desk")
    assert group.status == 200
    assert "Reset" not in texts(group.text)
    assert shop.read("/session")["user"] == "shop"


def test_what_a_user_may_not_ask_is_refused(shown: Shown, shop: Visitor) -> None:
    paths = [
        "/topics/ledger",
        "/topics/ledger/messages",
        "/search?topic=ledger&key=k",
        f"/messages/{shown.ids['ledger']}",
    ]
    paths += [f"/messages/{shown.ids['ledger']}?topic=orders", "/groups/auditors", "/overview", "/processes"]
    paths += ["/plugins", "/storage", "/users", "/dlq/desk", "/groups/auditors/reset?to=earliest"]
    for path in paths:
        answer = shop.get(f"/api/v1{path}")
        assert answer.status == 403, (path, answer.text)
        assert "of ledger" not in answer.text
    for path in (
        "/topics/ledger",
        "/users",
        f"/messages/{shown.ids['ledger']}",
        f"/messages/{shown.ids['ledger']}/body",
    ):
        answer = shop.get(path)
        assert answer.status == 403, path
        assert b"of ledger" not in answer.body
    before = shown.lines(op="topic.create")
    assert shop.change("/topics", topic="mine").status == 403
    assert shop.change("/topics/ledger/messages", body="x").status == 403
    assert shop.change("/groups/desk/reset", to="0", topic="orders", confirm="desk").status == 403
    refused = shown.lines(user="shop", decision="refused", role="worker-dashboard")
    ops = ("topic.create", "topic.describe", "offsets", "query", "status", "view", "group.describe", "offset.commit")
    assert {one["op"] for one in refused} >= set(ops)
    assert {(one["protocol"], one["address"]) for one in refused} == {("dashboard", "127.0.0.1")}
    allowed = [one for one in shown.lines(op="topic.create") if one["decision"] != "refused"]
    assert len(allowed) == len([one for one in before if one["decision"] != "refused"]), "nothing was made"


def test_a_user_does_what_he_may(shown: Shown, shop: Visitor) -> None:
    sent = shop.change("/topics/orders/messages", body="by shop")
    assert sent.status == 200, sent.text
    eventually(lambda: len(shop.read("/topics/orders/messages")["messages"]) == 2, "it can be read")
    assert shown.lines(user="shop", op="send", resource="Topic:orders", decision="allowed", role="worker-dashboard")


def test_the_node_names_the_visitor(shown: Shown) -> None:
    root = shown.visitor("--user", "root")
    assert "You are root" in texts(root.get("/").text)
    assert root.change("/topics", topic="by-root", queues=1).status == 200
    owner = shown.visitor()
    assert owner.change("/topics", topic="by-owner", queues=1).status == 200
    assert owner.change("/groups/desk/reset", to="0", topic="orders", confirm="desk").status == 200
    for topic, user in (("by-root", "root"), ("by-owner", f"uid {os.geteuid()}")):
        (line,) = shown.lines(op="topic.create", resource=f"Topic:{topic}")
        assert (line["user"], line["protocol"], line["address"]) == (user, "dashboard", "127.0.0.1")
        assert line["role"] == "coordinator"
    (moved,) = shown.lines(op="group.reset", resource="Group:desk", role="coordinator", protocol="dashboard")
    assert moved["user"] == f"uid {os.geteuid()}"
    assert shown.lines(op="login", user="root")[0]["reason"] == "by a link"


def log_in(visitor: Visitor, name: str, secret: str) -> Answer:
    visitor.get("/login")
    return visitor.submit("/login", user=name, secret=secret)


def test_a_user_logs_in_with_the_secret_and_out(shown: Shown) -> None:
    visitor = Visitor(shown.port)
    assert visitor.get("/topics").status == 401
    before = visitor.cookie
    assert log_in(visitor, "shop", shown.secret + "x").status == 403
    assert log_in(visitor, "nobody", shown.secret).status == 403
    assert log_in(visitor, "<b>", "short").status == 403
    assert visitor.get("/topics").status == 401
    entered = log_in(visitor, "shop", shown.secret)
    assert (entered.status, entered.headers["location"]) == (303, "/")
    assert visitor.cookie != before, "a session from before the login is nobody's"
    assert "You are shop" in texts(visitor.get("/topics").text)
    stolen = visitor.ask("POST", "/logout", f"token={'0' * 64}", Content_Type="application/x-www-form-urlencoded")
    assert stolen.status == 403
    assert visitor.submit("/logout").status == 303
    assert visitor.get("/topics").status == 401
    wrong = shown.lines(op="login", user="shop", decision="refused")
    assert len(wrong) == 1
    log = shown.node.log() + json.dumps(shown.lines())
    assert shown.secret not in log


def test_too_many_wrong_secrets_end_the_trying(shown: Shown) -> None:
    visitor = Visitor(shown.port)
    answers = [log_in(visitor, "root", f"wrong-secret-{number}").status for number in range(12)]
    assert answers == [403] * 10 + [429] * 2
    assert shown.visitor("--user", "root").get("/").status == 200, "a link goes on"


def test_who_is_gone_is_out(shown: Shown) -> None:
    shown.store("user", "add", "ann")
    shown.store("acl", "allow", "ann", "Topic:*", "Get")
    owner = shown.visitor()
    eventually(lambda: "ann" in [one["name"] for one in owner.read("/users")["users"]], "ann is known")
    ann = shown.visitor("--user", "ann")
    link = shown.link("--user", "ann")
    shown.store("user", "alter", "ann", "--new-secret")
    eventually(lambda: ann.get("/topics").status == 401, "a new secret ends the logins")
    again = shown.visitor("--user", "ann")
    assert again.get("/topics").status == 200
    shown.store("user", "delete", "ann", "--yes")
    eventually(lambda: again.get("/topics").status == 401, "a deleted user is out")
    assert again.ask("POST", "/api/v1/topics", "{}", Content_Type="application/json").status == 401
    assert Visitor(shown.port).get(link).status == 403, "a link for a user who is gone"
    shown.store("user", "add", "ann")
    assert again.get("/topics").status == 401, "another user of the same name"
    assert shown.run("dashboard", "--user", "nobody", "--node", shown.ipc, code=1) == ""
