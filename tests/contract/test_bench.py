"""Goal: what ``commitmq bench`` reports was really sent, seen and read, adds up, and leaves no topic and no process.

Method: tiny runs of each measurement against a real node, through the command and through the library; figures are
compared with each other and with what the node says, never with how fast this machine should be.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from commitmq import Admin, CommitMQError, Message, Producer
from commitmq.bench import target as target_module
from commitmq.bench.reads import checksum_of_batch, checksum_of_bodies, fill, measure_consume
from commitmq.bench.sends import measure_latency, measure_produce
from commitmq.bench.target import BenchTopic, Clock, Percentiles
from commitmq.client.consumer import Reader
from nodes import Node, commitmq, start_node

SEGMENT_BYTES = 8 << 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("bench"), f"commit_log.segment_bytes={SEGMENT_BYTES}") as running:
        yield running


def bench(node: Node, *arguments: str) -> dict[str, Any]:
    done = commitmq("bench", *arguments, "--node", node.address, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["bench"] == arguments[0]
    assert report["machine"]["cores"] >= 1
    return report


def topics(node: Node) -> set[str]:
    with Admin(node.address) as admin:
        return {topic.name for topic in admin.topics()}


# ---------------------------------------------------------------- figures


def test_percentiles_are_the_nearest_ranks() -> None:
    figures = Percentiles.of([1000 * value for value in range(1000, 0, -1)])
    assert figures == Percentiles(1000, 501.0, 901.0, 991.0, 1000.0, 1000.0)
    assert Percentiles.of([2500]) == Percentiles(1, 2.5, 2.5, 2.5, 2.5, 2.5)
    with pytest.raises(ValueError, match="sample"):
        Percentiles.of([])


# ---------------------------------------------------------------- latency


def test_latency_reports_every_send(node: Node) -> None:
    with BenchTopic(node.address) as topic:
        result = measure_latency(topic, body_bytes=300, count=250, limit_s=30)
        # Both ack levels, in two rounds, each with its uncounted sends first.
        assert topic.visible() >= 2 * 250
    assert not result.cut_short
    assert [one.ack for one in result.sends] == ["memory", "flushed"]
    for one in result.sends:
        figures = one.send
        assert figures.count == 250
        assert 0 < figures.p50_us <= figures.p90_us <= figures.p99_us <= figures.p999_us <= figures.max_us


def test_latency_as_a_command(node: Node) -> None:
    report = bench(node, "latency", "--count", "20", "--repeat", "2", "--ack", "memory")
    p50s = [run["sends"][0]["send"]["p50_us"] for run in report["runs"]]
    assert report["summary"]["p50_us"] == {
        "memory": {"median": pytest.approx(sum(p50s) / 2), "low": min(p50s), "high": max(p50s)}
    }
    text = commitmq("bench", "latency", "--count", "20", "--repeat", "1", "--node", node.address)
    assert text.returncode == 0, text.stderr
    assert "20 sends of 1024 bytes each" in text.stdout
    assert "send, memory" in text.stdout
    assert "send, flushed" in text.stdout
    assert text.stderr == ""  # no progress bar without a terminal


# ---------------------------------------------------------------- produce


@pytest.mark.parametrize("mode", ["batch", "async", "sync"])
def test_produce_counts_only_what_consumers_can_see(node: Node, mode: str) -> None:
    name = f"kept-{mode}"
    report = bench(
        node, "produce", "--mode", mode, "--messages", "250", "--batch", "100", "--body", "64", "--topic", name,
        "--ack", "memory", "--repeat", "2",
    )  # fmt: skip
    for run in report["runs"]:
        assert (run["mode"], run["ack"], run["body_bytes"], run["messages"]) == (mode, "memory", 64, 250)
        assert run["batch"] == (100 if mode == "batch" else 1)
        assert 0 < run["acked_seconds"] <= run["seconds"]
        assert run["messages_per_s"] == pytest.approx(250 / run["seconds"], rel=0.01)
        assert not run["cut_short"]
    rates = [run["messages_per_s"] for run in report["runs"]]
    assert report["summary"]["messages_per_s"] == {
        "median": pytest.approx(sum(rates) / 2),
        "low": min(rates),
        "high": max(rates),
    }
    # The topic was named, so it is still there, with what was counted and what each run sent to warm up.
    with Admin(node.address) as admin:
        assert sum(high for _, _, high, _ in admin.offsets(name)) == 2 * (250 + 250)


def test_produce_stops_in_time_and_says_so(node: Node) -> None:
    with BenchTopic(node.address) as topic:
        result = measure_produce(topic, mode="sync", messages=10_000_000, body_bytes=10, limit_s=0.2)
        assert result.cut_short
        assert 0 < result.messages < 10_000_000
        assert result.messages <= topic.visible()


def test_a_message_that_never_becomes_visible_is_an_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "_VISIBLE_WITHIN_S", 0.2)
    with BenchTopic(node.address) as topic, pytest.raises(CommitMQError, match="consumers see only 0"):
        topic.wait_visible(1)


# ---------------------------------------------------------------- consume


@pytest.mark.parametrize("mode", ["ranges", "bytes"])
@pytest.mark.parametrize("form", ["columns", "messages"])
def test_consume_reads_and_checks_every_body(node: Node, form: str, mode: str) -> None:
    with BenchTopic(node.address, queues=3) as topic:
        expected = fill(topic, messages=2500, body_bytes=100)
        assert expected.messages == topic.visible() == 2500
        seen: list[int] = []
        result = measure_consume(topic, form=form, mode=mode, expected=expected, progress=seen.append)
        assert (result.messages, result.body_bytes, result.checked, result.cut_short) == (2500, 250_000, True, False)
        assert sum(seen) == 2500
        assert len(seen) == result.polls
        assert result.messages_per_s == pytest.approx(2500 / result.seconds, rel=0.01)
        # One bit less in what is expected, and the same messages are refused.
        wrong = dataclasses.replace(
            expected, columns_sum=expected.columns_sum - 1, messages_sum=expected.messages_sum - 1
        )
        with pytest.raises(CommitMQError, match="not those that were written"):
            measure_consume(topic, form=form, mode=mode, expected=wrong)
        assert measure_consume(topic, form=form, mode=mode, messages=700).messages == 700


def test_the_checksum_sees_every_byte_of_every_body(node: Node) -> None:
    bodies = [b"a", bytes(range(256)) * 5, b"a" * 1000]
    with BenchTopic(node.address, queues=1) as topic:
        with Producer(node.address) as producer:
            producer.send_batch(topic.name, [bodies[0], Message(bodies[1], keys="k"), bodies[2]])
        topic.wait_visible(len(bodies))
        with Reader(topic.name, node=node.address) as consumer:
            batch = consumer.poll(5.0)
            assert [bytes(body) for body in batch.bodies] == bodies
            assert checksum_of_batch(batch) == checksum_of_bodies(bodies)
            assert checksum_of_batch(batch[1:3]) == checksum_of_bodies(bodies[1:3])
    for index, body in enumerate(bodies):
        changed = [*bodies]
        changed[index] = body[:-1] + bytes([body[-1] ^ 1])
        assert checksum_of_bodies(changed) != checksum_of_bodies(bodies)


def test_consume_of_a_topic_that_is_there_leaves_it_alone(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send_batch("mine", [b"body"] * 300)
    report = bench(node, "consume", "--topic", "mine", "--as", "messages", "--repeat", "1")
    assert report["runs"][0]["messages"] == 300
    assert report["runs"][0]["body_bytes"] == 1200
    assert not report["runs"][0]["checked"]
    assert "mine" in topics(node)
    refused = commitmq("bench", "consume", "--topic", "nobody-made-this", "--node", node.address)
    assert refused.returncode == 1
    assert "nobody-made-this" in refused.stderr


# ---------------------------------------------------------------- all of it


def test_nothing_is_left_of_a_measurements_own_topic(node: Node) -> None:
    before = topics(node)
    for arguments in (("produce", "--messages", "10"), ("consume", "--messages", "10"), ("latency", "--count", "2")):
        bench(node, *arguments, "--repeat", "1")
    assert topics(node) == before
    topic = BenchTopic(node.address)
    with topic:
        assert topics(node) == {*before, topic.name}
    assert topics(node) == before
    with pytest.raises(ValueError, match="mode"), BenchTopic(node.address) as topic:
        measure_produce(topic, mode="nonsense")
    assert topics(node) == before


def test_a_clock_ends() -> None:
    assert Clock(0.0).over()
    assert not Clock(60.0).over()
    assert Clock(0.0).left_s(3.0) == 3.0


# ---------------------------------------------------------------- many queues


def test_produce_over_many_queues(node: Node) -> None:
    before = topics(node)
    report = bench(
        node, "produce", "--topics", "3", "--queues", "5", "--batch", "10", "--messages", "300", "--repeat", "1"
    )
    [run] = report["runs"]
    assert (run["messages"], run["batch"], run["mode"], run["cut_short"]) == (300, 10, "batch", False)
    assert 0 < run["acked_seconds"] <= run["seconds"]
    assert run["messages_per_s"] == pytest.approx(300 / run["seconds"], rel=0.01)
    assert topics(node) == before
    with BenchTopic(node.address, queues=2, topics=3) as target:
        measure_produce(target, messages=60, batch=10)
        with Admin(node.address) as admin:
            found = [[high for _, _, high, _ in admin.offsets(name)] for name in target.names]
        assert found == [[11, 11]] * 3, "a batch, and one message before the clock started, in every queue"
        with pytest.raises(ValueError, match="only batches"):
            measure_produce(target, mode="sync", messages=1)
    refused = commitmq("bench", "produce", "--topics", "2", "--mode", "sync", "--node", node.address)
    assert refused.returncode == 2
    assert "--topics" in refused.stderr
