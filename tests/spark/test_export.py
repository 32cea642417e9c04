"""Goal: an export holds every message once, whatever dies meanwhile, and a second run adds what is new.

Method: RocketMQ's golden stores against messages.jsonl; failures at each step of an export (the driver's and the tasks'),
after which it is run again; a node that goes on writing; damaged and expired logs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from commitmq import failpoints
from commitmq.cli.main import main
from commitmq.errors import ConfigError
from commitmq.testing.node import start_node
from commitmq_plugins.spark.jobs.export import Form, export, exported
from commitmq_plugins.spark.jobs.manifest import ExportError, Manifest
from commitmq_plugins.spark.options import DataLossError
from commitmq_plugins.spark.sessions import plain
from golden_stores import GoldenStore
from shares import shared

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL: dict[str, Any] = {"max_partition_bytes": 30_000}
Place = tuple[str, int, int]


def places(spark: SparkSession, root: Path) -> list[Place]:
    """Where the messages of an export were, by its manifest; with a check that every file is as the manifest says."""
    for file in Manifest(root).files:
        found = pq.ParquetFile(root / file.path)
        assert found.metadata.num_rows == file.rows
        assert (root / file.path).stat().st_size == file.bytes
    rows = exported(spark, root).select("topic", "queue_id", "queue_offset").collect()
    return sorted((row.topic, row.queue_id, row.queue_offset) for row in rows)


def expected(store: GoldenStore) -> list[Place]:
    group = {"clean": "Golden", "crash": "Crashed"}[store.name]
    dead = (f"%DLQ%{group}_group", 0, 0)
    return sorted([(one["topic"], one["queue_id"], one["queue_offset"]) for one in store.messages] + [dead])


def test_every_message_with_every_column(spark: SparkSession, golden: GoldenStore, tmp_path: Path) -> None:
    done = export(spark, [str(golden.root)], tmp_path, **SMALL)
    assert done.messages == len(golden.messages) + 1
    rows = {row.physical_offset: row for row in exported(spark, tmp_path).collect()}
    for message in golden.messages:
        row = rows[message["physical_offset"]]
        assert (row.topic, row.queue_id, row.queue_offset) == (
            message["topic"], message["queue_id"], message["queue_offset"],
        )  # fmt: skip
        assert row.store == str(golden.root)
        assert row.msg_id == message["offset_msg_id"]
        assert row.properties == message["properties"]
        if not message["sys_flag"] & 1:  # others are decompressed
            assert row.body.hex() == message["body_hex"]
        assert row.body_size == len(message["body_hex"]) // 2
        assert row.date == f"{row.store_timestamp:%Y-%m-%d}"
    assert places(spark, tmp_path) == expected(golden)
    again = export(spark, [str(golden.root)], tmp_path)
    assert (again.commits, again.messages) == (0, 0)


def test_several_stores_are_one_export(
    spark: SparkSession, golden_stores: dict[str, GoldenStore], tmp_path: Path
) -> None:
    done = export(
        spark, [str(one.root) for one in golden_stores.values()], tmp_path, topics=["GoldenNormal", "CrashedNormal"]
    )
    wanted = [
        one
        for store in golden_stores.values()
        for one in store.messages
        if one["topic"] in ("GoldenNormal", "CrashedNormal")
    ]
    assert done.messages == len(wanted)
    assert {file.topic for file in Manifest(tmp_path).files} == {one["topic"] for one in wanted}


STEPS = (
    "export.before_write",
    "export.after_file",
    "export.after_tasks",
    "export.before_rename",
    "export.before_commit",
    "export.after_commit",
)


@pytest.mark.parametrize("step", [STEPS[0], *shared(STEPS[1:], 2)])
def test_an_export_that_failed_anywhere_is_simply_run_again(
    spark: SparkSession,
    golden_stores: dict[str, GoldenStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """The driver fails at a step. Steps of tasks are in processes that a test cannot reach: there the files that a dead
    attempt leaves are laid beside."""
    store = golden_stores["clean"]
    options: dict[str, Any] = {"max_partition_bytes": 15_000}
    if step in ("export.before_write", "export.after_file"):
        folder = tmp_path / "topic=GoldenNormal" / "date=2026-11-21"
        folder.mkdir(parents=True)
        (folder / ".part-00000001-dead.parquet").write_bytes(b"half")
        (folder / "part-00000001-dead.parquet").write_bytes(b"PAR1 never committed")
    else:
        hits = {"export.before_rename": 5}.get(step, 2)
        points = failpoints.parse(f"{step}=errno:EIO@{hits}")
        monkeypatch.setattr(failpoints, "ACTIVE", True)
        monkeypatch.setattr(failpoints, "_points", points)
        with pytest.raises(OSError, match="Input/output"):
            export(spark, [str(store.root)], tmp_path, **options)
        monkeypatch.undo()
        held = places(spark, tmp_path) if Manifest(tmp_path).commits else []
        assert len(held) == len(set(held))
        assert set(held) <= set(expected(store))
    export(spark, [str(store.root)], tmp_path, **options)
    assert places(spark, tmp_path) == expected(store)
    named = {file.path for file in Manifest(tmp_path).files}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("topic=*/*/*")} == named


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_an_export_that_is_killed_at_every_step_is_whole_in_the_end(
    spark: SparkSession, golden_stores: dict[str, GoldenStore], tmp_path: Path
) -> None:
    """SIGKILL to the driver, or in the first two steps to a worker: the verb in a process of its own, one step after the
    other, on the same folder; then it is left alone."""
    store = golden_stores["clean"]
    words = [
        sys.executable,
        "-m",
        "commitmq.cli.main",
        "pipeline",
        "export",
        str(store.root),
        "--to",
        str(tmp_path / "out"),
    ]
    for step in (*STEPS, ""):
        points = {failpoints.VARIABLE: f"{step}=kill@1"} if step else {}
        ended = subprocess.run(
            [*words, "--topic", "GoldenNormal", "--topic", "GoldenBatch", "--master", "local[2]", "--json"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **points},
            capture_output=True,
            timeout=300,
            check=False,
        )
        # After a commit there is nothing more to do, so the last step is not reached again.
        assert (ended.returncode == 0) == (not step), (step, ended.returncode, ended.stderr[-2000:])
        if step == "export.after_commit":
            assert Manifest(tmp_path / "out").commits
    wanted = [one for one in expected(store) if one[0] in ("GoldenNormal", "GoldenBatch")]
    assert places(spark, tmp_path / "out") == wanted


@pytest.mark.slow
def test_a_second_run_adds_what_a_node_has_stored_since(
    spark: SparkSession, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Several steps, while it writes; by its address and by its folder; parsed bodies; the verb; a topic made anew."""
    with start_node(tmp_path_factory.mktemp("cmq"), ["commit_log.segment_bytes=262144"]) as node:

        def put(start: int, end: int) -> None:
            node.send_many(
                "json", [json.dumps({"id": number, "name": f"n{number}"}).encode() for number in range(start, end)]
            )
            node.wait_until_dispatched("consume_queue")

        form = Form("json", "id bigint, name string")
        node.send("json", b"no json")
        node.send("json", b'{"id": 3} trailing')
        put(0, 500)
        first = export(spark, [node.address], tmp_path / "parsed", topics=["json"], form=form)
        assert (first.messages, first.malformed) == (502, 2)
        put(500, 800)
        second = export(spark, [node.address], tmp_path / "parsed", topics=["json"], form=form)
        assert (second.messages, second.malformed) == (300, 0)
        rows = exported(spark, tmp_path / "parsed").select("value.id", "value.name", "body").collect()
        assert sorted((row.id, row.name) for row in rows if row.id is not None) == [
            (one, f"n{one}") for one in range(800)
        ]
        assert sorted(row.body for row in rows if row.body is not None) == [b"no json", b'{"id": 3} trailing']
        with pytest.raises(ExportError, match="another folder"):
            export(spark, [node.address], tmp_path / "parsed", topics=["json"])

        words = [
            "pipeline",
            "export",
            str(node.store),
            "--to",
            str(tmp_path / "raw"),
            "--topic",
            "json",
            "--master",
            "local[2]",
        ]
        with pytest.raises(SystemExit) as ended:
            main([*words, "--file-mib", "1"])
        assert not ended.value.code
        assert len(places(spark, tmp_path / "raw")) == 802

        # The same store by its folder, and by a link to it, has nothing new: it is known by its id.
        (tmp_path / "link").symlink_to(node.store)
        assert export(spark, [str(node.store)], tmp_path / "parsed", topics=["json"], form=form).messages == 0
        assert export(spark, [str(tmp_path / "link")], tmp_path / "parsed", topics=["json"], form=form).messages == 0
        with pytest.raises(ConfigError, match="are the same store"):
            export(spark, [str(node.store), str(tmp_path / "link")], tmp_path / "twice")

        node.admin.topic_delete("json")
        # More than before: the queue's end tells nothing, its topic's incarnation does.
        node.send_many("json", [b"anew"] * 900, queue=0)
        node.wait_until_dispatched("consume_queue")
        with pytest.raises(DataLossError, match="recreated"):
            export(spark, [str(node.store)], tmp_path / "raw", topics=["json"])
        third = export(spark, [str(node.store)], tmp_path / "raw", topics=["json"], fail_on_data_loss=False)
        assert third.messages == 900
        assert {gap.reason for gap in third.gaps} == {"the topic was deleted and recreated"}


def test_damage_is_an_error_or_a_reported_gap(
    spark: SparkSession, golden_copy: Callable[[str], GoldenStore], tmp_path: Path
) -> None:
    store = golden_copy("clean")
    bad = next(one for one in store.messages if one["topic"] == "GoldenNormal" and one["queue_offset"] == 20)
    at = bad["physical_offset"]
    segment = sorted(store.layout.commit_log.iterdir())[at // 131_072]
    with segment.open("r+b") as file:
        file.seek(at % 131_072 + 100)
        file.write(b"\xff\xfe\xfd")
    out = tmp_path / "out"
    with pytest.raises(Exception, match="no sound record") as raised:
        export(spark, [str(store.root)], out, topics=["GoldenNormal"])
    assert "messages are missing" in str(plain(raised.value))
    done = export(spark, [str(store.root)], out, topics=["GoldenNormal"], fail_on_data_loss=False)
    assert done.messages == 239
    assert [(gap.queue_id, gap.first, gap.end) for gap in done.gaps] == [(bad["queue_id"], 20, 21)]
    assert Manifest(out).commits[-1].gaps == [gap.to_json() for gap in done.gaps]
    assert export(spark, [str(store.root)], out, topics=["GoldenNormal"]).messages == 0


def test_one_export_at_a_time_and_no_foreign_manifest(spark: SparkSession, golden_stores: Any, tmp_path: Path) -> None:
    store = str(golden_stores["clean"].root)
    with Manifest(tmp_path).locked(), pytest.raises(ExportError, match="another export"):
        export(spark, [store], tmp_path)
    with pytest.raises(ExportError, match="holds no export"):
        exported(spark, tmp_path)
    (tmp_path / "_commitmq" / "commits" / f"{1:020}.json").write_text("{}")
    with pytest.raises(ExportError, match="is no commit"):
        export(spark, [store], tmp_path)
    with pytest.raises(ConfigError, match="need a schema"):
        Form("json")
    with pytest.raises(ConfigError, match="name a source"):
        export(spark, [], tmp_path)
