"""Goal: a dispatcher of a plugin can only harm itself, and when it is mended nothing is missing and nothing is there twice.

Method: one real node with a plugin whose dispatcher does what a file says, at every moment. It keeps the physical offset
of each record it saw in SQLite, so what it missed or saw twice is counted, not estimated. The plugin is found the way an
installed one is: by its distribution's entry point.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Producer, ProtocolError
from nodes import Node, commitmq, environment, eventually, start_node

FOLDER = Path(__file__).parent / "misbehaving"
MODES = ("raise", "exit", "hang", "leak")
LEAST_RATE = 0.9  # of what the node does beside a dispatcher that behaves
SETTINGS = (
    "dispatch.park_after=3",
    "dispatch.plugin_memory_bytes=67108864",
    "supervisor.hang_timeout_s=2",
    "supervisor.restart_backoff_max_ms=400",
)


class Patient:
    """The node, its plugin's mode file and what the plugin has seen."""

    def __init__(self, node: Node, mode_file: Path) -> None:
        self.node = node
        self.mode_file = mode_file
        self.sent = 0
        self.end_offset = 0

    def mode(self, text: str) -> None:
        beside = self.mode_file.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self.mode_file)

    def row(self, name: str = "misbehaving") -> dict[str, Any]:
        with Admin(self.node.address) as admin:
            return next(row for row in admin.dispatchers() if row["name"] == name)

    def send(self, count: int, topic: str = "patients") -> None:
        with Producer(self.node.address) as producer:
            result = producer.send_batch(topic, [b"%d" % (self.sent + n) for n in range(count)])
        self.end_offset = result.end_offset
        self.sent += count

    def caught_up(self) -> None:
        """Wait until it has all that was sent. Its lag alone may have been told before that was written."""

        def has_all() -> bool:
            row = self.row()
            return bool(row["state"] == "running" and row["lag_bytes"] == 0 and row["position"] >= self.end_offset)

        eventually(has_all, "it has caught up")

    def mend(self) -> None:
        """Make it well and wait until it is; it may be parked at any moment until the last bad process is gone."""
        self.mode("well")

        def is_well() -> bool:
            row = self.row()
            if row["state"] == "parked":
                with Admin(self.node.address) as admin, contextlib.suppress(ProtocolError):
                    admin.dispatcher_retry("misbehaving")
            return bool(row["state"] == "running" and row["lag_bytes"] == 0)

        eventually(is_well, "it is well and has caught up")

    def seen(self) -> tuple[int, int]:
        """Records and distinct records that the dispatcher has in its own durable state."""
        database = sqlite3.connect(self.node.store / "commitmq" / "dispatchers" / "misbehaving" / "seen.db")
        try:
            row = database.execute("SELECT COUNT(*), COUNT(DISTINCT physical_offset) FROM seen").fetchone()
        finally:
            database.close()
        return int(row[0]), int(row[1])


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    folder = tmp_path_factory.mktemp("misbehaving")
    metadata = folder / "misbehaving-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[commitmq]\nmisbehaving = misbehaving_plugin\n")
    mode_file = folder / "mode"
    mode_file.write_text("well")
    paths = ":".join([str(folder), str(FOLDER), environment()["PYTHONPATH"]])
    with start_node(folder, *SETTINGS, f"plugins.misbehaving.mode_file={mode_file}", PYTHONPATH=paths) as node:
        yield Patient(node, mode_file)


@pytest.fixture(autouse=True)
def mended(patient: Patient) -> Iterator[None]:
    """Every test begins and ends with a dispatcher that is well, and has seen every record once."""
    yield
    patient.mend()
    assert patient.seen() == (patient.sent, patient.sent)


def test_it_sees_every_record_and_answers_questions(patient: Patient) -> None:
    patient.send(500)
    patient.caught_up()
    with Admin(patient.node.address) as admin:
        assert admin.dispatcher_query("misbehaving", {}) == {"seen": patient.sent, "distinct": patient.sent}
        with pytest.raises(ProtocolError, match="ZeroDivisionError"):
            admin.dispatcher_query("misbehaving", {"raise": True})
        restarts = patient.row()["restarts"]
        for wish, reason in (("exit", "SystemExit"), ("nothing", "must be a dict"), ("large", "max_frame_bytes")):
            with pytest.raises(ProtocolError, match=reason):
                admin.dispatcher_query("misbehaving", {wish: True})
        assert admin.dispatcher_query("misbehaving", {})["seen"] == patient.sent
        assert patient.row()["restarts"] == restarts, "a question must not end the process"
        with pytest.raises(ProtocolError, match="there is no dispatcher 'other'; there are consume_queue"):
            admin.dispatcher_query("other", {})
        with pytest.raises(ProtocolError, match="answers no queries"):
            admin.dispatcher_query("consume_queue", {})


@pytest.mark.parametrize("mode", MODES)
def test_whatever_it_does_the_rest_goes_on_and_it_catches_up_when_mended(patient: Patient, mode: str) -> None:
    patient.mode(mode)
    for _ in range(5):
        patient.send(200)
        time.sleep(0.1)
    queues = patient.row("consume_queue")
    assert (queues["state"], queues["restarts"]) == ("running", 0)
    eventually(lambda: patient.row()["restarts"] or patient.row()["state"] == "parked", "it was noticed")
    assert patient.row()["lag_bytes"] > 0
    assert patient.row("consume_queue")["lag_bytes"] == 0
    assert patient.node.row("writer")["restarts"] == 0


def test_poison_is_narrowed_down_to_one_record_and_can_be_skipped(patient: Patient) -> None:
    patient.send(300, "other")
    with Producer(patient.node.address) as producer:
        poison = producer.send("poison", b"bad", queue=2)
    patient.sent += 1
    patient.mode(f"poison {poison.physical_offset}")
    patient.send(300, "other")
    with Admin(patient.node.address) as admin:
        admin.dispatcher_reset("misbehaving", "begin")
        eventually(lambda: patient.row()["state"] == "parked", "the dispatcher is parked")
        parked = patient.row()["parked"]
        assert (parked["topic"], parked["queue"], parked["queue_offset"]) == ("poison", 2, poison.queue_offset)
        assert parked["physical_offset"] == poison.physical_offset
        assert "is poison" in patient.row()["last_error"]
        with pytest.raises(ProtocolError, match="is parked"):
            admin.dispatcher_query("misbehaving", {})
        with pytest.raises(ProtocolError, match="it is parked at physical offset"):
            admin.dispatcher_skip("misbehaving", parked["physical_offset"] - 1)
        shown = commitmq("status", "--store", str(patient.node.store)).stdout
        assert "dispatcher misbehaving is parked" in shown
        listed = commitmq("dispatcher", "list", "--node", patient.node.address).stdout
        assert f"physical offset {poison.physical_offset}" in listed
        assert "is poison" in listed
        # It is parked for good: it is not tried again by itself.
        restarts = patient.row()["restarts"]
        time.sleep(1)
        assert patient.row()["restarts"] == restarts

        skipped = commitmq("dispatcher", "skip", "misbehaving", "--yes", "--node", patient.node.address)
        assert skipped.returncode == 0, skipped.stderr
        patient.caught_up()
        assert patient.seen() == (patient.sent - 1, patient.sent - 1)
        skipped_range = [poison.physical_offset, poison.physical_offset + parked["size"]]
        eventually(lambda: patient.row()["skipped"] == [skipped_range], "what it leaves out is told")

        # Whoever goes back means all of it, the skipped record as well.
        patient.mode("well")
        moved = admin.dispatcher_reset("misbehaving", "begin")
        assert moved["position"] == 0
    patient.caught_up()
    assert patient.row()["skipped"] == []


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("flush ('x', 0)", "two of int"),
        ("flush (1, 0)", "no record begins"),
        ("flush (1099511627776, 0)", "is at the offset"),
        ("open 1", "no record begins"),
    ],
)
def test_a_place_that_cannot_be_is_not_believed(patient: Patient, mode: str, reason: str) -> None:
    patient.send(10)
    patient.caught_up()
    patient.mode(mode)
    if mode.startswith("open"):
        os.kill(patient.node.pids()["dispatcher-misbehaving"], signal.SIGKILL)
    eventually(lambda: reason in (patient.row()["last_error"] or ""), "it died of its answer")


@pytest.mark.slow
def test_who_cannot_go_back_stays_parked_and_can_be_tried_again(patient: Patient) -> None:
    patient.send(50)  # so that there is something to go back to
    eventually(lambda: patient.seen()[1] == patient.sent, "it has seen them all")
    patient.caught_up()
    with Producer(patient.node.address) as producer:
        patient.mode(f"stubborn {patient.row()['position']}")
        poison = producer.send("poison", b"bad")
    patient.sent += 1

    def is_parked() -> bool:
        parked = patient.row()["parked"]
        return (
            patient.row()["state"] == "parked" and bool(parked) and parked["physical_offset"] == poison.physical_offset
        )

    eventually(is_parked, "it is parked")
    with Admin(patient.node.address) as admin:
        with pytest.raises(ProtocolError, match="cannot go back"):
            admin.dispatcher_reset("misbehaving", "begin")
        eventually(is_parked, "it is parked at the same record")
        patient.mode("well")
        admin.dispatcher_retry("misbehaving")
    patient.caught_up()


@pytest.mark.parametrize("state", ["parked", "dead"])
def test_it_hears_of_a_topic_that_was_deleted_while_it_could_not_listen(patient: Patient, state: str) -> None:
    topic = f"gone_while_{state}"
    patient.send(5, topic)
    patient.caught_up()
    with Admin(patient.node.address) as admin:
        if state == "parked":
            patient.mode(f"poison {patient.row()['position']}")
            patient.send(1)
            eventually(lambda: patient.row()["state"] == "parked", "it is parked")
            admin.topic_delete(topic)
        else:
            pid = patient.node.pids()["dispatcher-misbehaving"]
            os.kill(pid, signal.SIGSTOP)
            admin.topic_delete(topic)
            os.kill(pid, signal.SIGKILL)
        patient.mend()
        eventually(
            lambda: topic in admin.dispatcher_query("misbehaving", {"forgotten": True})["topics"], "it has been told"
        )


def test_a_reset_takes_offsets_times_and_ends_and_refuses_the_rest(patient: Patient) -> None:
    patient.send(100)
    patient.caught_up()
    with Admin(patient.node.address) as admin, Producer(patient.node.address) as producer:
        sent = producer.send("resets", b"here")
        patient.sent += 1
        patient.caught_up()
        assert admin.dispatcher_reset("misbehaving", sent.physical_offset)["position"] == sent.physical_offset
        with pytest.raises(ProtocolError, match="no record begins at"):
            admin.dispatcher_reset("misbehaving", sent.physical_offset + 1)
        with pytest.raises(ProtocolError, match="the log has the offsets"):
            admin.dispatcher_reset("misbehaving", 1 << 40)
        with pytest.raises(ProtocolError, match='must be "begin"'):
            admin.dispatcher_reset("misbehaving", "middle")
        with pytest.raises(ProtocolError, match="follow the log"):
            admin.dispatcher_reset("consume_queue", "begin")
        patient.caught_up()
        assert patient.seen() == (patient.sent, patient.sent)
        # Forwards leaves out what is between; backwards brings it back.
        patient.mode("slow")
        patient.send(50)
        patient.send(50)
        end = admin.dispatcher_reset("misbehaving", "end")
        assert end["before"] <= end["position"]
    patient.mode("well")
    by_time = commitmq(
        "dispatcher", "reset", "misbehaving", "--to", "2001-01-01T00:00", "--yes", "--node", patient.node.address
    )
    assert by_time.returncode == 0, by_time.stderr
    assert "to 0" in by_time.stdout


def test_killed_while_slow_it_goes_on_where_it_was(patient: Patient) -> None:
    patient.mode("slow")
    for _ in range(3):
        patient.send(100)
        pid = patient.node.pids()["dispatcher-misbehaving"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: patient.node.pids().get("dispatcher-misbehaving", pid) != pid, "it runs again")  # type: ignore[misc]


def test_a_parked_dispatcher_does_not_keep_the_log_and_goes_on_behind_what_expired(patient: Patient) -> None:
    """What it misses here is gone for good."""
    with Producer(patient.node.address) as producer, Admin(patient.node.address) as admin:
        poison = producer.send("poison", b"bad", queue=2)
        patient.mode(f"poison {poison.physical_offset}")
        admin.dispatcher_reset("misbehaving", "begin")
        eventually(lambda: patient.row()["state"] == "parked", "the dispatcher is parked")
        producer.send_batch("other", [b"x" * 1_000] * 3_000)  # three segments

        def expired() -> bool:
            admin.expire(keep_bytes=0)
            return int(admin.status()["positions"]["min_offset"]) > poison.physical_offset

        eventually(expired, "a parked plugin does not keep segments from being deleted")
        minimum = int(admin.status()["positions"]["min_offset"])
    # The record it was parked at is gone, so there is nothing left to wait for, although nobody mended it.
    patient.caught_up()
    start, end = patient.row()["gaps"][-1]
    assert start <= poison.physical_offset < end <= minimum
    patient.sent = patient.seen()[0]
    assert patient.sent > 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_sends_and_queues_keep_their_rate(patient: Patient, record_property: Callable[[str, object], None]) -> None:
    """Ratio of what is stored and visible a second, with the dispatcher misbehaving to with it well, in turns: two ways to
    misbehave beside each second of it well.
    """
    body = b"x" * 1000

    def rate(seconds: float) -> float:
        count = 0
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            last = producer.send_batch("rates", [body] * 1000)
            count += 1000
        with Admin(patient.node.address) as admin:
            end = int(last.acks[-1].answer["end_offset"]) - 1
            eventually(lambda: admin.status()["positions"]["dispatched"] > end, "what was sent is visible")
        patient.sent += count
        return count / (time.perf_counter() - begun)

    ratios: dict[str, list[float]] = {mode: [] for mode in MODES}
    undecided = list(MODES)
    with Producer(patient.node.address) as producer:
        rate(0.5)
        # Two seconds of a shared machine differ by a quarter either way: where seven do not decide, more do.
        for turn in range(1, 22):
            for pair in filter(None, (undecided[:2], undecided[2:])):
                patient.mend()
                well = rate(1.0)
                for mode in pair if turn % 2 else reversed(pair):
                    patient.mend()
                    patient.mode(mode)
                    ratios[mode].append(rate(1.0) / well)
            if turn % 7 == 0:
                undecided = [mode for mode in MODES if statistics.median(ratios[mode]) < LEAST_RATE]
            if not undecided:
                break
    record_property("ratios", {mode: [round(one, 2) for one in found] for mode, found in ratios.items()})
    assert not undecided, ratios
