"""Goal: /metrics tells the truth about a live node, has what RocketMQ's boards and ours ask for, and costs a bounded amount.

Method: a real node that was used in every way; its answers are read by a strict parser. Each query of RocketMQ's published 5.x
boards and alerts, of our board and of our rules has a value. What the figures should be is counted by the test itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from commitmq import Admin, Consumer, ConsumeResult, Message, Producer, Reader, SendError, ShareConsumer, counting
from commitmq.counting import Family
from commitmq_plugins.metrics import exposition
from exposition import Metric, missing, parse, series_of
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(180)
DEPLOY = Path(__file__).parents[2] / "deploy"
SETTINGS = (
    "metrics.enable=true",
    "metrics.port=0",
    "metrics.age_ms=0",
    "metrics.queue_topics=orders",
    "metrics.timeout_ms=1500",
    "metrics.max_connections=12",
    "groups.heartbeat_interval_ms=200",
)
NODE = {"cluster": "DefaultCluster", "node_type": "broker", "node_id": "commitmq"}

# What RocketMQ's published boards and alerts for 5.x ask: rates by node and topic, lags by group, watermarks, the store.
ROCKETMQ_QUERIES = (
    "sum(rate(rocketmq_messages_in_total[1m])) by (cluster, node_id)",
    "sum(rate(rocketmq_messages_out_total[1m])) by (cluster, node_id)",
    "sum(rate(rocketmq_messages_in_total[1m])) by (cluster, topic)",
    "sum(rate(rocketmq_messages_out_total[1m])) by (cluster, topic, consumer_group)",
    "sum(rate(rocketmq_throughput_in_total[1m])) by (cluster, node_id)",
    "sum(rate(rocketmq_throughput_out_total[1m])) by (cluster, node_id)",
    'sum(rate(rocketmq_messages_in_total{message_type="normal"}[1m])) by (topic)',
    'sum(rate(rocketmq_messages_in_total{message_type="delay"}[1m])) by (cluster)',
    'sum(rate(rocketmq_messages_in_total{message_type="transaction"}[1m])) by (cluster)',
    "sum(rate(rocketmq_throughput_in_total[1m])) by (topic) / sum(rate(rocketmq_messages_in_total[1m])) by (topic)",
    "histogram_quantile(0.99, sum(rate(rocketmq_message_size_bucket[5m])) by (le, topic))",
    "sum(rocketmq_consumer_lag_messages) by (cluster, topic, consumer_group)",
    "max(rocketmq_consumer_lag_latency_milliseconds) by (cluster, topic, consumer_group)",
    "sum(rocketmq_consumer_ready_messages) by (cluster, topic, consumer_group)",
    "sum(rocketmq_consumer_inflight_messages) by (cluster, topic, consumer_group)",
    "max(rocketmq_consumer_queueing_latency_milliseconds) by (cluster, topic, consumer_group)",
    'sum(rocketmq_consumer_lag_messages{is_system="false"}) by (consumer_group, topic) > 1000',
    "max(rocketmq_consumer_lag_latency_milliseconds) by (consumer_group) > 60000",
    "sum(rocketmq_processor_watermark) by (cluster, node_id, processor)",
    'rocketmq_processor_watermark{processor="send"} > 5000',
    "max(rocketmq_broker_permission) by (node_id)",
    "rocketmq_topic_number",
    "rocketmq_consumer_group_number",
    "sum(rocketmq_consumer_connections) by (consumer_group, language, version)",
    "sum(rocketmq_storage_size_bytes) by (cluster, node_id)",
    'rocketmq_storage_flush_behind_bytes{storage_medium="disk"}',
    'rocketmq_storage_dispatch_behind_bytes{storage_type="local"}',
    "rocketmq_storage_message_reserve_time_milliseconds",
    "sum(rocketmq_half_messages) by (cluster)",
    "sum(rate(rocketmq_commit_messages_total[1m])) by (topic)",
    "sum(rate(rocketmq_rollback_messages_total[1m])) by (topic)",
    "sum(rate(rocketmq_finish_message_latency_milliseconds_bucket[5m])) by (le, topic)",
    "sum(rocketmq_timing_messages) by (topic)",
    "sum(rate(rocketmq_timer_enqueue_total[1m])) by (topic)",
    "sum(rate(rocketmq_timer_dequeue_total[1m])) by (topic)",
    "sum(rate(rocketmq_send_to_dlq_messages_total[5m])) by (topic, consumer_group)",
)
EXPORTER_QUERIES = (
    "sum(rocketmq_broker_tps) by (cluster)",
    "sum(rocketmq_broker_qps) by (broker)",
    "sum(rocketmq_producer_tps) by (topic)",
    "sum(rocketmq_producer_message_size) by (topic)",
    "sum(rocketmq_consumer_tps) by (group, topic)",
    "sum(rocketmq_consumer_message_size) by (topic)",
    "sum(rocketmq_producer_offset) by (topic) - on(topic) group_right sum(rocketmq_consumer_offset) by (group, topic)",
    "rocketmq_group_get_latency_by_storetime > 1000",
    "rocketmq_group_diff",
    "rocketmq_brokeruntime_put_tps10",
    "rocketmq_brokeruntime_getfound_tps10",
    "rocketmq_brokeruntime_commitlog_disk_ratio > 0.9",
    "rocketmq_brokeruntime_commitlogdir_capacity_total - rocketmq_brokeruntime_commitlogdir_capacity_free",
    "rocketmq_brokeruntime_dispatch_behind_bytes",
    "rocketmq_brokeruntime_commitlog_maxoffset - rocketmq_brokeruntime_commitlog_minoffset",
    "rocketmq_brokeruntime_msg_put_total_today_now",
    "rocketmq_brokeruntime_earliest_message_timestamp",
)


def address_of(node: Node) -> str:
    found = eventually(lambda: (node.row("worker-metrics") or {}).get("endpoints"), "metrics are served")
    return str(found[0])


def get(address: str, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    """Status, type and text of an answer."""
    request = urllib.request.Request(address + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def scrape(address: str, path: str = "/metrics") -> dict[str, Metric]:
    status, _, text = get(address, path)
    assert status == 200, text
    return parse(text)


def used(node: Node) -> None:
    """Use the node in every way that a metric tells of."""
    with Admin(node.address) as admin:
        admin.topic_create("orders", 2)
    with Producer(node.address, group="shop") as producer:
        for number in range(10):
            producer.send("orders", b"%02d" % number, queue=number % 2, ack="flushed")
        producer.send("orders", b"memory", queue=0, ack="memory")
        producer.send_batch("orders", [b"x" * 100] * 50, queue=1, ack="flushed")
        producer.send("later", b"later", delay=3_600)
        producer.send("later", b"now", delay=0.2)
        with producer.transaction("orders", b"committed", queue=0):
            pass
        with producer.transaction("orders", b"rolled back", queue=0) as transaction:
            transaction.rollback()
        with producer.transaction("orders", b"open", queue=0) as transaction:
            transaction.unknown()
        with pytest.raises(SendError):
            producer.send("orders", b"no such queue", queue=7)
    with Reader(["orders"], node=node.address) as reader:
        reader.poll(timeout_s=10)
    with Consumer("orders", group="refuses", node=node.address) as consumer:

        def refuse(message: Message) -> ConsumeResult:
            consumer.close()
            return ConsumeResult.DEAD

        consumer.run(refuse, workers=1)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("metrics"), *SETTINGS) as made:
        used(made)
        with (
            Consumer("orders", group="slow", node=made.address) as slow,
            ShareConsumer("orders", group="mailers", node=made.address, invisible_s=600) as mailers,
        ):
            # 62 messages: 5 in queue 0 by hand and one by its transaction, and 55 in queue 1.
            taken: list[Message] = []
            while len(taken) < 62:
                taken += slow.poll(timeout_s=10)
            slow.commit()
            assert len(mailers.receive(max_messages=10, wait_s=10)) > 0
            yield made


@pytest.fixture(scope="module")
def address(node: Node) -> str:
    return address_of(node)


# ---------------------------------------------------------------- names and values


def test_both_formats_are_what_scrapers_take(address: str) -> None:
    eventually(lambda: "commitmq_up" in scrape(address), "the processes are known", 20)
    status, kind, text = get(address)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = parse(text)
    status, kind, text = get(address, Accept="application/openmetrics-text; version=1.0.0, text/plain;q=0.5")
    assert (status, kind) == (200, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert {name.removesuffix("_total") for name in found} == set(parse(text, openmetrics=True))


def test_only_names_of_the_table_are_shown_with_their_labels(address: str) -> None:
    counted = {one.name: one for one in vars(counting).values() if isinstance(one, Family)}
    for path, table, labels in (
        ("/metrics", exposition.NATIVE | exposition.OWN, list(exposition.NODE_LABELS)),
        ("/metrics?compat=exporter", exposition.EXPORTER, []),
    ):
        for metric in scrape(address, path).values():
            one = table.get(metric.name) or counted[metric.name]
            assert metric.kind == one.kind
            assert metric.help == one.help
            wanted = (labels if metric.name.startswith("rocketmq_") else []) + list(one.labels)
            for _, shown in metric.samples:
                there = [name for name, _ in shown if name != "le"]
                assert there == [name for name in wanted if name in there], metric.name
                assert set(wanted) - set(there) <= {"is_retry"}, metric.name


def test_the_figures_are_those_of_the_test(node: Node, address: str) -> None:
    found = scrape(address)
    assert found["commitmq_messages_in_total"].value(topic="orders", source="client") == 61
    assert found["rocketmq_messages_in_total"].value(topic="orders", message_type="normal", **NODE) == 61
    assert found["rocketmq_messages_in_total"].value(message_type="transaction") == 3
    assert found["rocketmq_messages_in_total"].value(message_type="delay") == 2
    assert found["commitmq_messages_in_total"].value(topic="orders", source="node") == 1, "the committed message"
    sizes = found["rocketmq_message_size"].samples.items()
    counts = [value for (series, labels), value in sizes if ("topic", "orders") in labels and series.endswith("_count")]
    assert counts == [12]
    out = found["rocketmq_messages_out_total"]
    assert out.value(topic="orders", consumer_group="slow", **NODE) == 62
    assert found["commitmq_messages_out_total"].value(topic="orders", group="slow", way="pull") == 62
    assert found["commitmq_messages_out_total"].value(topic="orders", group="", way="pull") > 0
    assert found["rocketmq_throughput_out_total"].value(topic="orders", consumer_group="slow") > 62 * 90
    assert found["commitmq_sends_refused_total"].value(code="INVALID_PARAMETER") == 1
    assert found["rocketmq_commit_messages_total"].value(topic="orders") == 1
    assert found["rocketmq_rollback_messages_total"].value(topic="orders") == 1
    assert found["rocketmq_half_messages"].value() == 1
    eventually(
        lambda: scrape(address)["rocketmq_timing_messages"].value(topic="later") == 1,
        "the short delay is over, the long one is not",
    )
    assert found["rocketmq_broker_permission"].value() == 6
    assert found["commitmq_ready"].value() == 1
    with Admin(node.address) as admin:
        assert found["rocketmq_topic_number"].value() == len(admin.topics())
        assert found["rocketmq_consumer_group_number"].value() == len(admin.groups())
    assert found["commitmq_queue_end_offset"].value(topic="orders", queue="1") == 55
    in_flight = found["commitmq_pop_inflight_messages"].value(topic="orders", group="mailers")
    assert in_flight > 0
    names = {"consumer_group": "mailers", "topic": "orders"}

    def is_shown() -> bool:
        shown = scrape(address).get("rocketmq_consumer_inflight_messages")
        return shown is not None and shown.value(**names) == in_flight

    eventually(is_shown, "the look at the groups' positions has come to this one", 20)
    eventually(
        lambda: scrape(address)["rocketmq_consumer_lag_messages"].value(consumer_group="mailers", topic="orders") == 62,
        "what is in flight and what is not are all messages",
    )
    assert found["rocketmq_consumer_lag_messages"].value(consumer_group="slow", topic="orders", is_retry="false") == 0
    assert found["commitmq_dead_letters_total"].value(topic="orders", group="refuses") >= 1
    flushed = found["commitmq_send_duration_seconds"].samples[
        "commitmq_send_duration_seconds_count", (("ack", "flushed"),)
    ]
    assert flushed >= 11
    assert found["commitmq_disk_total_bytes"].value() > found["commitmq_disk_used_bytes"].value() > 0


def test_every_process_is_measured(node: Node, address: str) -> None:
    found = eventually(
        lambda: (one := scrape(address)) and ("worker-metrics" in str(one["commitmq_up"].samples) and one),
        "the processes are known",
        20,
    )
    for role in ("writer", "flush", "coordinator", "reader-0", "supervisor", "worker-metrics", "pop", "transaction"):
        assert found["commitmq_up"].value(process=role) == 1, role
        assert found["commitmq_process_cpu_seconds_total"].value(process=role) >= 0, (
            "a rare turn is shorter than a tick"
        )
        resident = found["commitmq_process_resident_memory_bytes"].value(process=role)
        assert resident >= found["commitmq_process_memory_bytes"].value(process=role) > 1 << 20
        assert found["commitmq_process_open_fds"].value(process=role) > 3
    assert found["commitmq_process_heartbeat_age_seconds"].value(process="writer") < 5
    assert sum(found["commitmq_process_cpu_seconds_total"].samples.values()) > 0.05, "all of them together took more"


# ---------------------------------------------------------------- boards and alerts


def board_queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "commitmq.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    return found + [re.sub(r"label_values\((\w+), \w+\)", r"\1", one) for one in variables]


def rule_queries() -> list[str]:
    text = (DEPLOY / "prometheus" / "commitmq-rules.yml").read_text()
    return re.findall(r"^\s+expr: (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("path", "queries"),
    [
        pytest.param("/metrics", ROCKETMQ_QUERIES, id="rocketmq"),
        pytest.param("/metrics?compat=exporter", EXPORTER_QUERIES, id="exporter"),
        pytest.param("/metrics", board_queries(), id="board"),
        pytest.param("/metrics", rule_queries(), id="rules"),
    ],
)
def test_each_query_has_a_value(address: str, path: str, queries: list[str]) -> None:
    assert len(queries) > 10
    scrape(address, path)
    time.sleep(1.1)  # the exporter's rates are made of two answers
    series = series_of(scrape(address, path))
    for labels in [labels for found in series.values() for labels in found]:
        labels["instance"] = "node"  # Prometheus adds it
    assert [why for query in queries for why in missing(query, series)] == []
    assert missing("sum(commitmq_nothing) by (topic)", series) != []
    assert missing("sum(commitmq_ready) by (topic)", series) != [] or "exporter" in path


# ---------------------------------------------------------------- lag


def test_lag_in_seconds_is_right_within_a_second(node: Node, address: str) -> None:
    with Producer(node.address) as producer, Consumer("behind", group="late", node=node.address) as consumer:
        producer.send("behind", b"read")
        assert [one.body for one in consumer.poll(timeout_s=10)] == [b"read"]
        consumer.commit()
        began_s = time.time()
        producer.send("behind", b"first", ack="flushed")
        stored_s = time.time()
        time.sleep(1.5)
        producer.send("behind", b"second", ack="flushed")

        def lag() -> tuple[float, float, float]:
            found = scrape(address)
            return (
                found["commitmq_group_lag_messages"].value(group="late", topic="behind"),
                found["commitmq_group_lag_seconds"].value(group="late", topic="behind"),
                found["rocketmq_consumer_lag_latency_milliseconds"].value(consumer_group="late", topic="behind") / 1000,
            )

        eventually(lambda: lag()[0] == 2, "both messages are in the queue")
        for _ in range(3):
            asked_s = time.time()
            messages, seconds, native = lag()
            answered_s = time.time()
            assert messages == 2
            # On a machine that is not busy the bounds are milliseconds apart.
            for one in (seconds, native):
                assert asked_s - stored_s - 0.1 <= one <= answered_s - began_s + 0.1
            time.sleep(0.4)
        found = scrape(address)
        worst = found["commitmq_group_queue_lag_messages"]
        assert max(value for (_, labels), value in worst.samples.items() if ("group", "late") in labels) >= 1
        taken = 0
        while taken < 2:
            taken += len(consumer.poll(timeout_s=10))
        consumer.commit()
        eventually(lambda: lag() == (0, 0, 0), "the group has caught up")


# ---------------------------------------------------------------- deaths


def test_counters_survive_the_death_of_a_process(node: Node, address: str) -> None:
    before = scrape(address)["commitmq_messages_in_total"].value(topic="orders", source="client")
    pid = node.pids()["writer"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: node.healed("writer", pid), "the writer runs again")
    with Producer(node.address) as producer:
        producer.send("orders", b"after", ack="flushed")
    eventually(
        lambda: scrape(address)["commitmq_messages_in_total"].value(topic="orders", source="client") == before + 1,
        "the successor goes on counting",
    )
    up = eventually(
        lambda: scrape(address)["commitmq_process_restarts_total"].value(process="writer") >= 1, "it is told", 20
    )
    assert up


def test_the_metrics_process_may_die(node: Node, address: str) -> None:
    pid = node.pids()["worker-metrics"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: node.healed("worker-metrics", pid), "it runs again")
    assert scrape(address_of(node))["commitmq_messages_in_total"].value(topic="orders", source="client") >= 61


# ---------------------------------------------------------------- health


def test_health(node: Node) -> None:
    address = address_of(node)
    status, kind, text = get(address, "/health/live")
    assert (status, kind, json.loads(text)) == (200, "application/json", {"live": True})
    status, _, text = get(address, "/health/ready")
    well = {"ready": True, "reasons": [], "takes_sends": True, "notes": []}
    assert (status, json.loads(text)) == (200, well)
    pid = node.pids()["writer"]
    os.kill(pid, signal.SIGKILL)
    status, _, text = eventually(
        lambda: (found := get(address, "/health/ready"))[0] == 503 and found, "a killed writer is seen"
    )
    assert "writer" in json.loads(text)["reasons"][0]
    assert json.loads(text)["takes_sends"] is False
    assert get(address, "/health/live")[0] == 200
    eventually(lambda: get(address, "/health/ready")[0] == 200, "the node is ready again")
    assert get(address, "/other")[0] == 404
    assert get(address, "/metrics?compat=nothing")[0] == 400


def test_a_drained_node_is_ready_for_reads_and_says_that_it_takes_no_sends(node: Node) -> None:
    address = address_of(node)
    assert f"metrics {address}" in node.run("status", "--node", node.address).stdout
    assert node.run("drain", "on", "--node", node.address).returncode == 0
    try:
        status, _, text = get(address, "/health/ready")
        told = json.loads(text)
        assert (status, told["ready"], told["reasons"], told["takes_sends"]) == (200, True, [], False)
        assert "`commitmq drain off`" in told["notes"][0]
        permission = "rocketmq_broker_permission"
        eventually(lambda: scrape(address)[permission].value() == 4, "the metric says read only")
    finally:
        assert node.run("drain", "off", "--node", node.address).returncode == 0
    eventually(lambda: scrape(address)[permission].value() == 6, "the metric says read and write")


# ---------------------------------------------------------------- scrapers that misbehave


def test_scrapers_that_misbehave_cost_little(node: Node) -> None:
    address = address_of(node)
    host, port = address.removeprefix("http://").rsplit(":", 1)
    held = []
    for number in range(40):
        sock = socket.create_connection((host, int(port)), timeout=5)
        if number % 2:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 8)  # and reads nothing
        else:
            sock.sendall(b"GET /metrics HT")
        held.append(sock)
    pid = node.pids()["worker-metrics"]
    eventually(lambda: _answers(address), "others are served again", 20)
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 250 << 20
    for sock in held:
        sock.close()
    assert node.pids()["worker-metrics"] == pid


def _answers(address: str) -> bool:
    try:
        return get(address, "/health/live")[0] == 200
    except OSError:
        return False
