"""Goal: filters by expression work through client, command line and protocol; a plugin's filter that is broken in any way
fails the requests that use it, by name, and nothing else.

Method: one real node with a plugin distribution on its path whose filters are good, cannot be imported, raise while they
compile, raise while they match, and answer nonsense.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commitmq import Admin, AsyncConsumer, Consumer, MessageSelector, Producer, ProtocolError, Reader, Sql
from commitmq.files.fd_cache import FdCache
from commitmq.format.bloom import mask
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.consume_queue_ext import ExtensionReader
from commitmq.supervision.exit_codes import CliExit
from nodes import Node, commitmq, eventually, start_node

pytestmark = pytest.mark.timeout(90)

PLUGIN = '''
"""A plugin with filters of every kind."""
from commitmq.plugin.hookspecs import FilterSpec, hookimpl


@hookimpl
def commitmq_filters(config):
    names = ("Prefix", "Uncompiled", "Raising", "Nonsense", "Nameless")
    return [
        *(FilterSpec(name.upper(), f"odd_filters:{name}") for name in names),
        FilterSpec("ABSENT", "no_such_module:Filter"),
        FilterSpec("TAG", "odd_filters:Prefix"),
    ]
'''
FILTERS = '''
"""What odd_plugin names."""
import numpy as np


class Compiled:
    properties = ("region",)

    def __init__(self, text):
        self.text = text

    def matches(self, batch):
        return batch["region"].starts_with(self.text)


class Prefix:
    """Messages whose region begins with the expression."""
    def compile(self, expression):
        return Compiled(expression)


class Uncompiled:
    def compile(self, expression):
        return 1 / 0


class Raising(Prefix):
    def compile(self, expression):
        class Raises(Compiled):
            def matches(self, batch):
                raise RuntimeError("out of ideas")
        return Raises(expression)


class Nonsense(Prefix):
    def compile(self, expression):
        class Counts(Compiled):
            def matches(self, batch):
                return np.arange(len(batch) + 1)
        return Counts(expression)


class Nameless(Prefix):
    def compile(self, expression):
        return object()
'''


def install(folder: Path) -> Path:
    """The plugin as an installed distribution in ``folder``."""
    folder.mkdir()
    (folder / "odd_plugin.py").write_text(PLUGIN)
    (folder / "odd_filters.py").write_text(FILTERS)
    info = folder / "odd_filters-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-filters\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[commitmq]\nodd_plugin = odd_plugin\n")
    return folder


@pytest.fixture(scope="module")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = install(tmp_path_factory.mktemp("plugin") / "lib")
    return os.pathsep.join([str(folder), *(path for path in sys.path if path)])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, plugin_path: str) -> Iterator[Node]:
    settings = (
        "topics.default_queues=2",
        "consume_queue.enable_ext=true",
        f"consume_queue.ext_file_bytes={EXT_FILE_BYTES}",
        "consume_queue.enable_filter_bit_map=true",
    )
    with start_node(tmp_path_factory.mktemp("filters"), *settings, PYTHONPATH=plugin_path) as made:
        yield made


EXT_FILE_BYTES = 4_096
REGIONS = ("eu", "us", "asia", None)


@pytest.fixture(scope="module")
def offers(node: Node) -> list[dict[str, str]]:
    """Properties of 400 messages of the topic offers; each body is its message's number."""
    sent: list[dict[str, str]] = []
    with Producer(node.address) as producer:
        for number in range(400):
            properties = {"price": str(number % 40)}
            region = REGIONS[number % 4]
            if region is not None:
                properties["region"] = region
            sent.append(properties)
            producer.send_async(
                "offers", b"%d" % number, tags=f"T{number % 3}", queue=number % 2, properties=properties
            )
        producer.flush(20)
    return sent


def numbers(node: Node, wanted: str | MessageSelector, count: int, **settings: Any) -> list[int]:
    """The numbers of the messages of offers that a consumer gets, sorted; exactly ``count`` are waited for."""
    found: list[int] = []
    with Reader("offers", node=node.address, filter=wanted, **settings) as consumer:
        while len(found) < count:
            batch = consumer.poll(10)
            assert len(batch), f"{len(found)} of {count} came"
            found += [int(message.body) for message in batch]
        assert not consumer.poll(0.2)
        assert set(consumer.positions.values()) == {200}, "the end was not reached"
    return sorted(found)


@pytest.mark.parametrize("mode", ["ranges", "bytes"])
def test_sql_selects_the_same_in_every_mode(node: Node, offers: list[dict[str, str]], mode: str) -> None:
    wanted = [
        number
        for number, one in enumerate(offers)
        if int(one["price"]) > 10 and one.get("region") in ("eu", "us") and number % 3 == 1
    ]
    assert len(wanted) > 20
    expression = "price > 10 AND region IN ('eu', 'us') AND TAGS = 'T1'"
    assert numbers(node, Sql(expression), len(wanted), mode=mode) == wanted
    none = [number for number in range(400) if number % 4 == 3]
    assert numbers(node, MessageSelector("SQL92", "region IS NULL"), 100, mode=mode) == none


def test_asyncio_and_groups(node: Node, offers: list[dict[str, str]]) -> None:
    async def main() -> list[int]:
        found: list[int] = []
        async with AsyncConsumer("offers", group="sql-group", node=node.address, filter=Sql("price = 39")) as consumer:
            async with asyncio.timeout(20):
                while len(found) < 10:
                    found += [int(message.body) for message in await consumer.poll(1)]
        return sorted(found)

    assert asyncio.run(main()) == list(range(39, 400, 40))


def test_bit_maps_of_a_groups_subscription(node: Node) -> None:
    """What is sent while a group subscribes gets its bits, and the group gets its messages, with every change of mind."""
    group, topic = "mapped", "bit-maps"
    sent = 0

    def send(producer: Producer) -> list[int]:
        nonlocal sent
        for _ in range(60):
            producer.send_async(topic, b"%d" % sent, queue=0, properties={"price": str(sent % 10)})
            sent += 1
        producer.flush(20)
        return list(range(sent - 60, sent))

    def is_published(expression: str) -> bool:
        listed = json.loads((node.store / "run" / "subscriptions.json").read_bytes())
        return any((one["group"], one["topic"], one["expression"]) == (group, topic, expression) for one in listed)

    with Producer(node.address) as producer:
        send(producer)
        with Admin(node.address) as admin:  # what is dispatched later would get bits, as it may
            eventually(lambda: admin.offsets(topic)[0][2] == sent, "the messages are dispatched")
        got: list[int] = []
        for price in (3, 4, 3):
            with Consumer(topic, group=group, node=node.address, filter=Sql(f"price = {price}")) as consumer:
                # The dispatcher hears of it at its interval: bits only spare looks, and nobody waits for them.
                eventually(partial(is_published, f"price = {price}"), "the subscription is published")
                wanted = [number for number in range(len(got) * 10, sent) if number % 10 == price]
                wanted += [number for number in send(producer) if number % 10 == price]
                fresh: list[int] = []
                while len(fresh) < len(wanted):
                    batch = consumer.poll(10)
                    assert len(batch), f"{fresh} instead of {wanted}"
                    fresh += [int(message.body) for message in batch]
                assert fresh == wanted
                assert not consumer.poll(0.2)
                got += fresh

    def written() -> bool:
        filters = json.loads((node.store / "config" / "consumerFilter.json").read_bytes())["filterDataByTopic"]
        return topic in filters and filters[topic]["groupFilterData"][group]["expression"] == "price = 3"

    eventually(written, "the file follows, at its interval")
    queue = ConsumeQueue(node.store / "consumequeue" / topic / "0", 6_000_000, FdCache(4))
    queue.refresh()
    units = [queue.unit(number) for number in range(sent)]
    codes = np.array([unit[2] for unit in units if unit is not None], np.int64)
    found = ExtensionReader(node.store / "consumequeue_ext", EXT_FILE_BYTES, FdCache(4)).resolve(f"{topic}/0", codes)
    assert found is not None
    assert not found.has_bitmap[:60].any(), "before the first subscription there is nothing to note"
    assert found.has_bitmap[60:].all()
    hit = (found.bitmaps[60:] & np.frombuffer(mask(group, topic), np.uint8)).any(axis=1)
    prices = np.arange(60, sent) % 10
    assert (hit == (prices == np.repeat([3, 4, 3], 60))).all()


def test_a_message_that_comes_later_ends_the_wait(node: Node) -> None:
    """A long poll goes on past messages that do not match, and ends with the first that does."""
    with (
        Producer(node.address) as producer,
        Reader(queues=[("later", 0)], node=node.address, filter=Sql("kind = 'x'")) as consumer,
    ):
        producer.send("later", b"0", queue=0, properties={"kind": "y"})
        assert not consumer.poll(0.5)
        for number in range(1, 5):
            producer.send("later", b"%d" % number, queue=0, properties={"kind": "y"})
        assert not consumer.poll(0.3)
        producer.send("later", b"5", queue=0, properties={"kind": "x"})
        assert [message.body for message in consumer.poll(10)] == [b"5"]


def test_the_command_line(node: Node, offers: list[dict[str, str]]) -> None:
    done = commitmq("consume", "offers", "--node", node.address, "--sql", "price = 7 AND region = 'asia'")
    assert done.returncode == CliExit.OK, done.stderr
    assert done.stdout == ""
    done = commitmq("consume", "offers", "--node", node.address, "--sql", "price = 38 AND region = 'asia'")
    assert sorted(map(int, done.stdout.split())) == list(range(38, 400, 40))
    done = commitmq("consume", "offers", "--node", node.address, "--sql", "price >")
    assert done.returncode == CliExit.FAILURE
    assert "at character 8" in done.stderr
    done = commitmq("consume", "offers", "--node", node.address, "--sql", "price > 1", "--tags", "T1")
    assert done.returncode == CliExit.USAGE


def test_a_plugins_filter(node: Node, offers: list[dict[str, str]]) -> None:
    found = numbers(node, MessageSelector("PREFIX", "a"), 100)
    assert found == [number for number in range(400) if number % 4 == 2]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("UNCOMPILED", "ZeroDivisionError"),
        ("RAISING", "out of ideas"),
        ("NONSENSE", "booleans"),
        ("NAMELESS", "properties"),
        ("ABSENT", "no_such_module"),
    ],
)
def test_a_broken_filter_fails_only_its_own_requests(
    node: Node, offers: list[dict[str, str]], kind: str, reason: str
) -> None:
    reader = node.pids()["reader-0"]
    with Reader("offers", node=node.address, filter=MessageSelector(kind, "eu")) as consumer:
        for _ in range(2):
            with pytest.raises(ProtocolError, match=reason) as failure:
                for _ in range(20):
                    consumer.poll(1)
            assert failure.value.code == "FILTER_FAILED"
            assert "odd_plugin" in str(failure.value)
            assert kind in str(failure.value)
    assert numbers(node, Sql("price = 39"), 10) == list(range(39, 400, 40))
    assert node.pids()["reader-0"] == reader


def test_the_plugin_is_reported(plugin_path: str) -> None:
    """It wanted to replace TAG: that one filter is refused, the others stand."""
    done = commitmq("plugins", "--json", PYTHONPATH=plugin_path)
    assert done.returncode == CliExit.OK, done.stderr
    report = next(one for one in json.loads(done.stdout) if one["distribution"] == "odd-filters")
    assert report["filters"] == ["PREFIX", "UNCOMPILED", "RAISING", "NONSENSE", "NAMELESS", "ABSENT"]
    assert report["failed_in"] == "commitmq_filters"
    assert "'TAG'" in report["failure"]


def test_sql_can_be_switched_off(tmp_path: Path) -> None:
    with start_node(tmp_path, "filter.sql_enabled=false") as node:
        with Producer(node.address) as producer:
            producer.send("t", b"x")
        with (
            Reader("t", node=node.address, filter=Sql("a = 1")) as consumer,
            pytest.raises(ProtocolError, match="no filter type 'SQL92'"),
        ):
            for _ in range(20):
                consumer.poll(1)


def test_selectors() -> None:
    assert Sql("a = 1").header() == {"filter_type": "SQL92", "filter": "a = 1"}
    assert MessageSelector("TAG", " * ").header() == {}
    assert repr(Sql("a = 1")) == "Sql(type='SQL92', expression='a = 1')"
    for kind, expression in (("", "x"), ("SQL92", None), (5, "x")):
        with pytest.raises(ValueError):
            MessageSelector(kind, expression)  # type: ignore[arg-type]
