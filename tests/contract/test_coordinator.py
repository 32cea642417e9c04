"""Goal: what clients and workers may rely on when they talk to the coordinator, also when it is killed or its disk is
full. Method: the real worker in a process of its own, over real ZeroMQ, on real files.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from commitmq.control import ControlBlock, Word
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.journal import OffsetsJournal, SetOffsets, encode_record
from commitmq.store.metadata.topic_files import load_topics
from commitmq.supervision import node_files
from commitmq.workers.runtime.context import ExitCode
from golden_stores import GoldenStore

PROGRAM = Path(__file__).with_name("coordinator_process.py")
ANSWER_MS = 10_000
FAST = {"heartbeat_interval_ms": 100, "session_timeout_ms": 600, "offsets_interval_ms": 100}


class Client:
    """A DEALER that speaks raw headers."""

    def __init__(self, sock: zmq.Socket[bytes], endpoint: str) -> None:
        self.socket = sock
        self.socket.connect(endpoint)
        self._next = 0

    def send(self, op: str, **fields: Any) -> int:
        self._next += 1
        self.socket.send(orjson.dumps({"v": 1, "op": op, "id": self._next, **fields}))
        return self._next

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = orjson.loads(self.socket.recv())
        return answer

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        identity = self.send(op, **fields)
        answer = self.answer()
        assert answer["id"] == identity
        return answer

    def ok(self, op: str, **fields: Any) -> dict[str, Any]:
        answer = self.call(op, **fields)
        assert answer["ok"] is True, answer
        return answer

    def refused(self, op: str, **fields: Any) -> str:
        answer = self.call(op, **fields)
        assert answer["ok"] is False
        assert len(answer["error"]) > 10
        code: str = answer["code"]
        return code


class Node:
    """A store folder, its control block, and coordinators that come and go on it."""

    def __init__(self, root: Path) -> None:
        self.layout = StoreLayout(root)
        self.layout.run.mkdir(parents=True, exist_ok=True)
        node_files.make_folders(self.layout)
        node_files.empty_run_folder(self.layout)
        self.control = ControlBlock(self.layout.control, create=True)
        self.heard(1 << 40)  # no process takes sends here, so every deletion has been heard of
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.lifeline: socket.socket | None = None
        self.endpoints: list[str] = []

    def start(self, config: dict[str, Any] | None = None, *, max_file_bytes: int | None = None) -> None:
        self.lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lifeline.settimeout(20)
        extra = [] if max_file_bytes is None else [str(max_file_bytes)]
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, str(PROGRAM), str(self.layout.root), str(theirs.fileno())),
                    *(json.dumps(config or {}), *extra),
                ],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
            )
        self.endpoints = []
        message = self.lifeline.recv(1 << 16)
        if message:
            self.endpoints = orjson.loads(message).get("endpoints", [])

    def heard(self, version: int) -> None:
        """Say that those who take sends know of all changes of topics up to ``version``."""
        self.control.put(Word.WRITER_TOPICS, version)
        self.control.put(Word.MEMORY_TOPICS, version)

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self.zmq.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self.sockets.append(sock)
        return sock

    def client(self, which: int = 1) -> Client:
        return Client(self.socket(zmq.DEALER), self.endpoints[which])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self._finish()

    def stop(self) -> int:
        assert self.lifeline is not None
        self.lifeline.send(b'{"command":"stop"}')
        return self._finish()

    def _finish(self) -> int:
        assert self.process is not None
        assert self.lifeline is not None
        _, self.errors = self.process.communicate(timeout=20)
        self.lifeline.close()
        code, self.process = self.process.returncode, None
        return code

    def close(self) -> None:
        if self.process is not None:
            self.kill()
        for sock in self.sockets:
            sock.close()
        self.zmq.term()
        self.control.close()
        if self.layout.sockets != self.layout.run:
            shutil.rmtree(self.layout.sockets)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "store")
    yield node
    node.close()


def loaded(path: Path) -> dict[str, Any]:
    """A configuration file that is there."""
    found = json_config.load(path)
    assert isinstance(found, dict)
    return found


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)


def _subscribed(node: Node) -> zmq.Socket[bytes]:
    news = node.socket(zmq.SUB)
    news.setsockopt(zmq.SUBSCRIBE, b"topics")
    news.connect(node.layout.ipc("topics"))
    # A subscription is there when the publisher's side has taken it; only a message that arrives proves that.
    client = node.client()
    for number in range(100):
        client.ok("topic.create", topic=f"probe{number}", queues=1)
        if news.poll(100):
            break
    while news.poll(100):
        news.recv_multipart()
    return news


def test_topics_over_tcp_and_ipc(node: Node) -> None:
    node.start()
    for which in (0, 1):
        client = node.client(which)
        name = f"orders{which}"
        assert client.ok("topic.create", topic=name, queues=3)["created"] is True
        assert client.ok("topic.create", topic=name, queues=3)["created"] is False
        assert client.refused("topic.create", topic=name, queues=4) == "INVALID_PARAMETER"
        topic = client.ok("topic.route", topic=name)["topic"]
        assert (topic["read_queues"], topic["write_queues"], topic["perm"]) == (3, 3, 6)
        assert client.refused("topic.route", topic=f"unknown{which}") == "TOPIC_NOT_EXIST"
        assert client.ok("topic.route", topic=f"made{which}", create=True)["topic"]["write_queues"] == 4
        assert client.refused("topic.route", topic="SELF_TEST_TOPIC", create=True) == "NO_PERMISSION"
    names = [topic["name"] for topic in node.client().ok("topic.list")["topics"]]
    assert names == ["made0", "made1", "orders0", "orders1"]
    assert node.client().ok("topic.describe", topic="made1")["topic"]["groups"] == []
    assert node.stop() == ExitCode.CLEAN


def test_changes_of_topics_are_published_after_they_are_durable(node: Node) -> None:
    node.start()
    news, client = _subscribed(node), node.client()
    node.control.put(Word.WRITTEN, 4_711)
    client.ok("topic.create", topic="t", queues=2)
    kind, body = news.recv_multipart()
    first = orjson.loads(body)
    assert kind == b"topics"
    assert first["topics"]["t"]["read_queues"] == 2
    assert first["version"] == node.control.get(Word.TOPICS_VERSION)
    assert "t" in load_topics(node.layout).topics
    _until(lambda: "t" in loaded(node.layout.config / "topics.json")["topicConfigTable"], "topics.json")
    client.ok("offset.commit", group="g", offsets=[["t", 1, 9]])
    assert client.ok("topic.delete", topic="t")["tombstone"] == 4_711
    incarnation = first["topics"]["t"]["incarnation"]
    second, third = (orjson.loads(news.recv_multipart()[1]) for _ in range(2))
    assert (second["version"], second["ending"], second["deleted"]) == (first["version"] + 1, [["t", incarnation]], [])
    assert (third["version"], third["ending"], third["deleted"]) == (
        first["version"] + 2,
        [],
        [["t", 4_711, incarnation]],
    )
    assert json_config.load(node.layout.tombstones) == {"t": 4_711}
    assert client.ok("offset.fetch", group="g", queues=[["t", 1]])["offsets"] == [["t", 1, -1]]
    assert client.refused("topic.delete", topic="t") == "TOPIC_NOT_EXIST"
    client.ok("topic.create", topic="t", queues=1)
    again = orjson.loads(news.recv_multipart()[1])["topics"]["t"]
    assert again["write_queues"] == 1
    assert again["incarnation"] > incarnation


def test_a_new_coordinator_makes_the_others_look(node: Node) -> None:
    node.start()
    version = node.control.get(Word.TOPICS_VERSION)
    node.kill()
    node.start()
    assert node.control.get(Word.TOPICS_VERSION) > version


def test_bad_requests_get_their_error_and_the_loop_goes_on(node: Node) -> None:
    node.start()
    client = node.client()
    cases: list[tuple[bytes, int | None, str]] = [
        (b"", None, "BAD_HEADER"),
        (b"\xff\xfe", None, "BAD_HEADER"),
        (b"[1]", None, "BAD_HEADER"),
        (b'{"id":7,"op":"topic.list"}', 7, "BAD_HEADER"),
        (b'{"v":2,"id":8,"op":"topic.list"}', 8, "UNSUPPORTED_VERSION"),
        (b'{"v":1,"op":"topic.list"}', None, "BAD_HEADER"),
        (b'{"v":1,"id":9,"op":"topic.paint"}', 9, "UNKNOWN_OP"),
        (b'{"v":1,"id":10,"op":"topic.create"}', 10, "INVALID_PARAMETER"),
        (b'{"v":1,"id":11,"op":"group.join","group":"g","member":"m","topics":[]}', 11, "INVALID_PARAMETER"),
        (b"[" * 100_000, None, "BAD_HEADER"),
    ]
    for frame, identity, code in cases:
        client.socket.send(frame)
        answer = client.answer()
        assert (answer["ok"], answer["id"], answer["code"]) == (False, identity, code), frame[:80]
    client.socket.send_multipart([b'{"v":1,"id":12,"op":"topic.list"}', b"payload"])
    assert client.answer()["code"] == "INVALID_PARAMETER"
    odd: list[Any] = [None, 0, -1, 1 << 63, 1.5, True, "", "x" * 300, "a b", [], [[]], [["t", 0]], {}, {"a": 1}]
    for op, fields in {
        "topic.route": ("topic", "create"),
        "topic.create": ("topic", "queues", "perm", "attributes", "update"),
        "topic.delete": ("topic",),
        "group.join": ("group", "member", "topics", "session_timeout_ms", "owned", "generation"),
        "group.heartbeat": ("group", "member", "generation", "owned"),
        "group.leave": ("group", "member"),
        "group.describe": ("group",),
        "offset.commit": ("group", "member", "offsets", "reset", "generation"),
        "offset.fetch": ("group", "queues"),
    }.items():
        good = {
            "topic": "t",
            "group": "g",
            "member": "m",
            "topics": ["t"],
            "owned": [],
            "offsets": [],
            "queues": 1,
            "generation": 0,
        }
        for field in fields:
            for value in odd:
                answer = client.call(op, **{**good, field: value})
                assert answer["ok"] or answer["code"] != "SYSTEM_ERROR", (op, field, value, answer)
    assert client.ok("topic.list")
    assert node.process is not None
    assert node.process.poll() is None


def test_commits_are_stored_fenced_and_never_go_back(node: Node) -> None:
    node.start()
    client = node.client()
    client.ok("topic.create", topic="t", queues=2)
    fetch = {"group": "g", "queues": [["t", 0], ["t", 1], ["t", 9]]}
    assert client.ok("offset.fetch", **fetch)["offsets"] == [["t", 0, -1], ["t", 1, -1], ["t", 9, -1]]
    assert client.ok("offset.commit", group="g", offsets=[["t", 0, 5]])["stored"] == [["t", 0, 5]]
    assert client.ok("offset.commit", group="g", offsets=[["t", 0, 3], ["t", 1, 1]])["stored"] == [
        ["t", 0, 5],
        ["t", 1, 1],
    ]
    assert client.ok("offset.commit", group="g", offsets=[["t", 0, 2]], reset=True)["stored"] == [["t", 0, 2]]
    assert client.refused("offset.commit", group="g", offsets=[["t", 0, 9], ["t", 2, 1]]) == "INVALID_PARAMETER"
    assert client.refused("offset.commit", group="g", offsets=[["u", 0, 9]]) == "TOPIC_NOT_EXIST"
    assert client.refused("offset.commit", group="g", member="m", offsets=[["t", 0, 9]]) == "UNKNOWN_MEMBER"
    assert client.ok("offset.fetch", **fetch)["offsets"][0] == ["t", 0, 2], "a commit happens as a whole or not at all"
    view = client.ok("group.join", group="g", member="m", topics=["t"])
    assert view["assigned"] == [["t", 0], ["t", 1]]
    assert client.refused("offset.commit", group="g", offsets=[["t", 0, 9]], reset=True) == "FENCED"
    client.ok("offset.commit", group="g", member="m", generation=view["generation"], offsets=[["t", 0, 9]])
    client.ok("group.leave", group="g", member="m")
    client.ok("offset.commit", group="g", offsets=[["t", 0, 1]], reset=True)


def test_many_commits_share_a_sync_and_are_answered_in_order(node: Node) -> None:
    node.start()
    client = node.client()
    client.ok("topic.create", topic="t", queues=1)
    sent = [client.send("offset.commit", group="g", offsets=[["t", 0, number]]) for number in range(500)]
    last = client.send("offset.fetch", group="g", queues=[["t", 0]])
    answers = [client.answer() for _ in range(501)]
    assert [answer["id"] for answer in answers] == [*sent, last]
    assert all(answer["ok"] for answer in answers)
    assert answers[-1]["offsets"] == [["t", 0, 499]]


def test_equal_lists_of_a_turn_have_their_own_ids_and_show_all_changes_before_them(node: Node) -> None:
    node.start()
    client = node.client()
    asked: dict[int, int | None] = {}
    for number in range(50):
        asked[client.send("topic.create", topic=f"t{number}", queues=1)] = None
        asked[client.send("topic.list")] = number
        asked[client.send("topic.list", limit=1)] = 0
        asked[client.send("group.list")] = None
        asked[client.send("topic.list")] = number
    answers = [client.answer() for _ in asked]
    assert [answer["id"] for answer in answers] == [*asked]
    for answer in answers:
        assert answer["ok"], answer
        least = asked[answer["id"]]
        if least is not None:
            names = {topic["name"] for topic in answer["topics"]}
            assert names >= {f"t{number}" for number in range(least + 1)} or len(names) == 1


@pytest.mark.slow
def test_acknowledged_offsets_survive_kill(node: Node) -> None:
    node.start({"groups": {**FAST, "offsets_interval_ms": 50}})
    client = node.client()
    client.ok("topic.create", topic="t", queues=4)
    acknowledged: dict[int, int] = {}
    for number in range(6):
        end = time.monotonic() + 0.1 + number * 0.017
        offset = number * 100_000
        while time.monotonic() < end or len(acknowledged) < 4:
            offset += 1
            client.ok("offset.commit", group="g", offsets=[["t", offset % 4, offset]])
            acknowledged[offset % 4] = offset
        client.send("offset.commit", group="g", offsets=[["t", 0, offset + 1_000]])
        node.kill()
        node.start({"groups": {**FAST, "offsets_interval_ms": 50}})
        client = node.client()
        answer = client.ok("offset.fetch", group="g", queues=[["t", queue] for queue in range(4)])
        for _, queue, found in answer["offsets"]:
            assert found == acknowledged[queue] or (queue, found) == (0, offset + 1_000)
            acknowledged[queue] = found


def test_the_json_file_follows_and_is_whole_after_stop(node: Node) -> None:
    node.start({"groups": FAST})
    client = node.client()
    client.ok("topic.create", topic="t", queues=1)
    client.ok("offset.commit", group="g", offsets=[["t", 0, 7]])
    path = node.layout.config / "consumerOffset.json"

    def table() -> Any:
        return (json_config.load(path) or {}).get("offsetTable")

    _until(lambda: table() == {"t@g": {0: 7}}, "the periodic snapshot")
    client.ok("offset.commit", group="g", offsets=[["t", 0, 8]])
    assert node.stop() == ExitCode.CLEAN
    assert table() == {"t@g": {0: 8}}
    groups = loaded(node.layout.config / "subscriptionGroup.json")
    assert groups["subscriptionGroupTable"]["g"]["retryMaxTimes"] == 16
    found = OffsetsJournal.open(node.layout.own / "offsets.journal")
    assert found is not None
    found[0].close()
    assert found[1].changes == []


def test_retry_topics_are_those_of_the_group_s_settings(node: Node) -> None:
    node.start()
    client = node.client()
    wanted = {"retry": "%RETRY%g", "dead": "%DLQ%g", "max_retries": 16}
    for _ in range(2):
        answer = client.ok("group.retry_topics", group="g")
        assert {name: answer[name] for name in wanted} == wanted
    topics = {one["name"]: one for one in client.ok("topic.list")["topics"]}
    assert {name: (topics[name]["read_queues"], topics[name]["perm"]) for name in topics} == {
        "%DLQ%g": (1, 6),
        "%RETRY%g": (1, 6),
    }
    client.ok("topic.delete", topic="%RETRY%g")
    assert node.stop() == ExitCode.CLEAN
    # As an operator, or RocketMQ, may have written it.
    path = node.layout.config / "subscriptionGroup.json"
    data = loaded(path)
    data["subscriptionGroupTable"]["g"].update(retryQueueNums=3, retryMaxTimes=5)
    data["subscriptionGroupTable"]["none"] = {
        **data["subscriptionGroupTable"]["g"],
        "groupName": "none",
        "retryQueueNums": 0,
    }
    json_config.persist(path, data)
    node.start()
    client = node.client()
    assert client.ok("group.retry_topics", group="g")["max_retries"] == 5
    assert client.ok("topic.describe", topic="%RETRY%g")["topic"]["read_queues"] == 3
    assert client.ok("group.retry_topics", group="h", only_retry=True)["dead"] == "%DLQ%h"
    assert client.ok("topic.describe", topic="%RETRY%h")["topic"]["read_queues"] == 1
    assert client.refused("topic.describe", topic="%DLQ%h") == "TOPIC_NOT_EXIST"
    assert client.refused("group.retry_topics", group="none") == "NO_PERMISSION"
    assert client.refused("group.retry_topics", group="b a d") == "INVALID_PARAMETER"
    assert client.refused("group.retry_topics") == "INVALID_PARAMETER"


def test_a_full_disk_refuses_commits_keeps_reads_and_heals(node: Node) -> None:
    node.start(max_file_bytes=0)
    client = node.client()
    client.ok("topic.create", topic="t", queues=1)
    client.ok("offset.commit", group="g", offsets=[["t", 0, 1]])
    assert node.process is not None
    node.process.send_signal(signal.SIGUSR2)
    answer = client.call("offset.commit", group="g", offsets=[["t", 0, 2]])
    assert (answer["code"], answer["retry_after_ms"] > 0) == ("SERVICE_NOT_AVAILABLE", True)
    assert client.refused("offset.commit", group="g", offsets=[["t", 0, 2]]) == "SERVICE_NOT_AVAILABLE"
    assert client.refused("topic.create", topic="u", queues=1) == "SERVICE_NOT_AVAILABLE"
    assert client.refused("topic.delete", topic="t") == "SERVICE_NOT_AVAILABLE"
    assert client.refused("topic.route", topic="u") == "TOPIC_NOT_EXIST"
    assert client.ok("offset.fetch", group="g", queues=[["t", 0]])["offsets"] == [["t", 0, 1]]
    assert client.ok("group.join", group="g", member="m", topics=["t"])["assigned"] == [["t", 0]]
    client.ok("group.leave", group="g", member="m")
    node.process.send_signal(signal.SIGUSR1)
    _until(lambda: client.call("offset.commit", group="g", offsets=[["t", 0, 3]])["ok"], "healing")
    # Topics have a journal of their own, which heals at its own next attempt.
    _until(lambda: client.call("topic.create", topic="u", queues=1).get("created") is True, "healing of topics")
    node.kill()
    node.start()
    assert node.client().ok("offset.fetch", group="g", queues=[["t", 0]])["offsets"] == [["t", 0, 3]]


def test_a_torn_journal_is_cut_and_a_damaged_one_refused(node: Node) -> None:
    node.start()
    client = node.client()
    client.ok("topic.create", topic="t", queues=1)
    for offset in (1, 2, 3):
        client.ok("offset.commit", group="g", offsets=[["t", 0, offset]])
    node.kill()
    path = node.layout.own / "offsets.journal"
    path.write_bytes(path.read_bytes() + encode_record(4, orjson.dumps([["set", "g", "t", [[0, 99]]]]))[:-3])
    damaged = bytearray(path.read_bytes())
    node.start()
    assert node.client().ok("offset.fetch", group="g", queues=[["t", 0]])["offsets"] == [["t", 0, 3]]
    assert node.stop() == ExitCode.CLEAN
    assert b"torn tail" in node.errors
    damaged[damaged.index(b"[0,2]")] ^= 1
    path.write_bytes(damaged)
    node.start()
    assert node._finish() == ExitCode.STORE_UNUSABLE
    assert b"offsets.journal" in node.errors
    assert path.read_bytes() == damaged


def test_a_deletion_that_a_crash_cut_short_is_finished_once_it_was_heard_of(node: Node) -> None:
    node.start()
    client = node.client()
    incarnation = client.ok("topic.create", topic="t", queues=1)["topic"]["incarnation"]
    client.ok("offset.commit", group="g", offsets=[["t", 0, 3]])
    node.kill()
    json_config.persist(node.layout.endings, {"t": incarnation})
    node.control.put(Word.WRITTEN, 80)
    node.heard(node.control.get(Word.TOPICS_VERSION))  # of nothing that the next coordinator says
    node.start({"topics": {"delete_timeout_ms": 300}})
    client = node.client()
    assert client.refused("topic.route", topic="t") == "TOPIC_NOT_EXIST"
    assert client.refused("topic.create", topic="t") == "SERVICE_NOT_AVAILABLE", (
        "no new one before the old one has ended"
    )
    assert client.refused("topic.delete", topic="t", incarnation=incarnation) == "SERVICE_NOT_AVAILABLE"
    assert json_config.load(node.layout.tombstones) is None
    node.control.put(Word.WRITTEN, 120)
    node.heard(node.control.get(Word.TOPICS_VERSION))
    answer = client.ok("topic.delete", topic="t", incarnation=incarnation)
    assert answer["tombstone"] == 120, "where the log was when they had heard"
    assert client.ok("offset.fetch", group="g", queues=[["t", 0]])["offsets"] == [["t", 0, -1]]
    assert json_config.load(node.layout.tombstones) == {"t": 120}
    assert json_config.load(node.layout.endings) == {}


def test_a_deletion_that_is_asked_for_again_never_deletes_the_next_topic(node: Node) -> None:
    node.start()
    client = node.client()
    first = client.ok("topic.create", topic="t", queues=1)["topic"]["incarnation"]
    assert client.ok("topic.delete", topic="t", incarnation=first)["incarnation"] == first
    assert client.ok("topic.delete", topic="t", incarnation=first)["deleted"] == "t", "its answer may have been lost"
    second = client.ok("topic.create", topic="t", queues=1)["topic"]["incarnation"]
    assert second > first
    assert client.ok("topic.delete", topic="t", incarnation=first)["deleted"] == "t"
    assert client.refused("topic.delete", topic="t", incarnation=second + 1) == "TOPIC_NOT_EXIST"
    assert client.ok("topic.route", topic="t")["topic"]["incarnation"] == second
    node.kill()
    node.start()
    assert node.client().ok("topic.route", topic="t")["topic"]["incarnation"] == second


class Member:
    """A consumer's side of the membership, driven by hand."""

    def __init__(self, node: Node, name: str) -> None:
        self.node, self.name = node, name
        self.client = node.client()
        self.owned: list[list[Any]] = []
        self.generation = self.pause_ms = 0

    def join(self) -> None:
        self._take(
            self.client.ok(
                "group.join",
                group="g",
                member=self.name,
                topics=["t"],
                owned=self.owned,
                generation=self.generation,
            )
        )

    def heartbeat(self) -> str | None:
        answer = self.client.call(
            "group.heartbeat", group="g", member=self.name, generation=self.generation, owned=self.owned
        )
        if not answer["ok"]:
            return str(answer["code"])
        self._take(answer)
        return None

    def _take(self, answer: dict[str, Any]) -> None:
        self.generation, self.owned, self.pause_ms = (
            answer["generation"],
            answer["assigned"],
            answer["next_heartbeat_ms"],
        )


def test_a_rebalance_takes_two_heartbeat_intervals(node: Node) -> None:
    interval_ms = 400
    node.start({"groups": {"heartbeat_interval_ms": interval_ms, "session_timeout_ms": 4_000}})
    node.client().ok("topic.create", topic="t", queues=4)
    a, b = Member(node, "a"), Member(node, "b")
    a.join()
    assert (len(a.owned), a.pause_ms) == (4, interval_ms)
    due = {a: time.monotonic() + interval_ms / 1_000}
    b.join()
    assert b.owned == []
    started = time.monotonic()
    due[b] = started + b.pause_ms / 1_000
    while (len(a.owned), len(b.owned)) != (2, 2):
        member = min(due, key=lambda one: due[one])
        time.sleep(max(0.0, due[member] - time.monotonic()))
        assert member.heartbeat() is None
        due[member] = time.monotonic() + member.pause_ms / 1_000
        assert not {tuple(queue) for queue in a.owned} & {tuple(queue) for queue in b.owned}
        assert time.monotonic() < started + 2.5 * interval_ms / 1_000
    described = node.client().ok("group.describe", group="g")["group"]
    assert described["state"] == "stable"
    assert [member["member"] for member in described["members"]] == ["a", "b"]
    assert described["queues"] == [["t", 0, "a"], ["t", 1, "a"], ["t", 2, "b"], ["t", 3, "b"]]


def test_a_silent_member_loses_its_session(node: Node) -> None:
    node.start({"groups": FAST})
    node.client().ok("topic.create", topic="t", queues=2)
    a, b = Member(node, "a"), Member(node, "b")
    a.join()
    b.join()

    def b_has_all() -> bool:
        b.heartbeat()
        return len(b.owned) == 2

    _until(b_has_all, "the hand-over from a silent member")
    assert a.heartbeat() == "UNKNOWN_MEMBER"
    assert a.client.refused("offset.commit", group="g", member="a", offsets=[["t", 0, 1]]) == "UNKNOWN_MEMBER"


def test_a_coordinator_that_was_stopped_for_a_while_does_not_end_sessions(node: Node) -> None:
    node.start({"groups": FAST})
    node.client().ok("topic.create", topic="t", queues=2)
    a = Member(node, "a")
    a.join()
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    identity = a.client.send("group.heartbeat", group="g", member="a", generation=a.generation, owned=a.owned)
    node.process.send_signal(signal.SIGCONT)
    answer = a.client.answer()
    assert (answer["ok"], answer["id"], answer["assigned"]) == (True, identity, a.owned)


def test_new_topics_and_queues_reach_running_members(node: Node) -> None:
    node.start()
    client = node.client()
    a = Member(node, "a")
    a.join()
    assert a.owned == []
    client.ok("topic.create", topic="t", queues=1)
    a.heartbeat()
    assert a.owned == [["t", 0]]
    client.ok("topic.create", topic="t", queues=2, update=True)
    a.heartbeat()
    assert a.owned == [["t", 0], ["t", 1]]
    client.ok("topic.delete", topic="t")
    a.heartbeat()
    assert a.owned == []


def test_after_a_restart_owners_keep_their_queues_although_another_asks_first(node: Node) -> None:
    config = {"groups": {"heartbeat_interval_ms": 100, "session_timeout_ms": 3_000}}
    node.start(config)
    node.client().ok("topic.create", topic="t", queues=2)
    a = Member(node, "a")
    a.join()
    assert len(a.owned) == 2
    generation = a.generation
    node.kill()
    node.start(config)
    a.client = node.client()
    b = Member(node, "b")
    b.join()
    assert b.owned == [], "the queues of a member that may still consume are not given away"
    assert a.client.refused("offset.commit", group="g", member="a", offsets=[["t", 0, 1]]) == "UNKNOWN_MEMBER"
    assert a.heartbeat() == "UNKNOWN_MEMBER"
    a.join()
    assert a.owned == [["t", 0]]
    assert a.generation > generation
    a.heartbeat()
    b.heartbeat()
    assert b.owned == [["t", 1]]


def test_limits_are_the_configured_ones(node: Node) -> None:
    node.start(
        {
            "topics": {"max_topics": 2, "default_queues": 1},
            "groups": {"max_groups": 1, "max_members_per_group": 1},
        }
    )
    client = node.client()
    client.ok("topic.create", topic="a")
    client.ok("topic.route", topic="b", create=True)
    assert client.refused("topic.create", topic="c") == "LIMIT_EXCEEDED"
    client.ok("group.join", group="g", member="m", topics=["a"])
    assert client.refused("group.join", group="g", member="n", topics=["a"]) == "LIMIT_EXCEEDED"
    assert client.refused("group.join", group="h", member="m", topics=["a"]) == "LIMIT_EXCEEDED"
    assert client.refused("group.join", group="x" * 121, member="m", topics=["a"]) == "INVALID_PARAMETER"
    assert [row["name"] for row in client.ok("group.list")["groups"]] == ["g"]
    assert client.refused("group.describe", group="h") == "GROUP_NOT_EXIST"


def test_without_auto_creation_names_must_exist(node: Node) -> None:
    node.start({"topics": {"auto_create": False}, "groups": {"auto_create": False}})
    client = node.client()
    assert client.refused("topic.route", topic="t", create=True) == "TOPIC_NOT_EXIST"
    client.ok("topic.create", topic="t", queues=1)
    assert client.refused("group.join", group="g", member="m", topics=["t"]) == "GROUP_NOT_EXIST"
    assert client.refused("offset.commit", group="g", offsets=[["t", 0, 1]]) == "GROUP_NOT_EXIST"


def test_the_golden_stores_are_served_as_rocketmq_left_them(golden: GoldenStore, tmp_path: Path) -> None:
    root = tmp_path / "golden"
    shutil.copytree(golden.root / "config", root / "config")
    before = {
        name: loaded(root / "config" / name)
        for name in ("topics.json", "consumerOffset.json", "subscriptionGroup.json")
    }
    node = Node(root)
    try:
        node.start()
        client = node.client()
        topics = {topic["name"]: topic for topic in client.ok("topic.list")["topics"]}
        assert topics.keys() == before["topics.json"]["topicConfigTable"].keys()
        assert topics["SCHEDULE_TOPIC_XXXX"]["read_queues"] == 18
        for name, queues in before["consumerOffset.json"]["offsetTable"].items():
            topic, group = name.split("@")
            wanted = [[topic, queue] for queue in queues]
            found = client.ok("offset.fetch", group=group, queues=wanted)["offsets"]
            assert found == [[topic, queue, offset] for queue, offset in queues.items()]
        groups = {row["name"] for row in client.ok("group.list")["groups"]}
        assert groups >= set(before["subscriptionGroup.json"]["subscriptionGroupTable"])
        assert node.stop() == ExitCode.CLEAN
        for name, content in before.items():
            assert json_config.load(root / "config" / name) == content
    finally:
        node.close()


def test_changes_that_the_journal_holds_are_readable_by_others(node: Node) -> None:
    """The journal's file is part of the format: what a commit writes is what its documentation says."""
    node.start()
    client = node.client()
    client.ok("topic.create", topic="t", queues=3)
    client.ok("offset.commit", group="g", offsets=[["t", 2, 5], ["t", 0, 1]])
    node.kill()
    found = OffsetsJournal.open(node.layout.own / "offsets.journal")
    assert found is not None
    found[0].close()
    assert found[1].changes == [SetOffsets("g", "t", ((2, 5), (0, 1)))]
    assert os.path.getsize(node.layout.own / "offsets.journal") == found[0].size_bytes
