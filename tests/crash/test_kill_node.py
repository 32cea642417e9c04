"""Goal: a whole node killed at any named place, also while it starts, recovers or stops, loses nothing acknowledged.

Method: the action ``kill_node`` of a failpoint sends SIGKILL to every process of the node at once, from inside, at the
place and the hit that the seed says; its keeper starts it again, and it meets the next place. With ``test_kill9``, which
kills the one process at the same places, this is the matrix of every failpoint and both deaths; a failpoint that is in
the code and in none of the lists fails the last test.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from pathlib import Path

import pytest
from test_io_error_matrix import PLACES
from test_kill9 import FAILPOINTS, SEGMENT_BYTES, SETTINGS, check_everything
from traffic import Traffic, seed

from commitmq import Producer, Reader
from commitmq.errors import CommitMQError
from commitmq.format.file_names import segment_name
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.supervision.exit_codes import CliExit
from disk_places import contents, places, queue_kinds
from nodes import Node, eventually, start_node
from shares import shared

PROJECT = Path(__file__).resolve().parents[2]
SAMPLE = ("writer.after_append", "flush.before_fdatasync", "queue.append", "journal.before_fdatasync")
AT_RECOVERY = (
    "supervisor.before_abort",
    "abort.write",
    "recovery.inside_scan",
    "recovery.after_scan",
    "recovery.before_cut",
    "recovery.before_remove",
    "recovery.before_sync",
    "queue.before_delete",
    "index.before_cut",
    "cut.write",
    "disk.sync.cut:before",
    "cut.journal",
    "disk.sync.cut_journal:before",
    "recovery.write_anew",
    "recovery.after_write_anew",
)
# After a death before the cut of an index file, the file is built again and not cut.
AT_INDEX_CUT = ("index.inside_cut",)
AT_CUT = ("recovery.cut",)
AT_STOP = (
    "allocate/disk.unlink.segment:before",
    "supervisor.before_abort_removed",
    "supervisor.before_abort_unlink",
)
AT_EXPIRY = ("cleanup.before_publish", "cleanup.after_publish", "cleanup.before_unlink", "cleanup.after_unlink")
AT_NEW_MINIMUM = ("min_offset.write", "min_offset.before_fsync")
# Where the tests of these are: they need more than a node under load.
ELSEWHERE = {
    "audit.write": "tests/unit/security/test_audit.py",
    "keeper.begin": "tests/crash/test_starts.py",
    "keeper.after_start": "tests/crash/test_starts.py",
    "supervisor.opened": "tests/crash/test_starts.py",
    "supervisor.before_ready": "tests/crash/test_starts.py",
    "recovery.done": "tests/crash/test_starts.py",
    "recovery.begin": "tests/crash/test_starts.py",
    "deletion.before_finish": "tests/crash/test_topic_life.py",
    "deletion.buried": "tests/crash/test_topic_life.py",
    "deletion.decided": "tests/crash/test_topic_life.py",
    "deletion.finished": "tests/crash/test_topic_life.py",
    "namesrv.done.REGISTER_BROKER": "tests/crash/test_rocketmq_deaths.py",
    "namesrv.read.REGISTER_BROKER": "tests/crash/test_rocketmq_deaths.py",
    "orders.after_fdatasync": "tests/crash/test_ordered_pop_crash.py",
    "orders.after_snapshot": "tests/crash/test_ordered_pop_crash.py",
    "orders.append": "tests/crash/test_ordered_pop_crash.py",
    "orders.before_fdatasync": "tests/crash/test_ordered_pop_crash.py",
    "remoting.answer:after": "tests/crash/test_rocketmq_deaths.py",
    "remoting.answer:before": "tests/crash/test_rocketmq_deaths.py",
    "rocketmq.ask.append:after": "tests/crash/test_rocketmq_deaths.py",
    "rocketmq.ask.append:before": "tests/crash/test_rocketmq_deaths.py",
    "rocketmq.asked.append": "tests/crash/test_rocketmq_deaths.py",
    "rocketmq.done.LOCK_BATCH_MQ": "tests/crash/test_rocketmq_deaths.py",
    "rocketmq.read.SEND_MESSAGE_V2": "tests/crash/test_rocketmq_deaths.py",
    "rocketmq.register:after": "tests/crash/test_rocketmq_deaths.py",
    "rocketmq.register:before": "tests/crash/test_rocketmq_deaths.py",
    "pop.after_copy": "tests/crash/test_pop_crash.py",
    "pop.after_put": "tests/crash/test_pop_crash.py",
    "pop.after_order": "tests/crash/test_ordered_pop_crash.py",
    "pop.after_order_commit": "tests/crash/test_ordered_pop_crash.py",
    "pop.before_copy": "tests/crash/test_pop_crash.py",
    "pop.before_order": "tests/crash/test_ordered_pop_crash.py",
    "pop.before_put": "tests/crash/test_pop_crash.py",
    "schedule.after_put": "tests/crash/test_schedule_crash.py",
    "schedule.before_put": "tests/crash/test_schedule_crash.py",
    "schedule.between_files": "tests/crash/test_schedule_crash.py",
    "transaction.after_commit": "tests/crash/test_transaction_crash.py",
    "transaction.after_op": "tests/crash/test_transaction_crash.py",
    "transaction.after_positions": "tests/crash/test_transaction_crash.py",
    "transaction.after_renewal": "tests/crash/test_transaction_crash.py",
    "transaction.before_answer": "tests/crash/test_transaction_crash.py",
    "transaction.before_commit": "tests/crash/test_transaction_crash.py",
    "transaction.before_op": "tests/crash/test_transaction_crash.py",
    "transaction.before_renewal": "tests/crash/test_transaction_crash.py",
    "timer.after_flush": "tests/crash/test_timer_crash.py",
    "timer.after_put": "tests/crash/test_timer_crash.py",
    "timer.before_making_again": "tests/crash/test_timer_crash.py",
    "timer.before_put": "tests/crash/test_timer_crash.py",
    "timer.between_files": "tests/crash/test_timer_crash.py",
    "timerlog.write": "tests/crash/test_timer_crash.py",
    "timerwheel.write": "tests/crash/test_timer_crash.py",
    "writer.after_heard": "tests/crash/test_topic_life.py",
    "writer.before_heard": "tests/crash/test_topic_life.py",
    "rebuild.before_exchange": "tests/unit/offline/test_repair.py",
    "restore.before_head": "tests/unit/offline/test_restore.py",
    "restore.between_parts": "tests/unit/offline/test_restore.py",
    "restore.write": "tests/unit/offline/test_restore.py",
    "repair.before_log": "tests/unit/offline/test_repair.py",
    "unshare.write": "tests/unit/files/test_unshare.py",
    "repair.write": "tests/unit/offline/test_repair.py",
    "memory.after_append": "tests/unit/dispatchers/test_memory_store.py",
    "memory.before_publish": "tests/unit/dispatchers/test_memory_store.py",
    "memory.before_unlink": "tests/unit/dispatchers/test_memory_store.py",
    "flush.after_commit": "tests/crash/test_pool_kill9.py",
    "flush.before_commit": "tests/crash/test_pool_kill9.py",
    "flush.before_give_back": "tests/crash/test_pool_kill9.py",
    "flush.before_zero": "tests/crash/test_pool_kill9.py",
    "flush.commit": "tests/crash/test_pool_kill9.py",
    "flush.inside_commit": "tests/crash/test_pool_kill9.py",
    "pool.after_take": "tests/crash/test_pool_kill9.py",
    "pool.before_make": "tests/crash/test_pool_kill9.py",
    "pool.before_owner": "tests/crash/test_pool_kill9.py",
    "pool.inside_remove": "tests/crash/test_pool_kill9.py",
    "recovery.after_takeover": "tests/crash/test_pool_kill9.py",
    "recovery.before_takeover": "tests/crash/test_pool_kill9.py",
    "recovery.takeover": "tests/crash/test_pool_kill9.py",
    "export.after_commit": "tests/spark/test_export.py",
    "export.after_file": "tests/spark/test_export.py",
    "export.after_tasks": "tests/spark/test_export.py",
    "export.before_commit": "tests/spark/test_export.py",
    "export.before_rename": "tests/spark/test_export.py",
    "export.before_write": "tests/spark/test_export.py",
    "job.before_step_done": "tests/spark/test_sending_jobs.py",
    "writer.after_fdatasync": "tests/crash/test_writer_sync.py",
    "writer.before_fdatasync": "tests/crash/test_writer_sync.py",
}


def kill_at_each(tmp_path: Path, points: tuple[str, ...]) -> None:
    """Every process but the keeper dies at each of ``points`` once; the keeper starts the node again, under load."""
    number = seed()
    chance = random.Random(number)
    fired = tmp_path / "fired"
    fired.mkdir()
    names = ";".join(f"{point}=kill_node@{chance.randint(*FAILPOINTS[point])}" for point in points)
    extra = {"COMMITMQ_FAILPOINTS": names, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with start_node(tmp_path, *SETTINGS, **extra) as node:
        with Traffic(node.address, number).running() as traffic:
            eventually(
                lambda: {one.name for one in fired.iterdir()} == set(points) or traffic.check(),  # type: ignore[func-returns-value]
                f"all of {names} fire",
                timeout_s=80,
            )
            eventually(node.is_ready, "the node is whole again", timeout_s=40)
            traffic.wait_for_sends(3)
        # (On a busy machine two points may be reached in one death.)
        assert "supervisor was killed by signal 9" in node.log()
        check_everything(node, traffic)


def test_a_node_killed_at_named_places_under_load(tmp_path: Path) -> None:
    kill_at_each(tmp_path, SAMPLE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", shared(range(8), 1))
def test_a_node_killed_at_every_place_under_load(tmp_path: Path, part: int) -> None:
    kill_at_each(tmp_path, tuple(sorted(FAILPOINTS))[part::8])  # the keeper's pauses double with each


def send(node: Node, first: int, count: int) -> None:
    with Producer(node.address) as producer:
        producer.send_batch("orders", [b"%d " % number + b"x" * 500 for number in range(first, first + count)], queue=0)


def numbers(node: Node) -> list[int]:
    found: list[int] = []
    with Reader(queues=[("orders", 0)], node=node.address) as consumer:
        while batch := consumer.poll(1.0):
            found += [int(message.body.split()[0]) for message in batch]
    return found


def lose_the_tail(layout: StoreLayout) -> int:
    """Make the last segment but one end in a torn record with more behind it, as a power cut may leave a log whose tail
    was not flushed; returns how many records are whole.
    """
    log = CommitLog(layout.commit_log, SEGMENT_BYTES)
    records = list(log.iter_records())
    log.close()
    last_base = records[-1].physical_offset // SEGMENT_BYTES * SEGMENT_BYTES
    torn = next(at for at, one in enumerate(records) if one.physical_offset >= last_base) - 40
    offset = records[torn].physical_offset
    with open(layout.commit_log / segment_name(offset // SEGMENT_BYTES * SEGMENT_BYTES), "r+b") as file:
        file.seek(offset % SEGMENT_BYTES + 200)
        file.write(bytes(100))
    sidecar = Sidecar.load(layout.sidecar)
    assert sidecar is not None
    sidecar.flushed = sidecar.queues_durable = records[torn - 10].physical_offset
    sidecar.boot ^= 1
    layout.sidecar.write_bytes(sidecar.to_bytes())
    return torn


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("points", "action"),
    [
        pytest.param(AT_RECOVERY[3:5], "kill_node", marks=pytest.mark.slow),
        pytest.param(AT_RECOVERY, "kill_node", marks=pytest.mark.long),
        # A third death of the one process before it is ready would fail the start.
        pytest.param(("recovery.inside_scan", "recovery.before_sync"), "kill", marks=pytest.mark.long),
        pytest.param(("recovery.after_scan", "recovery.before_cut"), "kill", marks=pytest.mark.long),
        pytest.param(AT_INDEX_CUT, "kill_node", marks=pytest.mark.slow),
        pytest.param(AT_CUT, "kill_node", marks=pytest.mark.long),
        pytest.param(AT_CUT, "errno:EIO", marks=pytest.mark.long),
        pytest.param(AT_CUT, "short:7", marks=pytest.mark.long),
    ],
    ids=[
        "two",
        "all",
        "the process",
        "the process at its cut",
        "inside a file of the index",
        "inside the cut",
        "refused",
        "short",
    ],
)
def test_a_recovery_killed_anywhere_is_run_again(tmp_path: Path, points: tuple[str, ...], action: str) -> None:
    settings = ("consume_queue.file_bytes=400", "index.hash_slots=30", "index.max_items=50")
    fired = tmp_path / "fired"
    fired.mkdir()
    with start_node(tmp_path, f"commit_log.segment_bytes={SEGMENT_BYTES}", *settings) as node:
        send(node, 0, 1_000)
        time.sleep(1.5)  # sidecar and index are written
        node.kill_all()
        whole = lose_the_tail(StoreLayout(node.store))
        names = ";".join(f"{point}={action}@1" for point in points)
        node.command_timeout_s = 200  # each death is another start
        ended = node.start(COMMITMQ_FAILPOINTS=names, COMMITMQ_FAILPOINTS_ONCE=str(fired))
        assert ended.returncode == 0, ended.stderr
        eventually(node.is_ready, "the node is ready at last")
        missed = set(points) - {one.name for one in fired.iterdir()}
        assert not missed, f"not met: {missed}"
        assert numbers(node) == list(range(whole))
        send(node, whole, 50)
        assert numbers(node) == list(range(whole + 50))
        assert any((node.store / "commitmq" / "cut").iterdir()), "what was cut is kept"


@pytest.mark.slow
def test_a_stop_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        for turn, point in enumerate(AT_STOP):
            node.stop()
            ended = node.start(COMMITMQ_FAILPOINTS=f"{point}=kill_node")
            assert ended.returncode == 0, ended.stderr
            send(node, 30 * turn, 30)
            assert node.stop().returncode != CliExit.OK
            ended = node.start()
            assert ended.returncode == 0, ended.stderr
            assert numbers(node) == list(range(30 * turn + 30))


@pytest.mark.parametrize(
    "points",
    [pytest.param(AT_EXPIRY, marks=pytest.mark.slow), pytest.param(AT_NEW_MINIMUM, marks=pytest.mark.long)],
    ids=["deletion", "minimum"],
)
def test_an_expiry_killed_anywhere_keeps_the_rest_readable(tmp_path: Path, points: tuple[str, ...]) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    names = ";".join(f"{point}=kill_node@{turn + 1}" for turn, point in enumerate(points))
    extra = {"COMMITMQ_FAILPOINTS": names, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    settings = ("retention.store_bytes=2000000", "retention.check_interval_ms=100", "retention.delete_interval_ms=10")
    with start_node(tmp_path, *SETTINGS, *settings, **extra) as node:
        sent = 0

        def send_more() -> bool:
            nonlocal sent
            try:
                send(node, sent, 200)
                sent += 200
            except CommitMQError:
                # Whether they are stored is not known: the same numbers are sent again.
                time.sleep(0.3)
            return {one.name for one in fired.iterdir()} == set(points)

        eventually(send_more, f"all of {names} fire", timeout_s=60)
        eventually(node.is_ready, "the node is whole again")
        send(node, sent, 200)
        found = numbers(node)
        assert found[-200:] == list(range(sent, sent + 200))
        assert found[0] > 0, "nothing expired"
        steps = {after - before for before, after in itertools.pairwise(found)}
        assert all(step == 1 or step <= 0 for step in steps), f"messages are missing: {steps}"


def test_every_failpoint_is_in_the_matrix() -> None:
    texts = [
        path.read_text(encoding="utf-8")
        for root in ("node", "dispatchers", "plugins")
        for path in sorted((PROJECT / root).rglob("*.py"))
    ]
    journals = set(re.findall(r'^    place(?:: ClassVar\[str\])? = "(\w+)"', "\n".join(texts), re.MULTILINE))
    journals -= set(queue_kinds())
    named = set()
    for text in texts:
        # A class that says what its files are called names its places by that.
        kinds = journals if "class Journal(" in text else queue_kinds()
        for name in re.findall(r'(?:failpoints\.(?:hit|clip)\(f?|(?:place|before_sync)"?[=:] ?f?)"([^"]+)"', text):
            named |= {re.sub(r"\{((self|cls)\.)?place\}", kind, name) for kind in kinds}
    # Those of commitmq.files.disk have a table of their own.
    disk = {f"{place}:{side}" for place in places() for side in ("before", "after")} | {
        f"{one}.write" for one in contents()
    }
    named = {one for one in named if not one.startswith(("disk.", "{what}")) and one != "name"}
    names = {r"\{self\.name\}": r"\w+", r"\{self\._name\}": r"\w+", r"\{role\}": r"[\w-]+", r"\{name\}": r"\w+"}
    names |= {r"\{op\}": r"[\w.]+", r"\{RequestCode\(command\.code\)\.name\}": r"\w+"}
    patterns = set()
    for one in map(re.escape, named):
        for place, some in names.items():
            one = one.replace(place, some)
        patterns.add(one)
    listed = {
        *FAILPOINTS,
        *PLACES,
        *AT_RECOVERY,
        *AT_INDEX_CUT,
        *AT_CUT,
        *AT_STOP,
        *AT_EXPIRY,
        *AT_NEW_MINIMUM,
        *ELSEWHERE,
    }
    missing = [pattern for pattern in sorted(patterns) if not any(re.fullmatch(pattern, name) for name in listed)]
    assert not missing, f"failpoints in the code that nothing kills: {missing}"
    listed = {name for name in listed if name.partition("/")[2] not in disk and name not in disk}
    stale = [name for name in sorted(listed) if not any(re.fullmatch(pattern, name) for pattern in patterns)]
    assert not stale, f"failpoints in the lists that the code does not have: {stale}"
    for name, where in ELSEWHERE.items():
        assert name in (PROJECT / where).read_text(encoding="utf-8"), f"{name} is not tested in {where}"
