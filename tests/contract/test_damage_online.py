"""Goal: what is damaged under a running node is never served as good: a consumer gets what is whole, and then an error
that says what is wrong and where; a query never gets a message that has not its key.

Method: a real node, whose files are changed behind its back, one thing at a time, each in a topic of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, Producer, Reader, SendResult
from commitmq.errors import CorruptRecordError
from commitmq.format.file_names import segment_name
from commitmq.supervision.exit_codes import CliExit
from nodes import SEGMENT_BYTES, Node, commitmq, start_node

COUNT = 40
HIT = 17


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("damage")) as made:
        yield made


def fill(node: Node, topic: str) -> list[SendResult]:
    with Producer(node.address) as producer:
        return [
            producer.send(topic, b"message %d of %s" % (number, topic.encode()), queue=0, keys=f"k{number}")
            for number in range(COUNT)
        ]


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        assert file.read(len(data)) != data
        file.seek(offset)
        file.write(data)


def in_log(node: Node, physical_offset: int) -> tuple[Path, int]:
    base = physical_offset - physical_offset % SEGMENT_BYTES
    return node.store / "commitlog" / segment_name(base), physical_offset - base


def read_around(node: Node, topic: str, mode: str) -> tuple[list[int], CorruptRecordError]:
    """The queue offsets of all good messages, and the error that came between; the damaged one is passed over by seek."""
    found: list[int] = []
    with Reader(queues=[(topic, 0)], node=node.address, mode=mode) as consumer:
        with pytest.raises(CorruptRecordError) as met:
            while True:
                found += [one.queue_offset for one in consumer.poll(5)]
        assert consumer.positions[topic, 0] == HIT
        with pytest.raises(CorruptRecordError):
            consumer.poll(5)
        consumer.seek(topic, 0, HIT + 1)
        while len(found) < COUNT - 1:
            batch = consumer.poll(5)
            assert batch, found
            found += [one.queue_offset for one in batch]
    return found, met.value


@pytest.mark.parametrize("what", ["body", "property", "queue offset", "size", "unit"])
def test_a_consumer_gets_the_rest_and_an_error_that_names_the_place(node: Node, what: str) -> None:
    topic = f"damaged-{what.replace(' ', '-')}"
    sent = fill(node, topic)
    offset = sent[HIT].physical_offset
    path, at = in_log(node, offset)
    record = path.read_bytes()[at : at + 400]
    if what == "body":
        change(path, at + record.index(b"message"), b"M")
    elif what == "property":
        change(path, at + record.index(b"k17"), b"K")
    elif what == "queue offset":
        change(path, at + 27, b"\x63")
    elif what == "size":
        change(path, at, b"\x00\x00\x02")
    else:
        # It leads to a whole record of another topic with the same size and the same queue number.
        other = fill(node, topic.replace("damaged", "another"))
        queue = node.store / "consumequeue" / topic / "0" / segment_name(0)
        change(queue, 20 * HIT, other[HIT].physical_offset.to_bytes(8, "big"))
    for mode in ("ranges", "bytes"):
        found, error = read_around(node, topic, mode)
        assert found == [number for number in range(COUNT) if number != HIT]
        assert topic in str(error)
        assert f"queue offset {HIT}" in str(error)


def test_a_query_never_gets_another_message(node: Node) -> None:
    """An item of the index that leads to another record, and a record that is damaged."""
    topic = "indexed"
    sent = fill(node, topic)
    with Admin(node.address) as admin:
        assert [one.queue_offset for one in admin.query(topic, key="k3", wait_s=10)] == [3]
        (file,) = (node.store / "index").iterdir()
        data = file.read_bytes()
        at = data.index(sent[3].physical_offset.to_bytes(8, "big"), 4_040)
        while at >= 0:  # items of its key and of its unique key
            change(file, at, sent[4].physical_offset.to_bytes(8, "big"))
            at = data.find(sent[3].physical_offset.to_bytes(8, "big"), at + 8)
        assert list(admin.query(topic, key="k3")) == []
        assert [one.queue_offset for one in admin.query(topic, key="k4")] == [4]
        path, place = in_log(node, sent[5].physical_offset)
        change(path, place + path.read_bytes()[place:].index(b"message 5"), b"M")
        with pytest.raises(CorruptRecordError, match=f"physical offset {sent[5].physical_offset}"):
            list(admin.query(topic, key="k5"))


@pytest.mark.parametrize(
    "verb",
    [("verify",), ("repair", "--skip", "--yes"), ("rebuild",), ("expire", "--keep-bytes", "0")],
    ids=lambda verb: verb[0],
)
def test_offline_tools_refuse_the_store_of_a_live_node(node: Node, verb: tuple[str, ...]) -> None:
    ended = commitmq("store", verb[0], str(node.store), *verb[1:])
    assert ended.returncode == CliExit.STORE_LOCKED, ended.stdout + ended.stderr
    assert str(node.store) in ended.stderr
    assert node.is_ready()
