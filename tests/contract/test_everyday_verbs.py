"""Goal: the everyday verbs say what is so, with --json and stable exit codes, and their examples in --help work.

Method: one real node with topics, groups and trouble that the test makes; the findings' rules on tables.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Consumer, Producer, SendError
from commitmq.cli import findings
from commitmq.cli.support import redacted
from commitmq.cli.top import TopSample, compared
from commitmq.supervision.exit_codes import CliExit
from nodes import Node, commitmq, eventually, start_node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("everyday"), "flow.client_send_bytes_per_s=1000000000") as made:
        with Admin(made.address) as admin:
            admin.topic_create("orders", 2)
            admin.topic_create("idle", 1)
        with Producer(made.address) as producer:
            for number in range(20):
                producer.send("orders", b"%d" % number, queue=number % 2)
        with Consumer("orders", group="kitchen", node=made.address, start="earliest") as consumer:
            got = 0
            while got < 6:
                got += len(consumer.poll(5, max_messages=6 - got))
            consumer.commit()
        yield made


def ran(node: Node, *words: str, code: int = 0, by: str = "--node") -> str:
    ended = node.run(*words, by, str(node.store) if by == "--store" else node.address)
    assert ended.returncode == code, ended.stderr + ended.stdout
    return ended.stdout if code == 0 else ended.stderr


def test_the_doctor_finds_nothing_wrong_and_then_what_is(node: Node) -> None:
    examined = json.loads(ran(node, "doctor", "--json", by="--store"))
    levels = {(one["level"], one["what"]) for one in examined["findings"] if one["what"] != "descriptors"}
    assert levels <= {("note", "group kitchen"), ("warning", "disk")}, examined
    assert ("note", "group kitchen") in levels
    assert examined["groups"] == examined["all_groups"] == 1
    os.kill(node.pids()["cleanup"], signal.SIGKILL)
    eventually(lambda: node.row("cleanup")["state"] == "ready", "cleanup is back")
    text = ran(node, "doctor")
    assert "note: cleanup: it was restarted once; the last end: killed by SIGKILL" in text
    gone = commitmq("doctor", "--node", "tcp://127.0.0.1:1", "--timeout", "0.2s")
    assert gone.returncode == CliExit.NODE_UNAVAILABLE


def test_top_shows_rates_and_lags(node: Node) -> None:
    page = json.loads(ran(node, "top", "--once", "--every", "0.1s", "--json"))
    assert {one["topic"] for one in page["topics"]} >= {"orders", "idle"}
    assert [(one["group"], one["lag"]) for one in page["groups"]] == [("kitchen", 14)]
    assert page["not_looked_at"] == {"topics": 0, "groups": 0}
    assert "kitchen" in ran(node, "top", "--once", "--every", "0.1s")
    before = TopSample(10.0, {"a": 5, "b": 5, "gone": 1}, {"g": (7, 3)}, 3, 1)
    now = TopSample(12.0, {"a": 5, "b": 25, "new": 9}, {"g": (9, 4), "h": (1, 1)}, 5, 2)
    told = compared(before, now, 1)
    assert told["topics"] == [{"topic": "b", "in_per_s": 10.0, "next_offsets": 25}]
    assert told["groups"] == [{"group": "g", "lag": 9, "lag_per_s": 1.0, "out_per_s": 0.5}]
    assert told["not_looked_at"] == {"topics": 2, "groups": 0}
    ends = {"RMQ_SYS_X": 9, "%DLQ%g": 0, "%RETRY%g": 4, "quiet": 0}
    kinds = {"RMQ_SYS_X": "system", "%DLQ%g": "dlq", "%RETRY%g": "retry", "quiet": "normal"}
    at_first = TopSample(1.0, dict.fromkeys(ends, 0), {"CMQ_DEAD_LETTERS": (9, 0), "g": (0, 0)}, 4, 2)
    told = compared(at_first, TopSample(2.0, ends, at_first.groups, 4, 2, kinds), 9)
    assert [one["topic"] for one in told["topics"]] == ["%RETRY%g", "quiet", "%DLQ%g", "RMQ_SYS_X"]
    assert [one["group"] for one in told["groups"]] == ["g", "CMQ_DEAD_LETTERS"]


@contextlib.contextmanager
def watched(node: Node, *words: str) -> Iterator[Iterator[str]]:
    """The lines of a verb that runs until Ctrl-C, which ends it without a complaint."""
    command = [sys.executable, "-m", "commitmq.cli.entry", *words, "--node", node.address]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    try:
        yield iter(watch.stdout.readline, "")
    finally:
        watch.send_signal(signal.SIGINT)
        _, complaint = watch.communicate(timeout=30)
    assert (watch.returncode, complaint) == (CliExit.INTERRUPTED, "")


def test_the_status_is_watched_until_ctrl_c(node: Node) -> None:
    roles = {one["role"] for one in json.loads(ran(node, "status", "--json"))["processes"]}
    for words in (("--watch", "0.1s", "--json"), ("--json", "--watch")):
        with watched(node, "status", *words) as lines:
            for _ in range(2):
                assert {one["role"] for one in json.loads(next(lines))["processes"]} == roles
    with watched(node, "status", "--watch", "0.1s") as lines:
        times = [line for line in itertools.islice(lines, 200) if re.fullmatch(r"\d\d:\d\d:\d\d\n", line)]
        assert len(times) > 1, "each page begins with its time"
    assert "--watch" in ran(node, "status", "--watch", "soon", code=2)
    gone = commitmq("status", "--watch", "--node", "tcp://127.0.0.1:1", "--timeout", "0.2s")
    assert gone.returncode == CliExit.NODE_UNAVAILABLE


def test_the_lag_of_a_group_is_watched_until_ctrl_c(node: Node) -> None:
    whole = json.loads(ran(node, "group", "lag", "kitchen", "--json"))
    least = max(one["lag"] for one in whole["queues"])
    found = json.loads(ran(node, "group", "lag", "kitchen", "--min", str(least), "--json"))
    assert found["lag"] == whole["lag"] == 14
    assert found["queues"] == [one for one in whole["queues"] if one["lag"] == least]
    assert ran(node, "group", "lag", "kitchen", "--min", "1000") == "group kitchen is 14 messages behind\n"
    assert [(one["name"], one["lag"]) for one in json.loads(ran(node, "group", "list", "--lag", "--json"))] == [
        ("kitchen", 14)
    ]
    assert re.search(r"MEMBERS  LAG  TOPICS\nkitchen +0 +14  orders", ran(node, "group", "list", "--lag"))
    assert "LAG" not in ran(node, "group", "list")
    for words in (("--watch", "0.1s", "--json"), ("--json", "--watch")):
        with watched(node, "group", "lag", "kitchen", *words) as lines:
            assert [json.loads(next(lines)) for _ in range(2)] == [whole] * 2
    assert "--watch" in ran(node, "group", "lag", "kitchen", "--watch", "soon", code=2)


def test_status_and_doctor_say_who_is_asked_and_where_the_node_listens(node: Node) -> None:
    address = node.address.removeprefix("tcp://")
    for verb in ("status", "doctor"):
        assert f"users off  node keys off\nlistens native {address}\n" in ran(node, verb)
        told = json.loads(ran(node, verb, "--json"))
        told = told["node"] if verb == "status" else told
        assert told["security"] == {"users": False, "node_keys": False, "faults": []}
        assert told["listeners"] == {"native": node.address}
        assert told["refuses_sends"] is False


def test_a_node_without_metrics_says_which_setting_turns_them_on(node: Node) -> None:
    assert "start it with --metrics, which sets metrics.enable=true" in ran(node, "metrics", code=1)


def test_verbs_say_what_the_node_does_not_have(node: Node) -> None:
    for form in ([], ["--json"]):
        assert "no client has written traces to this node yet" in ran(node, "trace", "nonsense", *form, code=1)
    ended = node.run("store", "verify", str(node.store))
    assert ended.returncode == CliExit.STORE_LOCKED
    assert f"the store is in use by process {node.supervisor_pid}" in ended.stderr
    assert "`commitmq store snapshot`" in ended.stderr


def test_a_drained_node_refuses_sends_and_nothing_else(node: Node) -> None:
    told = json.loads(ran(node, "drain", "on", "--json"))
    assert told == {"refuses_sends": True, "before": False, "not_yet": []}
    assert "SENDS ARE REFUSED: the node is drained; `commitmq drain off`" in ran(node, "status")
    assert json.loads(ran(node, "status", "--json"))["node"]["refuses_sends"] is True
    with Producer(node.address) as producer:
        with pytest.raises(SendError, match="drain off") as caught:
            producer.send("orders", b"refused", timeout_s=0.2)
        assert caught.value.code == "SERVICE_NOT_AVAILABLE"
        with pytest.raises(SendError, match="drain off"):
            producer.send_batch("orders", [b"refused"], timeout_s=0.2)
        with Consumer("orders", group="cooks", node=node.address, start="earliest") as consumer:
            assert len(consumer.poll(5))
            consumer.commit()
        found = json.loads(ran(node, "doctor", "--json"))
        assert found["refuses_sends"] is True
        assert ("warning", "sends") in {(one["level"], one["what"]) for one in found["findings"]}
        assert not [one for one in found["findings"] if "rate" in one["says"]], "a drain is no rate that one may raise"
        assert "takes sends" in ran(node, "drain", "off")
        assert producer.send("orders", b"taken", queue=0).queue_offset == 10


def test_a_start_says_in_one_line_that_the_node_is_drained(tmp_path: Path) -> None:
    fresh = Node(tmp_path / "store", "flow.refuse_sends=true")
    try:
        began = fresh.start()
        assert began.returncode == 0
        assert [line for line in began.stderr.splitlines() if "drain" in line] == [
            "WARNING: the node is drained and refuses sends, until `commitmq drain off` (flow.refuse_sends)"
        ]
    finally:
        fresh.stop()


def test_a_group_is_cloned_ahead_and_never_back(node: Node) -> None:
    with Admin(node.address) as admin:
        admin.commit_offsets("source", [("orders", 0, 3), ("orders", 1, 4)])
        admin.commit_offsets("target", [("orders", 1, 9)])
        planned = json.loads(ran(node, "group", "clone", "source", "target", "--dry-run", "--json"))
        assert planned["offsets"] == [["orders", 0, 3], ["orders", 1, 9]]
        assert [tuple(one) for one in admin.group("target")["offsets"]] == [("orders", 1, 9)]
        assert json.loads(ran(node, "group", "clone", "source", "target", "--json"))["offsets"] == planned["offsets"]
        assert sorted(tuple(one) for one in admin.group("target")["offsets"]) == [("orders", 0, 3), ("orders", 1, 9)]
    assert "there is no group 'absent'" in ran(node, "group", "clone", "absent", "target", code=CliExit.FAILURE)
    ran(node, "group", "create", "bare")
    assert "group bare has committed no offset" in ran(node, "group", "clone", "bare", "target", code=CliExit.FAILURE)
    assert "group fresh did not exist; it would be made" in ran(node, "group", "clone", "source", "fresh", "--dry-run")
    assert "group fresh did not exist; it is made" in ran(node, "group", "clone", "source", "fresh")
    assert "did not exist" not in ran(node, "group", "clone", "source", "fresh")


def test_a_bundle_has_everything_but_secrets_and_messages(node: Node, tmp_path: Path) -> None:
    target = tmp_path / "node.tar.gz"
    with Producer(node.address) as producer:
        producer.send("idle", b"canary-in-a-body")
    words = ("support", "bundle", str(node.store), "--to", str(target), "--json")
    told = json.loads(commitmq(*words).stdout)
    assert told["node"]
    assert target.stat().st_mode & 0o777 == 0o600
    assert commitmq(*words).returncode == CliExit.STORE_UNUSABLE, "it overwrites nothing"
    token = (node.store / "run" / "token").read_text().strip()
    with tarfile.open(target) as archive:
        parts = {one.name.partition("/")[2]: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr]
    assert parts.keys() >= {"status.json", "config.json", "doctor.json", "files.json", "versions.json", "node.log"}
    for name, data in parts.items():
        assert token.encode() not in data, name
        assert b"canary" not in data, name
    assert json.loads(parts["files.json"])["all"]
    assert redacted({"a": [{"secret_key": "x", "n": 1}], "key": "plugins.x.password", "value": "p"}) == {
        "a": [{"secret_key": "***", "n": 1}], "key": "plugins.x.password", "value": "***"
    }  # fmt: skip


def test_shells_complete_verbs() -> None:
    for shell in ("bash", "zsh", "fish"):
        ended = commitmq("completion", shell)
        assert "_COMMITMQ_COMPLETE" in ended.stdout
    ended = commitmq("", _COMMITMQ_COMPLETE="bash_complete", COMP_WORDS="commitmq do", COMP_CWORD="1")
    assert "doctor" in ended.stdout


@pytest.mark.parametrize("verb", ["doctor", "top", "status", "drain", "config show", "config set", "config unset",
                                  "completion", "user key rotate", "support bundle",
                                  "store snapshot", "group clone", "topic list", "topic prune",
                                  "topic offset", "topic time", "group create", "group delete", "group lag", "group members",
                                  "group pop", "topic update", "group list", "dlq list",
                                  "group describe", "group reset", "consume", "client list", "client show",
                                  "client verify", "export config",
                                  "import config", "metrics", "user show", "user copy", "acl copy", "acl import"])  # fmt: skip
def test_the_example_in_the_help_is_a_command(verb: str) -> None:
    from click.testing import CliRunner

    from commitmq.cli.main import cli

    text = CliRunner().invoke(cli, [*verb.split(), "--help"]).output
    example = re.search(r"Example: commitmq (.*)", text)
    assert example is not None, text
    words = example[1].partition(">>")[0].split()
    assert words[: len(verb.split())] == verb.split()
    command: Any = cli
    context = None
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name or "commitmq", words, parent=context, resilient_parsing=True)
        _, command, words = command.resolve_command(context, words)
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


# ---------------------------------------------------------------- the rules


def report(**changes: Any) -> dict[str, Any]:
    node = {"state": "ready", "keeper": "running", "index_problem": "", "cuts_kept": 0, "insecure": []}
    words = {"flush_errno": 0, "written_timestamp": 0, "written": 0, "dispatched": 0}
    base: dict[str, Any] = {
        "node": node, "positions": words, "processes": [], "dispatchers": [], "plugins": [],
        "disk_flags": [], "disk_warnings": [],
    }  # fmt: skip
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) else value
    return base


ROW = {"role": "writer", "state": "ready", "pid": 1, "restarts": 0}
PARKED = {"name": "d", "state": "parked", "parked": {"offset": 7}, "lag_bytes": 0, "gaps": [], "skipped": []}


@pytest.mark.parametrize(
    ("changes", "level", "what"),
    [
        ({"node": {"state": "starting"}}, "warning", "node"),
        ({"node": {"keeper": "gone"}}, "warning", "keeper"),
        ({"node": {"index_problem": "x"}}, "warning", "index"),
        ({"node": {"remaking": [{"role": "a worker", "phase": "x", "done": 1, "total": 2}]}}, "note", "a worker"),
        ({"node": {"insecure": ["open"]}}, "warning", "listener"),
        ({"node": {"refuses_sends": True}}, "warning", "sends"),
        ({"node": {"security": {"users": False, "node_keys": False, "faults": ["gone"]}}}, "error", "security"),
        ({"node": {"security": {"users": True, "node_keys": False, "faults": []}}}, "warning", "security"),
        ({"disk_warnings": ["soon full"]}, "warning", "disk"),
        ({"disk_warnings": ["full"], "disk_flags": ["DISK_FULL"]}, "error", "disk"),
        ({"positions": {"flush_errno": 5}}, "error", "flush"),
        ({"positions": {"written_timestamp": 1_000_000}}, "warning", "clock"),
        ({"positions": {"written": 1 << 30}}, "warning", "ConsumeQueues"),
        ({"processes": [{**ROW, "state": "waiting", "pid": None, "restarts": 4}]}, "error", "writer"),
        ({"processes": [{**ROW, "restarts": 3}]}, "warning", "writer"),
        ({"processes": [{**ROW, "restarts": 1}]}, "note", "writer"),
        ({"processes": [{**ROW, "refused": 3}]}, "note", "writer"),
        ({"processes": [{**ROW, "info": {"unheard_groups": ["shop"]}}]}, "warning", "writer"),
        ({"processes": [{**ROW, "info": {"set_aside": 1}}]}, "warning", "writer"),
        ({"processes": [{**ROW, "info": {"expiry": {"error": "EACCES"}}}]}, "error", "expiry"),
        ({"dispatchers": [PARKED]}, "error", "dispatcher d"),
        ({"dispatchers": [{**PARKED, "state": "running", "lag_bytes": 1 << 30}]}, "warning", "dispatcher d"),
        ({"plugins": [{"name": "p", "failure": "T\nboom", "failed_in": "import"}]}, "error", "plugin p"),
    ],
)
def test_each_trouble_is_one_finding(changes: dict[str, Any], level: str, what: str) -> None:
    assert findings.of_report(report(), now_ms=0) == []
    (found,) = findings.of_report(report(**changes), now_ms=0)
    assert (found.level, found.what) == (level, what)
    assert found.says
    assert found.do


def test_groups_and_limits_have_findings_too() -> None:
    from types import SimpleNamespace

    told = [findings.of_report(report(processes=[{**ROW, "restarts": count}]), now_ms=0)[0].says for count in (2, 7)]
    assert [one.partition(";")[0] for one in told] == ["it was restarted twice", "it was restarted 7 times"]
    assert [one.says for one in findings.of_dead_letters([("g", 1), ("h", 2)])] == ["1 dead letter", "2 dead letters"]
    lag = SimpleNamespace(topic="t", queue=0, lag=5, problem=None)
    (idle,) = findings.of_group({"name": "g", "members": []}, [lag])
    assert (idle.level, "`commitmq group delete g --offsets`" in idle.do) == ("note", True)
    members = [{"topics": ["a"]}, {"topics": ["a", "b"]}]
    (found,) = findings.of_group({"name": "g", "members": members}, [lag])
    assert "different topics: a; a, b" in found.says
    lag.problem, lag.lag = "behind the end", 0
    for own in ("CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_REVIVE_GROUP", "TOOLS_CONSUMER", "CMQ_DEAD_LETTERS"):
        assert findings.of_group({"name": own, "members": []}, [lag]) == [], "no program of a user belongs to it"
    assert [one.level for one in findings.of_group({"name": "g", "members": members[:1]}, [lag])] == ["error"]
    retries = ["b_c", "c", "d", "%RETRY%a_b_c", "%RETRY%a_d", "%RETRY%a+c"]
    assert findings.of_retry_topics(retries, ["a", "e"]) == []
    (shared,) = findings.of_retry_topics(retries, ["a", "a_b"])
    assert (shared.what, "groups a, a_b have" in shared.says) == ("%RETRY%a_b_c", True)
    (shared,) = findings.of_retry_topics(retries, ["a", "a_b_c"])
    assert "groups a_b_c, a have" in shared.says
    assert findings.of_limits({"writer": 1 << 20}) == []
    (low,) = findings.of_limits({"writer": 1 << 20, "reader-0": 1_024})
    assert low.says == "reader-0 may open 1024 descriptors"
