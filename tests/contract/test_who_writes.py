"""Goal: what commitmq.ownership says of files is what a live node does.

Method: a node that was used in many ways; then every file in its store has an owner, and every descriptor and mapping that
could write one belongs to a process that may (the kernel tells: ``/proc/PID/fdinfo`` and ``/proc/PID/maps``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, Consumer, Producer
from commitmq.ownership import FILES, Role, owner_of
from nodes import Node, start_node


def open_for_writing(pid: int, root: Path) -> Iterator[str]:
    """Paths below ``root`` that process ``pid`` could write, relative to it."""
    process = Path("/proc") / str(pid)
    for entry in os.listdir(process / "fd"):
        try:
            target = os.readlink(process / "fd" / entry)
            flags = next(
                line for line in (process / "fdinfo" / entry).read_text().splitlines() if line.startswith("flags")
            )
        except (FileNotFoundError, StopIteration):
            continue
        if target.startswith(f"{root}/") and int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY:
            yield os.path.relpath(target, root)
    for line in (process / "maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{root}/") and fields[1][1] == "w" and fields[1][3] == "s":
            yield os.path.relpath(fields[5], root)


def may(role: str, path: str) -> bool:
    """Whether the process ``role`` may have the file open for writing."""
    owner = owner_of(path.removesuffix(" (deleted)"))
    if owner is None:
        return False
    if path.startswith("commitlog/") and role == "flush":
        return True  # fdatasync wants a descriptor; with the pool flush copies records there
    if path.startswith("run/") and path.endswith(".lock"):
        return Path(path).stem == role
    named = Role.DISPATCHER if role.startswith("dispatcher-") else role
    return owner.writes in (role, named, Role.EACH) or owner.makes == role


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that wrote into most kinds of its files."""
    with start_node(tmp_path_factory.mktemp("owned")) as node:
        use(node)
        yield node


def use(node: Node) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create("kept")
        admin.topic_create("volatile", attributes={"storage.type": "memory"})
        admin.topic_create("inner", attributes={"queue.type": "BatchCQ"})
        admin.topic_create("gone")
        for topic in ("kept", "volatile", "gone"):
            producer.send(topic, b"one", tags="a", keys="k")
        producer.send_batch("inner", [b"one", b"two"])
        producer.send_batch("kept", [b"one", b"two"], ack="memory")
        admin.topic_delete("gone")
        with Consumer("kept", group="readers", node=node.address) as consumer:
            consumer.poll(timeout_s=5)
            consumer.commit()


def test_every_file_has_an_owner(used: Node) -> None:
    files = [str(path.relative_to(used.store)) for path in used.store.rglob("*") if not path.is_dir()]
    assert len(files) > 30
    assert [path for path in files if owner_of(path) is None] == []
    patterns = {
        owner.pattern
        for owner in FILES
        if owner.pattern.startswith(("commitlog", "consumequeue/", "index", "config/topics"))
    }
    assert len(patterns) >= 4
    assert patterns <= {owner.pattern for owner in map(owner_of, files) if owner is not None}


def test_only_the_owner_has_a_file_open_for_writing(used: Node) -> None:
    seen = {role: sorted(set(open_for_writing(pid, used.store))) for role, pid in used.pids().items()}
    assert any("commitlog" in path for path in seen["writer"]), "the search finds nothing"
    assert any("offsets.journal" in path for path in seen["coordinator"])
    assert [(role, path) for role, paths in seen.items() for path in paths if not may(role, path)] == []
