"""Goal: each program in examples/ runs, and does what its docstring says.

Method: one real node for all programs, each of which runs as its reader runs it and has topics of its own. The test compares
what a program prints, and where that is not enough, what the node has afterwards. The program for Spark has its test in
tests/spark.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, Producer, Reader
from nodes import Node, environment, start_node, wait_until_dispatched

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
ELSEWHERE = {"spark_counts"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    path = f"{EXAMPLES}:{environment()['PYTHONPATH']}"
    plugin = {"COMMITMQ_PLUGINS": "key_counts=key_counts", "PYTHONPATH": path}
    with start_node(tmp_path_factory.mktemp("examples"), **plugin) as made:
        yield made


def run(node: Node, program: str, *arguments: str) -> list[str]:
    """The lines that a program of examples/ prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{program}.py", *arguments],
        env=environment(COMMITMQ_NODE=node.address),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def bodies(node: Node, topic: str) -> list[bytes]:
    """The bodies of a topic, in the order of its queues."""
    wait_until_dispatched(node.address)
    with Admin(node.address) as admin:
        count = sum(high - low for _, low, high, _ in admin.offsets(topic))
    found: list[tuple[int, int, bytes]] = []
    with Reader(topic, node=node.address) as consumer:
        while len(found) < count:
            found += [(one.queue_id, one.queue_offset, one.body) for one in consumer.poll(timeout_s=5)]
    return [body for _, _, body in sorted(found)]


def test_send_and_receive(node: Node) -> None:
    expected = [
        "sent 'one espresso': queue 0, flushed",
        "sent 'two croissants': queue 0, flushed",
        "sent 'one tiramisu': queue 0, flushed",
        "received 'two croissants' with the tag food",
        "received 'one tiramisu' with the tag food",
    ]
    assert run(node, "send_and_receive") == expected
    assert run(node, "send_and_receive") == expected, "the group's offset was not committed"


def test_async_sends(node: Node) -> None:
    assert run(node, "async_sends") == ["1000 messages acknowledged, 0 failed"]
    assert sorted(map(int, bodies(node, "example-measurements"))) == list(range(1000))


def test_batches(node: Node) -> None:
    assert run(node, "batches") == [
        "readings: offsets 0 to 499",
        "alarms: offsets 500 to 501",
        "sensor-7 91 too hot",
        "sensor-3 -40 too cold",
    ]
    assert bodies(node, "example-readings")[:500] == [b"reading %d" % number for number in range(500)]


def test_consumer_group(node: Node) -> None:
    first, *told, one, other = run(node, "consumer_group")
    assert first == "first gets the queues [0, 1, 2, 3]"
    # Which half goes to the second member depends on the members' names, which are random.
    half = told[0].removeprefix("first gives back the queues ")
    assert half in ("[0, 1]", "[2, 3]")
    rest = "[2, 3]" if half == "[0, 1]" else "[0, 1]"
    assert sorted(told[1:]) == ["40 tasks done, 0 left", f"second gets the queues {half}"]
    assert (one, other) == (f"second gives back the queues {half}", f"first gives back the queues {rest}")
    with Admin(node.address) as admin:
        assert sorted(row.committed or 0 for row in admin.group_lag("example-workers")) == [10] * 4


def test_order_by_key(node: Node) -> None:
    lines = run(node, "order_by_key")
    assert len(lines) == 4
    queues = set()
    for number, line in enumerate(lines, 1):
        found = re.fullmatch(rf"order-{number} in queue \{{(\d)\}}: created, paid, packed, sent", line)
        assert found, line
        queues.add(found[1])
    assert len(queues) == 4, "the keys of the example are in different queues"


def test_sql_filter(node: Node) -> None:
    *found, refused = run(node, "sql_filter")
    assert found == ["a scooter for 1250 in eu", "a bicycle for 600 in us"]
    assert re.match("refused: INVALID_PARAMETER: .* wrong at character 8", refused), refused


def test_idempotent_import(node: Node) -> None:
    assert run(node, "idempotent_import", "600") == ["600 rows stored, 0 were stored before"]
    assert run(node, "idempotent_import") == ["400 rows stored, 600 were stored before"]
    assert run(node, "idempotent_import") == ["0 rows stored, 1000 were stored before"]
    assert bodies(node, "example-ledger") == [b"row %d" % number for number in range(1000)]


def test_order_service(node: Node, tmp_path: Path) -> None:
    for runs in (1, 2):
        *booked, counts, dead = run(node, "order_service", str(tmp_path / "orders.db"))
        assert sorted(booked) == ["booked croissant at the second try", "booked espresso at the second try"]
        assert counts == f"({2 * runs}, {440 * runs}) orders and cents", "each order is booked once"
        assert dead == f"dead letters: {['not an order'] * runs}"


def test_asyncio_clients(node: Node) -> None:
    assert run(node, "asyncio_clients") == ["ann: 20, ben: 20, cleo: 20"]
    assert len(set(bodies(node, "example-chat"))) == 60


def test_queries(node: Node) -> None:
    assert run(node, "queries") == [
        "customer-7: ['12 euros', '12 euros received'] complete",
        "open: ['12 euros', '30 euros']",
        "in this time: 3",
        "by message id: 12 euros received",
    ]


def test_memory_cache(node: Node) -> None:
    assert run(node, "memory_cache") == [
        "at first: {'coffee': '3.20', 'tea': '2.30'}",
        "then: {'coffee': '3.50'}",
        "kept in: memory",
    ]
    with Producer(node.address) as producer:
        producer.send("example-control", b"in the log")
    log = b"".join(path.read_bytes() for path in sorted((node.store / "commitlog").iterdir()))
    assert b"example-control" in log
    assert b"example-prices" not in log


def test_key_counts(node: Node) -> None:
    assert run(node, "key_counts") == ["{'about': 1, 'home': 3, 'news': 1}"]
    assert run(node, "key_counts") == ["{'about': 2, 'home': 6, 'news': 2}"]


def test_each_program_has_its_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(PROGRAMS) - ELSEWHERE == tested & set(PROGRAMS)
    assert len(PROGRAMS) >= 10


@pytest.mark.parametrize("program", PROGRAMS)
def test_its_docstring_says_how_to_run_it(program: str) -> None:
    text = (EXAMPLES / f"{program}.py").read_text(encoding="utf-8")
    assert 15 <= len(text.splitlines()) <= 65
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert f"`python examples/{program}.py" in docstring
