"""Goal: the answer to a query says whether it can be relied on.

Method: the reader's part alone, over real files, with the positions of the other processes set by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commitmq.config import NodeConfig, load
from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.errors import ProtocolError
from commitmq.format.index import IndexShape
from commitmq.format.record import Record
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.reader.process import KeyQueries, parse_query
from index_store import IndexStore

CONFIG = load(None, ["index.hash_slots=5", "index.max_items=50", "reader.max_query_items=1000"])


class Asked:
    """A store of ``count`` messages with the key ``k``, and its reader."""

    def __init__(self, root: Path, count: int, config: NodeConfig = CONFIG) -> None:
        self.store = IndexStore(root, IndexShape(5, 50))
        properties = {"KEYS": "k"}
        self.store.append([Record("T", store_timestamp=1_000 + n, properties=properties) for n in range(count)])
        self.store.build()
        self.config = config
        self.control = ControlBlock(root / "control", create=True)
        log = self.store.log
        queues = QueueReader(log, root / "consumequeue", 2_000)
        self.queries = KeyQueries(config, self.store.folder, self.control, log, queues)
        self.positions(self.store.end, self.store.end, self.store.end)

    def positions(self, written: int, dispatched: int, indexed: int) -> None:
        self.control.put(Word.WRITTEN, written)
        self.control.put_dispatcher(0, DispatcherWord.DISPATCHED, dispatched)
        self.control.put_dispatcher(1, DispatcherWord.DISPATCHED, indexed)

    def ask(self, floor: int = 0, **fields: Any) -> dict[str, Any]:
        request = parse_query({"topic": "T", "key": "k", **fields}, self.config.reader)
        answer, frames = self.queries.answer(request, lambda: floor)
        assert sum(map(len, frames)) == answer["count"] * self.store.records[0].total_size
        return answer


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path, 20)


def test_everything_is_indexed(asked: Asked) -> None:
    answer = asked.ask()
    assert answer == {
        "count": 20,
        "complete": True,
        "cut_short": False,
        "next": None,
        "log_end": asked.store.end,
        "indexed_to": asked.store.end,
        "last_timestamp": 1_019,
    }


def test_an_index_that_is_behind_is_not_complete(asked: Asked) -> None:
    end, before = asked.store.end, asked.store.records[12].physical_offset
    asked.positions(end, end, before)
    answer = asked.ask()
    assert (answer["complete"], answer["cut_short"], answer["indexed_to"]) == (False, False, before)
    assert asked.ask(up_to=before)["complete"], "what is asked about is indexed"
    assert asked.ask(up_to=before)["count"] == 12


def test_what_may_not_be_shown_yet_is_not_shown_and_said(asked: Asked) -> None:
    end, shown = asked.store.end, asked.store.records[7].physical_offset
    asked.positions(end, shown, end)
    answer = asked.ask()
    assert (answer["count"], answer["complete"], answer["indexed_to"]) == (7, False, shown)


def test_what_lies_below_the_topics_beginning_is_gone(asked: Asked) -> None:
    answer = asked.ask(floor=asked.store.records[15].physical_offset)
    assert (answer["count"], answer["complete"], answer["next"]) == (5, True, None)


def test_a_page_that_is_full_is_complete_and_goes_on(asked: Asked) -> None:
    first = asked.ask(max=15)
    assert (first["count"], first["complete"]) == (15, True)
    second = asked.ask(max=15, next=first["next"])
    assert (second["count"], second["complete"], second["next"]) == (5, True, None)


def test_work_beyond_the_limit_is_cut_short(tmp_path: Path) -> None:
    # One slot holds all items, so 1,200 of another key lie before the one that is wanted.
    asked = Asked(tmp_path, 1)
    others = [Record("T", store_timestamp=2_000, properties={"KEYS": "other"}) for _ in range(1_200)]
    asked.store.shape = IndexShape(1, 5_000)
    for name in asked.store.names():
        (asked.store.folder / name).unlink()
    asked.store.append(others)
    asked.store.build()
    asked.config = load(None, ["index.hash_slots=1", "index.max_items=5000", "reader.max_query_items=1000"])
    queues = QueueReader(asked.store.log, tmp_path / "consumequeue", 2_000)
    asked.queries = KeyQueries(asked.config, asked.store.folder, asked.control, asked.store.log, queues)
    asked.positions(*[asked.store.end] * 3)
    answer = asked.ask()
    assert (answer["count"], answer["complete"], answer["cut_short"]) == (0, False, True)
    answer = asked.ask(next=answer["next"])
    assert (answer["count"], answer["complete"], answer["next"]) == (1, True, None)


def test_a_node_without_an_index_says_so(tmp_path: Path) -> None:
    asked = Asked(tmp_path, 1, load(None, ["index.enable=false"]))
    with pytest.raises(ProtocolError, match="INDEX_DISABLED"):
        asked.ask()


@pytest.mark.parametrize("limit", [1, 64, 10_000])
def test_the_wish_is_cut_down_to_the_nodes_limit(limit: int) -> None:
    request = parse_query({"topic": "T", "key": "k", "max": limit}, CONFIG.reader)
    assert request.max_messages == min(limit, CONFIG.reader.max_query_messages)
