"""Goal: what the comparison with other systems tells is what was measured: medians, ratios, goals, gaps, and a run that
goes on where it was interrupted.

Method: documents made by hand, whose medians, ratios and verdicts are worked out here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import goals, report
from bench.drivers.common import percentiles
from bench.figures import figures_of
from bench.results import Results, Row, Spread, ratio
from bench.system import BenchError
from bench.workloads import BEFORE, FULL, OURS, workloads

MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "memory_gib": 8.0,
    "kernel": "Linux",
    "filesystem": "ext4 on /dev/x",
    "python": "3.11",
}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Of three rounds, with nothing measured yet."""
    options = {"size": "full", "rounds": 3, "systems": [], "only": None}
    return Results.new(tmp_path, command="run", started="then", machine=MACHINE, options=options)


def key(system: str, number: int, durability: str = "memory") -> dict[str, Any]:
    return {"round": number, "part": "main", "durability": durability, "system": system}


def add_sends(results: Results, system: str, *p50s: float, durability: str = "memory") -> None:
    """One measurement of send-1 a round."""
    for number, p50 in enumerate(p50s, 1):
        result = {"rate": 1e6 / p50, "latency_us": {"p50": p50, "p99": 10 * p50}, "errors": 0}
        results.add(key(system, number, durability), "send-1", "", work="send", job={}, result=result)


def send_row(system: str, durability: str = "memory") -> Row:
    return Row("send-1", durability, system)


def test_the_median_of_three_rounds_stands_between_the_lowest_and_the_highest(results: Results) -> None:
    add_sends(results, OURS, 300.0, 100.0, 110.0)
    assert results.spread(send_row(OURS), "p50") == Spread(110.0, 100.0, 300.0, 3)
    assert results.spread(send_row(OURS), "p99") == Spread(1100.0, 1000.0, 3000.0, 3)
    assert results.spread(send_row(OURS), "p99.9") is None
    assert results.spread(send_row("Kafka"), "p50") is None


def test_a_ratio_is_of_the_medians_and_its_range_of_rounds_that_have_both() -> None:
    # In round 2 both were slow, in round 3 theirs is missing.
    found = ratio({1: 100.0, 2: 300.0, 3: 110.0}, {1: 200.0, 2: 400.0})
    assert found == Spread(110.0 / 300.0, 0.5, 0.75, 2)
    assert ratio({1: 1.0}, {}) is None
    assert ratio({}, {1: 1.0}) is None
    assert ratio({1: 1.0}, {1: 0.0}) is None
    assert ratio({1: 1.0, 2: 3.0, 3: 3.0}, {1: 0.0, 2: 1.5, 3: 2.0}) == Spread(2.0, 1.5, 2.0, 2)
    assert ratio({1: 1.0}, {2: 4.0}) == Spread(0.25, 0.25, 0.25, 0)


@pytest.mark.parametrize(
    ("work", "result", "expected"),
    [
        ("batch", {"messages": 1000, "seconds": 2.0, "visible_seconds": 4.0}, {"rate": 250.0, "acked_rate": 500.0}),
        (
            "batch",
            {"messages": 1000, "seconds": 2.0, "visible_seconds": 4.0, "indexed_seconds": 5.5},
            {"rate": 250.0, "acked_rate": 500.0, "index_lag_s": 1.5},
        ),
        (
            "read",
            {"messages": 10, "seconds": 0.5, "bytes": 5_000_000, "first_s": 0.1},
            {"rate": 20.0, "mb_rate": 10.0, "first_s": 0.1},
        ),
        ("mixed", {"produced": 9, "consumed": 8, "seconds": 2.0}, {"rate": 4.0}),
        ("end_to_end", {"latency_us": {}}, {}),
        (
            "retry",
            {"latency_us": {"p50": 1002.0, "p99": 1005.0}, "over_us": {"p50": 2.0, "p99": 5.0}},
            {"p50": 1002.0, "p99": 1005.0, "over_p50": 2.0, "over_p99": 5.0},
        ),
        (
            "timers",
            {"messages": 50, "fill_seconds": 2.0, "cost_bytes": 3_000_000, "memory_bytes": 9_000_000, "seconds": 1.5},
            {"cost_mb": 3.0, "memory_mb": 9.0, "seconds": 1.5, "fill_rate": 25.0},
        ),
        ("idle", {"cpu_percent": 3.0, "memory_bytes": 5 << 20}, {"cpu_percent": 3.0, "memory_mib": 5.0}),
    ],
)
def test_figures_are_taken_from_results_and_missing_ones_left_out(
    work: str, result: dict[str, Any], expected: dict[str, float]
) -> None:
    assert figures_of(work, result) == expected


def test_percentiles_are_nearest_ranks_in_microseconds() -> None:
    samples_ns = [1000 * number for number in range(10_000, 0, -1)]
    found = percentiles(samples_ns)
    assert found == {"p50": 5001, "p90": 9001, "p99": 9901, "p99.9": 9991, "p99.99": 10_000, "max": 10_000}
    assert percentiles([]) == {}


def verdicts(results: Results, title: str) -> dict[str, bool | None]:
    """By peer."""
    return {one.peer[0].system: one.met for one in goals.judge(results) if one.goal.title == title}


def test_a_goal_of_at_most_is_met_up_to_its_factor_with_each_peer_by_itself(results: Results) -> None:
    add_sends(results, OURS, 100.0)
    add_sends(results, "RocketMQ", 100.0)
    add_sends(results, "Kafka", 99.0)
    assert verdicts(results, "single send, ack memory, p50") == {"RocketMQ": True, "Kafka": False, "NATS": None}


def test_a_goal_takes_the_median_and_not_the_best_round(results: Results) -> None:
    add_sends(results, OURS, 10.0, 100.0, 101.0, durability="flushed")
    add_sends(results, "Redis", 99.0, 99.0, 99.0, durability="flushed")
    add_sends(results, "RocketMQ", 299.0, 301.0, 303.0, durability="flushed")
    title = "single send, ack flushed, p50"
    found = {(one.peer[0].system, one.met) for one in goals.judge(results) if one.goal.title == title}
    assert found == {("Redis", False), ("RocketMQ", True)}


@pytest.mark.parametrize(("rate", "met"), [(300_000, True), (299_000, False)])
def test_a_goal_of_at_least_compares_our_flushed_batches_with_theirs_in_memory(
    results: Results, rate: int, met: bool
) -> None:
    def add(system: str, durability: str, messages: int) -> None:
        result = {"messages": messages, "seconds": 0.5, "visible_seconds": 1.0, "errors": 0}
        results.add(key(system, 1, durability), "batch-100-1", "", work="batch", job={}, result=result)

    add(OURS, "flushed", rate)
    add(OURS, "memory", 9_000_000)
    add("Kafka", "memory", 100_000)
    add("Kafka", "flushed", 1)
    title = next(one.title for one in goals.GOALS if "100 B" in one.title)
    assert verdicts(results, title) == {"Kafka": met}


def test_goals_name_workloads_and_figures_that_there_are() -> None:
    known = {one.name: one for one in FULL}
    durabilities: dict[str, set[str]] = {}
    for one in (*FULL, *workloads("quick")):
        durabilities.setdefault(one.name, set()).update(one.durabilities)
    for goal in goals.GOALS:
        for row, figure in (goal.ours, *goal.peers):
            if row.workload == "restart":
                continue
            workload = known[row.workload]
            assert row.durability in durabilities[row.workload]
            assert row.variant in workload.jobs(row.system, "full")
            assert figure in {one.name for one in goals_figures(workload.work)}

    for bound in goals.BOUNDS:
        row, figure = bound.ours
        assert row.durability in known[row.workload].durabilities
        assert figure in {one.name for one in goals_figures(known[row.workload].work)}


def add_delayed(results: Results, *figures: tuple[float, float]) -> None:
    """One measurement of delayed-burst a round: p99 and the earliest one."""
    for number, (p99, earliest) in enumerate(figures, 1):
        result = {"messages": 100_000, "latency_us": {"p99": p99}, "earliest_us": earliest, "early": 0, "errors": 0}
        results.add(key(OURS, number), "delayed-burst", "", work="delayed", job={}, result=result)


def bounds_met(results: Results) -> list[bool | None]:
    """Of the lateness and of the earliest one of delayed-burst."""
    return [one.met for one in goals.judge_bounds(results) if one.bound.ours[0].workload == "delayed-burst"]


def test_a_bound_takes_the_median_or_every_round(results: Results) -> None:
    assert bounds_met(results) == [None, None]
    add_delayed(results, (99_000.0, 1.0), (100_000.0, 0.0), (900_000.0, 5.0))
    assert bounds_met(results) == [True, True]
    text = report.markdown(results)
    assert "p99 lateness | 100,000 | 100,000 (99,000–900,000) | at most 100,000 µs | met |" in text
    assert "the earliest one | 100,000 | 1.00 (0–5.00) | at least 0 µs, in each round | met |" in text


def test_one_early_message_in_one_round_misses_the_bound(results: Results) -> None:
    add_delayed(results, (100_001.0, 1.0), (100_001.0, -0.5), (1.0, 5.0))
    assert bounds_met(results) == [False, False]


def test_the_other_checkout_has_goals_only_where_it_was_measured(results: Results) -> None:
    title = "unchanged: single sends, ack memory"
    add_sends(results, OURS, 100.0)
    assert verdicts(results, title) == {}
    results.document["systems"] = {OURS: {}, BEFORE: {}}
    add_sends(results, BEFORE, 98.0)
    assert verdicts(results, title) == {BEFORE: True}
    add_sends(results, BEFORE, 96.0)
    assert verdicts(results, title) == {BEFORE: False}


def goals_figures(work: str) -> Any:
    from bench.figures import FIGURES

    return FIGURES[work]


def test_what_is_read_is_stored_before_it_in_the_same_session() -> None:
    for size in ("full", "quick"):
        chosen = workloads(size)
        places = {one.name: place for place, one in enumerate(chosen)}
        for workload in chosen:
            if workload.reads:
                assert places[workload.reads] < places[workload.name]
                assert set(workload.durabilities) <= set(chosen[places[workload.reads]].durabilities)


def test_the_report_has_medians_ratios_verdicts_and_names_every_gap(results: Results) -> None:
    results.document["systems"] = {
        OURS: {"version": "1", "settings": {"memory": {"a": "1"}, "flushed": {"a": "2"}}},
        "RocketMQ": {"version": "5", "settings": {"memory": {}, "flushed": {}}},
        "NATS": {"missing": "no Go here"},
    }
    add_sends(results, OURS, 100.0, 120.0, 140.0)
    add_sends(results, "RocketMQ", 480.0, 480.0)
    results.add(key("RocketMQ", 3), "send-1", "", work="send", job={}, error="the driver ended\nwith | a trace")
    results.finish({**key(OURS, 1), "load_before": 0.5, "load_after": 2.25})
    text = report.markdown(results, ["throughput.png", "throughput.svg"])
    assert "| NATS | left out: no Go here |" in text
    assert "| single send, ack memory, p50 | RocketMQ | 120 (100–140) | 480 (480–480) | 0.25 (0.208–0.25) |" in text
    assert "| at most 1.00 × | met |" in text
    # The first figure of sends is the rate: ours is 1e6 / 120, theirs 1e6 / 480.
    assert "| RocketMQ | 2,083 (2,083–2,083) | 480 (480–480) |" in text
    assert "| 4.00 (4.00–4.80) |" in text
    assert "* send-1, memory, RocketMQ, 1 times: the driver ended" in text
    assert "with | a trace" not in text
    assert "| `a` | `1` | `2` |" in text
    assert "| 1 | main | memory | CommitMQ | 0.5 | 2.25 |" in text
    assert "![throughput](throughput.png)" in text


def test_sends_that_failed_are_told_beside_the_figures(results: Results) -> None:
    result = {"rate": 1.0, "latency_us": {"p50": 1.0}, "errors": 7}
    results.add(key("Kafka", 1), "send-1", "", work="send", job={}, result=result)
    assert results.spread(send_row("Kafka"), "p50") == Spread(1.0, 1.0, 1.0, 1)
    assert results.errors() == {send_row("Kafka"): ["7 messages failed or did not arrive"]}


def test_a_resumed_run_keeps_complete_sessions_and_does_interrupted_ones_again(results: Results) -> None:
    add_sends(results, OURS, 100.0, 200.0)
    results.finish(key(OURS, 1))
    again = Results.load(results.folder)
    assert again.is_done(key(OURS, 1))
    assert not again.is_done(key(OURS, 2))
    assert not again.is_done(key(OURS, 1, "flushed"))
    again.begin(key(OURS, 2))
    assert again.rows() == {send_row(OURS): {1: {"rate": 1e4, "p50": 100.0, "p99": 1000.0}}}


def test_results_are_not_written_over_and_other_files_not_taken_for_results(results: Results, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--resume"):
        Results.new(results.folder, command="another")
    (tmp_path / "results.json").write_text('{"format": 99}')
    with pytest.raises(BenchError, match="format"):
        Results.load(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(BenchError, match="cannot be read"):
        Results.load(tmp_path)
