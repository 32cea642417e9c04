"""Goal: ``produce`` and ``consume`` carry bytes faithfully through pipes and files, and say truly how far they got.

Method: the command runs as a process beside a real node, with pipes, files and signals of the test; a consumer reads
the messages that were stored.
"""

from __future__ import annotations

import base64
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, Producer, Tombstone
from commitmq.supervision.exit_codes import CliExit
from nodes import Node, environment, eventually, start_node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("cli"), "topics.default_queues=2") as made:
        yield made


def run(node: Node, *arguments: str, stdin: bytes = b"", **extra: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "commitmq.cli.main", *arguments],
        env=environment(COMMITMQ_NODE=node.address, **extra),
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )


def produce(node: Node, topic: str, stdin: bytes, *options: str) -> str:
    done = run(node, "produce", topic, *options, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def consume(node: Node, topic: str, *options: str) -> list[bytes]:
    done = run(node, "consume", topic, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def wait_for(node: Node, topic: str, count: int) -> None:
    with Admin(node.address) as admin:
        eventually(lambda: sum(row[2] for row in admin.offsets(topic)) >= count, "the messages are visible")


def test_lines_in_and_out(node: Node) -> None:
    lines = [b"first", "żółw 🚀".encode(), b" spaces \t", b"\xff\xfe no text", b"x" * 200_000, b"last without an end"]
    said = produce(node, "lines", b"\n".join(lines), "--queue", "0", "--batch", "2", "--tags", "T", "--keys", "a b")
    assert "6 messages stored in lines" in said
    wait_for(node, "lines", 6)
    assert consume(node, "lines") == lines
    rows = [json.loads(line) for line in consume(node, "lines", "--json")]
    assert {(row["tags"], *row["keys"]) for row in rows} == {("T", "a", "b")}
    assert base64.b64decode(rows[3]["body_base64"]) == lines[3]


def test_empty_lines_and_windows_line_ends(node: Node) -> None:
    said = json.loads(produce(node, "ends", b"one\r\n\n\r\ntwo\n", "--json", "--queue", "0"))
    assert (said["messages"], said["empty_lines"]) == (2, 2)
    wait_for(node, "ends", 2)
    assert consume(node, "ends") == [b"one", b"two"]


def test_json_lines_round_trip(node: Node, tmp_path: Path) -> None:
    rows = [
        {"body": "żółw", "tags": "🚀x", "keys": ["k1", "k2"], "properties": {"p": "q"}, "sharding_key": "s", "flag": 7},
        {"body_base64": base64.b64encode(b"\xff").decode(), "keys": "k3 k4"},
        {"body": "plain"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    produce(node, "json", b"", "--file", str(file), "--format", "jsonl")
    wait_for(node, "json", 3)
    found = {row.get("body"): row for row in map(json.loads, consume(node, "json", "--format", "jsonl"))}
    first = found["żółw"]
    assert (first["tags"], first["keys"], first["flag"]) == ("🚀x", ["k1", "k2"], 7)
    assert first["properties"].items() >= {"p": "q", "__SHARDINGKEY": "s"}.items()
    assert (found[None]["body_base64"], found[None]["keys"]) == ("/w==", ["k3", "k4"])
    assert found["plain"]["topic"] == "json"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "line 3"),
        (b"[]", "must be an object"),
        (b"{}", "either body or body_base64"),
        (b'{"body":"x","body_base64":"eA=="}', "either body or body_base64"),
        (b'{"body":5}', "body must be a string"),
        (b'{"body":""}', "empty"),
        (b'{"body_base64":"?"}', "line 3"),
        (b'{"body":"x","tag":"y"}', "unknown fields: tag"),
        (b'{"body":"x","properties":[]}', "properties must be"),
        (b'{"body":"x","properties":{"DELAY":"1"}}', "plain send must not"),
        (b'{"body":"x","flag":"1"}', "flag"),
        (b'{"body":"x","keys":5}', "keys must be"),
        (b'{"body":"x","keys":[5]}', "key 5"),
        (b'{"body":"x","tags":5}', "tags"),
        (b'{"body":"x","key":5}', "key"),
        (b'{"body":"x","sharding_key":["k"]}', "sharding_key"),
        (b'{"tombstone":true}', "key"),
        (b'{"tombstone":true,"key":"k","body":"x"}', "no body"),
        (b'{"queue_offset":1,"damage":"no zlib data","raw_body_base64":"eA=="}', "cannot be decoded"),
    ],
)
def test_a_bad_line_is_named_and_what_came_before_is_stored(node: Node, line: bytes, reason: str) -> None:
    with Admin(node.address) as admin:
        admin.topic_create("bad", 2)
        before = sum(row[2] for row in admin.offsets("bad"))
        good = b'{"body":"good"}\n'
        done = run(node, "produce", "bad", "--format", "jsonl", stdin=good + good + line + b"\n" + good)
        assert done.returncode == CliExit.FAILURE
        said = done.stderr.decode()
        assert "line 3: " in said
        assert reason in said
        assert "2 messages before it are stored" in said
        eventually(lambda: sum(row[2] for row in admin.offsets("bad")) == before + 2, "two messages more")


def test_input_that_pauses_is_sent_meanwhile(node: Node) -> None:
    sender = subprocess.Popen(
        [sys.executable, "-m", "commitmq.cli.main", "produce", "pauses"],
        env=environment(COMMITMQ_NODE=node.address),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert sender.stdin is not None
    with Producer(node.address) as producer:
        producer.send("pauses", b"first")
    sender.stdin.write(b"waits for nobody\n")
    sender.stdin.flush()
    wait_for(node, "pauses", 2)
    assert sender.poll() is None
    sender.stdin.close()
    assert sender.wait(20) == 0


def test_where_consume_begins_and_ends(node: Node) -> None:
    produce(node, "window", b"\n".join(b"%d" % n for n in range(20)), "--queue", "1")
    wait_for(node, "window", 20)
    assert consume(node, "window", "--limit", "3") == [b"0", b"1", b"2"]
    assert consume(node, "window", "--from", "17") == [b"17", b"18", b"19"]
    assert consume(node, "window", "--from", "latest") == []
    assert len(consume(node, "window", "--from", "2020-01-01")) == 20
    assert consume(node, "window", "--from", "2100-01-01T00:00:00Z") == []
    assert consume(node, "window", "--group", "cli", "--limit", "15") == [b"%d" % n for n in range(15)]
    assert consume(node, "window", "--group", "cli") == [b"%d" % n for n in range(15, 20)]
    done = run(node, "consume", "window", "--from", "yesterday")
    assert done.returncode == CliExit.USAGE
    assert b"--from" in done.stderr


def test_consume_by_tag(node: Node) -> None:
    for tag in ("A", "B", "C"):
        produce(node, "tagged", tag.encode() * 3, "--tags", tag)
    wait_for(node, "tagged", 3)
    started = time.monotonic()
    assert sorted(consume(node, "tagged", "--tags", "A || C")) == [b"AAA", b"CCC"]
    assert time.monotonic() - started < 4, "the end is seen although the filter hides messages"


def test_a_steady_pipe_is_sent_meanwhile(node: Node) -> None:
    """Where lines come without a pause, none is held for long."""
    feeder = "import sys, time\nfor n in range(400):\n    print(n, flush=True)\n    time.sleep(0.02)"
    with Admin(node.address) as admin:
        admin.topic_create("steady", 2)
        sender = subprocess.Popen(
            f"{sys.executable} -c '{feeder}' | {sys.executable} -m commitmq.cli.main produce steady",
            shell=True,
            env=environment(COMMITMQ_NODE=node.address),
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            eventually(lambda: sum(row[2] for row in admin.offsets("steady")) >= 20, "the first lines are stored")
            assert sender.poll() is None
            assert sum(row[2] for row in admin.offsets("steady")) < 400
        finally:
            os.killpg(sender.pid, signal.SIGTERM)
            sender.wait(20)
            assert sender.stdout is not None
            sender.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_command_sends_what_it_has_and_says_how_many(node: Node, number: signal.Signals) -> None:
    topic = f"ended-{number.name}"
    with Admin(node.address) as admin:
        admin.topic_create(topic, 2)
        sender = subprocess.Popen(
            [sys.executable, "-m", "commitmq.cli.main", "produce", topic],
            env=environment(COMMITMQ_NODE=node.address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert sender.stdin is not None
        sender.stdin.write(b"first\n")
        sender.stdin.flush()
        eventually(lambda: sum(row[2] for row in admin.offsets(topic)) == 1, "it is ready")
        sender.stdin.write(b"".join(b"%d\n" % line for line in range(300)) + b"half a li")
        sender.stdin.flush()
        sender.send_signal(number)
        said = sender.stderr.read().decode() if sender.stderr is not None else ""
        assert sender.wait(30) == CliExit.INTERRUPTED, said
        assert f"ended by {number.name}; 301 messages are stored; the last line was not whole" in said
        assert "Traceback" not in said
        eventually(lambda: sum(row[2] for row in admin.offsets(topic)) == 301, "all of it is stored")
        for stream in (sender.stdin, sender.stdout, sender.stderr):
            if stream is not None:
                stream.close()


def test_what_consume_writes_can_be_produced(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send(
            "origin", "żółw".encode(), tags="T", keys=["a", "b"], properties={"p": "q"}, sharding_key="s", flag=3
        )
        producer.send("origin", b"\xff", key="k")
        producer.send("origin", b"plain", properties={"region": "eu"})
        producer.send("origin", Tombstone("k"))
    wait_for(node, "origin", 4)
    written = run(node, "consume", "origin", "--json").stdout
    produce(node, "copies", written, "--format", "jsonl")
    wait_for(node, "copies", 4)

    def contents(topic: str) -> list[tuple[object, ...]]:
        rows = map(json.loads, consume(node, topic, "--json"))
        names = ("body", "body_base64", "tags", "keys", "flag", "tombstone")
        own = ("p", "region", "__SHARDINGKEY")
        return sorted(
            (repr([row.get(name) for name in names]), repr([row["properties"].get(name) for name in own]))
            for row in rows
        )

    assert contents("copies") == contents("origin")


def test_output_that_cannot_be_written_and_a_reader_that_left(node: Node) -> None:
    produce(node, "full", b"x")
    wait_for(node, "full", 1)
    main = f"{sys.executable} -m commitmq.cli.main"
    for command, code, reason in (
        (f"echo x | {main} produce full > /dev/full", CliExit.FAILURE, "cannot be written"),
        (f"{main} topic list > /dev/full", CliExit.FAILURE, "cannot be written"),
        (f"{main} consume full > /dev/full", CliExit.FAILURE, "cannot be written"),
        (f"{main} --help > /dev/full", CliExit.FAILURE, "cannot be written"),
        (f"set -o pipefail; {main} topic list | true", CliExit.OK, ""),
        (f"set -o pipefail; {main} --help | true", CliExit.OK, ""),
    ):
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment(COMMITMQ_NODE=node.address),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, (command, done)
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
        assert bool(reason) == bool(done.stderr), (command, done.stderr)


@pytest.mark.parametrize("address", ["localhost", "http://localhost:7310"])
@pytest.mark.parametrize("verb", [["topic", "list"], ["status"], ["produce", "t"], ["consume", "t"], ["stop"]])
def test_a_wrong_address_is_one_sentence(node: Node, verb: list[str], address: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commitmq.cli.main", *verb],
        env=environment(COMMITMQ_NODE=address),
        input=b"x",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == CliExit.CONFIG_ERROR, done
    assert done.stderr.startswith(b"commitmq: node address")
    assert done.stderr.count(b"\n") == 1


def test_topics_are_updated_and_only_deleted_by_one_who_means_it(node: Node) -> None:
    assert run(node, "topic", "create", "changing", "--queues", "2").returncode == 0
    done = run(node, "topic", "update", "changing", "--queues", "3", "--perm", "r", "--attribute", "reserve.time=5")
    assert done.stdout == b"topic changing updated: 3 queues  perm r  reserve.time=5\n", done
    assert run(node, "topic", "update", "changing").returncode == CliExit.USAGE
    assert b"TOPIC_NOT_EXIST" in run(node, "topic", "update", "never-made", "--queues", "3").stderr
    done = run(node, "topic", "delete", "changing")
    assert done.returncode == CliExit.USAGE
    assert b"--yes" in done.stderr
    assert run(node, "topic", "delete", "changing", "--yes").returncode == 0


def test_a_reset_of_a_queue_that_is_not_there(node: Node) -> None:
    produce(node, "reset", b"x")
    done = run(node, "group", "reset", "g", "reset", "--to", "0", "--queue", "99")
    assert done.returncode == CliExit.USAGE
    assert done.stderr.endswith(b"topic 'reset' does not have all of the queues [99]\n")


def test_a_topic_that_is_not_there(node: Node) -> None:
    done = run(node, "consume", "nothing-here")
    assert done.returncode == CliExit.FAILURE
    assert b"TOPIC_NOT_EXIST" in done.stderr


def test_without_a_node(node: Node) -> None:
    for verb in ("produce", "consume"):
        done = run(
            node,
            verb,
            "t",
            "--node",
            "tcp://127.0.0.1:9",
            *(["--timeout", "0.5"] if verb == "produce" else []),
            stdin=b"x",
        )
        assert done.returncode == CliExit.NODE_UNAVAILABLE, (verb, done)


def test_follow_goes_on_until_interrupted(node: Node) -> None:
    reader = subprocess.Popen(
        [sys.executable, "-m", "commitmq.cli.main", "consume", "followed", "--follow", "--group", "followers"],
        env=environment(COMMITMQ_NODE=node.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert reader.stdout is not None
    try:
        for number in range(3):
            produce(node, "followed", b"%d" % number)
            assert reader.stdout.readline() == b"%d\n" % number
        time.sleep(
            0.5
        )  # it waits for more: interrupted while it writes, it would leave the batch to be delivered again
        reader.send_signal(signal.SIGINT)
        _, complaints = reader.communicate(timeout=20)
        assert reader.returncode == 0, complaints
    finally:
        reader.kill()
        reader.wait()
    assert consume(node, "followed", "--group", "followers") == [], "what was written was committed"


def test_a_reader_that_had_enough_is_no_error(node: Node) -> None:
    produce(node, "enough", b"\n".join([b"x" * 100] * 5000))
    wait_for(node, "enough", 5000)
    done = subprocess.run(
        f"{sys.executable} -m commitmq.cli.main consume enough | head -n 1",
        shell=True,
        env=environment(COMMITMQ_NODE=node.address),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == b"x" * 100 + b"\n"
    assert done.stderr == b""


def test_a_terminal_gets_a_progress_bar(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_bytes(b"line of input\n" * 50_000)
    master, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "commitmq.cli.main", "produce", "bar", "--file", str(file)],
        env=environment(COMMITMQ_NODE=node.address, TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=terminal,
    ) as sender:
        os.close(terminal)
        shown = b""
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:  # the terminal's other end is closed
                break
            if not data:
                break
            shown += data
        assert sender.stdout is not None
        assert b"50000 messages stored in bar" in sender.stdout.read()
    os.close(master)
    assert sender.returncode == 0
    assert b"sending" in shown
