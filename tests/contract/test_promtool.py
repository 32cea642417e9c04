"""Goal: Prometheus' own tools take the answers and the alerts, and its own engine finds a value for each query of the board.

Method: promtool and prometheus (Debian's package prometheus, fetched where the machine lacks it) on a live node. The default
suite checks the same by a reader of its own (``test_metrics``).
"""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_metrics import (
    DEPLOY,
    EXPORTER_QUERIES,
    ROCKETMQ_QUERIES,
    SETTINGS,
    address_of,
    board_queries,
    get,
    rule_queries,
    used,
)

from commitmq import Consumer, ShareConsumer
from debian_programs import program
from nodes import Node, eventually, free_port, start_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: commitmq
    static_configs: [{{targets: ["{target}"]}}]
  - job_name: exporter
    params: {{compat: [exporter]}}
    static_configs: [{{targets: ["{target}"]}}]
"""


def tool(name: str) -> str:
    return program(name, "prometheus")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    tool("promtool")
    with start_node(tmp_path_factory.mktemp("promtool"), *SETTINGS) as made:
        used(made)
        with (
            Consumer("orders", group="slow", node=made.address) as slow,
            ShareConsumer("orders", group="mailers", node=made.address, invisible_s=600) as mailers,
        ):
            taken = 0
            while taken < 62:
                taken += len(slow.poll(timeout_s=10))
            slow.commit()
            mailers.receive(max_messages=10, wait_s=10)
            yield made


def test_promtool_takes_the_answer(node: Node) -> None:
    for path in ("/metrics", "/metrics?compat=exporter"):
        text = get(address_of(node), path)[2]
        done = subprocess.run(
            [tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        said = (done.stdout + done.stderr).splitlines()
        assert [line for line in said if line.startswith("commitmq_")] == []
        # It does not like RocketMQ's units and names either, but takes them: code 3 means advice only.
        assert done.returncode in (0, 3), said[:20]


def test_promtool_takes_the_alerts() -> None:
    rules = DEPLOY / "prometheus" / "commitmq-rules.yml"
    done = subprocess.run([tool("promtool"), "check", "rules", rules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rule_queries())} rules found" in done.stdout


@pytest.fixture
def prometheus(node: Node, tmp_path: Path) -> Iterator[str]:
    engine = tool("prometheus")
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG.format(target=address_of(node).removeprefix("http://")))
    address = f"127.0.0.1:{free_port()}"
    command = [
        engine,
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(
                lambda: len(asked(address, "count_over_time(commitmq_ready[30s]) >= 4")) == 1, "it has scraped", 60
            )
            yield address
        finally:
            process.terminate()


def asked(address: str, query: str) -> list[Any]:
    url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(json.loads(answer.read())["data"]["result"])
    except OSError:
        return []


def without_limit(query: str) -> str:
    """An alert's expression has a value on a healthy node only without its comparison."""
    for operator in (" > ", " == ", " >= "):
        if operator in query and "{" not in query.rpartition(operator)[2]:
            query = query.rpartition(operator)[0]
    return query


def test_each_query_has_a_value_in_prometheus(prometheus: str) -> None:
    queries = [*ROCKETMQ_QUERIES, *EXPORTER_QUERIES, *board_queries(), *rule_queries()]
    values = {}
    for query in queries:
        if "absent(" in query or " and on " in query or " or " in query:
            continue
        shown = query.replace("$__rate_interval", "1m").replace('instance=~"$instance"', 'instance=~".*"')
        values[query] = asked(prometheus, without_limit(shown))
    for query, found in values.items():
        print(f"{found[0]['value'][1] if found else 'NOTHING':>24}  {query}")  # noqa: T201
    assert [query for query, found in values.items() if not found] == []
