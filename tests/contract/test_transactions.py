"""Goal: a message of a transaction is seen when it is committed, once, and never when it is rolled back or given up.

Method: real nodes, requests at the level of the protocol, and reads of whole topics; RocketMQ's own store with undecided
transactions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from commitmq import (
    Admin,
    GroupNotFoundError,
    HalfMessage,
    OpenTransaction,
    Producer,
    ProtocolError,
    Reader,
    TransactionState,
)
from commitmq.semantics.transaction import DISCARD_TOPIC, HALF_TOPIC, OP_TOPIC
from commitmq.store.metadata import json_config
from delays import Peer, everything
from golden_stores import unpack
from nodes import Node, commitmq, eventually, halted, start_node, started
from transactions import GROUP, QUICK, EndPeer, send_half

pytestmark = pytest.mark.timeout(120)
TOPIC = "parcels"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("transactions"), *QUICK) as made:
        with Admin(made.address) as admin:
            admin.topic_create(TOPIC, 3)
        yield made


def bodies(node: Node, topic: str = TOPIC) -> list[bytes]:
    return [one.body for one in everything(node, topic)]


def test_a_half_message_is_not_seen_before_its_commit(node: Node) -> None:
    with Peer(node) as peer, EndPeer(node) as ends:
        half = send_half(peer, TOPIC, b"committed", queue=2)
        assert half["ok"], half
        assert (half["stored_topic"], half["stored_queue"], half["queue"]) == (HALF_TOPIC, 0, 2)
        assert b"committed" not in bodies(node)
        answer = ends.end(half, "commit")
        assert answer["ok"], answer
        assert (answer["decision"], answer["topic"], answer["queue"]) == ("commit", TOPIC, 2)
    eventually(lambda: b"committed" in bodies(node), "it is there")
    (stored,) = [one for one in everything(node, TOPIC) if one.body == b"committed"]
    assert (stored.queue, stored.offset) == (2, answer["queue_offset"])


def test_a_rolled_back_message_is_never_seen(node: Node) -> None:
    with Peer(node) as peer, EndPeer(node) as ends:
        half = send_half(peer, TOPIC, b"rolled back")
        first = ends.end(half, "rollback")
        assert first["ok"], first["error"]
        assert first["decision"] == "rollback"
        again = ends.end(half, "rollback")
        assert (again["decision"], again["before"]) == ("rollback", True)
        other = ends.end(half, "commit")
        assert (other["ok"], other["code"], other["decision"]) == (False, "TRANSACTION_ENDED", "rollback")
    assert b"rolled back" not in bodies(node)


def test_the_first_end_counts(node: Node) -> None:
    with Peer(node) as peer, EndPeer(node) as ends:
        half = send_half(peer, TOPIC, b"once")
        first = ends.end(half, "commit")
        assert first["ok"]
        assert ends.end(half, "commit")["before"]
        assert ends.end(half, "rollback")["code"] == "TRANSACTION_ENDED"
    eventually(lambda: b"once" in bodies(node), "it is there")
    assert bodies(node).count(b"once") == 1


def test_a_run_of_half_messages_ends_one_by_one(node: Node) -> None:
    many = [b"run-%d" % number for number in range(40)]
    with Peer(node) as peer, EndPeer(node) as ends:
        halves = [send_half(peer, TOPIC, body, queue=1) for body in many]
        for number, half in enumerate(halves):
            assert ends.end(half, "rollback" if number % 4 == 0 else "commit")["ok"]
    wanted = [body for number, body in enumerate(many) if number % 4]
    eventually(lambda: wanted[-1] in bodies(node), "the last one is there")
    assert [body for body in bodies(node) if body.startswith(b"run-")] == wanted


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ({"group": "others"}, "SYSTEM_ERROR", "producer group wrong"),
        ({"queue_offset": 10_000}, "SYSTEM_ERROR", "state table offset wrong"),
        ({"physical_offset": 1 << 50}, "SYSTEM_ERROR", "Find prepared transaction message failed"),
        ({"physical_offset": -1}, "INVALID_PARAMETER", "physical_offset"),
        ({"decision": "perhaps"}, "INVALID_PARAMETER", "decision"),
        ({"ack": "soon"}, "INVALID_PARAMETER", "ack must be memory or flushed"),
    ],
)
def test_an_end_names_its_transaction(node: Node, change: dict[str, object], code: str, sentence: str) -> None:
    with Peer(node) as peer, EndPeer(node) as ends:
        half = send_half(peer, TOPIC, b"wrong end")
        place = {"queue_offset": half["queue_offset"], "physical_offset": half["physical_offset"]}
        answer = ends.ask(**{"op": "transaction.end", "group": GROUP, "decision": "commit", **place, **change})
        assert (answer["ok"], answer["code"]) == (False, code)
        assert sentence in answer["error"]
        assert ends.end(half, "rollback")["ok"]


def test_a_commit_with_the_ack_memory_does_not_wait_for_the_device(node: Node) -> None:
    # The positions do: a power cut must not take a commit whose half message nobody would look at again.
    def positions() -> list[tuple[str, int, int]]:
        with Admin(node.address) as admin, contextlib.suppress(GroupNotFoundError):
            return sorted(tuple(one) for one in admin.group("CID_RMQ_SYS_TRANS")["offsets"])
        return []

    with Peer(node) as peer, EndPeer(node) as ends:
        before = settled(positions)
        with halted(node.pids()["flush"]):
            half, patient = (send_half(peer, TOPIC, body, ack="memory") for body in (b"at once", b"patient"))
            assert ends.end(half, "commit", ack="memory")["ok"]
            with pytest.raises(TimeoutError):
                ends.end(patient, "commit", timeout_s=0.5)
            assert positions() == before
        eventually(lambda: {b"at once", b"patient"} <= set(bodies(node)), "both are seen when they are on the device")
        eventually(lambda: positions() != before, "the positions follow")


def settled(look: Callable[[], Any]) -> Any:
    """What ``look`` finds when it does not change for a second."""
    known, since = look(), time.monotonic()
    while time.monotonic() - since < 1:
        time.sleep(0.05)
        if (now := look()) != known:
            known, since = now, time.monotonic()
    return known


def test_what_cannot_be_a_half_message_is_refused(node: Node) -> None:
    with Admin(node.address) as admin:
        admin.topic_create("in-memory", 1, attributes={"storage.type": "memory"})
    with Peer(node) as peer:
        numbered = peer.ask(
            b"x",
            op="send",
            topic=TOPIC,
            queue=0,
            properties={"TRAN_MSG": "true", "PGROUP": GROUP},
            producer_id="p",
            producer_epoch=0,
            sequence=0,
        )
        assert (numbered["code"], "idempotent" in numbered["error"]) == ("MESSAGE_ILLEGAL", True), numbered
        groupless = peer.ask(b"x", op="send", topic=TOPIC, queue=0, properties={"TRAN_MSG": "true"})
        assert (groupless["code"], "PGROUP" in groupless["error"]) == ("MESSAGE_ILLEGAL", True), groupless
        plain = peer.ask(b"no half message", op="send", topic=TOPIC, queue=0, properties={"TRAN_MSG": "no"})
        assert plain["ok"], plain
        assert "stored_topic" not in plain


def test_a_committed_message_obeys_its_delay(node: Node) -> None:
    with Peer(node) as peer, EndPeer(node) as ends:
        half = send_half(peer, TOPIC, b"commit, then a second", queue=1, DELAY="1")
        assert half["stored_topic"] == HALF_TOPIC
        answer = ends.end(half, "commit")
        assert answer["stored_topic"] == "SCHEDULE_TOPIC_XXXX"
        committed_ms = time.time_ns() // 1_000_000
    eventually(lambda: b"commit, then a second" in bodies(node), "it is delivered")
    (stored,) = [one for one in everything(node, TOPIC) if one.body == b"commit, then a second"]
    assert stored.queue == 1
    assert stored.store_timestamp >= committed_ms + 900, "it came too early"


# ---------------------------------------------------------------- checks


def test_a_live_producer_of_the_group_is_asked(node: Node) -> None:
    with Peer(node) as peer, EndPeer(node) as dead, EndPeer(node) as other, EndPeer(node) as alive:
        assert dead.register("askers")["ok"]
        dead.ask(op="transaction.leave")
        assert other.register("strangers")["ok"]
        assert alive.register("askers")["ok"]
        half = send_half(peer, TOPIC, b"asked about", queue=2, group="askers", KEYS="k")
        header, record = alive.wait_for_check()
        assert (record.topic, record.queue_id, record.body) == (TOPIC, 2, b"asked about")
        assert (header["unique_id"], header["group"]) == (half["unique_id"], "askers")
        assert header["queue_offset"] > half["queue_offset"], "it went back to the end of the half topic"
        assert record.properties["TRANSACTION_CHECK_TIMES"] == "1"
        place = {"queue_offset": header["queue_offset"], "physical_offset": header["physical_offset"]}
        answer = alive.ask(op="transaction.end", group="askers", decision="commit", from_check=True, **place)
        assert answer["ok"], answer
        assert not other.checks
        assert not dead.checks
        late = alive.end(half, "commit", "askers")
        assert late["ok"], "the first place of the transaction tells of the same end"
    eventually(lambda: b"asked about" in bodies(node), "it is there")
    time.sleep(1)
    assert bodies(node).count(b"asked about") == 1


def test_an_end_by_the_first_place_ends_a_transaction_that_was_put_back(node: Node) -> None:
    with Peer(node) as peer, EndPeer(node) as ends:
        assert ends.register("late")["ok"]
        half = send_half(peer, TOPIC, b"late end", group="late")
        header, _ = ends.wait_for_check()
        assert ends.end(half, "commit", "late")["ok"]
        place = {"queue_offset": header["queue_offset"], "physical_offset": header["physical_offset"]}
        again = ends.ask(op="transaction.end", group="late", decision="commit", from_check=True, **place)
        assert (again["ok"], again["before"]) == (True, True)
    eventually(lambda: b"late end" in bodies(node), "it is there")
    assert bodies(node).count(b"late end") == 1


def test_what_nobody_ends_is_given_up(tmp_path: Path) -> None:
    with start_node(tmp_path, *QUICK, "transaction.check_max=2") as node, Admin(node.address) as admin:
        admin.topic_create(TOPIC, 1)
        with Peer(node) as peer, EndPeer(node) as ends:
            assert ends.register()["ok"]
            half = send_half(peer, TOPIC, b"nobody knows")
            times = [ends.wait_for_check()[1].properties["TRANSACTION_CHECK_TIMES"] for _ in range(2)]
            assert times == ["1", "2"]
            eventually(lambda: bodies(node, DISCARD_TOPIC) == [b"nobody knows"], "it is given up")
            answer = ends.end(half, "commit")
            assert (answer["ok"], answer["code"]) == (False, "TRANSACTION_ENDED")
            assert ends.ask(op="transaction.list")["transactions"] == []
        assert bodies(node) == []


def test_a_group_without_a_producer_is_told_of(tmp_path: Path) -> None:
    def groups(node: Node) -> Any:
        report = orjson.loads(commitmq("status", "--json", "--node", node.address).stdout)
        (row,) = (one for one in report["processes"] if one["role"] == "transaction")
        return (row.get("info") or {}).get("unheard_groups")

    with start_node(tmp_path, *QUICK, "transaction.check_max=1000") as node, Admin(node.address) as admin:
        admin.topic_create(TOPIC, 1)
        with Peer(node) as peer, EndPeer(node) as ends:
            send_half(peer, TOPIC, b"nobody is there", group="lonely")
            eventually(lambda: groups(node) == ["lonely"], "it is told of")
            assert "no producer of the group can be asked" in node.log_tail()
            assert ends.register("lonely")["ok"]
            eventually(lambda: groups(node) == [], "it has a producer")


def test_an_immune_transaction_is_asked_later(node: Node) -> None:
    with Peer(node) as peer, EndPeer(node) as ends:
        assert ends.register("patient")["ok"]
        sent = time.monotonic()
        send_half(peer, TOPIC, b"ask me later", group="patient", CHECK_IMMUNITY_TIME_IN_SECONDS="2")
        header, record = ends.wait_for_check()
        assert time.monotonic() - sent > 1.9
        assert "TRAN_PREPARED_QUEUE_OFFSET" in record.properties
        place = {"queue_offset": header["queue_offset"], "physical_offset": header["physical_offset"]}
        assert ends.ask(op="transaction.end", group="patient", decision="rollback", from_check=True, **place)["ok"]


def test_a_deleted_topic_ends_its_transactions(node: Node) -> None:
    with Admin(node.address) as admin, Peer(node) as peer, EndPeer(node) as ends:
        admin.topic_create("gone", 1)
        half = send_half(peer, "gone", b"of the first topic")
        unseen = send_half(peer, "gone", b"also of the first one")
        admin.topic_delete("gone")
        answer = ends.end(half, "commit")
        assert (answer["ok"], answer["code"]) == (False, "TOPIC_NOT_EXIST")
        admin.topic_create("gone", 1)
        assert ends.end(unseen, "commit")["code"] in ("TOPIC_NOT_EXIST", "TRANSACTION_ENDED")
        new = send_half(peer, "gone", b"of the second one")
        assert ends.end(new, "commit")["ok"]
        eventually(lambda: bodies(node, "gone") == [b"of the second one"], "only the new one is there")


# ---------------------------------------------------------------- restarts


def test_open_transactions_outlive_the_node(tmp_path: Path) -> None:
    node = Node(tmp_path / "store", *QUICK)
    with started(node):
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, 1)
        with Peer(node) as peer, EndPeer(node) as ends:
            done, rolled, still, asked = (
                send_half(peer, TOPIC, name) for name in (b"done", b"rolled", b"still", b"asked")
            )
            assert ends.end(done, "commit")["ok"]
            assert ends.end(rolled, "rollback")["ok"]
        assert node.stop().returncode == 0
        assert node.start().returncode == 0
        with EndPeer(node) as ends:
            assert ends.end(still, "commit")["ok"]
            assert ends.end(rolled, "commit")["code"] == "TRANSACTION_ENDED"
            ends.register()
            header, record = ends.wait_for_check()
            assert record.body == b"asked"
            place = {"queue_offset": header["queue_offset"], "physical_offset": header["physical_offset"]}
            assert ends.ask(op="transaction.end", group=GROUP, decision="commit", from_check=True, **place)["ok"]
            assert ends.end(asked, "commit")["ok"]
        eventually(lambda: sorted(bodies(node)) == [b"asked", b"done", b"still"], "each is there once")

        def positions() -> list[int]:
            table = json_config.load(node.store / "config" / "consumerOffset.json") or {}
            found = table.get("offsetTable", {})
            return [found.get(f"{topic}@CID_RMQ_SYS_TRANS", {}).get(0, -1) for topic in (HALF_TOPIC, OP_TOPIC)]

        time.sleep(0.5)  # a round of checks passes what is done
        assert node.stop().returncode == 0
    assert positions()[0] >= 5
    assert positions()[1] >= 1


def test_a_node_without_the_process_refuses(tmp_path: Path) -> None:
    with start_node(tmp_path, "transaction.enable=false") as node:
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, 1)
        with Peer(node) as peer:
            answer = send_half(peer, TOPIC, b"x")
        assert (answer["code"], answer["outcome"]) == ("MESSAGE_ILLEGAL", "not_stored")
        assert "transaction.enable" in answer["error"]


# ---------------------------------------------------------------- administration


def test_a_person_ends_transactions(node: Node) -> None:
    with Admin(node.address) as admin, Peer(node) as peer:
        halves = [send_half(peer, TOPIC, b"by hand %d" % number, group="nobody", KEYS="k") for number in range(3)]

        def listed_ones() -> list[OpenTransaction]:
            return [one for one in admin.transactions() if one.group == "nobody"]

        eventually(lambda: len(listed_ones()) == 3, "they are dispatched")
        mine = listed_ones()
        assert {one.unique_id for one in mine} == {half["unique_id"] for half in halves}
        assert (mine[0].topic, mine[0].keys, mine[0].body_bytes) == (TOPIC, "k", 9)
        done = admin.transaction_resolve(halves[0]["unique_id"], "commit")
        assert (done["decision"], done["topic"]) == ("commit", TOPIC)
        listed = commitmq("transaction", "list", "--group", "nobody", "--json", "--node", node.address)
        assert len(orjson.loads(listed.stdout)) == 2, listed
        assert halves[1]["unique_id"] in commitmq("transaction", "list", "--node", node.address).stdout
        second = commitmq("transaction", "resolve", halves[1]["unique_id"], "rollback", "--yes", "--node", node.address)
        assert (second.returncode, second.stdout) == (0, "rolled back\n"), second.stderr
        third = commitmq("transaction", "resolve", halves[2]["unique_id"], "commit", "--node", node.address)
        assert third.stdout.startswith(f"committed: {TOPIC}/0@"), third.stderr
        with pytest.raises(ProtocolError, match="no open transaction"):
            admin.transaction_resolve(halves[1]["unique_id"], "commit")
    eventually(lambda: b"by hand 2" in bodies(node), "they are there")
    assert b"by hand 1" not in bodies(node)
    assert b"by hand 0" in bodies(node)


# ---------------------------------------------------------------- RocketMQ's own store


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "killed"])
def test_what_rocketmq_left_open_is_checked_and_decided(tmp_path: Path, stopped: bool) -> None:
    golden = unpack("semantics", tmp_path)
    expected = orjson.loads((tmp_path / "expected.json").read_bytes())
    if not stopped:
        # A killed RocketMQ leaves ``abort``, and its offsets are some seconds behind.
        (golden.root / "abort").write_text("1")
        table = golden.root / "config" / "consumerOffset.json"
        text = table.read_text()
        for topic, offset in ((HALF_TOPIC, 27), (OP_TOPIC, 3)):
            assert f'"{topic}@CID_RMQ_SYS_TRANS":{{0:{offset}' in text.replace("\t", "").replace("\n", ""), text
        table.write_text(text.replace("0:27", "0:18").replace("0:3\n", "0:1\n"))
        (golden.root / "config" / "consumerOffset.json.bak").unlink(missing_ok=True)
    must: dict[str, str] = {}
    for one in expected["messages"]:
        if one["kind"].startswith("half"):
            must[one["uniq_key"]] = one["must"]
    undecided = {key for key, what in must.items() if what == "check-back"}
    assert undecided
    there_before = {one["uniq_key"] for one in expected["messages"] if one["kind"] == "half-committed"}
    asked: dict[str, HalfMessage] = {}

    def check(message: HalfMessage) -> TransactionState:
        asked[message.unique_id] = message
        first = min(undecided)
        return TransactionState.ROLLBACK if message.unique_id == first else TransactionState.COMMIT

    node = Node.bare(golden.root, *QUICK, "retention.hours=0", "network.port=0")
    with started(node):
        topic = "PendingTx"

        def there() -> list[str]:
            with Reader(topic, node=node.address, start="earliest") as reader:
                found = []
                while len(batch := reader.poll(timeout_s=0.5)):
                    found += [one.properties["UNIQ_KEY"] for one in batch]
            return found

        with Producer(node.address, group="Pending_tx", transaction_listener=check), Admin(node.address) as admin:
            # One is immune for a day by its own property: a person decides about it.
            eventually(lambda: len(admin.transactions()) <= 1, "what can be checked is decided", timeout_s=60)
            left = {one.unique_id for one in admin.transactions()}
            for key in left:
                admin.transaction_resolve(key, "commit")
        assert asked.keys() | left >= undecided
        assert asked.keys() <= undecided, "a transaction was asked about that RocketMQ had decided"
        wanted = sorted(there_before | (undecided - {min(undecided)} if min(undecided) not in left else undecided))
        eventually(lambda: sorted(there()) == wanted, "each decided one is there once", timeout_s=30)
