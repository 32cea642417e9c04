"""Goal: a service account without a home or a writable installation runs a node; what it stores is its own; accounts that
were there before it cannot keep it from starting; clients of other accounts on the same host work all the same.

Method: nodes and clients are run by other accounts, which needs root; where that is not possible a test says so and is
skipped, and its twin without other accounts (permissions and folders only) remains.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accounts import (
    OTHER_STRANGER,
    STRANGER,
    as_account,
    bare_environment,
    obeying,
    open_folder,
    python_for_all,
    read_only_copy,
)
from commitmq import Admin, Consumer, Producer, Reader
from commitmq.store.layout import StoreLayout
from commitmq.store.shared_memory import recorded_folder
from commitmq.supervision.exit_codes import CliExit
from commitmq.testing.node_process import NodeProcess
from nodes import Node


class AccountNode(NodeProcess):
    """A node and its verbs, run with ``words`` in front by ``python`` in a bare environment, ``package`` first."""

    def __init__(
        self, store: Path, words: list[str], python: str, *package: Path, settings: tuple[str, ...] = ()
    ) -> None:
        super().__init__(store, *settings)
        self.words = words
        self.python = python
        self._package = package

    def environment(self, **extra: str) -> dict[str, str]:
        return bare_environment(*self._package, **extra)

    def run(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.words, self.python, "-m", "commitmq.cli.main", *arguments],
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def send_one(node: NodeProcess) -> bool:
    with Producer(node.address) as producer:
        return producer.send("orders", b"one", queue=0).queue_offset >= 0


def works_without_a_home(node: NodeProcess) -> None:
    try:
        started = node.start()
        assert started.returncode == 0, started.stderr + node.log_tail()
        assert send_one(node)
        stopped = node.stop()
        assert stopped.returncode == 0, stopped.stderr
    finally:
        node.end()


def test_a_service_account_without_a_home_starts_what_root_installed() -> None:
    words = as_account(STRANGER)
    python = python_for_all()
    with open_folder() as folder:
        (folder / "data").mkdir()
        os.chown(folder / "data", STRANGER, STRANGER)
        works_without_a_home(AccountNode(folder / "data/store", words, python, read_only_copy(folder / "site")))


def test_without_a_home_and_a_package_to_write_to_a_node_starts(tmp_path: Path) -> None:
    """The twin of the test above for machines where nobody is root."""
    package = read_only_copy(tmp_path / "site")
    works_without_a_home(AccountNode(tmp_path / "store", obeying(), sys.executable, package))


# ---------------------------------------------------------------- what others made before


def test_folders_that_others_made_before_keep_no_node_from_starting(tmp_path: Path) -> None:
    """The names that an earlier version would have used exist already, open to all; that version refused to start."""
    store = tmp_path / ("long" * 20)
    store.mkdir()
    found = store.stat()
    memory = hashlib.sha256(os.fsencode(store) + f"\0{found.st_dev}\0{found.st_ino}".encode()).hexdigest()[:20]
    sockets = hashlib.sha256(os.fsencode(store)).hexdigest()[:16]
    taken = [
        Path(f"/dev/shm/commitmq-{os.getuid()}-{memory}"),
        Path(tempfile.gettempdir()) / f"commitmq-{os.getuid()}-{sockets}",
    ]
    node = Node(store)
    try:
        for folder in taken:
            folder.mkdir()
            folder.chmod(0o777)
            (folder / "theirs").touch()
        started = node.start()
        assert started.returncode == 0, started.stderr + node.log_tail()
        assert send_one(node)
        assert node.stop().returncode == 0
        assert all((folder / "theirs").exists() for folder in taken)
    finally:
        node.end()
        for folder in taken:
            shutil.rmtree(folder, ignore_errors=True)


def outside(node: NodeProcess) -> list[Path]:
    """Folders that the node has outside of its store."""
    layout = StoreLayout(node.store)
    found = [layout.sockets] if layout.sockets != layout.run else []
    memory = recorded_folder(layout)
    return [*found, *([memory] if memory else [])]


@pytest.mark.parametrize("name", ["store", "long" * 20])
def test_a_stopped_store_leaves_nothing_but_its_files(tmp_path: Path, name: str) -> None:
    node = Node(tmp_path / name, "commit_log.transient_store_pool=true", "commit_log.transient_store_pool_size=2")
    try:
        assert node.start().returncode == 0
        assert send_one(node)
        first = outside(node)
        assert first
        assert all(folder.is_dir() for folder in first)
        node.kill_all()
        assert all(folder.is_dir() for folder in first), "nobody was left to remove it"
        assert node.start().returncode == 0
        second = outside(node)
        assert node.stop().returncode == 0
        assert not [folder for folder in (*first, *second) if folder.exists()]
        assert not list((tmp_path / name / "run").iterdir())
        assert not recorded_folder(StoreLayout(node.store))
    finally:
        node.end()


def test_a_start_that_is_refused_leaves_no_folder_either(tmp_path: Path) -> None:
    node = Node(tmp_path / ("long" * 20), "memory.folder=/nowhere")
    refused = node.start()
    assert refused.returncode == CliExit.STORE_UNUSABLE
    assert "memory.folder" in refused.stderr
    assert not list((node.store / "run").iterdir())


# ---------------------------------------------------------------- where one may not go


def refused(folder: Path, *words: str) -> str:
    """What the verb says of a store that this account cannot use, once it exits as it should."""
    ended = AccountNode(folder, obeying(), sys.executable).run(*words, HOME=str(folder))
    assert ended.returncode == CliExit.STORE_UNUSABLE, ended
    assert ended.stdout == ""
    return ended.stderr


@pytest.mark.parametrize("verb", [["start"], ["start", "--background"], ["stop"], ["status"], ["pipeline", "stats"]])
def test_a_store_below_a_folder_that_one_may_not_enter_is_one_sentence(tmp_path: Path, verb: list[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o000)
    words = [*verb, str(closed / "store")] if verb[0] == "pipeline" else [*verb, "--store", str(closed / "store")]
    told = refused(tmp_path, *words)
    assert told == f"commitmq: cannot use this folder as a store: Permission denied [{closed / 'store'}]\n"


@pytest.mark.parametrize("verb", ["dump", "verify"])
def test_a_store_that_one_may_not_enter_is_one_sentence(tmp_path: Path, verb: str) -> None:
    closed = tmp_path / "closed"
    (closed / "commitlog").mkdir(parents=True)
    closed.chmod(0o444)
    told = refused(tmp_path, "store", verb, str(closed))
    assert told == f"commitmq: cannot use this folder as a store: Permission denied [{closed}]\n"


# ---------------------------------------------------------------- who may read


def unwanted(root: Path, mask: int) -> list[str]:
    """Files and folders under ``root`` that have a permission which ``mask`` forbids."""
    found = []
    for path in (root, *root.rglob("*")):
        mode = path.lstat().st_mode
        if not path.is_symlink() and mode & mask:
            found.append(f"{stat.filemode(mode)} {path.relative_to(root)}")
    return found


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.timeout(300)
def test_files_are_the_owner_s_alone_whatever_the_umask(tmp_path: Path) -> None:
    """Everything that a node and the offline verbs make, with topics of each kind, in memory too."""
    settings = ("commit_log.segment_bytes=131072", "consume_queue.enable_ext=true", "memory.segment_bytes=262144")
    node = Node(tmp_path / "store", *settings, "commit_log.transient_store_pool=true")
    with umask(0):
        try:
            assert node.start().returncode == 0
            with Admin(node.address) as admin:
                admin.topic_create("batches", 1, attributes={"queue.type": "BatchCQ"})
                admin.topic_create("cache", 1, attributes={"storage.type": "memory"})
            with Producer(node.address) as producer:
                for topic in ("orders", "batches", "cache"):
                    producer.send_batch(topic, [b"x" * 1000] * 100, queue=0)
            with Consumer("orders", group="group", node=node.address) as consumer:
                assert consumer.poll(30)
            for folder in (node.store, *outside(node)):
                assert unwanted(folder, 0o077) == []
            assert node.stop().returncode == 0
            rebuilt = node.run("store", "rebuild", str(node.store))
            assert rebuilt.returncode == 0, rebuilt.stderr
            damaged = node.store / "commitlog" / "00000000000000000000"
            with damaged.open("r+b") as file:
                file.seek(5000)
                file.write(b"damage")
            repaired = node.run("store", "repair", str(node.store), "--skip", "--yes")
            assert repaired.returncode == 0, repaired.stderr
            assert list((node.store / "commitmq/cut").iterdir())
            assert unwanted(node.store, 0o077) == []
        finally:
            node.end()


def test_a_folder_that_says_so_shares_the_store_with_its_group(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o2750)
    node = Node(tmp_path / "store")
    with umask(0):
        try:
            assert node.start().returncode == 0
            assert send_one(node)
            with Reader("orders", node=node.address) as consumer:
                assert consumer.poll(30), "its ConsumeQueue is there"
            assert unwanted(node.store, 0o027) == []
            for name in ("commitlog", "commitlog/00000000000000000000", "consumequeue/orders/0", "run/token"):
                assert (node.store / name).stat().st_mode & 0o040, name
            assert node.stop().returncode == 0
        finally:
            node.end()


def test_a_store_that_others_can_read_is_named(tmp_path: Path) -> None:
    node = Node(tmp_path / "store")
    with umask(0o022):
        (node.store / "commitlog").mkdir(parents=True)
        (node.store / "commitmq").mkdir()
    try:
        assert node.start().returncode == 0
        assert "other accounts can read this store" in node.log()
        assert "chmod -R go-rwx" in node.log()
        assert stat.S_IMODE((node.store / "commitlog").stat().st_mode) == 0o755, "somebody may rely on it"
        assert stat.S_IMODE((node.store / "commitmq").stat().st_mode) == 0o700, "that is ours"
        assert node.stop().returncode == 0
    finally:
        node.end()


READ = """
import sys
from commitmq import Producer, Reader
with Producer(sys.argv[1]) as producer:
    producer.send("orders", b"from another account", queue=0)
with Reader(node=sys.argv[1], queues=[("orders", 0)]) as consumer:
    bodies = []
    while len(bodies) < 2:
        bodies += [message.body.decode() for message in consumer.poll(30)]
    print(bodies, all(link.ranges for link in consumer._puller._readers.links.values() if link))
"""


@pytest.mark.parametrize("shared", [False, True])
def test_clients_of_another_account_work_and_map_the_log_only_where_they_may(shared: bool) -> None:
    python = python_for_all()
    with open_folder() as folder:
        store = folder / "store"
        store.mkdir()
        os.chown(store, STRANGER, OTHER_STRANGER)
        store.chmod(0o2750 if shared else 0o755)
        node = AccountNode(store, as_account(STRANGER, OTHER_STRANGER), python)
        try:
            started = node.start()
            assert started.returncode == 0, started.stderr + node.log_tail()
            assert send_one(node)
            done = subprocess.run(
                [*as_account(OTHER_STRANGER), python, "-c", READ, node.address],
                env=bare_environment(),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() == f"{['one', 'from another account']} {shared}"
            assert node.stop().returncode == 0
        finally:
            node.end()
