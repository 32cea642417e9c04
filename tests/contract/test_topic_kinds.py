"""Goal: what a kind of topic cannot have is refused with the reason, and the table of docs/topics.md says the same.

Method: a node with a topic of each kind; each cell of the table is tried by the clients: "yes", or the code of the error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commitmq import (
    Admin,
    CommitMQError,
    Consumer,
    ExactlyOnce,
    InvalidMessageError,
    Message,
    Producer,
    ProtocolError,
    RequestTimeoutError,
    ShareConsumer,
    Sql,
)
from commitmq.client.handling.send_back import SendBack, request_of
from nodes import Node, start_node

pytestmark = pytest.mark.timeout(240)
PAGE = Path(__file__).parents[2] / "docs" / "topics.md"
LMQ = "%LMQ%lights"
TOPICS = {
    "plain": "kind-plain",
    "BatchCQ": "kind-batch",
    "memory": "kind-memory",
    "light queue": LMQ,
    "retry": "%RETRY%kind-group",
}
ATTRIBUTES = {
    "BatchCQ": {"queue.type": "BatchCQ"},
    "memory": {"storage.type": "memory"},
}
SETTINGS = ("consume_queue.enable_lmq=true", "consume_queue.enable_multi_dispatch=true")


class Tried:
    """The node, and what the cells do."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.producer = Producer(node.address, group="payers", timeout_s=20, ack="memory")
        self.numbers = 0

    def close(self) -> None:
        self.producer.close()

    def group(self) -> str:
        self.numbers += 1
        return f"g{self.numbers}"

    def first(self, topic: str, filter: str | Sql = "*") -> Message:
        """The first message of a topic that a consumer reads."""
        with Consumer(topic, group=self.group(), node=self.node.address, start="earliest", filter=filter) as consumer:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                for message in consumer.poll(0.5):
                    return message
        raise AssertionError(f"no message of {topic} came")

    def send_back(self, topic: str, group: str, *, delay_s: float) -> None:
        """As a handler that failed."""
        with Admin(self.node.address) as admin:
            admin._ask("coordinator", "group.retry_topics", {"group": group})
        back = SendBack(self.node.address, group, timeout_s=20)
        try:
            (answer,) = back.exchange([request_of(self.first(topic), dead=False, delay_s=delay_s, max_retries=None)])
        finally:
            back.close()
        if answer.error is not None:
            raise answer.error

    # each of these raises what a program gets

    def send(self, topic: str) -> None:
        self.producer.send(topic, b"x", queue=0)

    def batch(self, topic: str) -> None:
        self.producer.send_batch(topic, [b"x", b"y"], queue=0)

    def delay(self, topic: str) -> None:
        self.producer.send(topic, b"x", queue=0, delay_level=18)

    def timer(self, topic: str) -> None:
        self.producer.send(topic, b"x", queue=0, delay=3_000)

    def transaction(self, topic: str) -> None:
        with self.producer.transaction(topic, b"x", queue=0):
            pass

    def request(self, topic: str) -> None:
        try:
            self.producer.request(topic, b"x", queue=0, timeout_s=0.5)
        except RequestTimeoutError:
            return  # it was sent

    def further(self, topic: str) -> None:
        self.producer.send(topic, b"x", queue=0, multi_dispatch=["%LMQ%other"])

    def numbered(self, topic: str) -> None:
        with Producer(self.node.address, delivery=ExactlyOnce(), timeout_s=20) as producer:
            producer.send(topic, b"x", queue=0)

    def retry(self, topic: str) -> None:
        self.send_back(topic, self.group(), delay_s=1_000)

    def share(self, topic: str) -> None:
        with ShareConsumer(topic, group=self.group(), node=self.node.address) as consumer:
            consumer.receive(wait_s=0.1)

    def tag(self, topic: str) -> None:
        self.first(topic, filter="wanted")

    def sql(self, topic: str) -> None:
        self.first(topic, filter=Sql("TAGS = 'wanted'"))


COLUMNS: dict[str, Callable[[Tried, str], None]] = {
    "`send`": Tried.send,
    "`send_batch`": Tried.batch,
    "delay level": Tried.delay,
    "`delay`, `deliver_at`": Tried.timer,
    "transaction": Tried.transaction,
    "request": Tried.request,
    "`multi_dispatch`": Tried.further,
    "idempotent": Tried.numbered,
    "retry": Tried.retry,
    "sharing": Tried.share,
    "tag filter": Tried.tag,
    "SQL filter": Tried.sql,
}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    with start_node(tmp_path_factory.mktemp("kinds"), *SETTINGS) as node:
        with Admin(node.address) as admin:
            for kind, topic in TOPICS.items():
                if not topic.startswith("%"):
                    admin.topic_create(topic, 1, attributes=ATTRIBUTES.get(kind))
        made = Tried(node)
        wanted = Message(b"first", tags="wanted")
        for kind, topic in TOPICS.items():
            if kind == "BatchCQ":
                made.producer.send_batch(topic, [wanted])
            elif not topic.startswith("%"):
                made.producer.send(topic, wanted)
        made.producer.send("kind-plain", b"first", tags="wanted", queue=0, multi_dispatch=[LMQ])
        made.send_back("kind-plain", "kind-group", delay_s=0.0)
        yield made
        made.close()


def outcome(tried: Tried, column: str, topic: str) -> str:
    try:
        COLUMNS[column](tried, topic)
    except InvalidMessageError:
        return "InvalidMessageError"
    except CommitMQError as error:
        return str(getattr(error, "code", type(error).__name__))
    return "yes"


def table() -> dict[str, dict[str, str]]:
    """Row, column to cell of the table in the page."""
    lines = PAGE.read_text(encoding="utf-8").split("## What each kind can have")[1].split("\n\n")
    rows = next(part for part in lines if part.startswith("|")).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[2:]}


def test_the_table_has_every_kind_and_every_column() -> None:
    found = table()
    assert set(found) == set(COLUMNS)
    assert all(list(row) == list(TOPICS) for row in found.values())


@pytest.mark.parametrize("kind", TOPICS)
def test_a_kind_does_what_the_table_says(tried: Tried, kind: str) -> None:
    said = {column: re.sub("[`*]", "", row[kind]) for column, row in table().items()}
    assert {column: outcome(tried, column, TOPICS[kind]) for column in COLUMNS} == said


def test_a_compaction_topic_cannot_be_made(tried: Tried) -> None:
    with Admin(tried.node.address) as admin, pytest.raises(ProtocolError, match="this node serves DELETE"):
        admin.topic_create("compacted", 1, attributes={"cleanup.policy": "COMPACTION"})
