"""What the crash tests of the movers share: a death at a named place, then a look at the topic."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from commitmq import Admin
from delays import Stored, everything
from nodes import Node, eventually, started

TOPIC, QUEUES = "parcels", 2


def places(first: Sequence[str], slow: Iterable[str], long: Iterable[str]) -> list[object]:
    """Failpoints as parameters: the first one in every run, the others with their markers."""
    return [
        first[0],
        *(pytest.param(place, marks=pytest.mark.slow) for place in (*first[1:], *slow)),
        *(pytest.param(place, marks=pytest.mark.long) for place in long),
    ]


@contextlib.contextmanager
def dying_node(tmp_path: Path, settings: Sequence[str], place: str) -> Iterator[Node]:
    """A node with the topic, in which ``place`` fires once. :func:`wait_for_death` waits for that."""
    fired = fired_folder(tmp_path)
    fired.mkdir()
    extra = {"COMMITMQ_FAILPOINTS": place, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with started(Node(tmp_path / "store", *settings), **extra) as node:
        make_topic(node)
        yield node


def wait_for_death(node: Node, tmp_path: Path, place: str) -> None:
    """Until ``place`` has fired and the node is whole again."""
    eventually(lambda: any(fired_folder(tmp_path).iterdir()), f"{place} fires", timeout_s=60)
    eventually(node.is_ready, "the node is whole again", timeout_s=60)


def fired_folder(tmp_path: Path) -> Path:
    """Where a failpoint leaves its mark."""
    return tmp_path / "fired"


def make_topic(node: Node) -> None:
    with Admin(node.address) as admin:
        admin.topic_create(TOPIC, QUEUES)


def check_each_once(node: Node, role: str, sent: Iterable[bytes], topic: str = TOPIC) -> list[Stored]:
    """Wait until every body of ``sent`` is in the topic; each must be there once, and none left out. Returns all."""
    bodies = set(sent)

    def found() -> Counter[bytes]:
        return Counter(one.body for one in everything(node, topic))

    eventually(lambda: found().keys() >= bodies, "every message is delivered", timeout_s=90)
    assert "left_out" not in info(node, role)
    twice = {body: times for body, times in found().items() if times > 1}
    assert not twice
    return everything(node, topic)


def info(node: Node, role: str) -> dict[str, object]:
    """What a process tells in the status."""
    with Admin(node.address) as admin:
        rows = {row["role"]: row for row in admin.status()["processes"]}
    found: dict[str, object] = rows[role].get("info") or {}
    return found
