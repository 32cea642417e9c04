"""Goal: import, replay and compact put into a topic what they should, each message once, wherever a run breaks off.

Method: one real node whose messages are compared one by one; runs that fail between a step and what remembers it, and are
repeated; compaction against the same rules in a few lines of plain Python.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from topic_contents import stored

from commitmq import Message, Tombstone, failpoints
from commitmq.cli.main import main
from commitmq.errors import InvalidMessageError
from commitmq.testing.node import CommitMQNode, start_node
from commitmq_plugins.spark.jobs.export import Form, export
from commitmq_plugins.spark.jobs.manifest import ExportError
from commitmq_plugins.spark.jobs.positions import StateError
from commitmq_plugins.spark.jobs.replay import by_queue, compact, import_export, replay, shares
from commitmq_plugins.spark.sinks import NOT_CARRIED
from golden_stores import GoldenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUEUES = 3
COUNT = 1200


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommitMQNode]:
    """With the topic ``source``: keys that come again, messages without any, tags, properties and flags."""
    with start_node(tmp_path_factory.mktemp("cmq"), ["commit_log.segment_bytes=262144"]) as found:
        found.admin.topic_create("source", QUEUES)
        choose = random.Random(5)
        for queue in range(QUEUES):
            messages = [
                Message(
                    f"{queue}/{number} ".encode() * choose.randrange(1, 40),
                    keys=f"key-{choose.randrange(40)}" if choose.random() < 0.9 else None,
                    tags=choose.choice(["a", "b", None]),
                    properties={"number": str(number), "text": "größer"} if number % 3 else None,
                    flag=number % 5,
                )
                for number in range(COUNT // QUEUES)
            ]
            found.send_many("source", messages, queue=queue)
        found.wait_until_dispatched("consume_queue")
        yield found


def what(message: Message) -> tuple[Any, ...]:
    """What of a message is the sender's."""
    own = {name: value for name, value in message.properties.items() if name not in NOT_CARRIED}
    return message.queue_id, message.body, message.tags, message.keys, own, message.flag


def contents(node: CommitMQNode, topic: str) -> list[tuple[Any, ...]]:
    return [what(one) for one in stored(node, topic)]


def broken(monkeypatch: pytest.MonkeyPatch, point: str, hit: int) -> None:
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"{point}=errno:EIO@{hit}"))


def test_export_and_import_are_a_round_trip(
    spark: SparkSession, node: CommitMQNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export(spark, [str(node.store)], out, topics=["source"], max_partition_bytes=40_000)
    broken(monkeypatch, "job.before_step_done", 1)
    with pytest.raises(OSError, match="Input/output"):
        import_export(spark, out, "source", target="copy", node=node.address)
    monkeypatch.undo()
    done = import_export(spark, out, "source", target="copy", node=node.address)
    assert done.sent.messages == COUNT
    assert done.sent.repeated > 0
    assert contents(node, "copy") == contents(node, "source")
    again = import_export(spark, out, "source", target="copy", node=node.address)
    assert (again.sent.messages, again.begun_at) == (0, again.steps)
    parsed = tmp_path / "parsed"
    export(spark, [str(node.store)], parsed, topics=["source"], form=Form("csv", "first string"))
    with pytest.raises(ExportError, match="--keep-body"):
        import_export(spark, parsed, "source", node=node.address)


def test_tombstones_are_sent_again_as_such(spark: SparkSession, node: CommitMQNode, tmp_path: Path) -> None:
    """With nothing beside them, and with tags, properties and flags; also two in a row, and where a piece has no other."""
    kinds: list[list[bytes | Message]] = [
        [
            Message(b"1", keys="one"),
            Tombstone("one"),
            Message(b"2", keys="two"),
            Tombstone("two"),
            Tombstone("one"),
        ],
        [Tombstone("three", tags="a", properties={"why": "größer"}, flag=7)],
    ]
    for queue, messages in enumerate(kinds):
        node.send_many("buried", messages, queue=queue)
    node.wait_until_dispatched("consume_queue")
    expected = contents(node, "buried")
    assert [one[1] for one in expected] == [b"1", b"", b"2", b"", b"", b""]
    export(spark, [str(node.store)], tmp_path / "out", topics=["buried"])
    done = import_export(spark, tmp_path / "out", "buried", target="dug-up", node=node.address)
    assert (done.sent.messages, done.sent.empty) == (6, 0)
    assert contents(node, "dug-up") == expected
    replay(spark, [str(node.store)], "buried", "replayed", tmp_path / "state", node=node.address)
    assert contents(node, "replayed") == expected


def test_what_rocketmq_has_stored_can_be_imported(
    spark: SparkSession, node: CommitMQNode, golden_stores: dict[str, GoldenStore], tmp_path: Path
) -> None:
    """Bodies that were compressed come decompressed; marks of delivery are left behind."""
    store = golden_stores["clean"]
    export(spark, [str(store.root)], tmp_path, topics=["GoldenNormal", "GoldenDelay"])
    for topic in ("GoldenNormal", "GoldenDelay"):
        with pytest.raises(SystemExit) as ended:
            main(
                ["pipeline", "import", str(tmp_path), "--topic", topic, "--node", node.address, "--master", "local[2]"]
            )
        assert not ended.value.code
        messages = sorted(
            (one for one in store.messages if one["topic"] == topic),
            key=lambda one: (one["queue_id"], one["queue_offset"]),
        )
        found = stored(node, topic)
        assert len(found) == len(messages)
        for one, message in zip(found, messages, strict=True):
            own = {name: value for name, value in message["properties"].items() if name not in NOT_CARRIED}
            assert {name: value for name, value in one.properties.items() if name not in NOT_CARRIED} == own
            assert (one.queue_id, one.flag) == (message["queue_id"], message["flag"])
            if not message["sys_flag"] & 1:
                assert one.body.hex() == message["body_hex"]


@pytest.mark.parametrize("hit", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_replay_that_breaks_off_goes_on(
    spark: SparkSession, node: CommitMQNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hit: int
) -> None:
    target, state = f"again-{hit}", tmp_path / "state.json"

    def run() -> Any:
        return replay(spark, [node.address], "source", target, state, node=node.address, step_bytes=60_000)

    broken(monkeypatch, "job.before_step_done", hit)
    with pytest.raises(OSError, match="Input/output"):
        run()
    monkeypatch.undo()
    done = run()
    assert done.begun_at == hit - 1
    assert done.steps > 3
    assert 0 < done.sent.repeated < COUNT
    assert contents(node, target) == contents(node, "source")
    assert run().sent.messages == 0
    with pytest.raises(StateError, match="another job"):
        replay(spark, [node.address], "source", "elsewhere", state, node=node.address)


def test_a_replay_takes_what_was_asked_for_at_its_rate(spark: SparkSession, node: CommitMQNode, tmp_path: Path) -> None:
    expected = [one for one in contents(node, "source") if one[2] == "a" and one[3] == ["key-7"]]
    assert expected
    replay(spark, [str(node.store)], "source", "chosen", tmp_path / "one", node=node.address, tags="a", keys=["key-7"])
    assert contents(node, "chosen") == expected
    middle = stored(node, "source")[COUNT // 2].store_timestamp
    early = [what(one) for one in stored(node, "source") if one.store_timestamp < middle]
    words = ["pipeline", "replay", str(node.store), "--topic", "source", "--to", "early", "--until", str(middle)]
    words += ["--state", str(tmp_path / "two"), "--rate", "200", "--node", node.address, "--master", "local[2]"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    # Each task has its share of the rate, and sends for a tenth of a second at once; the last piece is not waited for. Its
    # clock starts before it opens its connection, so what it sends first is stored later than that, on a slow machine by much.
    times = [one.store_timestamp for one in stored(node, "early")]
    assert max(times) - min(times) > 750 * (len(early) / 200 - 0.1)
    assert contents(node, "early") == early


@pytest.mark.parametrize(("across", "without_key"), [(False, "drop"), (True, "keep")])
def test_compaction_keeps_the_newest_of_each_key(
    spark: SparkSession,
    node: CommitMQNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    across: bool,
    without_key: str,
) -> None:
    newest: dict[Any, Message] = {}
    keyless = []
    for one in sorted(stored(node, "source"), key=lambda one: (one.store_timestamp, one.queue_offset)):
        if one.keys:
            newest[None if across else one.queue_id, one.properties["KEYS"]] = one
        else:
            keyless.append(one)
    kept = [*newest.values(), *(keyless if without_key == "keep" else [])]
    target = f"compacted-{across}"

    def run() -> Any:
        options: dict[str, Any] = {"across_queues": across, "without_key": without_key}
        return compact(spark, [str(node.store)], "source", target, tmp_path / "state", node=node.address, **options)

    broken(monkeypatch, "job.before_step_done", 1)
    with pytest.raises(OSError, match="Input/output"):
        run()
    monkeypatch.undo()
    done = run()
    assert (done.read, done.keys, done.deleted, done.without_key) == (COUNT, len(newest), 0, len(keyless))
    assert done.sent.messages == done.sent.repeated == len(kept)
    order = sorted(kept, key=lambda one: (one.queue_id, one.queue_offset))
    if across:
        # Several queues' tasks; messages of one store time may be of any order among queues, so any newest one will do.
        assert {one[3][0] for one in contents(node, target) if one[3]} == {one.keys[0] for one in kept if one.keys}
        assert len(contents(node, target)) == len(kept)
    else:
        assert contents(node, target) == [what(one) for one in order]
    assert run().read == 0
    with pytest.raises(InvalidMessageError, match="have no key"):
        compact(spark, [str(node.store)], "source", target, tmp_path / "other", node=node.address, without_key="refuse")


def test_a_copy_has_as_many_queues_as_its_source_though_few_hold_messages(
    spark: SparkSession, node: CommitMQNode, tmp_path: Path
) -> None:
    node.admin.topic_create("wide", 7)
    node.send_many("wide", [Message(b"m", keys="k")] * 5, queue=2)
    node.wait_until_dispatched("consume_queue")
    export(spark, [str(node.store)], tmp_path / "out", topics=["wide"])
    import_export(spark, tmp_path / "out", "wide", target="wide-imported", node=node.address)
    replay(spark, [str(node.store)], "wide", "wide-replayed", tmp_path / "replay", node=node.address)
    compact(spark, [node.address], "wide", "wide-compacted", tmp_path / "compact", node=node.address)
    for name in ("wide-imported", "wide-replayed", "wide-compacted"):
        assert node.admin.topic(name).write_queues == 7, name
        assert {message.queue_id for message in stored(node, name)} == {2}


def test_a_rate_is_for_the_queues_that_have_messages(spark: SparkSession) -> None:
    """Of four tasks one has it all, so it may take the whole rate; a quarter of it would take four times as long."""
    parts = shares(spark, {0: 900, 4: 100, 1: 0}, queues=4, partitions=4)
    assert sorted(parts) == [0, 0, 0, 1]
    frame = spark.createDataFrame(
        [("s", "t", queue, at, None, None, None, 0, b"x") for queue in range(4) for at in range(5)],
        "store string, topic string, queue_id int, queue_offset bigint, tags string, keys string, "
        "properties map<string,string>, flag int, body binary",
    )
    sizes = [len(part) for part in by_queue(frame, 4, 3).rdd.glom().collect()]
    counted = shares(spark, dict.fromkeys(range(4), 5), queues=4, partitions=3)
    assert [share * 20 for share in counted] == sizes
