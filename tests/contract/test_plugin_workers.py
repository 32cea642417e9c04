"""Goal: a plugin's worker process lives like the node's own, is configured by its own section, and harms nobody.

Method: a real node with a plugin that has one worker that serves and one that dies at once; the plugin is found by its
distribution's entry point. Configuration that does not fit is refused at the start, whoever wrote the section.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from commitmq import Producer, Reader
from commitmq.supervision.exit_codes import CliExit
from nodes import Node, commitmq, environment, eventually, start_node

FOLDER = Path(__file__).parent / "misbehaving"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("distribution")
    metadata = folder / "serving-2.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: serving\nVersion: 2.5\n")
    (metadata / "entry_points.txt").write_text("[commitmq]\nserving = worker_plugin\n")
    return ":".join([str(folder), str(FOLDER), environment()["PYTHONPATH"]])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, paths: str) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("workers")
    with start_node(folder, "plugins.serving.step=7", PYTHONPATH=paths) as node:
        yield node


def ask(node: Node, text: str) -> str:
    endpoint = eventually(lambda: node.row("worker-serving").get("endpoints"), "the worker serves")[0]
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        dealer.send_string(text)
        assert dealer.poll(10_000), "no answer"
        return dealer.recv_string()
    finally:
        context.destroy(linger=0)


def test_it_serves_with_its_own_settings_and_sees_the_nodes_positions(node: Node) -> None:
    assert ask(node, "you").startswith("hello you 7 ")
    with Producer(node.address) as producer:
        end = producer.send("numbers", b"one").physical_offset
    assert int(ask(node, "you").split()[-1]) > end


def test_it_is_a_client_of_its_own_node(node: Node) -> None:
    assert ask(node, "send").startswith("hello send 7 ")
    with Reader(["from-the-worker"], node=node.address) as consumer:
        assert [one.body for one in consumer.poll(timeout_s=10)] == [b"one"]


def test_plugins_are_asked_with_settings(paths: str) -> None:
    refused = commitmq("plugins", "--json", "--set", "plugins.serving.step=0", PYTHONPATH=paths)
    assert "plugins.serving.step=0 is below the least allowed value 1" in refused.stderr
    assert "step" not in commitmq("plugins", "--json", "--set", "plugins.serving.step=9", PYTHONPATH=paths).stderr


def test_a_server_has_the_priority_of_the_node_and_other_workers_give_way(node: Node) -> None:
    pids = node.pids()
    own = os.getpriority(os.PRIO_PROCESS, pids["coordinator"])
    assert os.getpriority(os.PRIO_PROCESS, pids["worker-serving"]) == own
    eventually(
        lambda: os.getpriority(os.PRIO_PROCESS, node.pids()["worker-idling"]) == min(own + 5, 19),
        "dispatch.plugin_niceness holds for a worker that is no server",
    )


def test_a_worker_has_failpoints_of_its_own(tmp_path: Path, paths: str) -> None:
    (once := tmp_path / "once").mkdir()
    points = {"COMMITMQ_FAILPOINTS": "idling.begins=kill@1", "COMMITMQ_FAILPOINTS_ONCE": str(once)}
    with start_node(tmp_path, PYTHONPATH=paths, **points) as node:
        eventually(lambda: node.row("worker-idling").get("restarts") == 1, "it died once")
        assert (once / "idling.begins").exists(), "it died there"


def test_it_is_started_again_after_its_death(node: Node) -> None:
    ask(node, "before")
    pid = node.pids()["worker-serving"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: node.healed("worker-serving", pid), "the worker runs again")
    assert ask(node, "after").startswith("hello after 7 ")


def test_one_that_cannot_live_is_tried_with_pauses_and_named(node: Node) -> None:
    row = eventually(
        lambda: (found := node.row("worker-dying")).get("restarts", 0) >= 3 and found, "it was tried again"
    )
    assert "no life in it" in row["last_error"]
    assert node.report()["node"]["state"] == "ready"
    assert all(row["restarts"] == 0 for row in node.report()["processes"] if not row["role"].startswith("worker-"))


def test_it_stops_before_the_nodes_own_and_the_store_is_closed_in_order(tmp_path: Path, paths: str) -> None:
    with start_node(tmp_path, PYTHONPATH=paths) as node:
        with Producer(node.address) as producer:
            producer.send("numbers", b"one")
        eventually(lambda: node.row("worker-serving").get("state") == "ready", "the worker serves")
        ended = node.stop()
        assert ended.returncode == CliExit.OK, ended.stderr
        assert int((node.store / "commitmq" / "serving-stopped").read_text()) > 0
        assert not (node.store / "abort").exists()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("plugins.serving.step=0", "plugins.serving.step=0 is below the least allowed value 1"),
        ("plugins.serving.step=fast", "plugins.serving.step='fast' must be a whole number"),
        ("plugins.serving.stride=1", "there is no key plugins.serving.stride; keys are step, greeting"),
        (
            "plugins.other.step=1",
            "no plugin has a section [plugins.other]; sections of plugins: rocketmq, dashboard, serving",
        ),
        ("plugins.serving.greeting=ahoy", "must be one of hello, bye"),
    ],
)
def test_a_section_that_does_not_fit_refuses_the_start(tmp_path: Path, paths: str, setting: str, sentence: str) -> None:
    node = Node(tmp_path / "store", setting)
    try:
        ended = node.start(PYTHONPATH=paths)
        assert ended.returncode == CliExit.CONFIG_ERROR
        assert sentence in ended.stderr
        assert not (node.store / "abort").exists(), "nothing was served, so there is nothing to recover"
    finally:
        node.end()


def test_a_plugin_can_check_what_does_not_go_together(tmp_path: Path, paths: str) -> None:
    node = Node(tmp_path / "store", "plugins.serving.greeting=bye", "plugins.serving.step=100")
    try:
        ended = node.start(PYTHONPATH=paths)
        assert ended.returncode == CliExit.CONFIG_ERROR
        assert "greeting=bye and step=100 do not go together" in ended.stderr
    finally:
        node.end()
