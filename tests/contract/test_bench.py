"""Goal: what ``commitmq bench`` reports was really sent, seen and read, adds up, and leaves no topic and no process.

Method: tiny runs of each measurement against a real node, through the command and through the library; figures are
compared with each other and with what the node says, never with how fast this machine should be.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, CommitMQError, Message, Producer, trace_points
from commitmq.bench import target as target_module
from commitmq.bench.baseline import Baseline, BaselineError, Figure, compare
from commitmq.bench.checksum import checksum_of_batch, checksum_of_bodies
from commitmq.bench.consume import fill, measure_consume
from commitmq.bench.device import Device
from commitmq.bench.echo import EchoPeer
from commitmq.bench.figures import Clock, Percentiles, Spread
from commitmq.bench.floors import COPY, ECHO_AND_SYNC, NONE, Floors
from commitmq.bench.goals import Goal, judge, measure_all
from commitmq.bench.latency import measure_latency
from commitmq.bench.produce import measure_produce
from commitmq.bench.target import BenchTopic
from commitmq.bench.trace_points import _times as trace_times
from commitmq.client.consumer import Reader
from commitmq.trace_points import TracePoint
from nodes import Node, alive, commitmq, eventually, start_node

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
        return {topic["name"] for topic in admin.topics()}


# ---------------------------------------------------------------- figures


def test_percentiles_are_the_nearest_ranks() -> None:
    figures = Percentiles.of([1000 * value for value in range(1000, 0, -1)])
    assert figures == Percentiles(1000, 501.0, 901.0, 991.0, 1000.0, 1000.0)
    assert Percentiles.of([2500]) == Percentiles(1, 2.5, 2.5, 2.5, 2.5, 2.5)
    with pytest.raises(ValueError, match="sample"):
        Percentiles.of([])


@pytest.mark.parametrize(
    ("at_most", "values", "met"),
    [(True, [1.0, 1.6, 9.0], True), (True, [1.7], False), (False, [60.0, 1.0, 61.0], True), (False, [59.0], False)],
)
def test_the_median_decides_whether_a_goal_is_met(at_most: bool, values: list[float], met: bool) -> None:
    outcome = judge(Goal("", "", 1.6 if at_most else 60.0, at_most), values)
    assert outcome.met is met
    assert outcome.measured.low == min(values)
    assert outcome.measured.high == max(values)
    assert judge(Goal("", "", None), values).met is None


# ---------------------------------------------------------------- latency


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_the_echo_answers_what_it_got_and_goes(transport: str) -> None:
    with EchoPeer(transport) as peer:
        pid = peer.pid
        for body in (b"", b"x" * 1024):
            peer.socket.send(body)
            assert peer.socket.recv() == body
        assert alive(pid)
    eventually(lambda: not alive(pid), "the echo process is gone")


def test_a_device_stores_round_and_round(tmp_path: Path) -> None:
    body = b"x" * 3_000_000
    with Device(tmp_path) as device:
        for _ in range(3):
            device.store(body)
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_latency_reports_every_send_beside_the_echo(node: Node) -> None:
    with BenchTopic(node.address) as topic:
        result = measure_latency(topic, body_bytes=300, count=250, limit_s=30)
        # Both ack levels, in two rounds, each with its uncounted sends first.
        assert topic.visible() >= 2 * 250
    assert result.transport == "ipc"
    assert (result.rounds, result.echo.count, result.cut_short) == (2, 250, False)
    assert [one.ack for one in result.sends] == ["memory", "flushed"]
    assert result.device is not None
    assert result.device.count == 250
    assert result.device.p50_us > 0
    for one in result.sends:
        figures = one.send
        assert figures.count == 250
        assert 0 < figures.p50_us <= figures.p90_us <= figures.p99_us <= figures.p999_us <= figures.max_us
        assert one.ratio_p50 == pytest.approx(figures.p50_us / result.echo.p50_us, rel=0.01)
        assert len(one.round_ratios) == result.rounds


def test_latency_as_a_command(node: Node) -> None:
    report = bench(node, "latency", "--count", "20", "--repeat", "2", "--ack", "memory")
    assert len(report["runs"]) == 2
    ratio = report["summary"]["ratio_p50"]
    assert list(ratio) == ["memory"]
    assert [run["device"] for run in report["runs"]] == [None, None]  # nothing here waits for the disk
    assert ratio["memory"]["low"] <= ratio["memory"]["median"] <= ratio["memory"]["high"]
    text = commitmq("bench", "latency", "--count", "20", "--repeat", "1", "--node", node.address)
    assert text.returncode == 0, text.stderr
    assert "echo (ipc)" in text.stdout
    assert "fdatasync alone" in text.stdout
    assert "times the echo's" in text.stdout
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


def test_all_measures_each_goal_once(node: Node) -> None:
    begun: list[tuple[str, int]] = []
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count

    def begin(name: str, total: int) -> Any:
        begun.append((name, total))
        return advance

    outcomes = list(measure_all(node.address, repeat=1, count=20, messages=2000, begin=begin))
    assert [one.goal.limit for one in outcomes] == [None, 1.6, 3.0, 250_000, None, 60_000, None, 600_000, 250_000]
    assert [one.met is None for one in outcomes] == [one.goal.limit is None for one in outcomes]
    assert all(isinstance(one.measured, Spread) and one.measured.median > 0 for one in outcomes)
    assert len(begun) == 8
    assert done == sum(total for _, total in begun)
    report = bench(node, "all", "--repeat", "1", "--count", "20", "--messages", "1000")
    assert [one["goal"]["name"] for one in report["results"]] == [one.goal.name for one in outcomes]
    assert report["summary"]["missed"] == sum(one["met"] is False for one in report["results"])


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


# ---------------------------------------------------------------- baselines


KEPT = ("latency", "--count", "5", "--repeat", "1", "--ack", "memory")


@pytest.fixture(scope="module")
def kept(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline. Read only."""
    file = tmp_path_factory.mktemp("baseline") / "baseline.json"
    report = bench(node, *KEPT, "--save", str(file))
    assert "compared" not in report
    assert Baseline.load(file).floors == Floors(**report["floors"])
    return file


def test_a_measurement_is_kept_and_compared(node: Node, kept: Path) -> None:
    before = Baseline.load(kept)
    assert before.bench == "latency"
    assert before.floors.echo_p50_us > 0
    assert before.floors.fdatasync_p50_us is not None
    report = bench(node, *KEPT, "--compare", str(kept), "--fail-below", "0.001")
    compared = report["compared"]
    [one] = compared["figures"]
    assert compared["taken"] == before.taken
    assert (one["before"], one["now"]) == (
        before.figures[0].value.median,
        report["runs"][0]["sends"][0]["send"]["p50_us"],
    )
    assert one["ratio"] == pytest.approx(one["before"] / one["now"], abs=0.001)
    assert one["corrected"] > 0


def test_a_fall_below_the_baseline_is_an_exit_code(node: Node, kept: Path, tmp_path: Path) -> None:
    before = Baseline.load(kept)
    file = tmp_path / "baseline.json"
    values = [dataclasses.replace(one, value=Spread(0.01, 0.01, 0.01)) for one in before.figures]
    dataclasses.replace(before, figures=tuple(values)).save(file)
    ended = commitmq("bench", *KEPT, "--compare", str(file), "--fail-below", "0.5", "--node", node.address)
    assert ended.returncode == 1, ended.stderr
    assert "by the machine's own" in ended.stdout
    assert "times the baseline, below 0.5" in ended.stderr


def test_a_baseline_of_another_measurement_is_refused_before_anything_is_measured(
    node: Node, kept: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"format": "something else"}', encoding="ascii")
    for arguments, sentence in (
        (("latency", "--ack", "memory", "--body", "9", "--compare", str(kept)), "body 1024 then and 9 now"),
        (("produce", "--compare", str(kept)), "one of `bench latency`"),
        (("latency", "--compare", str(other)), "is no baseline"),
        (("latency", "--fail-below", "0.9"), "--compare"),
    ):
        refused = commitmq("bench", *arguments, "--node", node.address)
        assert refused.returncode == 2
        assert sentence in refused.stderr


def test_floors_correct_for_a_machine_that_became_slower() -> None:
    def measured(floor_us: float, sync_us: float | None, copies: float, sends: float, rate: float) -> Baseline:
        figures = (
            Figure("send", "us", Spread(sends, sends, sends), False, ECHO_AND_SYNC),
            Figure("batches", "messages/s", Spread(rate, rate, rate), True, COPY),
            Figure("ratio", "x", Spread(sends, sends, sends), False, NONE),
        )
        return Baseline("some", {"body": 1}, {}, Floors(floor_us, sync_us, copies, 1.0), figures)

    before = measured(100, 60, 8000, sends=320, rate=400_000)
    # Twice as slow, and half the copies a second: the same software. Its batches became a tenth slower beyond that.
    send, batches, ratio = compare(before, measured(200, 120, 4000, sends=640, rate=180_000))
    assert (send.ratio, send.corrected) == (0.5, 1.0)
    assert (batches.ratio, batches.corrected) == (0.45, 0.9)
    assert (ratio.ratio, ratio.corrected, ratio.judged) == (0.5, None, 0.5)
    send, _, _ = compare(before, measured(200, None, 4000, sends=640, rate=180_000))
    assert (send.corrected, send.judged) == (None, 0.5)
    with pytest.raises(BaselineError, match="none of"):
        compare(before, dataclasses.replace(before, figures=()))


@pytest.mark.slow
def test_every_figure_of_all_measurements_has_a_floor_that_can_be_had(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    for arguments in (
        ("memory", "--messages", "100", "--batch", "50", "--count", "5"),
        ("consume", "--messages", "100"),
        ("produce", "--mode", "sync", "--messages", "5"),
        ("all", "--count", "5", "--messages", "100"),
    ):
        bench(node, *arguments, "--repeat", "1", "--save", str(file))
        found = Baseline.load(file)
        assert found.figures
        for one in found.figures:
            assert one.value.median > 0
            assert (found.floors.of(one.floor) is None) is (one.floor == NONE)
            assert one.more_is_better is (one.unit == "messages/s")


# ---------------------------------------------------------------- trace points


def test_the_trace_points_of_a_send_add_up(tmp_path: Path) -> None:
    ended = commitmq(
        "bench",
        "trace-points",
        "--count",
        "60",
        "--ack",
        "flushed",
        "--body",
        "200",
        "--folder",
        str(tmp_path),
        "--json",
    )
    assert ended.returncode == 0, ended.stderr
    [result] = json.loads(ended.stdout)["results"]
    assert 0 < result["sends"] <= 60, "on a busy machine some are not seen everywhere"
    names = [step["name"] for step in result["steps"]]
    assert len(names) == len(set(names)) == 13
    assert all(step["time"]["count"] == result["sends"] for step in result["steps"])
    assert all(step["time"]["p50_us"] >= 0 for step in result["steps"])
    # Medians of parts do not add up to the median of the whole exactly, but they are parts of it.
    assert sum(step["time"]["p50_us"] for step in result["steps"]) < 1.5 * result["total"]["p50_us"]
    assert sum(step["share"] for step in result["steps"]) == pytest.approx(1.0, abs=0.02)
    assert list(tmp_path.iterdir()) == []


def test_trace_points_are_put_in_their_order() -> None:
    order = [TracePoint.CALLED, TracePoint.HANDED_OVER, TracePoint.W_AWAKE, TracePoint.W_RECEIVED, TracePoint.RETURNED]
    # Two frames are handed over; the writer woke for something else before, then for this; flush is nobody's business here.
    seen = [(10, 1), (12, 3), (13, 10), (14, 3), (15, 10), (17, 11), (18, 20), (30, 5)]
    assert trace_times(order, seen, 15) == [10, 14, 15, 17, 30]
    assert trace_times(order, [(10, 1), (14, 3), (17, 11), (30, 5)], 9) == [10, 14, 14, 17, 30], "it was awake"
    assert trace_times(order, [(10, 1), (14, 3), (30, 5)], 9) is None
    late = [(10, 1), (13, 10), (14, 11), (20, 3), (30, 5)]
    assert trace_times(order, late, 15) == [10, 14, 14, 14, 30], "the client lost its core after it handed over"


def test_without_the_variable_nothing_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def work(self, number: int) -> int:
            return number + 1

    monkeypatch.delenv(trace_points.VARIABLE, raising=False)
    worker = Worker()
    trace_points.watch("worker", (worker, "work", TracePoint.F_SYNC, TracePoint.F_SYNCED))
    assert vars(worker) == {}
    monkeypatch.setenv(trace_points.VARIABLE, str(tmp_path))
    trace_points.watch("worker", (worker, "work", TracePoint.F_SYNC, TracePoint.F_SYNCED))
    assert worker.work(1) == 2
    (first, one), (second, other) = trace_points.read(tmp_path)
    assert (one, other) == (TracePoint.F_SYNC, TracePoint.F_SYNCED)
    assert first <= second
