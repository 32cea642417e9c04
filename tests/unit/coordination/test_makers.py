"""Goal: a user makes no more topics and groups than the quota, over restarts; what is gone, or made by nobody, does not count.

Method: requests to a real service with a user that the test names, and services that follow each other on one folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, Word
from commitmq.coordination.service import Service
from commitmq.errors import ProtocolError
from commitmq.store.layout import StoreLayout
from small_disk import room


class Made:
    """A service; ``user`` asks. Each user may have ``most`` of a kind, 0: any number."""

    def __init__(self, root: Path, most: int = 2) -> None:
        self.layout = StoreLayout(root)
        self.layout.run.mkdir(parents=True, exist_ok=True)
        self.control = ControlBlock(self.layout.control, create=True)
        self.user: str | None = "shop"
        self.most = most
        self.begin()

    def begin(self) -> None:
        self.service = Service(self.layout, NodeConfig(), self.control, 1, room())
        self.service.makers.who = lambda: self.user
        self.service.makers.most = lambda kind, user: self.most

    def again(self) -> None:
        """As after the process's death: nothing is closed."""
        self.begin()

    def ask(self, op: str, **fields: Any) -> None:
        self.service.handle({"op": op, **fields}, 2)
        self.service.end_turn(2)

    def topic(self, name: str) -> None:
        self.ask("topic.create", topic=name, queues=1)

    def delete(self, name: str) -> None:
        self.ask("topic.delete", topic=name)
        self.service.tell(10)
        for word in (Word.WRITER_TOPICS, Word.MEMORY_TOPICS):
            self.control.put(word, 1 << 40)
        self.service.end_turn(3)
        assert not self.service.topics.exists(name)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_a_user_makes_as_many_topics_as_the_quota(made: Made) -> None:
    made.topic("a")
    made.ask("topic.route", topic="b", create=True)
    made.topic("a")  # it is there
    with pytest.raises(ProtocolError, match=r"user shop has made 2 topics, the most") as refused:
        made.topic("c")
    assert refused.value.code == "LIMIT_EXCEEDED"
    with pytest.raises(ProtocolError, match="LIMIT_EXCEEDED"):
        made.ask("topic.route", topic="c", create=True)
    made.user = "cook"
    made.topic("c")
    made.user = None
    for number in range(5):
        made.topic(f"nobody{number}")


def test_what_is_gone_does_not_count(made: Made) -> None:
    made.topic("a")
    made.topic("b")
    made.delete("a")
    made.topic("c")
    with pytest.raises(ProtocolError, match="LIMIT_EXCEEDED"):
        made.topic("d")
    made.user = "cook"
    made.topic("a")
    made.user = "shop"
    made.delete("b")
    made.topic("d")


def test_groups_count_and_their_own_topics_do_not(made: Made) -> None:
    for number in range(2):
        made.ask("group.retry_topics", group=f"g{number}")
        made.ask("group.config", group=f"g{number}", set={"consumeEnable": True})
    with pytest.raises(ProtocolError, match=r"user shop has made 2 groups"):
        made.ask("group.config", group="g2", set={"consumeEnable": True})
    with pytest.raises(ProtocolError, match="LIMIT_EXCEEDED"):
        made.ask("group.join", group="g3", member="m", topics=["a"])
    made.ask("group.delete", group="g0")
    made.topic("a")
    made.topic("b")
    made.ask("group.config", group="g2", set={"consumeEnable": True})


def test_topics_of_failures_without_their_group_count(made: Made) -> None:
    made.topic("%RETRY%nobody")
    made.topic("%DLQ%nobody")
    with pytest.raises(ProtocolError, match=r"user shop has made 2 topics"):
        made.topic("%RETRY%others")


def test_the_next_coordinator_knows_it(made: Made) -> None:
    made.topic("a")
    made.again()
    made.topic("b")
    made.again()
    with pytest.raises(ProtocolError, match="LIMIT_EXCEEDED"):
        made.topic("c")
    made.most = 3
    made.topic("c")


def test_a_file_that_is_torn_or_gone_costs_a_count_only(made: Made) -> None:
    made.topic("a")
    made.topic("b")
    path = made.layout.own / "makers.log"
    path.write_bytes(path.read_bytes()[:-3])
    made.again()
    made.topic("c")
    with pytest.raises(ProtocolError, match="LIMIT_EXCEEDED"):
        made.topic("d")
    path.unlink()
    made.again()
    made.topic("d")


def test_what_was_made_and_deleted_takes_no_memory(tmp_path: Path) -> None:
    made = Made(tmp_path, most=0)
    makers = made.service.makers
    for number in range(5_000):
        makers.makes("topic", f"t{number}")
    assert len(makers._owners) <= 1_025
    makers.write()
    for number in range(10_000):
        makers.makes("topic", f"u{number}")
        makers.write()
    assert (made.layout.own / "makers.log").stat().st_size < 1_000_000
