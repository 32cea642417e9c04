"""Goal: a plugin from outside, installed with pip, does what it is for, and counts every message once whatever dies.

Method: the distribution in tests/fixtures is installed into a fresh environment; a node of that environment runs it. What it
counted is compared with what was sent.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, Message, Producer, SendError
from commitmq.testing.node_process import alive, eventually
from environments import Environment, EnvironmentNode

TAG_COUNTS = Path(__file__).parents[1] / "fixtures" / "commitmq-tag-counts"
TAGS = ("drink", "food", "grün", "标签", None)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("env") / "venv")
    made.install(str(TAG_COUNTS))
    return made


@pytest.fixture(scope="module")
def node(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentNode]:
    node = EnvironmentNode(
        environment,
        tmp_path_factory.mktemp("plugin") / "store",
        "supervisor.restart_backoff_max_ms=200",
        "plugins.tag_counts.untagged=none",
        "plugins.tag_counts.longest_tag=20",
    )
    try:
        ended = node.start()
        assert ended.returncode == 0, ended.stderr
        yield node
        assert node.stop().returncode == 0, node.log_tail()
    finally:
        node.end()


def dispatcher(node: EnvironmentNode) -> dict[str, object]:
    with Admin(node.address) as admin:
        return next(row for row in admin.dispatchers() if row["name"] == "tag_counts")


def caught_up(node: EnvironmentNode) -> bool:
    with Admin(node.address) as admin:
        status = admin.status()
    row = next(row for row in status["dispatchers"] if row["name"] == "tag_counts")
    return bool(row["state"] == "running" and row["position"] == status["positions"]["written"])


def counted(node: EnvironmentNode, topic: str) -> dict[str, int]:
    eventually(lambda: caught_up(node), f"everything is counted; now {dispatcher(node)}")
    with Admin(node.address) as admin:
        rows = admin.dispatcher_query("tag_counts", {"topic": topic})["counts"]
    found: Counter[str] = Counter()
    for _minute, _topic, tag, messages in rows:
        found[tag] += messages
    return dict(found)


def stored(node: EnvironmentNode, topic: str) -> dict[str, int]:
    """What a consumer finds: after crashes that is the truth, since a send without an answer may be stored or not."""
    found: Counter[str] = Counter()
    read = node.run("consume", topic, "--from", "earliest", "--json", "--node", node.address)
    assert read.returncode == 0, read.stderr
    for line in read.stdout.splitlines():
        found[json.loads(line)["tags"] or "none"] += 1
    return dict(found)


def test_it_is_listed_with_its_distribution(node: EnvironmentNode, environment: Environment) -> None:
    listed = json.loads(node.run("plugins", "--json").stdout)
    assert [(one["name"], one["distribution"], one["version"], one["failure"]) for one in listed] == [
        ("tag_counts", "commitmq-tag-counts", "1.0.0", None)
    ]
    assert listed[0]["hooks"] == ["commitmq_config", "commitmq_dispatchers", "commitmq_register_commands"]
    assert listed[0]["dispatchers"] == ["tag_counts"]


def test_its_command_its_query_and_its_section(node: EnvironmentNode, tmp_path: Path) -> None:
    with Producer(node.address) as producer:
        producer.send_batch("bills", [b"x"] * 7, tags="paid")
        producer.send_batch("bills", [b"x"] * 2)
    assert counted(node, "bills") == {"paid": 7, "none": 2}
    printed = node.run("tag-counts", "--topic", "bills", "--node", node.address)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.endswith("9 messages\n")
    assert "bills  paid  7" in printed.stdout
    by_verb = node.run("dispatcher", "query", "tag_counts", '{"tag": "paid"}', "--node", node.address)
    assert json.loads(by_verb.stdout)["total"] == 7
    refused = node.run("dispatcher", "query", "tag_counts", '{"colour": 1}', "--node", node.address)
    assert refused.returncode != 0
    assert "a request has topic, tag, since_ms, until_ms, not colour" in refused.stderr
    assert "tag-counts" in node.run("--help").stdout
    wrong = "plugins.tag_counts.longest_tag=0"
    bad = node.run("start", "--store", str(tmp_path / "other"), "--set", "network.port=0", "--set", wrong)
    assert bad.returncode != 0
    assert "longest_tag" in bad.stderr


@pytest.mark.slow
def test_counts_are_exact_whatever_dies_under_load(node: EnvironmentNode) -> None:
    batch = [Message(b"x" * (number % 90 + 1), tags=TAGS[number % len(TAGS)]) for number in range(500)]
    go_on = threading.Event()
    go_on.set()
    sent = 0

    def send() -> None:
        nonlocal sent
        while go_on.is_set():
            try:
                with Producer(node.address, timeout_s=5) as producer:
                    while go_on.is_set():
                        producer.send_batch("load", batch)
                        sent += 1
                        go_on.wait(0.05)  # this shows correctness, and leaves the machine to its other users
            except (SendError, OSError):
                go_on.wait(0.1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(3):
            before = sent
            eventually(lambda before=before: sent > before + 2, "sends go on")  # type: ignore[misc]
            pid = node.pids()["dispatcher-tag_counts"]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: not alive(pid) and node.healed("dispatcher-tag_counts", pid), "it is back")  # type: ignore[misc]
        node.kill_all()
    finally:
        go_on.clear()
        sender.join(60)
    assert node.start().returncode == 0
    truth = stored(node, "load")
    assert sum(truth.values()) >= sent * len(batch) > 0
    assert counted(node, "load") == truth


@pytest.mark.slow
def test_a_restart_takes_the_code_that_is_installed_now(node: EnvironmentNode) -> None:
    with Producer(node.address) as producer:
        producer.send("restarted", b"x", tags="fine", queue=0)
    eventually(lambda: counted(node, "restarted") == {"fine": 1}, "it counts")
    before = node.pids()["dispatcher-tag_counts"]
    ended = node.run("dispatcher", "restart", "tag_counts", "--node", node.address)
    assert ended.stdout == "dispatcher tag_counts starts again\n"
    eventually(lambda: node.healed("dispatcher-tag_counts", before), "a new process serves")
    assert counted(node, "restarted") == {"fine": 1}


@pytest.mark.slow
def test_poison_is_parked_and_a_person_decides(node: EnvironmentNode) -> None:
    with Producer(node.address) as producer:
        producer.send("poison", b"x", tags="fine", queue=0)
        first = producer.send("poison", b"x", tags="x" * 21, queue=0)
        producer.send("poison", b"x", tags="x" * 22, queue=0)
        producer.send("poison", b"x", tags="fine", queue=0)
    eventually(lambda: dispatcher(node)["state"] == "parked", "it is parked")
    listed = node.run("dispatcher", "list", "--node", node.address).stdout
    assert f"tag_counts is parked at message 1 of poison queue 0 (physical offset {first.physical_offset})" in listed
    assert "a tag of 21 characters" in listed
    # Others do not care.
    assert stored(node, "poison")["fine"] == 2
    # Trying again without a change parks it again; a skip gets it to the second one.
    assert node.run("dispatcher", "retry", "tag_counts", "--node", node.address).returncode == 0
    eventually(lambda: dispatcher(node)["state"] != "parked", "it tries")
    eventually(lambda: dispatcher(node)["state"] == "parked", "it is parked again")
    assert node.run("dispatcher", "skip", "tag_counts", "--yes", "--node", node.address).returncode == 0
    eventually(lambda: "a tag of 22 characters" in str(dispatcher(node)["last_error"]), "it meets the second one")
    eventually(lambda: dispatcher(node)["state"] == "parked", "it is parked at the second one")
    # The person changes the setting: with a new start it takes the second one.
    node.settings.append("plugins.tag_counts.longest_tag=22")
    assert node.stop().returncode == 0
    assert node.start().returncode == 0
    assert counted(node, "poison") == {"fine": 2, "x" * 22: 1}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_own_tests_pass_where_it_is_installed(environment: Environment) -> None:
    assert " passed" in environment.pytest(TAG_COUNTS)
