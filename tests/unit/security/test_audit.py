"""Goal: the audit log keeps every line in its chain through rotations, restarts, crashes and full disks, and shows each cut.

Method: logs in a folder, damaged byte by byte as a person or a crash would; errors of the disk by failpoints and by folders
that are gone; a process that is killed in the middle of a line.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from commitmq import failpoints
from commitmq.log import get_log
from commitmq.security import audit
from commitmq.security.audit import SAVED_S, Actor, AuditLimits, AuditLog, Event, parsed
from commitmq.security.audit_trail import AuditTrail, Chain
from nodes import eventually

SHOP = Actor("shop", "native", "10.1.2.3", "k" * 40)


class Logs:
    """Audit logs in one folder; all are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "commitmq" / "audit"
        self.told: list[str] = []
        self._open: list[AuditLog] = []

    def log(self, role: str = "coordinator", **limits: Any) -> AuditLog:
        found = AuditLog(self.folder, role, get_log("test"), AuditLimits(**limits), told=self.told.append)
        self._open.append(found)
        return found

    def close(self) -> None:
        for one in self._open:
            one.close()
        self._open.clear()

    def lines(self) -> list[dict[str, Any]]:
        return list(AuditTrail(self.folder).lines())

    def chain(self, role: str = "coordinator") -> Chain:
        return next(one for one in AuditTrail(self.folder).verified() if one.role == role)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    found = Logs(tmp_path)
    yield found
    found.close()


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(text: str) -> None:
        monkeypatch.setattr(failpoints, "_points", failpoints.parse(text))
        monkeypatch.setattr(failpoints, "ACTIVE", bool(text))

    return put


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread, which tries again what failed, does not come."""
    monkeypatch.setattr(audit, "_SYNC_S", 600.0)


def fill(log: AuditLog, count: int, begin: int = 0) -> None:
    for number in range(begin, begin + count):
        log.write(Event(SHOP, "topic.create", f"Topic:t{number}", request=number, after={"queues": 4}))


def test_a_line_says_who_did_what(logs: Logs) -> None:
    with logs.log().changing(Event(SHOP, "topic.create", "Topic:orders", request=7, before=None, after={"queues": 4})):
        pass
    (line,) = logs.lines()
    assert {name: line[name] for name in ("role", "n", "prev", "user", "key", "protocol", "address")} == {
        "role": "coordinator",
        "n": 1,
        "prev": "",
        "user": "shop",
        "key": "k" * 12,
        "protocol": "native",
        "address": "10.1.2.3",
    }
    assert (line["op"], line["resource"], line["decision"], line["request"], line["after"]) == (
        "topic.create",
        "Topic:orders",
        "allowed",
        7,
        {"queues": 4},
    )
    path = logs.folder / "coordinator.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(logs.folder.stat().st_mode) == 0o700


def test_a_change_that_fails_has_a_line_of_that(logs: Logs) -> None:
    with pytest.raises(ValueError, match="no room"), logs.log().changing(Event(SHOP, "topic.create", "Topic:t")):
        raise ValueError("no room")
    assert [(one["decision"], one.get("reason")) for one in logs.lines()] == [("allowed", None), ("failed", "no room")]


def test_strange_texts_are_bounded_and_break_no_line(logs: Logs) -> None:
    strange = "\ud800\n\x00" + "x" * 100_000
    actor = Actor(strange, strange, strange, strange)
    logs.log().write(Event(actor, strange, strange, reason=strange, before={strange: strange}, after=[1] * 10_000))
    fill(logs.log("reader-0"), 1)
    data = (logs.folder / "coordinator.jsonl").read_bytes()
    assert data.count(b"\n") == 1
    assert len(data) < 8_000
    assert logs.chain().faults == []


def test_a_number_that_json_does_not_carry_costs_no_request(logs: Logs) -> None:
    log = logs.log()
    log.write(Event(Actor("ann"), "topic.create", request=1 << 80))
    log.refused(Actor("ann"), "send", request=-(1 << 80))
    assert [line["request"] for line in logs.lines()] == [{"cut": str(1 << 80)}, {"cut": str(-(1 << 80))}]


def test_the_chain_goes_on_over_files_and_restarts(logs: Logs) -> None:
    for begin in range(0, 90, 30):
        log = logs.log(max_file_bytes=4_096, max_files=100)
        fill(log, 30, begin)
        log.close()
    assert len(list(logs.folder.iterdir())) > 4
    assert [one["resource"] for one in logs.lines()] == [f"Topic:t{number}" for number in range(90)]
    chain = logs.chain()
    assert (chain.lines, chain.first, chain.last, chain.faults, chain.notes) == (90, 1, 90, [], [])


def test_old_files_are_deleted_and_the_chain_says_so(logs: Logs) -> None:
    log = logs.log(max_file_bytes=2_048, max_files=3)
    fill(log, 100)
    log.close()
    assert len(list(logs.folder.iterdir())) == 3
    chain = logs.chain()
    assert chain.faults == []
    assert chain.first > 1
    assert "deleted by their age" in chain.notes[0]
    # The same by a person: one more file goes.
    min(logs.folder.glob("coordinator.jsonl.*")).unlink()
    assert "are missing at the beginning" in logs.chain().faults[0]


def test_every_change_of_a_whole_line_shows(logs: Logs) -> None:
    log = logs.log()
    fill(log, 5)
    log.close()
    path = logs.folder / "coordinator.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    middle = 2
    changed = lines[middle].replace(b'"shop"', b'"shoq"')
    forged = {
        "changed": [*lines[:middle], changed, *lines[middle + 1 :]],
        "missing": [*lines[:middle], *lines[middle + 1 :]],
        "twice": [*lines[: middle + 1], lines[middle], *lines[middle + 1 :]],
        "swapped": [lines[0], lines[2], lines[1], *lines[3:]],
        "no line": [*lines[:middle], b"nothing\n", *lines[middle:]],
        "no beginning": lines[1:],
    }
    for what, left in forged.items():
        path.write_bytes(b"".join(left))
        assert logs.chain().faults, what
    path.write_bytes(b"".join(forged["missing"]))
    assert logs.chain().faults == [f"coordinator.jsonl, byte {len(lines[0] + lines[1])}: lines 3 to 3 are missing"]
    path.write_bytes(b"".join(lines))
    assert logs.chain().faults == []


def test_a_cut_under_a_running_process_shows(logs: Logs) -> None:
    log = logs.log()
    fill(log, 5)
    path = logs.folder / "coordinator.jsonl"
    size = path.stat().st_size
    os.truncate(path, size - 30)  # in the middle of line 5
    fill(log, 2, 5)
    chain = logs.chain()
    assert [one["n"] for one in logs.lines()] == [1, 2, 3, 4, 6, 7]
    assert chain.faults
    path.unlink()
    fill(log, 2, 7)
    assert logs.chain().faults == ["lines 1 to 7 are missing at the beginning"]
    assert [one["n"] for one in logs.lines()] == [8, 9]


@pytest.mark.parametrize("cut", [1, 2, 40, 150])
def test_a_crash_in_the_middle_of_a_line_is_named_and_no_fault(logs: Logs, cut: int) -> None:
    log = logs.log()
    fill(log, 3)
    log.close()
    path = logs.folder / "coordinator.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    assert logs.chain().faults == []
    if cut > 1:
        assert "unfinished line" in logs.chain().notes[0]
    log = logs.log()
    fill(log, 2, 3)
    log.close()
    chain = logs.chain()
    assert chain.faults == []
    # With its line end alone missing a line is whole.
    assert [one["n"] for one in logs.lines()] == ([1, 2, 3, 4, 5] if cut == 1 else [1, 2, 3, 4])
    assert bool(chain.notes) == (cut > 1)


def test_a_crash_within_the_first_line(logs: Logs) -> None:
    log = logs.log()
    fill(log, 1)
    log.close()
    path = logs.folder / "coordinator.jsonl"
    os.truncate(path, 20)
    fill(logs.log(), 2)
    chain = logs.chain()
    assert (chain.faults, chain.lines, len(chain.notes)) == ([], 2, 1)


KILLED = """
import sys
from pathlib import Path
from commitmq.log import get_log
from commitmq.security.audit import AuditLimits, AuditLog
from commitmq.security.audit import Actor, Event
log = AuditLog(Path(sys.argv[1]), "coordinator", get_log("test"), AuditLimits(max_file_bytes=1024))
for number in range(20):
    log.write(Event(Actor("shop"), "topic.create", f"Topic:t{number}"))
log.close()
"""


@pytest.mark.parametrize(
    "point",
    [
        "audit.write=kill@8",
        "audit.write=short:50@8;disk.sync.audit:before=kill",
        "disk.replace.audit:after=kill@2",
        "disk.open.audit:after=kill@2",
    ],
)
def test_a_killed_process_leaves_a_chain_that_goes_on(logs: Logs, point: str) -> None:
    environment = {**os.environ, "COMMITMQ_FAILPOINTS": point}
    arguments = [sys.executable, "-c", KILLED, str(logs.folder)]
    (logs.folder.parent).mkdir(mode=0o700)
    killed = subprocess.run(arguments, env=environment, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert logs.chain().faults == []
    log = logs.log(max_file_bytes=1_024)
    fill(log, 20)
    log.close()
    assert logs.chain().faults == []
    assert [one["resource"] for one in logs.lines() if "resource" in one][-20:] == [f"Topic:t{n}" for n in range(20)]


def test_a_full_disk_costs_lines_but_no_more(logs: Logs, points: Any, no_thread: None) -> None:
    log = logs.log()
    fill(log, 2)
    points("audit.write=errno:ENOSPC@1-2")
    fill(log, 2, 2)
    assert "No space left" in log.fault
    assert logs.told == [log.fault]
    fill(log, 1, 4)
    assert (log.fault, logs.told[-1], len(logs.told)) == ("", "", 2)
    chain = logs.chain()
    assert (chain.faults, chain.lines) == ([], 3)
    assert "2 lines could not be written before line 3" in chain.notes[0]


def test_lines_are_taken_back_whole_files_and_broken_lines_too(logs: Logs, points: Any, no_thread: None) -> None:
    log = logs.log(max_file_bytes=1_024)
    fill(log, 8)
    before = logs.lines()
    log.begin()
    fill(log, 30)
    points("audit.write=short:30")
    fill(log, 2)
    assert log.lost == 2
    log.take_back()
    points("")
    assert (logs.lines(), log.lost) == (before, 0)
    fill(log, 8)
    log.begin()
    points("disk.resize.audit:before=errno:EIO@1")
    fill(log, 1)
    log.take_back()
    assert "take lines back" in log.fault
    fill(log, 1)
    assert (log.fault, len(logs.lines())) == ("", 18)
    chain = logs.chain()
    assert (chain.faults, chain.notes) == ([], [])
    # Another program's file is not cut.
    log.begin()
    path = logs.folder / "coordinator.jsonl"
    path.unlink()
    fill(log, 3)
    log.take_back()
    assert path.read_bytes().count(b"\n") == 3


def test_a_short_write_is_an_unfinished_line(logs: Logs, points: Any, no_thread: None) -> None:
    log = logs.log(max_file_bytes=1_024)
    fill(log, 2)
    points("audit.write=short:30@1-2")
    fill(log, 2, 2)
    points("")
    fill(log, 8, 4)
    chain = logs.chain()
    assert chain.faults == []
    assert chain.lines == 10
    assert any("unfinished line" in one for one in chain.notes)


def test_a_file_that_cannot_be_opened_heals(logs: Logs, no_thread: None) -> None:
    logs.folder.parent.mkdir(mode=0o700)
    logs.folder.write_text("in the way")
    log = logs.log()
    fill(log, 3)
    assert log.fault
    assert len(logs.told) == 1
    logs.folder.unlink()
    fill(log, 1, 3)
    assert log.fault == ""
    assert [one["lost"] for one in logs.lines()] == [3]


def test_a_file_that_cannot_be_renamed_goes_on(logs: Logs, points: Any) -> None:
    log = logs.log(max_file_bytes=1_024)
    points("disk.replace.audit:before=errno:EACCES")
    fill(log, 10)
    assert "continues" in log.fault
    assert len(logs.lines()) == 10
    points("")
    fill(log, 10, 10)
    assert log.fault == ""
    assert logs.chain().faults == []


@pytest.mark.parametrize(
    ("point", "lost"),
    [
        ("audit.write=errno:ENOSPC@3-6", 3),
        ("disk.open.audit:before=errno:EACCES@1-6", 5),
        ("disk.sync.audit:before=errno:EIO@1-2", 0),
        ("disk.sync_folder.audit:before=errno:EMFILE@1-2", 0),
        ("disk.unlink.audit:before=errno:EIO@1", 0),
        ("disk.replace.audit:before=errno:EACCES@1-20", 0),
    ],
)
def test_a_fault_passes_without_another_line(logs: Logs, points: Any, point: str, lost: int) -> None:
    log = logs.log(max_file_bytes=1_024, max_files=2)
    points(point)
    fill(log, 5 if lost else 20)
    eventually(lambda: log.fault == "" and len(logs.told) == 2, "that the fault has passed", 20)
    eventually(lambda: len(list(logs.folder.iterdir())) <= 2, "that no file is too many", 10)
    assert [one["lost"] for one in logs.lines() if "lost" in one] == ([lost] if lost else [])
    assert logs.chain().faults == []


def test_refusals_of_a_second_are_bounded_and_counted(logs: Logs) -> None:
    log = logs.log(refusals_per_second=5)
    for number in range(1_000):
        log.refused(SHOP, "send", "Topic:orders", "no entry", number)
    eventually(lambda: sum(one.get("count", 1) for one in logs.lines()) == 1_000, "the summary", 10)
    told = [one for one in logs.lines() if one["op"] == "send"]
    assert all(one["decision"] == "refused" and one["reason"] == "no entry" for one in told)
    # The thousand take a second or two.
    assert 5 <= len(told) <= 15


def test_refusals_never_roll_changes_away(logs: Logs) -> None:
    """The names are long, and each character takes six bytes in JSON."""
    log = logs.log(max_file_bytes=4_096, max_files=2, user_bytes_per_second=64, refusals_per_second=100_000)
    cook = Actor("cook", "native", "10.1.2.4")
    log.change(Event(cook, "topic.create", "Topic:cooked"))
    for number in range(2_000):
        log.refused(SHOP, "topic.describe", "Topic:" + "\x01\x02" * 400, "no entry for " + "\x01" * 800, number)
    log.refused(cook, "send", "Topic:private", "no entry")
    log.close()
    lines = logs.lines()
    assert [one["resource"] for one in lines if one.get("user") == "cook"] == ["Topic:cooked", "Topic:private"]
    assert {one["role"] for one in lines} == {"coordinator"}
    (summed,) = [one for one in lines if one["op"] == "audit.summary"][-1:]
    assert (summed["user"], summed["decision"]) == ("shop", "refused")
    chains = AuditTrail(logs.folder).verified()
    assert [(one.role, one.faults) for one in chains] == [("coordinator", []), ("coordinator.refused", [])]
    assert sum(one.stat().st_size for one in logs.folder.iterdir()) < 4 * 2 * 4_096


def test_what_a_user_causes_is_bounded_in_bytes(logs: Logs) -> None:
    log = logs.log(user_bytes_per_second=64, changes_per_second=100_000, refusals_per_second=100_000)
    at_once = 64 * SAVED_S
    for number in range(1_000):
        log.change(Event(SHOP, "topic.create", f"Topic:t{number}", after={"x": "y" * 200}))
        log.used(Event(SHOP, "send", f"t{number}"))
        log.refused(SHOP, "send", "Topic:" + "\x01" * 800, "\x01" * 800)
    log.close()
    for name in ("coordinator", "coordinator.refused"):
        size = (logs.folder / f"{name}.jsonl").stat().st_size
        assert at_once < size < at_once + 8_000, name
    lines = logs.lines()
    assert sum(one.get("count", 1) for one in lines) == 3_000
    assert max(len(orjson.dumps(one)) for one in lines) < 4_000


def test_claimed_names_share_a_bound(logs: Logs) -> None:
    log = logs.log(user_bytes_per_second=64)
    for number in range(5_000):
        log.refused(Actor(f"claimed {number}", "remoting", "10.1.2.3"), "SEND_MESSAGE", reason="\x01" * 200)
    log.close()
    lines = logs.lines()
    assert (logs.folder / "coordinator.refused.jsonl").stat().st_size < 64 * SAVED_S * 16 + 40_000
    assert sum(one.get("count", 1) for one in lines) == 5_000
    assert any("users were refused in a second" in one.get("reason", "") for one in lines)


def test_changes_of_a_user_are_bounded_and_others_keep_their_lines(logs: Logs) -> None:
    log = logs.log(changes_per_second=5)
    cook = Actor("cook", "native", "10.1.2.4")
    for number in range(1_000):
        log.change(Event(SHOP, "topic.create", f"Topic:t{number}"))
    log.change(Event(cook, "topic.create", "Topic:cooked"))
    log.change(Event(SHOP, "topic.delete", "Topic:t1"))
    with pytest.raises(ValueError), log.changing(Event(SHOP, "topic.delete", "Topic:t2")):
        raise ValueError("it is not there")
    eventually(lambda: sum(one.get("count", 1) for one in logs.lines()) == 1_004, "the summary", 10)
    lines = logs.lines()
    of_shop = [one for one in lines if one["user"] == "shop" and one["op"] != "audit.summary"]
    # The thousand take a second or two.
    assert 5 <= sum(one["op"] == "topic.create" for one in of_shop) <= 15
    # The first of each kind is there, and that of another user.
    assert next(one["resource"] for one in of_shop if one["op"] == "topic.delete") == "Topic:t1"
    assert [one["reason"] for one in of_shop if one["decision"] == "failed"] == ["it is not there"]
    assert [one["resource"] for one in lines if one["user"] == "cook"] == ["Topic:cooked"]
    summed = [one for one in lines if one["op"] == "audit.summary"]
    assert all(one["user"] == "shop" and sum(one["after"].values()) == one["count"] for one in summed)
    assert sum(one["after"].get("topic.create", 0) for one in summed) >= 985
    assert not logs.chain().faults


def test_a_summary_comes_although_nothing_more_is_written(logs: Logs) -> None:
    log = logs.log(changes_per_second=0)
    for _ in range(3):
        log.change(Event(SHOP, "topic.create", "Topic:a"))
    eventually(lambda: [one.get("count") for one in logs.lines()] == [None, 2], "the summary", 10)
    log.change(Event(SHOP, "topic.create", "Topic:a"))
    log.change(Event(SHOP, "topic.create", "Topic:a"))
    log.close()
    assert [one.get("count") for one in logs.lines()] == [None, 2, None, 1]


def test_uses_are_written_once_and_bounded(logs: Logs) -> None:
    log = logs.log(uses_per_hour=48)
    assert [log.is_first("shop", "send", "orders") for _ in range(3)] == [True, False, False]
    assert [log.is_first("shop", "send", f"t{number}") for number in range(5)] == [True, True, False, False, False]
    assert [(one["op"], one["user"]) for one in logs.lines()] == [("audit.summary", "shop")]
    assert not logs.log("reader-0", enable=False).is_first("shop", "send", "orders")


def test_no_user_turns_off_the_uses_and_connections_of_others(logs: Logs) -> None:
    log = logs.log(uses_per_hour=160)
    assert sum(log.is_first("shop", "send", f"t{number}") for number in range(200)) == 10
    assert log.is_first_connection("shop", "k" * 40, "10.1.2.3")
    assert [log.is_first("cook", "send", "t1") for _ in range(2)] == [True, False]
    assert sum(log.is_first(f"user{number}", "send", f"t{one}") for number in range(20) for one in range(20)) == 149
    assert sum(log.is_first_connection("shop", "k" * 40, f"10.1.1.{number}") for number in range(20)) == 9
    assert [log.is_first_connection("cook", "k" * 40, "10.1.2.3") for _ in range(2)] == [True, False]
    told = [one["reason"] for one in logs.lines() if one["user"] == "shop"]
    assert [one.split(" of this user")[0] for one in told] == ["the first 10 uses", "the first 10 connections"]


def test_names_of_any_length_cost_no_memory(logs: Logs) -> None:
    log = logs.log()
    long = 100_000
    fill(log, 1)
    tracemalloc.start()
    try:
        for number in range(100):
            name = f"{number}" + "x" * long
            assert log.is_first("shop", f"send{name}", name)
            log.used(Event(SHOP, f"send{name}", name))
            log.refused(Actor(f"claimed{name}", "remoting", name), f"send{name}", name, name)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 20 * long
    assert max(len(orjson.dumps(one)) for one in logs.lines()) < 4_000


def test_off_is_off(logs: Logs) -> None:
    log = logs.log(enable=False)
    fill(log, 3)
    log.refused(SHOP, "send")
    log.close()
    assert not logs.folder.exists()


def test_lines_of_several_processes_are_merged_by_time(logs: Logs) -> None:
    first, second = logs.log("coordinator"), logs.log("supervisor")
    for number in range(6):
        fill((first, second)[number % 2], 1, number)
    found = logs.lines()
    assert [one["resource"] for one in found] == [f"Topic:t{number}" for number in range(6)]
    middle = found[3]["time"]
    assert [one["resource"] for one in AuditTrail(logs.folder).lines(middle)] == ["Topic:t3", "Topic:t4", "Topic:t5"]


def test_threads_share_one_log(logs: Logs) -> None:
    log = logs.log(max_file_bytes=8_192, max_files=100)
    threads = [threading.Thread(target=fill, args=(log, 100)) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert (logs.chain().lines, logs.chain().faults) == (400, [])


def test_only_lines_are_lines() -> None:
    for text in (b"", b"[]", b"1", b'{"n":"1","prev":"","time":""}', b'{"n":1,"time":""}', b"{", orjson.dumps({})):
        assert parsed(text) is None
