"""Goal: what sends and pulls know of a topic follows its attributes. Method: files and news as the coordinator makes them."""

from __future__ import annotations

from pathlib import Path

import orjson

from commitmq.control import ControlBlock
from commitmq.store.layout import StoreLayout
from commitmq.store.topic_config import TopicConfig, TopicTable
from commitmq.workers.topic_view import TopicView, TopicViews


def test_attributes_come_from_the_file_and_the_news(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    table = TopicTable()
    table.put(TopicConfig("cache", 2, 2, attributes={"storage.type": "memory", "message.type": "FIFO"}))
    table.put(TopicConfig("plain", 2, 2))
    table.persist(layout.config / "topics.json")
    control = ControlBlock(tmp_path / "control", create=True)
    views = TopicViews(layout, control)
    cache, plain = views.get("cache"), views.get("plain")
    assert cache is not None
    assert plain is not None
    assert cache.is_memory
    assert (cache.queue_type, cache.attribute("message.type", "NORMAL")) == ("SimpleCQ", "FIFO")
    assert not plain.is_memory
    assert plain.attribute("message.type", "NORMAL") == "NORMAL"

    batches = {"read_queues": 1, "write_queues": 1, "perm": 6, "attributes": {"queue.type": "BatchCQ"}}
    assert views.hear(orjson.dumps({"version": 1, "topics": {"b": batches}, "deleted": []})) == {"b"}
    found = views.get("b")
    assert found is not None
    assert found.queue_type == "BatchCQ"
    control.close()


def test_a_changed_attribute_counts_as_a_change(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    table = TopicTable()
    table.put(TopicConfig("t", 2, 2))
    table.persist(layout.config / "topics.json")
    control = ControlBlock(tmp_path / "control", create=True)
    views = TopicViews(layout, control)
    table.put(TopicConfig("t", 2, 2, attributes={"message.type": "FIFO"}))
    table.persist(layout.config / "topics.json")
    assert views.reload() == {"t"}
    assert views.get("t") == TopicView.of(2, 2, 6, {"message.type": "FIFO"})
    control.close()
