"""Goal: an administrator sees the messages that wait for their time, and cancels one by its handle or its id.

Method: real nodes with messages of both kinds: delivered, waiting, cancelled and rolled ones; limits of what is read; the
command line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import orjson
import pytest

from commitmq import Admin, AsyncAdmin, InvalidMessageError, Producer, ProtocolError
from commitmq.semantics.timer import RecallHandle
from delays import everything
from nodes import Node, commitmq, eventually, start_node

pytestmark = pytest.mark.timeout(120)
TOPIC = "parcels"


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Messages roll after two seconds."""
    with start_node(tmp_path_factory.mktemp("waiting"), "timer.roll_window_s=2") as made:
        with Admin(made.address) as admin:
            admin.topic_create(TOPIC, 2)
            admin.topic_create("other", 1)
        yield made


def test_what_waits_is_listed_and_recalled(node: Node) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer:
        nothing = admin.delayed()
        assert (len(nothing), nothing.complete, nothing.read) == (0, True, 0)
        far = producer.send(TOPIC, b"far", keys="k", tags="t", delay=3_000, queue=1)
        level = producer.send(TOPIC, b"level", delay_level=5)
        other = producer.send("other", b"other", delay=50)
        by_handle = producer.send(TOPIC, b"by handle", delay=1_000)
        by_id = producer.send(TOPIC, b"by id", delay=2_000)
        by_line = producer.send(TOPIC, b"by line", delay=2_500)
        soon = [producer.send(TOPIC, b"soon", delay=0.2), producer.send(TOPIC, b"soon", delay_level=1)]
        waiting = [other, level, by_handle, by_id, by_line, far]

        def listed(topic: str | None = None) -> list[str]:
            return [one.unique_id for one in admin.delayed(topic)]

        # Delivered ones go, and the others are due in this order, also when they went round the wheel again.
        eventually(lambda: listed() == [one.unique_id for one in waiting], "the delivered ones are gone", timeout_s=20)
        eventually(lambda: admin.delayed().read > 2 * len(waiting), "they went round again", timeout_s=20)
        assert listed() == [one.unique_id for one in waiting]
        assert {one.unique_id for one in soon}.isdisjoint(listed())
        assert listed("other") == [other.unique_id]
        found = {one.unique_id: one for one in admin.delayed()}
        last, staged = found[far.unique_id], found[level.unique_id]
        assert (last.topic, last.queue, last.keys, last.tags, last.body_bytes) == (TOPIC, 1, "k", "t", 3)
        assert (last.level, staged.level, staged.recall_handle) == (0, 5, None)
        assert abs(last.due - 3_000_000 - far.store_timestamp) < 1_000
        assert staged.due == staged.stored + 60_000
        assert RecallHandle.decode(last.recall_handle or "").unique_key == far.unique_id

        # What ends a list early is told.
        first = admin.delayed(max_messages=1)
        assert ([one.unique_id for one in first], first.complete) == ([other.unique_id], False)
        short = admin.delayed(most_read=3)
        assert (short.complete, short.read) == (False, 3)
        little = admin.delayed(most_bytes=1)
        assert (little.complete, 0 < little.read < admin.delayed().read) == (False, True)
        late = admin.delayed(most_s=0.0)
        assert (late.complete, late.read, list(late)) == (False, 0, [])

        handle = found[by_handle.unique_id].recall_handle
        assert handle is not None
        assert admin.delayed_recall(handle) == handle
        assert asyncio.run(recall_and_list(node, by_id.unique_id)) > 0
        done = commitmq("delayed", "recall", by_line.unique_id, "--node", node.address)
        assert (done.returncode, done.stdout) == (0, "cancelled\n"), done.stderr
        rest = [other.unique_id, level.unique_id, far.unique_id]
        eventually(lambda: listed() == rest, "the cancelled ones are gone", timeout_s=10)

        with pytest.raises(InvalidMessageError, match="delay level"):
            admin.delayed_recall(level.unique_id)
        with pytest.raises(ProtocolError, match="no waiting message") as caught:
            admin.delayed_recall("0" * 32)
        assert caught.value.code == "INVALID_PARAMETER"
        with pytest.raises(ProtocolError) as caught:
            admin.delayed_recall(soon[0].unique_id)
        assert caught.value.code == "ILLEGAL_OPERATION"
        with pytest.raises(ValueError, match="at least 1"):
            admin.delayed(max_messages=0)

    told = commitmq("delayed", "list", "--json", "--topic", TOPIC, "--node", node.address)
    answer = orjson.loads(told.stdout)
    assert [one["unique_id"] for one in answer["messages"]] == [level.unique_id, far.unique_id]
    assert answer["complete"]
    table = commitmq("delayed", "list", "--max", "1", "--node", node.address)
    assert other.unique_id in table.stdout
    assert "may be more" in table.stderr
    assert sorted(one.body for one in everything(node, TOPIC)) == [b"soon", b"soon"]


async def recall_and_list(node: Node, which: str) -> int:
    async with AsyncAdmin(node.address) as admin:
        await admin.delayed_recall(which)
        return len(await admin.delayed())
