"""Goal: the pages about delayed messages, transactions, traces, clients, the audit log, histories and the live view tell what
the node holds, change only what was confirmed, and cost a bounded look.

Method: a real node with messages of each kind, visited by HTTP; what a page says is compared with Admin and with the verbs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from commitmq import Admin, Consumer, Producer
from dashboard_client import Visitor, texts
from delays import Peer, everything
from nodes import Node, commitmq, eventually, free_ports, start_node
from transactions import send_half

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = [
        f"plugins.dashboard.{one}" for one in ("enable=true", f"port={free_ports(1)}", "age_ms=0", "history_s=1")
    ]
    folder = tmp_path_factory.mktemp("pages")
    with start_node(folder, *settings, "groups.auto_create=true", "topics.default_queues=1") as made:
        yield made


@pytest.fixture(scope="module")
def visitor(node: Node) -> Visitor:
    def endpoints() -> list[str]:
        return list(node.row("worker-dashboard").get("endpoints") or ())

    eventually(lambda: bool(endpoints()), "the dashboard is ready")
    return Visitor(int(endpoints()[0].rpartition(":")[2]))


def form(visitor: Visitor, path: str, **values: Any) -> int:
    """The status of a form of the page at ``path``."""
    visitor.get(path)
    return visitor.submit(path.partition("?")[0], **values).status


def test_a_delayed_message_is_cancelled_after_a_preview(node: Node, visitor: Visitor) -> None:
    assert visitor.read("/delayed") == {"messages": [], "complete": True, "looked_at": 0, "late_s": 0.0}
    with Producer(node.address) as producer:
        sent = producer.send("later", b"an espresso", delay=3_600, keys="k-1")
        producer.send("later", b"a tea", delay_level=18)
    eventually(lambda: len(visitor.read("/delayed")["messages"]) == 2, "both wait")
    rows = {row["unique_id"]: row for row in visitor.read("/delayed?topic=later")["messages"]}
    row = rows.pop(sent.unique_id or "")
    (level,) = rows.values()
    assert (level["level"], level["handle"], row["level"], row["keys"]) == (18, None, None, "k-1")
    assert 3_500 < row["in_s"] <= 3_601
    path = f"/delayed/{quote(row['handle'], safe='')}"
    page = texts(visitor.get(path).text)
    assert "nothing has changed" in page
    assert f"commitmq delayed recall {row['handle']}" in page.replace("'", "")
    assert form(visitor, path, confirm="late") == 400
    assert len(visitor.read("/delayed")["messages"]) == 2, "nothing was cancelled"
    assert form(visitor, path, confirm="later") == 200
    eventually(lambda: len(visitor.read("/delayed")["messages"]) == 1, "one is cancelled")
    for wrong in ("x", quote("<script>", safe="")):
        assert visitor.get(f"/delayed/{wrong}").status == 400


def test_transactions_are_ended_by_hand(node: Node, visitor: Visitor) -> None:
    assert visitor.read("/transactions") == {"transactions": [], "running": False, "next": None}
    assert "transaction" not in node.pids(), "reading starts no process"
    with Admin(node.address) as admin, Peer(node) as peer:
        admin.topic_create("pay", 1)
        halves = [send_half(peer, "pay", b"%d" % number, KEYS=f"k{number}") for number in range(3)]
    assert all(one["ok"] for one in halves), halves
    eventually(lambda: len(visitor.read("/transactions")["transactions"]) == 3, "all are open")
    page = visitor.read("/transactions?limit=2")
    assert [one["id"] for one in page["transactions"]] == [one["unique_id"] for one in halves[:2]]
    rest = visitor.read(f"/transactions?limit=2&after={page['next']}")
    assert [one["id"] for one in rest["transactions"]] == [halves[2]["unique_id"]]
    first, second, third = (one["unique_id"] for one in halves)
    preview = visitor.get(f"/transactions/{first}?decision=commit&place={page['transactions'][0]['place']}")
    assert "nothing has changed" in texts(preview.text)
    assert everything(node, "pay") == []
    assert visitor.submit(f"/transactions/{first}", decision="commit", confirm="pays").status == 400
    assert everything(node, "pay") == []
    done = visitor.submit(f"/transactions/{first}", decision="commit", confirm="pay")
    assert done.status == 200, texts(done.text)
    eventually(lambda: [one.body for one in everything(node, "pay")] == [b"0"], "it is committed")
    assert visitor.change(f"/transactions/{first}", decision="commit", confirm="pay").status == 404, "it has ended"
    rolled = visitor.change(f"/transactions/{third}", decision="rollback", confirm="pay")
    assert (rolled.status, rolled.json["done"], rolled.json["offset"]) == (200, True, None)
    eventually(lambda: [one["id"] for one in visitor.read("/transactions")["transactions"]] == [second], "one is open")
    assert visitor.get(f"/api/v1/transactions/{second}?decision=perhaps").status == 400
    ends = visitor.read("/audit?op=transaction.end")["lines"]
    assert {(one["protocol"], one["address"]) for one in ends} == {("dashboard", "127.0.0.1")}


def test_the_trace_of_a_message(node: Node, visitor: Visitor) -> None:
    with Producer(node.address, trace=True) as producer:
        sent = producer.send("traced", b"x", tags="hot", keys="k")
    eventually(lambda: len(visitor.read(f"/messages/{sent.unique_id}/trace")["records"]) == 1, "the trace is there", 20)
    for path in (f"/messages/{sent.unique_id}/trace?topic=traced", f"/messages/{sent.msg_id}/trace"):
        (record,) = visitor.read(path)["records"]
        assert (record["record"], record["outcome"], record["details"]["topic"]) == ("Pub", "done", "traced")
    page = visitor.get(f"/messages/{sent.msg_id}")
    (link,) = re.findall(r'href="(/messages/[^"]*/trace[^"]*)"', page.text)
    assert "Pub" in texts(visitor.get(link).text)
    assert visitor.read("/messages/nobody/trace")["records"] == []


def test_clients_are_members_of_groups(node: Node, visitor: Visitor) -> None:
    assert visitor.read("/clients")["total"] == 0
    with Admin(node.address) as admin:
        admin.topic_create("read", 2)
    with Consumer("read", group="readers", node=node.address) as consumer:
        consumer.poll(0.5)
        eventually(lambda: [one["queues"] for one in visitor.read("/clients")["clients"]] == [2], "it has its queues")
        found = visitor.read("/clients")
        (row,) = found["clients"]
        assert (row["group"], row["topics"], row["queues"], found["total"]) == ("readers", ["read"], 2, 1)
        assert row["member"] in texts(visitor.get("/clients?q=READ").text)
        (connected,) = found["connections"]
        assert (connected["gateway"], connected["consumes"], found["complete"]) == ("native", ["readers"], True)
        assert connected["id"] == row["member"]
        # (The first request of a connection can be answered before the connection is known.)
        eventually(
            lambda: consumer.poll(0.1) is not None and visitor.read("/clients")["connections"][0]["address"], "it"
        )
        nobody = visitor.read("/clients?q=nobody")
        assert nobody["clients"] == nobody["connections"] == []


def test_the_audit_log_from_its_end(node: Node, visitor: Visitor) -> None:
    with Admin(node.address) as admin:
        for number in range(7):
            admin.topic_create(f"audited-{number}", 1)
    shown = commitmq("audit", "--store", str(node.store), "--json", "--last", "0").stdout.splitlines()
    lines = [json.loads(one) for one in shown]
    whole = visitor.read("/audit?limit=200")
    assert (whole["ended_by"], whole["next"], whole["looked_at"]) == ("end", None, len(lines))
    assert sorted(one["time"] for one in lines) == [one["time"] for one in whole["lines"]][::-1]
    found: list[str] = []
    go_on = ""
    while True:
        page = visitor.read(f"/audit?op=topic&limit=3{go_on}")
        found += [one["resource"] for one in page["lines"]]
        if page["next"] is None:
            break
        go_on = f"&go_on={quote(page['next'])}"
    assert found[:7] == [f"Topic:audited-{number}" for number in reversed(range(7))]
    wanted = [one["resource"] for one in lines if one["op"].startswith("topic.")]
    assert found == wanted[::-1]
    assert visitor.read("/audit?resource=Topic:audited-3")["lines"][0]["operation"] == "topic.create"
    assert visitor.read("/audit?since=2099-01-01")["lines"] == []
    assert visitor.read("/audit?until=2020-01-01")["lines"] == []
    assert visitor.read("/audit?refused=1")["lines"] == []
    for wrong in ("go_on=x", "go_on=..%2f..:1:2", "since=soon", "limit=201"):
        assert visitor.get(f"/api/v1/audit?{wrong}").status == 400, wrong
    assert visitor.get("/api/v1/audit?go_on=nobody:1:2").json["lines"] == []
    assert "Topic:audited-6" in texts(visitor.get("/audit").text)


def test_histories_are_drawn_without_a_script(node: Node, visitor: Visitor) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create("counted", 1)
        assert [one for one in visitor.read("/topics/counted/history")["points"] if one["value"] is not None] == []
        admin.commit_offsets("slow", [("counted", 0, 0)])
        for _ in range(5):
            producer.send("counted", b"x" * 100)
        eventually(lambda: visitor.read("/groups/slow/history")["latest"] == 5.0, "the lag is sampled", 20)
        producer.send_batch("counted", [b"y" * 100] * 50)
        eventually(lambda: (visitor.read("/topics/counted/history")["highest"] or 0) > 1, "the rate is sampled", 20)
        eventually(lambda: (visitor.read("/history?span=24h")["highest"] or 0) > 100, "bytes are sampled", 20)
    for path in ("/history", "/topics/counted/history?span=24h", "/groups/slow/history"):
        page = visitor.get(path)
        assert page.status == 200
        assert "<svg" in page.text
        assert "<script" not in page.text
        assert "style=" not in page.text
    assert visitor.read("/groups/nobody/history")["points"] == []
    assert visitor.get("/topics/nowhere/history").status == 404
    assert visitor.get("/history?span=2h").status == 400


def test_the_live_view_goes_on_where_it_was(node: Node, visitor: Visitor) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create("live", 2)
        for number in range(4):
            producer.send("live", b"old-%d" % number, queue=number % 2)
        eventually(lambda: len(visitor.read("/topics/live/tail")["messages"]) == 4, "all can be read")
        first = visitor.read("/topics/live/tail?limit=3")
        assert [one["message"]["preview"] for one in first["messages"]] == ["old-3", "old-2", "old-1"]
        assert first["new"] == 0
        page = visitor.get("/topics/live/tail?limit=3&every=2")
        (refresh,) = re.findall(r'<meta http-equiv="refresh" content="2; url=([^"]*)"', page.text)
        for number in range(2):
            producer.send("live", b"new-%d" % number, queue=number)
        address = refresh.replace("&amp;", "&")
        assert address.startswith("/topics/live/tail?")

        def second() -> Any:
            return visitor.read(address)

        eventually(lambda: second()["new"] == 2, "the new ones are seen")
        assert [(one["message"]["preview"], one["is_new"]) for one in second()["messages"]] == [
            ("new-1", True), ("new-0", True), ("old-3", False),
        ]  # fmt: skip
        third = visitor.read(
            f"/topics/live/tail?limit=3&go_on={quote(second()['next'])}&seen={quote(second()['seen'])}"
        )
        assert (third["new"], len(third["messages"])) == (0, 3)
    assert "http-equiv" not in visitor.get("/topics/live/tail?every=0").text
    assert visitor.get("/topics/live/tail?go_on=x").status == 400
