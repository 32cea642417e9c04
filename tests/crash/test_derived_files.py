"""Goal: what a node derives from its log is made again by the node, whatever a power cut left of it, and a query says
"incomplete" until then.

Method: a node with every kind of derived file (index, extensions with bit maps, batch and light queues, the record of the
queues' ends, timer wheel and timer log) dies with all its processes. Pages of each kind are zeroed, as if they never reached
the device, and it starts again, with the index dispatcher halted until the test has asked it.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Consumer, Message, Producer, Sql
from commitmq.format.index import HEADER_BYTES
from nodes import Node, commitmq, eventually, start_node

SETTINGS = (
    "index.hash_slots=300",
    "index.max_items=600",
    "dispatch.batch_messages=100",
    "consume_queue.file_bytes=2000",
    "consume_queue.enable_ext=true",
    "consume_queue.enable_filter_bit_map=true",
    "consume_queue.ext_file_bytes=4096",
    "consume_queue.batch_file_bytes=1840",
    "consume_queue.enable_lmq=true",
    "consume_queue.enable_multi_dispatch=true",
    "consume_queue.flush_interval_ms=100",
    "timer.log_file_bytes=1040",
    "timer.persist_interval_ms=50",
)
COUNT = 500


def fill(node: Node) -> None:
    with (
        Admin(node.address) as admin,
        Producer(node.address) as producer,
        Consumer(["t"], group="odd", node=node.address, filter=Sql("TAGS = 'odd'")),
    ):
        admin.topic_create("batches", 1, attributes={"queue.type": "BatchCQ"})
        some = [Message(b"%d" % at, tags="odd" if at % 2 else "even", keys=f"k{at}") for at in range(COUNT)]
        producer.send_batch("t", some, queue=0)
        for at in range(90):
            producer.send_batch("batches", [b"%d-%d" % (at, one) for one in range(3)], queue=0)
            producer.send("light", b"%d" % at, queue=0, multi_dispatch=["%LMQ%a"])
            producer.send("later", b"%d" % at, delay=3_600 + at % 7)
        eventually(lambda: admin.query("t", key=f"k{COUNT - 1}").complete, "everything is indexed")
        state = node.store / "commitmq" / "dispatchers" / "index" / "files.json"
        eventually(lambda: json.loads(state.read_bytes())["durable"], "full index files are durable")
        eventually(lambda: positions(node).get("queue_offset") == 90, "all timers are in the wheel")


def positions(node: Node) -> Any:
    """Of the timer."""
    path = node.store / "commitmq" / "timer.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def zero(path: Path, start: int, end: int | None = None) -> None:
    """These bytes never reached the device."""
    data = path.read_bytes()
    path.write_bytes(data[:start] + bytes(len(data[start:end])) + data[start:][len(data[start:end]) :])


def tear(store: Path) -> None:
    def files(pattern: str) -> list[Path]:
        found = sorted(store.glob(pattern))
        assert found, pattern
        return found

    first, *others = files("index/*")
    item = HEADER_BYTES + 4 * 300 + 2 * 20  # a start does not look at this one
    zero(first, item, item + 20)
    for path in others:
        zero(path, HEADER_BYTES)
    zero(files("consumequeue_ext/t/0/*")[1], 512, 2_048)
    zero(files("batchconsumequeue/batches/0/*")[1], 512, 1_024)
    zero(files("consumequeue/%LMQ%a/0/*")[0], 512, 1_024)
    zero(files("commitmq/queue_ends")[0], 20, 40)
    zero(files("timerwheel")[0], 0)
    zero(files("timerlog/*")[1], 0, 512)


def received(node: Node, topic: str, count: int, filter: Sql | str = "*") -> set[bytes]:
    found: set[bytes] = set()
    group = "all" if filter == "*" else "odd"
    with Consumer([topic], group=group, node=node.address, filter=filter) as consumer:

        def take() -> bool:
            found.update(one.body for one in consumer.poll(0.1))
            return len(found) >= count

        eventually(take, topic)
    return found


def verified(node: Node) -> Any:
    return json.loads(commitmq("store", "verify", "--json", str(node.store)).stdout)


@pytest.mark.timeout(240)
def test_torn_derived_files_are_made_again(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        fill(node)
        node.kill_all()
        tear(node.store)
        told_of = {one["kind"] for one in verified(node)["findings"]}
        assert told_of >= {"timer.wheel", "timer.log", "queue.extension", "queue.missing", "file.unreadable"}
        assert any(kind.startswith("index.") for kind in told_of)
        assert node.start(COMMITMQ_FAILPOINTS="dispatcher.index.before_dispatch=stop@3").returncode == 0
        with Admin(node.address) as admin, Producer(node.address) as producer:
            producer.send("t", b"new", tags="odd", keys="k-new", queue=0)
            assert not admin.query("t", key="k-new").complete
            told = next(one for one in node.report()["node"]["remaking"] if one["role"] == "dispatcher-index")
            assert told["phase"] == "making files of the index again"
            assert 0 <= told["done"] < told["total"]
            os.kill(node.pids()["dispatcher-index"], signal.SIGCONT)
            eventually(lambda: "its files are damaged, it goes back" in node.log(), "all of the index was read")
            eventually(lambda: not node.report()["node"]["remaking"], "everything is made again")
            eventually(lambda: admin.query("t", key="k-new").complete, "the index is whole")
            for key in ("k0", "k7", f"k{COUNT - 1}", "k-new"):
                found = admin.query("t", key=key)
                assert (len(found), found.complete) == (1, True), key
            eventually(lambda: positions(node)["is_whole"], "the timer wheel is made again")
        odd = {b"%d" % at for at in range(1, COUNT, 2)} | {b"new"}
        assert received(node, "t", len(odd), filter=Sql("TAGS = 'odd'")) == odd
        assert received(node, "batches", 270) == {b"%d-%d" % (at, one) for at in range(90) for one in range(3)}
        assert node.stop().returncode == 0
        report = verified(node)
        assert (report["sound"], report["findings"]) == (True, [])
