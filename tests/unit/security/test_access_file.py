"""Goal: the file of users is changed whole or not at all, read only whole, and never lets everybody in by accident.

Method: every failpoint of a change with an error and with a death; files that somebody removed, cut or edited; several that
change it at once; a process that reads it while it changes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq.security.access_file import LOOK_MS, AccessFile, AccessTable, LiveAccess, written_down
from commitmq.security.audit import Actor
from commitmq.security.audit_trail import AuditTrail
from commitmq.security.policy import Secret, User

SECRET = "canary-of-the-secret"


@contextlib.contextmanager
def active(text: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "ACTIVE", True)
        patch.setattr(failpoints, "_points", failpoints.parse(text))
        yield


def add(file: AccessFile, name: str) -> AccessTable:
    def apply(table: AccessTable) -> None:
        table.users[name] = User(name, Secret(SECRET))

    return file.change(apply)


def without_bob(table: AccessTable) -> None:
    del table.users["bob"]


def names(root: Path) -> list[str]:
    return sorted(AccessFile(root).load().users)


def test_a_store_without_the_file_has_no_users(tmp_path: Path) -> None:
    assert AccessFile(tmp_path).load().is_open
    assert not (tmp_path / "config").exists(), "a look makes nothing"


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    before = os.umask(0)
    try:
        add(file, "ann")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in file.folder.iterdir()} == {0o600}
    assert add(file, "bob").version == 2
    assert names(tmp_path) == ["ann", "bob"]


POINTS = [
    f"{place}:{side}"
    for place in ("disk.open.acl_lock", "disk.open.acl", "disk.sync.acl", "disk.replace.acl", "disk.sync_folder.acl")
    for side in ("before", "after")
] + ["acl.write"]
FOLDERS = ["disk.sync_folder.folder:before", "disk.sync_folder.folder:after"]
FIRST = [
    f"{place}:{side}"
    for place in ("disk.open.acl_configured", "disk.sync_folder.acl_configured")
    for side in ("before", "after")
]


@pytest.mark.parametrize("point", FOLDERS)
def test_the_first_user_is_not_there_before_its_folder_is_on_the_device(tmp_path: Path, point: str) -> None:
    with active(f"{point}=errno:EIO"), pytest.raises(StoreError, match="file of users"):
        add(AccessFile(tmp_path), "ann")
    assert AccessFile(tmp_path).load().is_open
    add(AccessFile(tmp_path), "ann")
    assert names(tmp_path) == ["ann"]


@pytest.mark.parametrize("point", POINTS)
def test_an_error_leaves_the_old_users_or_the_new(tmp_path: Path, point: str) -> None:
    file = AccessFile(tmp_path)
    add(file, "ann")
    with active(f"{point}=errno:EIO"), pytest.raises(StoreError, match="file of users"):
        add(file, "bob")
    assert names(tmp_path) in (["ann"], ["ann", "bob"])
    add(file, "bob")
    assert names(tmp_path) == ["ann", "bob"]


def audited(root: Path) -> list[tuple[str, str, str]]:
    lines = (root / "commitmq" / "audit" / "users.jsonl").read_bytes().splitlines()
    return [(one["resource"], one["decision"], one.get("reason", "")) for one in map(orjson.loads, lines)]


def test_the_audit_log_says_whether_a_change_that_failed_is_there(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    add(file, "ann")
    with active("disk.replace.acl:before=errno:EIO"), pytest.raises(StoreError):
        add(file, "bob")
    with active("disk.sync_folder.acl:before=errno:EIO"), pytest.raises(StoreError):
        add(file, "eve")
    assert names(tmp_path) == ["ann", "eve"]
    bob, failed, eve, made = audited(tmp_path)[1:]
    assert (bob[:2], failed[:2]) == (("User:bob", "allowed"), ("User:bob", "failed"))
    assert (eve[:2], made[:2]) == (("User:eve", "allowed"), ("User:eve", "allowed"))
    assert "a power cut may take it back" in made[2]


def test_a_change_that_nobody_would_see_is_not_made(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    add(file, "ann")
    with active("disk.open.audit:before=errno:ENOSPC"), pytest.raises(StoreError, match="cannot be written down"):
        add(file, "ghost")

    def two(table: AccessTable) -> None:
        table.users.update({name: User(name, Secret(SECRET)) for name in ("one", "other")})

    with active("disk.open.audit:before=errno:ENOSPC@1"), pytest.raises(StoreError, match="cannot be written down"):
        file.change(two)  # the second line could be written
    assert names(tmp_path) == ["ann"]
    add(file, "bob")
    found = audited(tmp_path)
    assert [one[:2] for one in found if one[1] != "failed"] == [("User:ann", "allowed"), ("User:bob", "allowed")]


@pytest.mark.parametrize(
    "points",
    [
        "audit.write=errno:ENOSPC@4-99",  # allowed, and no room for what comes then
        "audit.write=short:50@4-99",
        "audit.write=short:50@8-99;disk.open.acl:before=errno:ENOSPC",  # two of the five have a line that says failed
    ],
)
def test_the_lines_of_a_change_that_a_full_disk_stops_are_taken_back(tmp_path: Path, points: str) -> None:
    def five(table: AccessTable) -> None:
        table.users.update({f"user{one}": User(f"user{one}", Secret(SECRET)) for one in range(5)})

    file = AccessFile(tmp_path)
    add(file, "ann")
    with active(points), pytest.raises(StoreError, match="No space left"):
        file.change(five)
    assert names(tmp_path) == ["ann"]
    trail = AuditTrail(tmp_path / "commitmq" / "audit")
    assert [(one["resource"], one["decision"]) for one in trail.lines()] == [("User:ann", "allowed")]
    with active(points.replace("-99", "")), pytest.raises(StoreError, match="No space left"):
        file.change(five)  # there is room for one line again
    add(file, "bob")
    found = [(one["decision"], one.get("resource")) for one in trail.lines()]
    failed = {what for decision, what in found if decision == "failed"}
    assert failed in ({f"User:user{one}" for one in range(5)}, {None})  # each, or one line for all
    assert {what for decision, what in found if decision == "allowed"} - failed == {"User:ann", "User:bob"}
    assert [one.faults for one in trail.verified()] == [[]]


@pytest.mark.parametrize(("made", "reason"), [(True, "a power cut may take it back"), (None, "cannot be read whether")])
def test_the_lines_of_a_change_that_may_be_made_stay(tmp_path: Path, made: bool | None, reason: str) -> None:
    file = AccessFile(tmp_path)
    after = file.load().copy()
    after.users["bob"] = User("bob", Secret(SECRET))
    actor = Actor("uid 7", "file", "local")
    with pytest.raises(OSError, match="gone"), written_down(tmp_path, actor, file.load(), after, lambda: made):
        raise OSError("gone")
    assert [one[:2] for one in audited(tmp_path)] == [("User:bob", "allowed")] * 2
    assert reason in audited(tmp_path)[1][2]


def test_a_change_that_is_interrupted_has_lines_of_that(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    after = file.load().copy()
    after.users["bob"] = User("bob", Secret(SECRET))
    actor = Actor("uid 7", "file", "local")
    with pytest.raises(KeyboardInterrupt), written_down(tmp_path, actor, file.load(), after, lambda: False):
        raise KeyboardInterrupt
    assert audited(tmp_path)[1] == ("User:bob", "failed", "KeyboardInterrupt()")


def test_where_few_lines_fit_one_says_that_nothing_was_made(tmp_path: Path) -> None:
    def five(table: AccessTable) -> None:
        table.users.update({f"user{one}": User(f"user{one}", Secret(SECRET)) for one in range(5)})

    with active("audit.write=errno:ENOSPC@4-5"), pytest.raises(StoreError):
        AccessFile(tmp_path).change(five)
    (line,) = AuditTrail(tmp_path / "commitmq" / "audit").lines()
    assert (line["op"], line["decision"]) == ("audit.summary", "failed")
    assert line["reason"].startswith("changes of users, 5, were not made: users stay as they are")


def _die(root: Path, point: str) -> None:
    with active(f"{point}=kill"):
        add(AccessFile(root), "bob")


@pytest.mark.parametrize("point", [*POINTS, *FIRST])
def test_a_death_leaves_the_old_users_or_the_new(tmp_path: Path, point: str) -> None:
    if point not in FIRST:
        add(AccessFile(tmp_path), "ann")
    process = multiprocessing.get_context("fork").Process(target=_die, args=(tmp_path, point))
    process.start()
    process.join(20)
    assert process.exitcode == -9
    assert names(tmp_path) in (["ann"], ["ann", "bob"], ["bob"])
    add(AccessFile(tmp_path), "bob")
    assert "bob" in names(tmp_path)


def test_a_file_that_somebody_removed_lets_nobody_in(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    add(file, "ann")
    file.path.unlink()
    with pytest.raises(StoreError, match="is missing"):
        file.load()
    with pytest.raises(StoreError, match="is missing"):
        add(file, "bob")
    (file.folder / "configured").unlink()
    assert file.load().is_open


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("{", ""),
        ("[]", "shape"),
        ('{"version": 1, "users": {"ann": {}}, "policies": {}}', "ann"),
        (
            '{"version": 1, "users": {"ann": {"type": "Normal", "status": "enable", "secret": 1}}, "policies": {}}',
            "ann",
        ),
        ('{"version": 1, "users": {}, "policies": {"bob": {}}}', "bob"),
        ('{"version": -1, "users": {}, "policies": {}}', "version"),
    ],
)
def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, text: str, reason: str) -> None:
    file = AccessFile(tmp_path)
    add(file, "ann")
    file.path.write_text(text)
    with pytest.raises(StoreError, match=f"(?i)damaged.*{reason}"):
        file.load()
    with pytest.raises(StoreError, match="damaged"):
        add(file, "bob")
    assert file.path.read_text() == text


def test_a_message_never_has_the_secret(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    add(file, "ann")
    file.path.write_text(file.path.read_text().replace('"Normal"', '"Strange"'))
    with pytest.raises(StoreError) as caught:
        file.load()
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(User("ann", Secret(SECRET)))
    assert SECRET not in f"{Secret(SECRET)}"


def _add_many(root: Path, first: int) -> None:
    for number in range(first, first + 20):
        add(AccessFile(root), f"user-{number}")


def test_several_change_it_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add_many, args=(tmp_path, first)) for first in (0, 20, 40)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(60)
    assert [one.exitcode for one in processes] == [0, 0, 0]
    table = AccessFile(tmp_path).load()
    assert (len(table.users), table.version) == (60, 60)


def test_another_account_may_not_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(StoreError, match="owner"):
        add(AccessFile(tmp_path), "ann")
    assert not (tmp_path / "config").exists()


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def pass_ms(self, count: float) -> None:
        self.now += int(count * 1_000_000)


def test_a_running_process_follows_the_file(tmp_path: Path) -> None:
    clock, file = Clock(), AccessFile(tmp_path)
    live = LiveAccess(file, get_log("test"), clock_ns=clock)
    assert live.table().is_open
    add(file, "ann")
    clock.pass_ms(LOOK_MS - 1)
    assert live.table().is_open, "it looks only now and then"
    clock.pass_ms(1)
    assert list(live.table().users) == ["ann"]
    known = live.table()
    clock.pass_ms(LOOK_MS)
    assert live.table() is known, "what did not change is not read"


@pytest.mark.parametrize("damage", ["remove", "remove folder", "cut"])
def test_a_running_process_keeps_its_users_when_the_file_goes(tmp_path: Path, damage: str) -> None:
    clock, file = Clock(), AccessFile(tmp_path)
    add(file, "ann")
    live = LiveAccess(file, get_log("test"), clock_ns=clock)
    data = file.path.read_bytes()
    if damage == "cut":
        file.path.write_bytes(data[:40])
    else:
        for one in file.folder.iterdir() if damage == "remove folder" else [file.path]:
            one.unlink()
    for _ in range(3):
        clock.pass_ms(LOOK_MS)
        assert list(live.table().users) == ["ann"]
    file.path.write_bytes(data)
    add(file, "bob")
    clock.pass_ms(LOOK_MS)
    assert list(live.table().users) == ["ann", "bob"]


def test_a_read_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A user who was deleted while the process had no descriptor left stayed in until the next change.
    clock, file = Clock(), AccessFile(tmp_path)
    add(file, "ann")
    add(file, "bob")
    read = AccessFile(tmp_path)
    live = LiveAccess(read, get_log("test"), clock_ns=clock)
    file.change(without_bob)

    def fails() -> AccessTable:
        raise StoreError("cannot read the file of users: Too many open files", path=file.path)

    with monkeypatch.context() as patch:
        patch.setattr(read, "load", fails)
        clock.pass_ms(LOOK_MS)
        assert list(live.table().users) == ["ann", "bob"]
    clock.pass_ms(LOOK_MS)
    assert list(live.table().users) == ["ann"]


def test_a_file_that_gets_its_rights_back_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = Clock(), AccessFile(tmp_path)
    add(file, "ann")
    live = LiveAccess(file, get_log("test"), clock_ns=clock)
    before = live._state()
    file.path.chmod(0o640)
    assert live._state() != before, "chmod and chown change neither inode, time of change nor size"


def test_of_two_reads_at_once_the_newer_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = AccessFile(tmp_path), AccessFile(tmp_path)
    add(file, "ann")
    add(file, "bob")
    live = LiveAccess(read, get_log("test"))
    file.path.touch()
    goes_on, has_read, load = threading.Event(), threading.Event(), read.load

    def slowly() -> AccessTable:
        table = load()
        if threading.current_thread() is other:
            has_read.set()
            assert goes_on.wait(10)
        return table

    monkeypatch.setattr(read, "load", slowly)
    other = threading.Thread(target=live.newest)
    other.start()
    assert has_read.wait(10)
    file.change(without_bob)
    threading.Timer(0.2, goes_on.set).start()
    assert list(live.newest().users) == ["ann"]
    other.join()
    assert list(live.newest().users) == ["ann"]


EMPTY = '{"version":99999,"users":{},"policies":{}}'


def test_a_file_without_users_lets_nobody_in(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    add(file, "ann")
    clock = Clock()
    live = LiveAccess(file, get_log("test"), clock_ns=clock)
    file.path.write_text(EMPTY)
    clock.pass_ms(LOOK_MS)
    assert list(live.table().users) == ["ann"], "the users of before stay"
    with pytest.raises(StoreError, match="has no user, although there were some"):
        file.load()
    with pytest.raises(StoreError, match="has no user"):
        add(file, "bob")
    assert file.path.read_text() == EMPTY


def test_no_change_takes_the_last_user(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    file.change(lambda table: None)
    assert file.load().is_open, "there never was one"
    add(file, "ann")
    with pytest.raises(StoreError, match="the last user stays"):
        file.change(lambda table: table.users.clear())
    assert names(tmp_path) == ["ann"]
