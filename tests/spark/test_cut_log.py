"""Goal: streams, exports and replays that go on over a log that was cut say which messages are gone, and then miss nothing
that came later at the same offsets.

Method: a node is killed, a record in its log damaged and the log cut there by ``store repair``; as many messages and more are
sent afterwards. So the ends of the queues tell nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException
from source_reading import wait_until_shown
from streamed import Query

from commitmq import Producer
from commitmq_plugins.spark.jobs.export import export, exported
from commitmq_plugins.spark.jobs.replay import replay
from commitmq_plugins.spark.options import DataLossError
from nodes import Node, commitmq, start_node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLD, CUT_AT, NEW = 10, 5, 8
LOST = rf"t/0 \[{CUT_AT}, {OLD}\)"


def cut(node: Node, physical_offset: int) -> None:
    node.kill_all()
    with (node.store / "commitlog" / f"{0:020}").open("r+b") as log:
        log.seek(physical_offset)
        log.write(b"\xff" * 40)
    ended = commitmq("store", "repair", str(node.store), "--cut", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert node.start().returncode == 0


def test_readers_of_a_cut_log_miss_nothing_later(spark: SparkSession, tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        with Producer(node=node.address) as producer:
            places = [producer.send("t", b"old", queue=0).physical_offset for _ in range(OLD)]
        wait_until_shown(node.address)
        query = Query(spark, tmp_path, store=str(node.store), topics="t")
        pulled = Query(spark, tmp_path / "pulled", node=node.address, transfer="pull", topics="t")
        assert len(pulled.run()) == OLD
        state = tmp_path / "replay.json"
        assert len(query.run()) == OLD
        assert export(spark, [str(node.store)], tmp_path / "out", topics=["t"]).messages == OLD
        assert replay(spark, [str(node.store)], "t", "again", state, node=node.address).sent.messages == OLD
        state.write_text(json.dumps({**json.loads(state.read_text()), "done": 0}))  # as if it had died before
        cut(node, places[CUT_AT])
        with Producer(node=node.address) as producer:
            for _ in range(NEW):
                producer.send("t", b"new", queue=0)
        wait_until_shown(node.address)

        with pytest.raises(StreamingQueryException, match=LOST):
            query.run()
        with pytest.raises(StreamingQueryException, match=LOST):
            pulled.run()
        with pytest.raises(DataLossError, match=LOST):
            export(spark, [str(node.store)], tmp_path / "out", topics=["t"])
        with pytest.raises(DataLossError, match=LOST):
            replay(spark, [str(node.store)], "t", "again", state, node=node.address)

        query.options["failOnDataLoss"] = "false"
        assert query.run() == ["new"] * NEW
        assert query.run() == []
        pulled.options["failOnDataLoss"] = "false"
        assert pulled.run() == ["new"] * NEW
        done = export(spark, [str(node.store)], tmp_path / "out", topics=["t"], fail_on_data_loss=False)
        assert (done.messages, [(gap.first, gap.end) for gap in done.gaps]) == (NEW, [(CUT_AT, OLD)])
        rows = exported(spark, tmp_path / "out").select("body").collect()
        assert sorted(bytes(row.body) for row in rows) == [b"new"] * NEW + [b"old"] * OLD
        assert export(spark, [str(node.store)], tmp_path / "out", topics=["t"]).messages == 0
