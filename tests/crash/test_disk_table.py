"""Goal: no call of the store to the kernel can cost what was acknowledged, whether a node dies beside it or it fails.

Method: the table below has every call of commitmq.files.disk, by the process that makes it. A real node under the load of the
power cuts' tests meets each: it dies as a whole before or after the call, or the call fails, before it did anything or after
it did it, with EIO, ENOSPC or EMFILE. Whatever the node does then (go on, refuse sends, refuse to start), the next start has
everything that the load had been told, by its own journal. The table is held against the sources and a node that is watched.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import random
import time
from pathlib import Path

import pytest
from power_check import Recovered, check, config_of
from power_load import PASSING, SETTINGS, Load, Said
from test_io_error_matrix import make_batches
from traffic import seed

from disk_places import CONTENT, PASSING_CONTENT, PROJECT, contents, places, sources
from nodes import Node, start_node

EXPIRING = {
    **SETTINGS,
    "retention.store_bytes": 2_000_000,
    "retention.check_interval_ms": 100,
    "retention.delete_interval_ms": 10,
}
_log = logging.getLogger(__name__)  # what was not met: pytest -o log_cli=true -o log_cli_level=INFO
SIDES = ("before", "after")
ERRORS = ("EIO", "ENOSPC", "EMFILE")
# The calls of each process, and up to which hit of a process one is drawn; what comes once in a start only comes first.
TABLE = {
    "allocate": {
        "open.segment": 4, "reserve.segment": 4, "sync.segment": 4, "rename.segment": 4, "sync_folder.segment": 5,
        "open.folder": 5, "unlink.segment": 1, "map.segment": 2,
    },
    "cleanup": {
        "open.min_offset": 2, "sync.min_offset": 2, "sync_folder.min_offset": 1, "unlink.segment": 2, "open.folder": 2,
        "sync_folder.folder": 2,
    },
    "coordinator": {
        "open.json": 3, "sync.json": 3, "replace.json": 3, "replace.json_backup": 1, "sync_folder.json": 3, "open.folder": 6,
        "sync_folder.folder": 1, "sync_folder.json_backup": 1,
        "open.members": 1, "replace.members": 1, "open.subscriptions": 1, "replace.subscriptions": 1,
        "open.journal": 1, "sync.journal": 6, "replace.journal": 1, "sync_folder.journal": 1, "open.queue": 1,
        "open.audit": 1, "sync.audit": 1, "sync_folder.audit": 1,
        **{f"{one}.{what}": 1 for one in PASSING_CONTENT for what in ("members", "subscriptions")},
    },
    "dispatcher-consume_queue": {
        "open.segment": 3, "map.segment": 3, "open.journal": 1,
        "open.queue": 20, "resize.queue": 6, "sync.queue": 9, "unlink.queue": 1,
        "open.queue_ext": 5, "resize.queue_ext": 3, "sync.queue_ext": 9, "unlink.queue_ext": 1, "open.batch_queue": 1,
        "resize.batch_queue": 1, "sync.batch_queue": 3, "unlink.batch_queue": 1,
        "open.folder": 9, "sync_folder.folder": 2, "sync.queue_folder": 3,
        **{f"{one}.queue_ends": 2 for one in CONTENT},
    },
    "dispatcher-index": {
        "open.segment": 3, "map.segment": 3, "open.index": 2, "unlink.index": 1, "resize.index": 1,
        "reserve.index": 2, "rename.index": 1,
        "map.index": 2, "sync.index": 1, "open.folder": 3, "sync_folder.folder": 1,
        **{f"{one}.{what}": 2 for one in CONTENT for what in ("index_state", "dispatcher_state")},
    },
    "flush": {
        "open.segment": 3, "sync.segment": 30, "open.position": 3, "sync.position": 3, "open.checkpoint": 3,
        "sync.checkpoint": 3, "sync_folder.checkpoint": 1, "open.folder": 1,
    },
    "dispatcher-memory": {"open.journal": 1},
    "reader-0": {"open.queue": 3, "open.journal": 1},
    "recovery": {
        "open.checkpoint": 1, "sync.checkpoint": 1, "sync_folder.checkpoint": 1, "open.position": 1, "sync.position": 1,
        "sync_folder.position": 1, "open.folder": 1, "sync_folder.folder": 1, "open.segment": 1, "map.segment": 1,
        "sync.segment": 1,
        "open.queue": 1, **{f"{one}.{what}": 1 for one in CONTENT for what in ("producers", "cut_history")},
    },
    "reput": {"open.segment": 3, "map.segment": 3},
    "supervisor": {
        "open.checkpoint": 1, "sync.checkpoint": 1, "open.position": 1, "sync.position": 1, "open.folder": 4,
        "open.lock": 1, "sync.lock": 1, "open.abort": 1, "resize.abort": 1, "sync.abort": 1, "unlink.abort": 1,
        "open.abort_backup": 1, "unlink.run": 9, "sync_folder.folder": 4,
        **{f"{one}.{what}": 1 for one in CONTENT for what in ("store_file", "epoch", "shared_memory")},
        **{f"{one}.node_file": 2 for one in PASSING_CONTENT},
    },
    "writer": {
        "open.segment": 4, "map.segment": 4, "sync.segment": 2, "open.queue": 2, "open.journal": 1, "open.folder": 4,
        **{f"{one}.producers": 6 for one in CONTENT},
    },
}  # fmt: skip
# Where these are met: they need more than a node under load.
ELSEWHERE = {
    "open.flush_failed": "tests/crash/test_io_errors.py",
    "sync.flush_failed": "tests/crash/test_io_errors.py",
    "sync_folder.flush_failed": "tests/crash/test_io_errors.py",
    "open.cut": "tests/unit/store/recovery/test_cut_refusals.py",
    "sync.cut": "tests/unit/store/recovery/test_cut_refusals.py",
    "open.cut_journal": "tests/unit/store/recovery/test_cut_refusals.py",
    "sync.cut_journal": "tests/unit/store/recovery/test_cut_refusals.py",
    "unlink.producers": "tests/unit/workers/recovery/test_lowering.py",
    "unlink.queue_ends": "tests/unit/store/queues/test_queue_ends.py",
    "rename.aside": "tests/unit/workers/test_schedule_levels.py",
    **{
        f"{one}.{what}": "tests/crash/test_timer_crash.py"
        for what in ("timerlog", "timerwheel")
        for one in ("open", "resize", "sync", "sync_folder", "unlink")
    },
    "map.timerlog": "tests/crash/test_timer_crash.py",
    **{f"{one}.timercheck": "tests/crash/test_timer_crash.py" for one in CONTENT},
    "resize.journal": "tests/unit/store/metadata/test_journal.py",
    **{f"{one}.acl": "tests/unit/security/test_access_file.py" for one in CONTENT},
    **{f"{one}.node_key": "tests/unit/security/test_node_key_file.py" for one in CONTENT},
    "open.node_key_configured": "tests/unit/security/test_node_key_file.py",
    "sync_folder.node_key_configured": "tests/unit/security/test_node_key_file.py",
    **{f"{one}.set_aside": "tests/unit/workers/runtime/test_set_aside.py" for one in CONTENT},
    **{f"{one}.audit": "tests/unit/security/test_audit.py" for one in ("replace", "unlink", "resize")},
    "open.acl_lock": "tests/unit/security/test_access_file.py",
    "open.acl_configured": "tests/unit/security/test_access_file.py",
    "sync_folder.acl_configured": "tests/unit/security/test_access_file.py",
    **{f"{one}.settings": "tests/unit/supervision/test_live_settings.py" for one in CONTENT},
    **{f"{one}.unshare": "tests/unit/files/test_unshare.py" for one in ("open", "reserve", "sync", "replace")},
    **{f"{one}.socket_record": "tests/unit/supervision/test_node_files.py" for one in CONTENT},
    **{f"{one}.pool_note": "tests/unit/store/test_shared_folder.py" for one in CONTENT},
    **{f"{one}.pool_owner": "tests/unit/store/test_shared_folder.py" for one in PASSING_CONTENT},
}
# What lasts no longer than the node, or is no file of a store: locks, sockets, shared memory, what a client or a bench has,
# log files, a snapshot that is being made, whether a descriptor is to be had (protocol/channel), what the kernel tells of a
# process (network/growth), memory in the place of a file that is too short (offline/log_damage).
NO_STORE = {
    "cli/consume.py", "cli/main.py", "cli/output.py", "cli/user_key.py",
    "client/receiving/part.py",
    "client/receiving/position_file.py", "protocol/channel.py",
    "control.py", "failpoints.py", "network/gate.py", "offline/log_damage.py",
    "supervision/processes.py", "store/geometry.py", "store/shared_memory.py",
    "store/log/transient_pool.py", "workers/runtime/doorbell.py",
    "workers/writer/local_sockets.py", "workers/runtime/role_lock.py", "workers/allocate.py",
    "counting.py",
    "memory.py", "log.py", "supervision/supervisor.py", "offline/snapshot.py",
    "offline/held_store.py", "plugin/project.py", "testing/node_process.py", "testing/contract.py",
}  # fmt: skip
# Verbs on a stopped store, which have failpoints of their own, listed in test_kill_node.
OWN_FAILPOINTS = {
    "offline/verify_queues.py", "offline/rebuild.py", "offline/rebuild_parallel.py", "offline/rebuild_pieces.py",
    "offline/repair.py",
}  # fmt: skip
PLACES = [f"{role}/disk.{place}" for role, calls in TABLE.items() for place in calls]
# A start that meets an error in these is refused.
STARTING = ("recovery/", "supervisor/")
SAMPLE_CRASH = (
    "allocate/disk.rename.segment:after",
    "flush/disk.sync.segment:after",
    "dispatcher-consume_queue/disk.resize.queue:before",
)
SAMPLE_ERRORS = {
    "allocate/disk.sync_folder.segment:before": "EIO",
    "allocate/disk.rename.segment:after": "ENOSPC",
    "writer/disk.open.segment:before": "EMFILE",
    "flush/disk.open.segment:before": "EMFILE",
    "flush/disk.sync.position:after": "EIO",
    "writer/disk.sync.producers:before": "EIO",
    "dispatcher-consume_queue/disk.open.folder:before": "EMFILE",
    "dispatcher-consume_queue/disk.open.queue:after": "EMFILE",
    "dispatcher-index/disk.rename.index:after": "EIO",
}


def hit(place: str, chance: random.Random) -> int:
    role, _, rest = place.partition("/disk.")
    return chance.randint(1, TABLE[role][rest.partition(":")[0]])


def life(tmp_path: Path, actions: dict[str, str], number: int, *, starts: int = 4) -> set[str]:
    """Lives of a node in which each of ``actions`` happens once, if it comes to that; then a start without, and the check.

    Returns the places that were not met.
    """
    chance = random.Random(number)
    fired = tmp_path / "fired"
    fired.mkdir()
    points = ";".join(f"{name}={action}@{hit(name, chance)}" for name, action in actions.items())
    extra = {"COMMITMQ_FAILPOINTS": points, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    said = Said()
    node = Node(tmp_path / "store", *(f"{name}={str(value).lower()}" for name, value in EXPIRING.items()))
    # A start may meet ten deaths, and the keeper waits longer before each next supervisor: 60 s in all.
    node.command_timeout_s = 180.0

    def missing() -> set[str]:
        return actions.keys() - {one.name.replace("%", "/", 1) for one in fired.iterdir()}

    try:
        # Each of those may cost a start.
        for turn in range(starts + sum(name.startswith(STARTING) for name in actions)):
            if node.start(**extra).returncode != 0:
                continue  # a refused start: what it is told is asserted where each error is tested
            if turn == 0:
                with contextlib.suppress(AssertionError):
                    make_batches(node.address)
            load = Load(node.address, said, f"{number}/{turn}", sees_unflushed=False)
            try:
                left, until = missing(), time.monotonic() + 8
                while left and time.monotonic() < until:
                    time.sleep(0.05)
                    if missing() != left:
                        left, until = missing(), time.monotonic() + 8
                time.sleep(1.0)
                # On a busy machine little is sent in that time. A node that takes no more is left alone in the end.
                until = time.monotonic() + 30
                while not has_enough(said) and time.monotonic() < until:
                    time.sleep(0.05)
            finally:
                end(load)
            if turn % 2:
                node.kill_all()
            else:
                node.stop()
            if not missing():
                break
    finally:
        node.end()
    recovered = Recovered(tmp_path / "store", config_of(EXPIRING))
    assert check(recovered, said, time.monotonic_ns(), power=False) > 50, "too little happened to show anything"
    return missing()


def has_enough(said: Said) -> bool:
    """Whether the check has something to look for; what ``PASSING`` got goes with it."""
    return sum(topic != PASSING for _, _, _, topic, *_ in said.acked) > 100


def end(load: Load) -> None:
    """As ``load.end``; that the node was away for long is no trouble here: it may have died many times, or not started. A poll
    may tell that a queue could not be read, too: the next one would go on.
    """
    with contextlib.suppress(AssertionError):
        load.end()
    told = ("NODE_UNAVAILABLE", "the node starts", "SYSTEM_ERROR: cannot read the queue")
    assert not [trouble for trouble in load.trouble if not any(one in trouble for one in told)]


@pytest.mark.timeout(300)
def test_a_node_dies_at_some_places(tmp_path: Path) -> None:
    assert not life(tmp_path, dict.fromkeys(SAMPLE_CRASH, "kill_node"), seed())


@pytest.mark.timeout(300)
def test_some_calls_fail(tmp_path: Path) -> None:
    assert not life(tmp_path, {name: f"errno:{error}" for name, error in SAMPLE_ERRORS.items()}, seed())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("action", ["kill_node", *(f"errno:{error}" for error in ERRORS)])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("part", range(8))
def test_the_whole_table(tmp_path: Path, part: int, side: str, action: str) -> None:
    every = {f"{place}:{side}": action for place in PLACES[part::8]}
    check_met(every, life(tmp_path, every, seed() + part, starts=4))


def check_met(actions: dict[str, str], missed: set[str]) -> None:
    """An error ends what would have come behind it, so some places may not be met in these lives."""
    _log.info("not met: %s", sorted(missed))
    assert len(missed) <= len(actions) // 2, f"not met: {sorted(missed)}"


# ---------------------------------------------------------------- the table itself


def test_every_call_in_the_sources_is_in_the_table() -> None:
    listed = {f"disk.{place}" for calls in TABLE.values() for place in calls} | {f"disk.{place}" for place in ELSEWHERE}
    assert sorted(places() - listed) == [], "calls that nothing fails"
    assert sorted(listed - places()) == [], "in the table, and not in the sources"
    for where in ELSEWHERE.values():
        assert (PROJECT / where).exists()
    assert contents() == {
        "acl", "cut_history", "dispatcher_state", "epoch", "index_state", "journal", "json", "members", "node_file",
        "node_key", "pool_note", "pool_owner", "producers", "queue_ends", "set_aside", "settings", "shared_memory",
        "socket_record", "store_file", "subscriptions", "timercheck",
    }  # fmt: skip


@pytest.mark.slow
def test_a_watched_node_makes_the_calls_of_the_table(tmp_path: Path) -> None:
    """No process of a node makes a call that the table does not have."""
    seen = tmp_path / "seen"
    seen.mkdir()
    extra = {"COMMITMQ_FAILPOINTS_SEEN": str(seen)}
    settings = [f"{name}={str(value).lower()}" for name, value in EXPIRING.items()]
    with start_node(tmp_path, *settings, **extra) as node:
        make_batches(node.address)
        load = Load(node.address, Said(), str(seed()), sees_unflushed=False)
        time.sleep(6)
        load.end()
        node.stop()
        assert node.start(**extra).returncode == 0
    found = {
        f"{one.name.rpartition('.')[0]}/{line.removesuffix(':before')}"
        for one in seen.iterdir()
        for line in one.read_text().split()
        if line.startswith("disk.") and line.endswith(":before")
        if not one.name.startswith("timer.")  # whose calls test_timer_crash lets fail
    }
    # `commitmq start` makes the folders before there is a supervisor; the same calls are met in the workers.
    known = set(PLACES) | {"/disk.open.folder", "/disk.sync_folder.folder"}
    assert sorted(one for one in found - known if one.partition("/disk.")[2] not in ELSEWHERE) == []
    assert len(found) > len(PLACES) // 2, "the node was not watched"


DIRECT = {
    "os": (
        "open",
        "fsync",
        "fdatasync",
        "rename",
        "replace",
        "link",
        "unlink",
        "remove",
        "ftruncate",
        "posix_fallocate",
    ),
    "mmap": ("mmap",),
}


# Methods of a path that rename it, or open it to write.
METHODS = ("rename", "write_bytes", "write_text")
WRITING = set("wax+")


def passes_by(call: ast.Call) -> bool:
    """Whether the call asks the kernel without :mod:`commitmq.files.disk`. Reading a file by its path is none of its
    business.
    """
    function = call.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    owner = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
    if owner in ("disk", *DIRECT):
        return name in DIRECT.get(owner, ())
    if name == "open":
        modes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        return any(len(mode) <= 3 and WRITING & set(mode) for mode in modes)
    return isinstance(function, ast.Attribute) and name in METHODS


def test_nothing_passes_the_module_by() -> None:
    found = set()
    for path in sources():
        name = (
            str(path.relative_to(PROJECT))
            .removeprefix("node/commitmq/")
            .removeprefix("dispatchers/commitmq_dispatchers/")
        )
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and passes_by(node):
                found.add(name)
    found.remove("files/disk.py")
    assert sorted(found - NO_STORE - OWN_FAILPOINTS) == [], "use commitmq.files.disk"
    assert sorted((NO_STORE | OWN_FAILPOINTS) - found) == [], "these use it already"
