"""Goal: the administrator's client tells the truth about a real node, and refusals say why.

Method: one real node for the module; each answer is compared with the messages, topics and groups that the test made.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from commitmq import Admin, CommitMQError, Consumer, NodeUnavailableError, Producer, ProtocolError
from nodes import Node, eventually, start_node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("admin"), "topics.default_queues=2") as made:
        yield made


@pytest.fixture
def admin(node: Node) -> Iterator[Admin]:
    with Admin(node.address) as made:
        yield made


def test_the_node(node: Node, admin: Admin) -> None:
    metadata = admin.metadata()
    assert metadata["store"] == str(node.store)
    assert metadata["segment_bytes"] == 1 << 20
    assert "ok" not in metadata
    status = admin.status()
    assert status["node"]["state"] == "ready"
    assert {"writer", "reader-0", "coordinator"} <= {row["role"] for row in status["processes"]}


def test_topics(node: Node, admin: Admin) -> None:
    assert admin.topic_create("made", 3).created
    assert not admin.topic_create("made", 3).created
    assert admin.topic("made").write_queues == 3
    assert "made" in [one.name for one in admin.topics()]
    with pytest.raises(ProtocolError, match="INVALID_PARAMETER"):
        admin.topic_create("made", 4)
    with Producer(node.address) as producer:
        producer.send_batch("made", [b"x"] * 5, queue=1)
    wanted = [(0, 0, 0, None), (1, 0, 5, None), (2, 0, 0, None)]
    eventually(lambda: admin.offsets("made") == wanted, "the queue shows its messages")
    admin.topic_delete("made")
    for ask in (admin.topic, admin.offsets, admin.topic_delete):
        with pytest.raises(ProtocolError, match="TOPIC_NOT_EXIST"):
            ask("made")


def test_offsets_by_time(node: Node, admin: Admin) -> None:
    with Producer(node.address) as producer:
        first = producer.send("times", b"x", queue=0)
        later = producer.send("times", b"x", queue=0)
        while later.store_timestamp == first.store_timestamp:
            later = producer.send("times", b"x", queue=0)
    eventually(lambda: admin.offsets("times")[0][2] == later.queue_offset + 1, "the messages are visible")
    for when in (later.store_timestamp, datetime.fromtimestamp(later.store_timestamp / 1000, UTC)):
        assert admin.offsets("times", when)[0][3] == later.queue_offset
    assert admin.offsets("times", 0)[0][3] == 0
    assert admin.offsets("times", later.store_timestamp + 1)[0][3] == later.queue_offset + 1


def test_view(node: Node, admin: Admin) -> None:
    with Producer(node.address, compress="zlib", compress_over_bytes=10) as producer:
        result = producer.send("viewed", b"view me" * 100, tags="T", keys="k")
    eventually(lambda: admin.offsets("viewed")[result.queue][2] == 1, "the message is visible")
    for where in (result.physical_offset, result.msg_id):
        message = admin.view(where)
        assert (message.topic, message.queue_id, message.queue_offset) == ("viewed", result.queue, result.queue_offset)
        assert (message.body, message.tags, message.msg_id) == (b"view me" * 100, "T", result.msg_id)
    with pytest.raises(ProtocolError, match="no message begins"):
        admin.view(result.physical_offset + 1)
    with pytest.raises(ValueError, match="offset message id"):
        admin.view("nonsense")


def test_groups_and_their_lag(node: Node, admin: Admin) -> None:
    with Producer(node.address) as producer:
        producer.send_batch("lagging", [b"x"] * 10, queue=0)
    eventually(lambda: admin.offsets("lagging")[0][2] == 10, "the queue shows its messages")
    with pytest.raises(ProtocolError, match="GROUP_NOT_EXIST"):
        admin.group("lags")
    with Consumer("lagging", group="lags", node=node.address, auto_commit=False) as consumer:
        assert len(consumer.poll(10, max_messages=4)) == 4
        consumer.commit()
        rows = admin.group_lag("lags")
        assert (rows[0].queue, rows[0].committed, rows[0].end, rows[0].lag) == (0, 4, 10, 6)
        (member,) = admin.group("lags")["members"]
        assert {row.member for row in rows} == {member["member"]}
        assert {"name": "lags", "members": 1, "topics": ["lagging"]} in admin.groups()
    assert admin.group("lags")["members"] == []
    admin.reset_offsets("lags", "lagging", datetime.fromtimestamp(0, UTC))
    assert [row.committed for row in admin.group_lag("lags")] == [0, 0]
    assert [row.lag for row in admin.group_lag("lags")] == [10, 0]
    with pytest.raises(ValueError, match="does not have all"):
        admin.reset_offsets("lags", "lagging", "earliest", queues=[0, 7])
    with pytest.raises(ValueError, match="to must be"):
        admin.reset_offsets("lags", "lagging", "middle")


def test_without_a_node_and_after_close() -> None:
    with Admin("tcp://127.0.0.1:9", timeout_s=0.3) as admin:
        with pytest.raises(NodeUnavailableError, match="is it started"):
            admin.status()
        with pytest.raises(NodeUnavailableError):
            admin.topics()
    with pytest.raises(CommitMQError, match="closed"):
        admin.status()


def test_stop(tmp_path_factory: pytest.TempPathFactory) -> None:
    with start_node(tmp_path_factory.mktemp("stopped")) as node:
        with Admin(node.address) as admin:
            admin.stop()
        assert node.stop().returncode != 0, "there is nothing left to stop"
        assert not (node.store / "abort").exists()
