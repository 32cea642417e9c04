"""Goal: bit maps spare looks at records, and never hide a message, whatever became of the subscriptions meanwhile.

Method: coordinator's subscriptions, ConsumeQueue dispatcher and reader's filter are the real objects on one store and one
control block, in one process; the test decides when each takes its turn. What a pull finds is compared with the records
themselves. Failures name their seed.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from commitmq.config import FilterConfig, from_mapping
from commitmq.control import ControlBlock, Word
from commitmq.coordination import subscriptions
from commitmq.coordination.subscriptions import MAX_PER_TOPIC, Subscriptions
from commitmq.format import bloom
from commitmq.log import get_log
from commitmq.plugin.hookspecs import DispatcherView
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.reader.filters import ExpressionFilter, Filters
from commitmq.workers.runtime.topic_view import BitMapFilter, CompiledSubscriptions, SubscriptionView
from commitmq_dispatchers.consume_queue import ConsumeQueueDispatcher
from queue_store import QueueStore

SQL = [{"type": "SQL92", "factory": "commitmq_plugins.sql92.evaluator:SqlFilter", "plugin": "sql"}]
EXPRESSIONS = [f"TAGS = 'T{number}'" for number in range(4)]


class Counting:
    """A filter that counts the records it was shown."""

    def __init__(self, wanted: ExpressionFilter) -> None:
        self.may_match = wanted.may_match
        self.terms = wanted.terms
        self._wanted = wanted
        self.seen = 0

    def judge(self, data: Any, positions: Any, sizes: Any, verdicts: Any) -> None:
        self.seen += len(positions)
        self._wanted.judge(data, positions, sizes, verdicts)


class Node:
    """The parts of a node, by hand."""

    def __init__(self, root: Path, *, bit_maps: bool = True) -> None:
        self.store = QueueStore(root, file_bytes=2_000)
        section = {
            "file_bytes": 2_000,
            "enable_ext": True,
            "ext_file_bytes": 500,
            "enable_filter_bit_map": bit_maps,
        }
        self.config = from_mapping({"consume_queue": section, "commit_log": {"segment_bytes": 65_536}})
        self.control = ControlBlock(self.store.layout.control, create=True)
        self.log = CommitLog(self.store.layout.commit_log, 65_536)
        self.filters = Filters(SQL, limit=100)
        self.subscriptions = Subscriptions.load(self.store.layout, self.control)
        self.subscriptions.write()
        self.position = 0
        self.start_dispatcher()
        self.view = SubscriptionView(self.store.layout, self.control)
        self.reader = QueueReader(self.log, self.store.layout.consume_queue, 2_000, ext_file_bytes=500)

    def start_dispatcher(self, position: int | None = None) -> None:
        """A new life of the dispatcher, from ``position`` on."""
        view = DispatcherView(
            self.store.layout,
            self.config,
            get_log("test"),
            self.log,
            self.position if position is None else position,
            dict,
            lambda _changed: None,
            subscriptions_of=CompiledSubscriptions(self.store.layout, self.control, SQL),
        )
        self.dispatcher = ConsumeQueueDispatcher()
        self.position = self.dispatcher.open(view)

    def send(self, rng: random.Random, count: int) -> None:
        for number in range(count):
            self.store.put("t", 0, b"%d" % number, tag=rng.choice(["T0", "T1", "T2", "T3", None]), dispatch=False)
        self.control.put(Word.WRITTEN, self.store.end)

    def dispatch(self, rows: int = 1 << 20) -> None:
        """One batch of at most ``rows`` records."""
        if self.position < self.store.end:
            walker = LogWalker(self.log, max_rows=rows, max_bytes=1 << 20)
            batch = walker.walk(self.position, self.store.end)
            walker.release()
            self.dispatcher.dispatch(batch)
            self.position = batch.end

    def dispatch_all(self) -> None:
        while self.position < self.store.end:
            self.dispatch()

    def pull(self, group: str, expression: str, most: int = 1_000) -> tuple[list[int], int]:
        """Queue offsets that a pull of everything finds, and how many records were looked at."""
        wanted = self.filters.get("SQL92", expression)
        assert isinstance(wanted, ExpressionFilter)
        counting = Counting(wanted)
        bound = self.position
        self.view.refresh()
        known = self.view.of_group("t", group)
        helped: Any = counting
        if known is not None and known.expression == expression:
            helped = BitMapFilter(counting, known)
        places = {one.physical_offset: one.queue_offset for one in self.store.records["t", 0]}
        offset, found = 0, []
        while True:
            result = self.reader.read("t", 0, offset, bound=bound, wanted=helped, max_messages=most, max_bytes=1 << 20)
            found += [places[physical] for physical in result.units["physical_offset"].tolist()]
            if result.next_offset >= result.max_offset:
                return found, counting.seen
            offset = result.next_offset

    def expected(self, expression: str) -> list[int]:
        tag = expression.split("'")[1]
        return [
            one.queue_offset
            for one in self.store.records["t", 0]
            if one.properties.get("TAGS") == tag and one.physical_offset < self.position
        ]


def test_bit_maps_spare_looks(tmp_path: Path) -> None:
    """Before a subscription every record is looked at, behind it only those that match, and few others."""
    rng = random.Random(1)
    node = Node(tmp_path / "store")
    node.send(rng, 100)
    node.dispatch_all()
    node.subscriptions.join("g", ["t"], EXPRESSIONS[1])
    node.subscriptions.join("other", ["t"], EXPRESSIONS[2])
    node.subscriptions.write()
    assert node.pull("g", EXPRESSIONS[1]) == (node.expected(EXPRESSIONS[1]), 100)
    node.send(rng, 200)
    node.dispatch_all()
    expected = node.expected(EXPRESSIONS[1])
    assert node.pull("g", EXPRESSIONS[1]) == (expected, 100 + sum(offset >= 100 for offset in expected))
    # Another expression than the group's, or another group, gets no help and no harm.
    assert node.pull("g", EXPRESSIONS[2]) == (node.expected(EXPRESSIONS[2]), 300)
    assert node.pull("nobody", EXPRESSIONS[1]) == (expected, 300)


@pytest.mark.parametrize("seed", range(6))
def test_no_message_is_ever_hidden(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subscriptions change, die, go and come back at any moment, the dispatcher lags, dies and goes back."""
    monkeypatch.setattr(subscriptions, "_DEAD_FOR_MS", 0)  # what is dead goes with the next look
    rng = random.Random(seed)
    node = Node(tmp_path / "store", bit_maps=seed % 5 != 0)
    groups = ["g1", "g2", "g3"]
    durable = 0
    node.send(rng, 20)
    node.dispatch()
    for _ in range(60):
        match rng.randrange(8):
            case 0 | 1:
                node.send(rng, rng.randint(1, 20))
            case 2 | 3:
                node.dispatch(rng.randint(1, 30))
            case 4:
                node.subscriptions.join(rng.choice(groups), ["t"], rng.choice(EXPRESSIONS))
                node.subscriptions.write()
            case 5 if rng.random() < 0.3:
                gone = rng.choice(groups)
                node.subscriptions.group_ended(gone)
                node.subscriptions.look()
                node.subscriptions.write()
            case 6:
                if rng.random() < 0.5:
                    node.dispatcher.flush(thorough=True)
                    durable = node.position
                else:
                    node.start_dispatcher(durable)
                    node.reader.forget("t")
            case _ if rng.random() < 0.2:  # the coordinator dies
                node.subscriptions = Subscriptions.load(node.store.layout, node.control)
                node.subscriptions.write()
        for group in groups:
            mine = node.view.of_group("t", group)
            expression = mine.expression if mine is not None and rng.random() < 0.7 else rng.choice(EXPRESSIONS)
            found, _ = node.pull(group, expression, rng.choice([7, 1_000]))
            assert found == node.expected(expression), (seed, group, expression)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def test_what_is_kept(tmp_path: Path) -> None:
    """consumerFilter.json has RocketMQ's shape, and a coordinator takes over what is there as dead."""
    node = Node(tmp_path / "store")
    path = node.store.layout.config / "consumerFilter.json"
    assert not path.exists()
    before_ms = wall_ms()
    node.subscriptions.join("g1", ["T", "U"], "a > 5 AND b = 'x'")
    joined_ms = wall_ms()
    time.sleep(0.005)
    publishing_ms = wall_ms()
    node.subscriptions.write()
    kept = orjson.loads(path.read_bytes())
    entry = kept["filterDataByTopic"]["T"]["groupFilterData"]["g1"]
    # The version is of the moment in which the expression came; bits count from the moment in which it was published.
    assert before_ms <= entry.pop("clientVersion") <= joined_ms
    assert publishing_ms <= entry.pop("bornTime") <= wall_ms()
    assert entry == {
        "bloomFilterData": {"bitNum": 112, "bitPos": bloom.positions("g1", "T")},
        "consumerGroup": "g1",
        "dead": False,
        "deadTime": 0,
        "expression": "a > 5 AND b = 'x'",
        "expressionType": "SQL92",
        "topic": "T",
    }
    assert list(kept["filterDataByTopic"]) == ["T", "U"]
    again = Subscriptions.load(node.store.layout, node.control)
    assert len(again) == 2
    assert all(one.dead_ms for of_topic in again.by_topic.values() for one in of_topic.values())
    again.join("g1", ["T"], "a > 5 AND b = 'x'")
    assert not again.by_topic["T"]["g1"].dead_ms
    again.join("g1", ["T"], None)  # now without an expression
    assert again.by_topic["T"]["g1"].dead_ms
    path.write_text("no JSON")
    path.with_name("consumerFilter.json.bak").unlink(missing_ok=True)
    assert len(Subscriptions.load(node.store.layout, node.control)) == 0


def test_bounds(tmp_path: Path) -> None:
    node = Node(tmp_path / "store")
    config = FilterConfig(max_subscriptions=40)
    node.subscriptions = Subscriptions.load(node.store.layout, node.control, config)
    for number in range(60):
        node.subscriptions.join(f"g{number}", ["t"], EXPRESSIONS[0])
    node.subscriptions.join("long", ["u"], "a = 1 " + " " * 20_000)
    assert len(node.subscriptions) == 40
    node.subscriptions.write()
    node.view.refresh()
    assert len(list(node.view.of_topic("t"))) == MAX_PER_TOPIC
    node.store.layout.run.joinpath("subscriptions.json").write_text("torn")
    node.control.put(Word.SUBSCRIPTIONS_VERSION, 99)
    node.view.refresh()
    assert list(node.view.of_topic("t")) == []


def test_an_expression_that_cannot_be_compiled_has_no_bits(tmp_path: Path) -> None:
    node = Node(tmp_path / "store")
    node.subscriptions.join("bad", ["t"], "a >")
    node.subscriptions.join("good", ["t"], EXPRESSIONS[0])
    node.subscriptions.write()
    compiled = CompiledSubscriptions(node.store.layout, node.control, SQL)("t")
    assert [mask for mask, _ in compiled] == [bloom.mask("good", "t")]
    node.send(random.Random(1), 20)
    node.dispatch_all()
    assert node.pull("good", EXPRESSIONS[0])[0] == node.expected(EXPRESSIONS[0])
    assert np.frombuffer(compiled[0][0], np.uint8).any()
