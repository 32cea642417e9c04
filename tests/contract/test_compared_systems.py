"""Goal: what the comparison says of RocketMQ, Kafka, Redis and NATS is work that was done: everything that was sent
is read back, byte for byte, in every way that is measured; and it outlives a kill.

Method: the real servers and drivers in tiny sizes. The bodies' CRC-32 are added up where they are sent and again where they
are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import remoting
from bench.measurement import run_driver
from bench.system import Server, System
from bench.systems import load

pytestmark = pytest.mark.timeout(900)

PERCENTILES = ["p50", "p90", "p99", "p99.9", "p99.99", "max"]
# It is a package of the system, which neither the project nor its checks install.
NOT_INSTALLED_HERE = {"redis"}


# Servers of others cost minutes: with each landing the one whose place a node takes, all before a release.
OTHERS = [
    pytest.param(name, marks=pytest.mark.long) for name in ("commitmq-rocketmq", "kafka", "redis", "nats", "confluent")
]


@pytest.fixture(scope="module", params=[pytest.param("rocketmq", marks=pytest.mark.slow), *OTHERS])
def system(request: pytest.FixtureRequest) -> System:
    found = load(request.param)
    if missing := found.missing():
        if os.environ.get("COMMITMQ_CI") == "1" and request.param not in NOT_INSTALLED_HERE:
            pytest.fail(missing)
        pytest.skip(missing)
    found.install()
    return found


@pytest.fixture(scope="module")
def server(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with system.start(tmp_path_factory.mktemp("server") / "store", "memory") as running:
        yield running


def drive(server: Server, work: str, topic: str, **job: Any) -> dict[str, Any]:
    common = {"queues": 3, "body_bytes": 100, "ack": "memory", "clients": 1, "seed": 7, "warmup_s": 0.1, "seconds": 0.3}
    given = {**common, "timeout_s": 60.0, "work": work, "topic": topic, **job}
    return run_driver(server, given, limit_s=180)


def assert_read_back(server: Server, topic: str, sent: dict[str, Any], **job: Any) -> None:
    read = drive(server, "read", topic, messages=sent["messages"], mode="checksum", **job)
    assert read["messages"] == sent["messages"]
    assert read["bytes"] == sent["messages"] * job.get("body_bytes", 100)
    assert read["checksum"] == sent["checksum"]
    assert 0 < read["first_s"] <= read["seconds"]


def assert_latencies(result: dict[str, Any]) -> None:
    found = [result["latency_us"][name] for name in PERCENTILES]
    assert found == sorted(found)
    assert found[0] > 0


def _long(*cases: Any) -> list[Any]:
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize("clients", [3, *_long(1)])
def test_single_sends(server: Server, clients: int) -> None:
    done = drive(server, "send", f"send-{clients}", clients=clients, seconds=1.0)
    assert done["errors"] == 0
    assert done["messages"] > 10
    assert done["rate"] == pytest.approx(done["messages"] / done["seconds"])
    assert_latencies(done)


@pytest.mark.parametrize("window", [50, *_long(1, 10_000)])
def test_pipelined_sends_are_read_back(server: Server, window: int) -> None:
    topic = f"pipeline-{window}"
    sent = drive(server, "pipeline", topic, messages=501, window=window)
    assert (sent["messages"], sent["errors"]) == (501, 0)
    assert 0 < sent["seconds"] <= sent["visible_seconds"]
    assert_read_back(server, topic, sent)


@pytest.mark.parametrize(("clients", "queues", "batch"), [(1, 3, 100), *_long((3, 1, 30), (1, 150, 7))])
def test_batches_are_read_back(server: Server, clients: int, queues: int, batch: int) -> None:
    topic = f"batch-{clients}-{queues}"
    sent = drive(server, "batch", topic, messages=2000, clients=clients, queues=queues, batch=batch, body_bytes=1024)
    assert (sent["messages"], sent["errors"]) == (2000, 0)
    assert_read_back(server, topic, sent, queues=queues, body_bytes=1024)


@pytest.mark.long
def test_every_message_of_an_open_loop_arrives(server: Server) -> None:
    # Twice: a topic that is not new must not be taken for what this producer sent.
    for _ in range(2):
        done = drive(server, "end_to_end", "end-to-end", rate=500, seconds=0.6, warmup_s=0.2)
        assert done["messages"] == 300
        assert done["errors"] == 0
        assert_latencies(done)
        assert done["latency_us"]["p50"] < 0.6e6


@pytest.mark.long
def test_the_consumer_behind_a_producer_gets_all(server: Server) -> None:
    for _ in range(2):
        done = drive(server, "mixed", "mixed", batch=50)
        assert done["produced"] == done["consumed"] > 50
        assert done["errors"] == 0
        assert 0 < done["produce_seconds"] <= done["seconds"]


def test_every_message_is_found_by_its_key(system: System, server: Server) -> None:
    if "query" not in system.works:
        pytest.skip(f"{system.name} finds no message by its key")
    done = drive(server, "query", "query", messages=300, batch=50, count=40)
    assert (done["messages"], done["found"], done["errors"]) == (40, 40, 0)
    assert_latencies(done)


def needs(system: System, work: str) -> None:
    if work not in system.works:
        pytest.skip(f"{system.name} cannot do it")


def test_delayed_messages_arrive_once_and_their_lateness_is_told(system: System, server: Server) -> None:
    needs(system, "delayed")
    done = drive(server, "delayed", "delayed", rate=400, seconds=0.5, ahead_s=2.0)
    assert (done["messages"], done["again"], done["errors"]) == (200, 0, 0)
    assert done["stored_ahead_s"] > 0
    assert done["earliest_us"] <= done["latency_us"]["p50"]
    assert sorted(done["latency_us"].values()) == list(done["latency_us"].values())
    if not done["early"]:
        assert done["earliest_us"] >= 0


def test_committed_transactions_can_be_read(system: System, server: Server) -> None:
    needs(system, "transactions")
    done = drive(server, "transactions", "transactions", clients=3, seconds=0.5)
    assert done["errors"] == 0
    assert done["messages"] > 0
    assert done["rate"] == pytest.approx(done["messages"] / done["seconds"])
    assert_latencies(done)


@pytest.mark.long
def test_every_message_of_an_open_loop_is_pushed(system: System, server: Server) -> None:
    needs(system, "push")
    for _ in range(2):  # the second time the group goes on behind the first
        done = drive(server, "push", "push", rate=500, seconds=0.6, warmup_s=0.2)
        assert (done["messages"], done["errors"], done["lost"]) == (300, 0, 0)
        assert_latencies(done)


def test_idle_connections_are_counted(system: System, server: Server) -> None:
    needs(system, "connections")
    with remoting.connected(server.broker_port, 20):
        assert server.memory_bytes() > 1_000_000


@pytest.mark.parametrize("clients", [2, *_long(1)])
def test_shared_messages_are_received_and_acknowledged_once(system: System, server: Server, clients: int) -> None:
    needs(system, "share")
    done = drive(server, "share", f"shared-{clients}", messages=500, batch=32, clients=clients)
    assert (done["messages"], done["errors"]) == (500, 0)
    assert done["checksum"] == done["sent_checksum"]
    assert 500 / 32 <= done["receives"] < 500


def test_a_failed_message_is_handled_again_after_its_delay(system: System, server: Server) -> None:
    needs(system, "retry")
    done = drive(server, "retry", "retry", rate=50, seconds=0.4, delay_ms=1000)
    assert (done["messages"], done["errors"]) == (20, 0)
    assert done["over_us"]["p50"] == pytest.approx(done["latency_us"]["p50"] - 1e6)
    assert_latencies(done)


@pytest.mark.long
def test_messages_that_wait_in_the_timer_are_there_after_a_kill(system: System, tmp_path: Path) -> None:
    needs(system, "timers")
    with system.start(tmp_path / "store", "memory") as server:
        job = {"messages": 300, "batch": 50, "ahead_s": 3600.0}
        filled = drive(server, "timers", "waiting", **job)
        assert (filled["messages"], filled["errors"]) == (300, 0)
        server.kill()
        server.restart()
        back = drive(server, "timers_ready", "ready", messages=300)
        assert 0 < back["seconds"] < 60


@pytest.mark.long
def test_what_was_acknowledged_outlives_a_kill(system: System, tmp_path: Path) -> None:
    with system.start(tmp_path / "store", "flushed") as server:
        sent = drive(server, "batch", "kept", messages=300, batch=20, ack="flushed")
        server.kill()
        assert server.pids() == []
        server.restart()
        back = drive(server, "ready", "ready")
        assert 0 < back["seconds"] < 60
        assert_read_back(server, "kept", sent)
