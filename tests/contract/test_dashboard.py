"""Goal: the dashboard tells what the node holds, changes only what a visitor confirmed, and never hangs with the node.

Method: a real node, visited by HTTP as a browser and as a program do. What a page says is compared with Admin;
the writer stands still, and is killed, meanwhile; names and bodies carry markup.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from commitmq import Admin, Consumer, Producer
from commitmq_plugins.dashboard.api.routes import ROUTES
from dashboard_client import Visitor, texts
from delays import Peer, everything
from nodes import Node, commitmq, eventually, free_ports, halted, start_node

pytestmark = pytest.mark.timeout(120)
MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}\u202e"
SETTINGS = (
    "plugins.dashboard.enable=true",
    "plugins.dashboard.age_ms=0",
    "plugins.dashboard.deadline_ms=700",
    "plugins.dashboard.names=mq.example",
    "topics.default_queues=2",
    "groups.auto_create=true",
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("dashboard"), *SETTINGS, f"plugins.dashboard.port={free_ports(1)}") as made:
        yield made


@pytest.fixture(scope="module")
def port(node: Node) -> int:
    def address() -> str:
        rows = {row["role"]: row for row in node.report()["processes"]}
        return "".join(rows["worker-dashboard"]["endpoints"] or ())

    eventually(lambda: bool(address()), "the dashboard is ready")
    assert address().startswith("http://127.0.0.1:")
    return int(address().rpartition(":")[2])


@pytest.fixture
def visitor(port: int) -> Visitor:
    return Visitor(port)


def test_create_send_browse_and_query_by_key(node: Node, visitor: Visitor) -> None:
    visitor.get("/topics")
    made = visitor.submit("/topics", topic="orders", queues=2)
    assert made.status == 200
    assert "commitmq topic create orders --queues 2" in texts(made.text)
    again = visitor.change("/topics", topic="orders", queues=2)
    assert again.json == {**again.json, "topic": "orders", "created": False}
    visitor.get("/topics/orders")
    sent = visitor.submit("/topics/orders/messages", body="one espresso", tag="hot", keys="k-1 k-2")
    assert sent.status == 200, sent.text
    other = visitor.change("/topics/orders/messages", topic_typo="x", body="y")
    assert other.status == 400
    assert "topic_typo" in other.json["error"]
    assert visitor.change("/topics/nowhere/messages", body="y").status == 404
    eventually(lambda: len(visitor.read("/topics/orders/messages")["messages"]) == 1, "it can be read")
    [row] = visitor.read("/topics/orders/messages")["messages"]
    assert (row["preview"], row["tag"], row["keys"]) == ("one espresso", "hot", ["k-1", "k-2"])
    eventually(lambda: visitor.read("/search?topic=orders&key=k-2")["messages"] == [row], "the key is found")
    for query in (f"id={row['message_id']}", f"id={row['unique_id']}&topic=orders"):
        assert visitor.read(f"/search?{query}")["messages"] == [row]
    for query, status in (("topic=orders", 400), (f"id={row['unique_id']}", 409), ("id=x&topic=orders", 404)):
        assert visitor.get(f"/api/v1/search?{query}").status == status, query
    page = texts(visitor.get("/search?topic=orders&key=k-2").text)
    assert "one espresso" in page
    whole = visitor.read(f"/messages/{row['message_id']}")
    assert whole["message"]["body"] == "one espresso"
    by_unique = visitor.read(f"/messages/{row['unique_id']}?topic=orders")
    assert by_unique["message"]["row"]["message_id"] == row["message_id"]
    saved = visitor.get(f"/messages/{row['message_id']}/body?topic=orders")
    assert (saved.body, saved.headers["content-type"]) == (b"one espresso", "application/octet-stream")
    assert saved.headers["content-disposition"].startswith("attachment")


def test_messages_come_newest_first_and_from_a_place_on(node: Node, visitor: Visitor) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create("many", 3)
        for number in range(250):
            producer.send("many", b"m-%03d" % number, tags="even" if number % 2 == 0 else "odd", queue=number % 3)
        time.sleep(0.01)  # times are milliseconds
        middle = datetime.now(UTC)
        time.sleep(0.01)
        for number in range(250, 300):
            producer.send("many", b"m-%03d" % number, tags="late", queue=number % 3)
    eventually(lambda: sum(one["messages"] for one in visitor.read("/topics/many")["queues"]) == 300, "all can be read")

    def pages(query: str) -> tuple[list[list[str]], dict[str, Any]]:
        found, go_on = [], ""
        while True:
            page = visitor.read(f"/topics/many/messages?limit=120&{query}{go_on}")
            found.append([one["preview"] for one in page["messages"]])
            if page["next"] is None:
                return found, page
            assert len(found) < 10
            go_on = f"&go_on={quote(page['next'])}"

    newest, last = pages("")
    assert [len(one) for one in newest] == [120, 120, 60]
    assert flat(newest) == [f"m-{number:03d}" for number in reversed(range(300))]
    assert (last["ended_by"], last["total"]) == ("queues", 300)
    odd, _ = pages("tag=odd")
    assert flat(odd) == [f"m-{number:03d}" for number in reversed(range(250)) if number % 2]
    since, _ = pages(f"time={quote(middle.isoformat())}")
    assert sorted(flat(since)) == [f"m-{number:03d}" for number in range(250, 300)]
    one_queue, _ = pages("queue=1&offset=90")
    assert flat(one_queue) == [f"m-{number:03d}" for number in range(271, 300, 3)]
    assert flat(pages("text=m-017&offset=0")[0]) == ["m-017"]
    assert visitor.get("/api/v1/topics/many/messages?limit=201").status == 400
    assert visitor.get("/api/v1/topics/many/messages?go_on=x").status == 400


def flat(pages: list[list[str]]) -> list[str]:
    return [one for page in pages for one in page]


def test_reading_leaves_no_trace(node: Node, visitor: Visitor) -> None:
    with Admin(node.address) as admin:
        before = (admin.groups(), admin.topics())
        for page in ROUTES:
            if page.method == "GET":
                visitor.get(page.path.replace("{topic}", "many").replace("{group}", "nobody").replace("{id}", "0" * 32))
        visitor.get("/topics/never/messages")
        assert (admin.groups(), admin.topics()) == before


def test_a_group_is_reset_after_a_preview(node: Node, visitor: Visitor) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create("bills", 1)
        for number in range(10):
            producer.send("bills", b"%d" % number)
        with Consumer("bills", group="desk", node=node.address) as consumer:
            seen = 0
            while seen < 10:
                seen += len(consumer.poll(2))
            consumer.commit()
        now = admin.group_lag("desk")[0].committed
        assert now == 10
        eventually(lambda: not admin.group("desk")["members"], "the member has left")
        assert visitor.read("/groups?q=desk")["groups"] == [
            {"name": "desk", "members": 0, "topics": 1, "lag_messages": 0, "lag_s": 0.0}
        ]
        page = visitor.get("/groups/desk/reset?to=4&topic=bills")
        assert "6 messages would come again" in texts(page.text)
        assert "commitmq group reset desk bills --to 4" in texts(page.text)
        preview = visitor.read("/groups/desk/reset?to=4&topic=bills")
        move = {"topic": "bills", "queue": 0, "before": 10, "after": 4, "again": 6, "skipped": 0}
        assert (preview["done"], preview["moves"]) == (False, [move])
        assert admin.group_lag("desk")[0].committed == 10, "a preview changes nothing"
        refused = visitor.submit("/groups/desk/reset", to="4", topic="bills", confirm="des")
        assert refused.status == 400
        assert admin.group_lag("desk")[0].committed == 10, "the name was not typed"
        done = visitor.submit("/groups/desk/reset", to="4", topic="bills", confirm="desk")
        assert done.status == 200, texts(done.text)
        assert admin.group_lag("desk")[0].committed == 4
        rows = visitor.read("/groups?show=behind&sort=-lag")["groups"]
        assert [(row["name"], row["lag_messages"]) for row in rows] == [("desk", 6)]
        assert rows[0]["lag_s"] >= 0, "known, and to a tenth of a second"
        assert visitor.read("/groups/desk")["lags"][0]["lag"] == 6
        assert visitor.read("/overview")["worst_lags"][0]["name"] == "desk"
        # The command line that the page gave does the same.
        ran = commitmq(*preview["command"].split()[1:], "--dry-run", "--node", node.address)
        assert ran.returncode == 0, ran.stderr


def test_dead_letters_are_resent_once(node: Node, visitor: Visitor) -> None:
    bury(node, "cooks", "dishes", 3)
    page = visitor.get("/dlq/cooks")
    assert page.text.count('type="checkbox" name="offsets"') == 3
    assert [one["group"] for one in visitor.read("/dlq")["groups"]] == ["cooks"]
    refused = visitor.submit("/dlq/cooks/resend", offsets=[0, 2], confirm="")
    assert refused.status == 400
    assert len(everything(node, "dishes")) == 3
    first = visitor.submit("/dlq/cooks/resend", offsets=[0, 2], confirm="cooks")
    assert first.status == 200, texts(first.text)
    assert "2 of 2 were sent" in texts(first.text)
    assert len(everything(node, "dishes")) == 5
    again = visitor.change("/dlq/cooks/resend", offsets=[0, 1, 2, 77], confirm="cooks")
    outcomes = {one["offset"]: one["outcome"] for one in again.json["outcomes"]}
    assert outcomes == {0: "resent before", 1: "resent", 2: "resent before", 77: "not there"}
    assert len(everything(node, "dishes")) == 6, "a repeated click stores nothing twice"
    states = [one["state"] for one in visitor.read("/dlq/cooks?all=1")["letters"]]
    assert states == ["resent"] * 3
    assert visitor.change("/dlq/cooks/resend", offsets=list(range(101)), confirm="cooks").status == 400


class Dangers(HTMLParser):
    """Elements and attributes that no page of the dashboard has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "img", "b", "i", "u") and (tag, attrs) != ("b", []):
            self.found.append(tag)
        self.found += [f"{tag} {name}" for name, _ in attrs if name.startswith(("on", "style", "srcdoc"))]
        self.found += [
            f"{tag} {one}" for name, one in attrs if name in ("href", "src", "action") and one and one[0] not in "/#"
        ]


def dangers(html: str) -> list[str]:
    parser = Dangers()
    parser.feed(html)
    return parser.found


def pid_of(node: Node, role: str) -> int:
    return int({row["role"]: row for row in node.report()["processes"]}[role]["pid"])


def bury(node: Node, group: str, topic: str, count: int) -> None:
    """Dead letters of ``group``, which came from ``topic``."""
    with Admin(node.address) as admin, Producer(node.address) as producer, Peer(node) as peer:
        for name in (topic, f"%DLQ%{group}", f"%RETRY%{group}"):
            admin.topic_create(name, 1)
        assert peer.hello()["ok"]
        for number in range(count):
            sent = producer.send(topic, b"%d" % number)
            answer = peer.ask(
                b"", op="send_back", group=group, topic=topic, queue=sent.queue, queue_offset=sent.queue_offset,
                physical_offset=sent.physical_offset, delay_level=-1,
            )  # fmt: skip
            assert answer["ok"], answer
        eventually(lambda: admin.offsets(f"%DLQ%{group}")[0].max == count, "all can be read")


def test_markup_is_shown_as_text(node: Node, visitor: Visitor) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create("hostile", 1)
        sent = producer.send(
            "hostile", MARKUP.encode(), tags="<b>t</b>", keys=["<i>k</i>"], properties={"<u>p</u>": MARKUP}
        )
        nested = producer.send("hostile", b"[" * 20_000 + b"]" * 20_000)
        binary = producer.send("hostile", bytes(range(256)))
    eventually(lambda: visitor.read("/topics/hostile")["messages"] == 3, "all can be read")
    paths = ["/topics/hostile/messages", "/search?topic=hostile&key=" + quote("<i>k</i>")]
    paths += [f"/messages/{one.msg_id}" for one in (sent, nested, binary)]
    paths += ["/topics?q=" + quote(MARKUP), "/groups/" + quote(MARKUP, safe=""), "/topics/" + quote(MARKUP, safe="")]
    paths += ["/" + quote(MARKUP, safe=""), "/groups?q=" + quote(MARKUP), "/dlq/" + quote(MARKUP, safe="")]
    for path in paths:
        page = visitor.get(path)
        assert page.status < 500, (path, page.text)
        assert dangers(page.text) == [], path
        assert "\u202e" not in page.text, path
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src" not in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["cache-control"] == "no-store"
    assert "<script>alert(1)</script>" in texts(visitor.get(f"/messages/{sent.msg_id}").text)


def test_other_names_and_other_origins_are_refused(visitor: Visitor) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:80"):
        answer = visitor.ask("GET", "/api/v1/overview", Host=host)
        assert answer.status == 421, host
        assert "store" not in answer.json
    for host in ("mq.example", "localhost:7380", "MQ.example:1"):
        assert visitor.ask("GET", "/api/v1/overview", Host=host).status == 200
    visitor.get("/topics")
    good = {"Content_Type": "application/x-www-form-urlencoded", "Origin": visitor.origin}
    form = f"token={visitor.token}&topic=stolen"
    for headers in (
        {**good, "Origin": "http://evil.example"},
        {**good, "Origin": "null"},
        {**good, "Origin": f"http://localhost:{visitor.port}"},  # another origin: cookies do not tell them apart
        {"Content_Type": good["Content_Type"]},
        {**good, "Cookie": "commitmq_session=" + "0" * 32},
        {**good, "Cookie": "x=y"},
        {**good, "Content_Type": "text/plain"},
        {**good, "Content_Type": "multipart/form-data; boundary=x"},
    ):
        assert visitor.ask("POST", "/topics", form, **headers).status in (403, 415), headers
    assert visitor.ask("POST", "/topics", "topic=stolen&token=" + "0" * 64, **good).status == 403
    assert visitor.ask("POST", "/api/v1/topics", '{"topic": "stolen"}', Content_Type="application/json").status == 403
    assert visitor.ask("POST", "/topics", "a" * 300_000, **good).status == 413
    assert visitor.get("/api/v1/topics/stolen").status == 404
    assert visitor.ask("POST", "/topics", f"token={visitor.token}&topic=mine", **good).status == 200
    cookie = visitor.ask("GET", "/", Cookie="").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


def test_a_page_waits_for_no_process_longer_than_its_deadline(node: Node, visitor: Visitor) -> None:
    visitor.get("/topics/orders")
    with halted(pid_of(node, "coordinator")):
        for path in ("/", "/groups", "/topics/orders", "/api/v1/groups/desk"):
            page = visitor.get(path)
            assert page.took_s < 4, path
            assert page.status in (200, 503), path
        assert "Not known" in texts(visitor.get("/").text)
    with halted(pid_of(node, "writer")):
        assert visitor.get("/").status == 200
        assert visitor.read("/topics/many/messages?limit=1")["messages"], "reading needs no writer"
        sent = visitor.submit("/topics/orders/messages", body="while it stands")
        assert sent.took_s < 4
        assert sent.status == 503


def test_a_killed_writer_is_seen(node: Node, visitor: Visitor) -> None:
    before = {row["role"]: row["restarts"] for row in visitor.read("/processes")["processes"]}["writer"]

    def is_shown() -> bool:
        """Kill it again and again: each time the supervisor waits longer, and the page has more time to see it."""
        pid = node.pids().get("writer")
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        page = visitor.get("/")
        assert page.status == 200
        says = "the process writer is not ready" in texts(page.text)
        return says and visitor.get("/health/ready").status == 503

    eventually(is_shown, "the page says that the writer is gone")
    eventually(lambda: visitor.read("/overview")["ready"], "it is back", 60)
    rows = {row["role"]: row for row in visitor.read("/processes")["processes"]}
    assert rows["writer"]["restarts"] > before
    assert "SIGKILL" in rows["writer"]["last_exit"]


def test_a_drained_node_says_so(node: Node, visitor: Visitor) -> None:
    def warned() -> bool:
        return any("drained" in one for one in visitor.read("/overview")["warnings"])

    assert not warned()
    assert commitmq("drain", "on", "--node", node.address).returncode == 0
    try:
        eventually(warned, "the overview says that the node is drained")
    finally:
        assert commitmq("drain", "off", "--node", node.address).returncode == 0
    eventually(lambda: not warned(), "it is no longer")


def test_every_page_has_its_landmarks_and_nothing_from_elsewhere(visitor: Visitor) -> None:
    values = {
        "{topic}": "orders",
        "{group}": "desk",
        "{id}": visitor.read("/topics/orders/messages")["messages"][0]["message_id"],
    }
    for page in ROUTES:
        path = page.path
        for name, value in values.items():
            path = path.replace(name, value)
        if page.method != "GET":
            continue
        html = visitor.get(path).text
        assert html.count("<h1>") == 1, path
        for part in ("<main", "<header>", '<nav aria-label="Main">', "<title>", 'lang="en"', "<footer>"):
            assert part in html, (path, part)
        assert html.count("<table>") == html.count("<caption>"), path
        assert "<script" not in html
        assert not re.search(r'(href|src|action)="(?!/|#)', html), path
        for control in re.findall(r"<(?:input|select|textarea)[^>]*>", html):
            assert (
                'type="hidden"' in control or "aria-label" in control or f">{control}" not in html or "<label" in html
            )


def test_a_silent_visitor_and_many_of_them_stop_nobody(node: Node, visitor: Visitor) -> None:
    held = [socket.create_connection(("127.0.0.1", visitor.port)) for _ in range(40)]
    try:
        assert visitor.get("/health/live").status == 200
    finally:
        for one in held:
            one.close()


def test_an_idle_dashboard_costs_little(node: Node) -> None:
    process = psutil.Process(pid_of(node, "worker-dashboard"))
    time.sleep(1.0)  # the threads of the tests before end
    before = process.cpu_times()
    time.sleep(2.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.06, "more than 3 % of a core"
    assert process.memory_info().rss < 250 << 20


def test_a_node_with_users_asks_for_a_login(node: Node, visitor: Visitor) -> None:
    ended = commitmq("user", "add", "root", "--super", "--json", "--store", str(node.store))
    assert ended.returncode == 0, ended.stderr
    secret = json.loads(ended.stdout)["secret"]
    eventually(lambda: visitor.get("/").status == 401, "the dashboard knows of the user")
    for path in ("/", "/api/v1/overview", "/api/v1/session", "/topics", "/users", "/messages/x/body"):
        refused = visitor.get(path)
        assert refused.status == 401, path
        assert str(node.store) not in refused.text
    shown = commitmq("dashboard", "--node", node.address)
    assert shown.returncode == 0, shown.stderr
    link = shown.stdout.strip().removeprefix(visitor.origin)
    assert link.startswith("/login?link=")
    key = node.store / "commitmq" / "workers" / "dashboard" / "login.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert visitor.get(link[:-1] + ("0" if link[-1] != "0" else "1")).status == 403
    assert visitor.get(link).status == 303
    assert visitor.read("/users")["users"] == [{"name": "root", "type": "Super", "status": "enable", "keys": 0}]
    assert secret not in visitor.get("/users").text
    stranger = Visitor(visitor.port)
    assert stranger.get(link).status == 403, "a link serves once"
    assert stranger.get("/").status == 401
