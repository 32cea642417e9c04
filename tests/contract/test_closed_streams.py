"""Goal: with closed standard streams every verb says in one sentence what it cannot do, or does it; never a traceback.

Method: the command as a shell runs it, with `<&-`, `>&-` and `2>&-`, against a node and against stores.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Producer
from commitmq.supervision.exit_codes import CliExit
from nodes import Node, environment, eventually, start_node

pytestmark = pytest.mark.timeout(180)

OUTPUT = "commitmq: the output cannot be written: standard output is closed\n"
# What they write: something on standard output.
WRITING = [
    "topic list", "topic list --json", "topic describe closed", "topic create closed", "group list",
    "group reset g closed --to earliest", "query --topic closed --key k", "dispatcher list", "status", "plugins",
    "consume closed", "consume closed --json --limit 1", "produce closed", "--help", "--version", "pipeline --help",
    "bench --help", "store dump STORE",
]  # fmt: skip
FAILING = [
    ("topic delete closed", CliExit.USAGE),
    ("topic describe nothing-there", CliExit.FAILURE),
    ("no-such-verb", CliExit.USAGE),
    ("topic list --node tcp://127.0.0.1:9:9", CliExit.CONFIG_ERROR),
    ("status --node tcp://127.0.0.1:9 --timeout 0.1", CliExit.NODE_UNAVAILABLE),
    ("store verify STORE", CliExit.STORE_LOCKED),
    ("stop --store /nothing/there", CliExit.NODE_UNAVAILABLE),
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("closed"), "topics.default_queues=1") as made:
        with Producer(made.address) as producer:
            producer.send("closed", b"x")
        yield made


def run(node: Node, verb: str, redirection: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    verb = verb.replace("STORE", str(node.store))
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m commitmq.cli.main {verb} {redirection}"],
        env=environment(COMMITMQ_NODE=node.address),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, (verb, redirection, done.stderr)
    assert "Exception" not in done.stderr, (verb, redirection, done.stderr)
    return done


@pytest.mark.parametrize("verb", WRITING)
def test_closed_output_is_one_sentence(node: Node, verb: str) -> None:
    done = run(node, verb, ">&-", stdin="x\n")
    assert (done.returncode, done.stderr) == (CliExit.FAILURE, OUTPUT)


@pytest.mark.parametrize("verb", WRITING)
def test_nobody_need_listen_to_complaints(node: Node, verb: str) -> None:
    done = run(node, verb, "2>&-", stdin="x\n")
    assert done.returncode == CliExit.OK
    assert done.stdout


@pytest.mark.parametrize(("verb", "code"), FAILING)
def test_errors_keep_their_codes(node: Node, verb: str, code: CliExit) -> None:
    for redirection in (">&-", "<&- >&- 2>&-"):
        done = run(node, verb, redirection)
        assert (done.returncode, done.stdout) == (code, ""), redirection
        assert bool(done.stderr) == ("2>&-" not in redirection)


def test_nothing_to_write_is_no_error(node: Node) -> None:
    run(node, "topic create empty", "")
    for redirection in (">&-", "<&-", "<&- >&- 2>&-"):
        done = run(node, "consume empty", redirection)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_was_not_written_is_not_committed(node: Node) -> None:
    run(node, "produce committed", "", stdin="a\nb\n")
    eventually(lambda: run(node, "consume committed", "").stdout == "a\nb\n", "the messages are visible")
    assert run(node, "consume committed --group closed", ">&-").returncode == CliExit.FAILURE
    assert run(node, "consume committed --group closed", "").stdout == "a\nb\n"


def test_input_that_cannot_be_read(node: Node, tmp_path: Path) -> None:
    done = run(node, "produce closed", "<&-")
    assert (done.returncode, done.stdout) == (CliExit.FAILURE, "")
    assert done.stderr == "commitmq: the input cannot be read: it is closed; 0 messages are stored\n"
    file = tmp_path / "lines"
    file.write_text("a\n")
    assert run(node, f"produce closed --file {file}", "<&-").stdout.startswith("1 messages stored")
    done = run(node, "dispatcher reset index --to begin", "<&-")
    assert (done.returncode, done.stdout) == (CliExit.USAGE, "")
    assert "the command cannot ask" in done.stderr


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_node_starts_and_stops_without_streams(node: Node, tmp_path: Path, redirection: str) -> None:
    """Some launchers close everything. No file or socket of the node may get the number of a standard stream."""
    own = Node(tmp_path / "store")
    try:
        done = run(node, " ".join(own.arguments()) + " --background", redirection)
        assert (done.returncode, done.stderr) == (CliExit.OK, "")
        assert own.is_ready()
        with Producer(own.address) as producer:
            producer.send("t", b"x")
        done = run(node, f"stop --store {own.store}", redirection)
        assert (done.returncode, done.stderr) == (CliExit.OK, "")
    finally:
        own.end()
