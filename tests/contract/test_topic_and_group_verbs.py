"""Goal: the verbs for topics and groups say and do what their page tells, with --json and stable exit codes.

Method: one real node with topics and groups that the tests make; the command in this process, through its own main.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Consumer, GroupNotFoundError, Producer, ProtocolError, ShareConsumer
from commitmq.cli.main import main
from commitmq.supervision.exit_codes import CliExit
from nodes import Node, eventually, start_node, wait_until_dispatched

pytestmark = pytest.mark.timeout(120)
Run = Callable[..., str]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("verbs"), "groups.heartbeat_interval_ms=200") as made:
        yield made


@pytest.fixture
def admin(node: Node) -> Iterator[Admin]:
    with Admin(node.address) as made:
        yield made


@pytest.fixture
def run(node: Node, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Runs a verb; gives its output, or with another ``code`` what it complains of."""

    def ran(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--node", node.address])
        out, err = (one.decode() for one in capfdbinary.readouterr())
        assert ended.value.code == code, out + err
        return out if code == 0 else err

    return ran


def told(run: Run, *words: str) -> Any:
    return json.loads(run(*words, "--json"))


# ---------------------------------------------------------------- topics


def test_topics_are_listed_by_kind_and_idle_ones_are_pruned(node: Node, admin: Admin, run: Run) -> None:
    for name in ("old", "empty", "busy", "%RETRY%g", "%DLQ%g"):
        admin.topic_create(name, 2)
    admin.topic_create("of-memory", 1, attributes={"storage.type": "memory"})
    admin.topic_create("of-batches", 1, attributes={"queue.type": "BatchCQ"})
    admin.commit_offsets("g", [("old", 0, 0)])
    with Producer(node.address) as producer:
        for _ in range(3):
            producer.send("old", b"x", queue=0)
        time.sleep(0.7)
        between = time.time()
        time.sleep(1.1)
        producer.send("busy", b"x", queue=1)
        wait_until_dispatched(node.address)

        def idle_since() -> str:
            return f"{int((time.time() - between) * 1000)}ms"

        kinds = {one["name"]: one["kind"] for one in told(run, "topic", "list", "--all")}
        assert kinds["old"] == "normal"
        assert told(run, "topic", "list", "--kind", "retry", "--kind", "dlq") == [
            {**asdict(admin.topics()[[one.name for one in admin.topics()].index(name)]), "kind": kind}
            for name, kind in (("%DLQ%g", "dlq"), ("%RETRY%g", "retry"))
        ]
        assert kinds["of-memory"] == "memory"
        assert kinds["of-batches"] == "batch"
        idle = {one["name"] for one in told(run, "topic", "list", "--idle", idle_since())}
        assert idle >= {"old", "empty", "%DLQ%g", "of-memory", "of-batches"}
        assert "busy" not in idle
        plan = told(run, "topic", "prune", "--idle", idle_since(), "--dry-run")
        assert [one["topic"] for one in plan["topics"]] == ["empty", "of-batches", "old"]
        assert plan["topics"][2] == {"topic": "old", "kind": "normal", "messages": 3, "groups": ["g"]}
        assert plan["deleted"] == []
        assert "give --yes" in run("topic", "prune", "--idle", "5s", code=CliExit.USAGE)
        before_ms = int(between * 1000)
        producer.send("empty", b"in use again")
        assert not admin.topic_delete_idle("empty", before_ms), "it got a message since the list was made"
        assert not admin.topic_delete_idle("TBW102", before_ms)
        assert not admin.topic_delete_idle("never-made", before_ms)
        text = run("topic", "prune", "--idle", idle_since(), "--yes")
        assert text.endswith("2 topics deleted\n")
    left = {one.name for one in admin.topics()}
    assert left >= {"empty", "busy", "%RETRY%g", "of-memory"}
    assert not left & {"old", "of-batches"}
    assert "no topic has been idle" in run("topic", "prune", "--idle", "1h", "--yes")
    with pytest.raises(ValueError, match="a kind of topics"):
        admin.topics_idle(0, ["odd"])


def test_a_time_leads_to_offsets_and_an_offset_to_its_time(node: Node, admin: Admin, run: Run) -> None:
    admin.topic_create("timed", 2)
    with Producer(node.address) as producer:
        for number in range(6):
            producer.send("timed", b"%d" % number, queue=number % 2)
            time.sleep(0.01)
    eventually(lambda: [one.max for one in admin.offsets("timed")] == [3, 3], "the messages are in their queues")
    (stored,) = told(run, "topic", "time", "timed", "--offset", "1", "--queue", "1")["messages"]
    assert stored["store_timestamp"] == admin.message_at("timed", 1, 1).store_timestamp
    assert admin.message_at("timed", 1, 1).body == b"3"
    found = told(run, "topic", "offset", "timed", "--time", str(stored["store_timestamp"]))
    assert found["queues"][1] == {"queue": 1, "offset": 1, "min": 0, "max": 3}
    assert [one["offset"] for one in told(run, "topic", "offset", "timed", "--time", "2999-01-01")["queues"]] == [3, 3]
    assert [one["queue"] for one in told(run, "topic", "time", "timed", "--offset", "2")["messages"]] == [0, 1]
    assert "STORED (UTC)" in run("topic", "time", "timed", "--offset", "2")
    assert "MESSAGES SINCE" in run("topic", "offset", "timed", "--time", "2020-01-01")
    with pytest.raises(ProtocolError, match="has no message at offset 9: it has offsets 0 to 2"):
        admin.message_at("timed", 0, 9)
    assert "no queue of topic timed" in run("topic", "time", "timed", "--offset", "9", code=CliExit.FAILURE)
    assert "TOPIC_NOT_EXIST" in run("topic", "offset", "absent", "--time", "0", code=CliExit.FAILURE)
    assert "no ISO 8601 time" in run("topic", "offset", "timed", "--time", "soon", code=CliExit.USAGE)


def test_fewer_read_queues_are_refused_while_a_group_would_miss_messages(node: Node, admin: Admin, run: Run) -> None:
    made = told(run, "topic", "create", "shrunk", "--read-queues", "4", "--write-queues", "3")["topic"]
    assert (made["read_queues"], made["write_queues"]) == (4, 3)
    assert "give --queues, or" in run("topic", "update", "shrunk", "--queues", "1", "--read-queues", "2", code=2)
    told(run, "topic", "update", "shrunk", "--perm", "rw")
    assert (admin.topic("shrunk").read_queues, admin.topic("shrunk").write_queues) == (4, 3), "what is not named stays"
    with Producer(node.address) as producer:
        for number in range(10):
            producer.send("shrunk", b"%d" % number, queue=3 if number else 0)
    eventually(lambda: admin.offsets("shrunk")[3].max == 9, "the messages are in their queues")
    admin.commit_offsets("miser", [("shrunk", 0, 1), ("shrunk", 3, 2)])
    refusal = run("topic", "update", "shrunk", "--queues", "2", code=CliExit.FAILURE)
    assert "group miser has not read 7 messages in queue 3 of topic shrunk" in refusal
    assert "shrunk updated: 4 read queues and 2 write queues" in run("topic", "update", "shrunk", "--write-queues", "2")
    assert told(run, "topic", "update", "shrunk", "--read-queues", "2", "--force")["topic"]["read_queues"] == 2
    lag = told(run, "group", "lag", "miser")
    assert lag["lag"] == 7
    assert (lag["queues"][-1]["queue"], lag["queues"][-1]["problem"]) == (
        3, "nobody reads this queue, because the topic has 2 read queues"
    )  # fmt: skip
    assert "queue 3 (no longer read): 9 messages" in run("topic", "describe", "shrunk")
    found = [
        one for one in told(run, "doctor")["findings"] if one["what"] == "group miser" and "queue 3" in one["says"]
    ]
    assert [(one["level"], one["do"]) for one in found] == [
        ("warning", "`commitmq topic update shrunk --read-queues 4`")
    ]
    time.sleep(1.1)
    plan = told(run, "topic", "prune", "--idle", "1s", "--dry-run")["topics"]
    assert [one["messages"] for one in plan if one["topic"] == "shrunk"] == [10]
    told(run, "topic", "update", "shrunk", "--read-queues", "4")
    admin.commit_offsets("miser", [("shrunk", 3, 9)])
    assert admin.topic_update("shrunk", 2).read_queues == 2
    assert [one.queue for one in admin.hidden_queues("shrunk")] == [3]
    assert told(run, "group", "lag", "miser")["lag"] == 0


@pytest.mark.parametrize("attribute", ["queue.type=BatchCQ", "storage.type=memory"])
def test_queues_that_are_read_no_longer_are_known_of_every_kind_of_topic(
    node: Node, admin: Admin, attribute: str
) -> None:
    name = attribute.replace("=", "-").replace(".", "-")
    admin.topic_create(name, 2, attributes=dict([attribute.split("=")]))
    with Producer(node.address) as producer:
        producer.send_batch(name, [b"x"] * 3, queue=1)
    eventually(lambda: admin.offsets(name)[1].max == 3, "the messages are in their queue")
    admin.topic_update(name, 1)
    assert [(one.queue, one.max) for one in admin.hidden_queues(name)] == [(1, 3)]


# ---------------------------------------------------------------- groups


def test_a_group_is_made_once_and_deleted_when_nobody_reads_for_it(node: Node, admin: Admin, run: Run) -> None:
    made = told(run, "group", "create", "crew", "--set", "retryMaxTimes=3")
    assert (made["created"], made["config"]["retryMaxTimes"]) == (True, 3)
    assert "exists already" in run("group", "create", "crew", "--set", "retryMaxTimes=3")
    assert "its retryMaxTimes is 3" in run("group", "create", "crew", "--set", "retryMaxTimes=4", code=CliExit.FAILURE)
    admin.topic_create("shifts", 4)
    admin.commit_offsets("crew", [("shifts", 0, 0)])
    with Consumer("shifts", group="crew", node=node.address, member="m"):
        refused = run("group", "delete", "crew", "--offsets", "--yes", code=CliExit.FAILURE)
        assert "has 1 members: close them first" in refused
        assert admin.group_config("crew")["retryMaxTimes"] == 3
    assert "give --yes" in run("group", "delete", "crew", code=CliExit.USAGE)
    assert told(run, "group", "delete", "crew", "--yes") == {"deleted": "crew", "offsets": False, "kept_offsets": 4}
    text = run("group", "delete", "crew", "--yes")
    assert "its committed offsets in 4 queues stay" in text
    assert "`commitmq group delete crew --offsets`" in text
    assert len(admin.group("crew")["offsets"]) == 4, "its offsets stay without --offsets"
    assert told(run, "group", "delete", "crew", "--offsets", "--yes") == {
        "deleted": "crew", "offsets": True, "kept_offsets": 0
    }  # fmt: skip
    with pytest.raises(GroupNotFoundError):
        admin.group("crew")
    assert "GROUP_NOT_EXIST" in run("group", "delete", "crew", "--yes", code=CliExit.FAILURE)


def test_members_are_shown_with_their_places_and_a_plan_changes_nothing(node: Node, admin: Admin, run: Run) -> None:
    admin.topic_create("dishes", 5)
    with Consumer("dishes", group="cooks", node=node.address, member="one", strategy="AVG_BY_CIRCLE") as consumer:
        consumer.poll(0.1)
        shown = told(run, "group", "members", "cooks")
        (member,) = shown["members"]
        assert (shown["strategy"], member["member"]) == ("AVG_BY_CIRCLE", "one")
        assert member["queues"] == [["dishes", queue] for queue in range(5)]
        assert member["address"] in (f"process {os.getpid()}", "127.0.0.1")
        assert member["heard_ms_ago"] >= 0
        assert "dishes 0-4" in run("group", "members", "cooks")
        plan = told(run, "group", "describe", "cooks", "--plan", "3")
        assert plan == {
            "group": "cooks",
            "strategy": "AVG_BY_CIRCLE",
            "shares": [["new-1", "dishes", [0, 3]], ["new-2", "dishes", [1, 4]], ["one", "dishes", [2]]],
        }
        assert "by the strategy AVG_BY_CIRCLE" in run("group", "describe", "cooks", "--plan", "6")
        assert told(run, "group", "members", "cooks")["members"][0]["queues"] == member["queues"]
    assert "GROUP_NOT_EXIST" in run("group", "members", "nobody", code=CliExit.FAILURE)


def test_messages_in_flight_are_counted_by_queue(node: Node, admin: Admin, run: Run) -> None:
    admin.topic_create("tasks", 1)
    with Producer(node.address) as producer:
        for _ in range(5):
            producer.send("tasks", b"x")
    with ShareConsumer("tasks", group="workers", node=node.address, invisible_s=60) as consumer:
        messages = consumer.receive(4, 10)
        assert len(messages) == 4
        assert told(run, "group", "pop", "workers")["queues"] == [["tasks", "tasks", 0, 4]]
        assert "share queues" in run("group", "delete", "workers", "--yes", code=CliExit.FAILURE)
        assert messages[0].ack()
        found = told(run, "group", "pop", "workers")
        assert found["messages"] == 3
        assert found["revive"]["topic"].startswith("rmq_sys_REVIVE_LOG_")
        assert found["revive"]["late_ms"] == 0
        assert "group workers has 3 messages in flight" in run("group", "pop", "workers")
        consumer.ack(messages[1:])
    assert told(run, "group", "pop", "nobody")["queues"] == []


def test_a_group_is_shifted_and_follows_a_group_or_a_file(node: Node, admin: Admin, run: Run, tmp_path: Path) -> None:
    admin.topic_create("moved", 2)
    with Producer(node.address) as producer:
        for number in range(20):
            producer.send("moved", b"x", queue=number % 2)
    eventually(lambda: [one.max for one in admin.offsets("moved")] == [10, 10], "the messages are in their queues")
    admin.commit_offsets("mover", [("moved", 0, 4), ("moved", 1, 9)])
    saved = tmp_path / "offsets.json"
    saved.write_text(run("group", "describe", "mover", "--json"))
    planned = told(run, "group", "reset", "mover", "--shift", "3", "--dry-run")
    assert planned["offsets"] == [["moved", 0, 7], ["moved", 1, 10]], "not behind the end"
    assert planned["before"] == [4, 9]
    assert told(run, "group", "reset", "mover", "--shift", "-5", "--queue", "1")["offsets"] == [["moved", 1, 4]]
    assert told(run, "group", "reset", "follower", "--copy-from", "mover")["offsets"] == [
        ["moved", 0, 4],
        ["moved", 1, 4],
    ]
    assert told(run, "group", "reset", "mover", "--file", str(saved))["offsets"] == [["moved", 0, 4], ["moved", 1, 9]]
    assert sorted(admin.group("mover")["offsets"]) == [["moved", 0, 4], ["moved", 1, 9]]
    saved.write_text('{"offsets": [["moved", "0", 4]]}')
    assert "as `group describe --json` writes it" in run(
        "group", "reset", "m", "--file", str(saved), code=CliExit.USAGE
    )
    assert "give one of" in run("group", "reset", "mover", code=CliExit.USAGE)
    assert "GROUP_NOT_EXIST" in run("group", "reset", "nobody", "--shift", "1", code=CliExit.FAILURE)
    assert "no offset to begin from" in run("group", "reset", "mover", "other", "--shift", "1", code=CliExit.USAGE)
    with pytest.raises(ValueError, match="does not have all of the queues"):
        admin.set_offsets("mover", [("moved", 7, 0)])


# ---------------------------------------------------------------- messages


def test_messages_of_one_queue_or_time_are_written_in_each_format(node: Node, admin: Admin, run: Run) -> None:
    admin.topic_create("read", 2)
    with Producer(node.address) as producer:
        for number in range(6):
            producer.send("read", b"%d" % number, queue=number % 2)
            time.sleep(0.01)
    eventually(lambda: [one.max for one in admin.offsets("read")] == [3, 3], "the messages are in their queues")
    until = str(admin.message_at("read", 0, 2).store_timestamp)  # of "4"
    assert run("consume", "read", "--queue", "1", "--format", "raw") == "135"
    assert run("consume", "read", "--queue", "1", "--format", "hex") == "31\n33\n35\n"
    assert sorted(run("consume", "read", "--until", until, "--format", "raw")) == ["0", "1", "2", "3"]
    assert run("consume", "read", "--until", until, "--queue", "0", "--from", "1", "--limit", "5") == "2\n"
    assert "has no queue 7" in run("consume", "read", "--queue", "7", code=CliExit.USAGE)
    assert "--group excludes" in run("consume", "read", "--group", "g", "--queue", "0", code=CliExit.USAGE)
    (found,) = told(run, "query", "--topic", "read", "--offset", "1", "--queue", "1")["messages"]
    assert found["body"] == "3"
    assert "has no message at offset 9" in run("query", "--topic", "read", "--offset", "9", code=CliExit.FAILURE)
