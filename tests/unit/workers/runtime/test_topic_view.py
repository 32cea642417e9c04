"""Goal: what sends and pulls know of a topic follows its attributes. Method: files and news as the coordinator makes them."""

from __future__ import annotations

from pathlib import Path

import orjson

from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.topic_config import TopicConfig, TopicTable
from commitmq.store.metadata.topic_files import NO_END
from commitmq.workers.runtime.topic_view import TopicView, TopicViews


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


def _route(incarnation: int, **attributes: str) -> dict[str, object]:
    return {"read_queues": 1, "write_queues": 1, "perm": 6, "attributes": attributes, "incarnation": incarnation}


def _news(version: int, **parts: object) -> bytes:
    return orjson.dumps({"version": version, "topics": {}, "ending": [], "deleted": [], **parts})


def test_a_topic_that_ended_does_not_come_back_by_what_is_late(tmp_path: Path) -> None:
    """An answer about a topic may cross the news of its end; the next topic of the name is another one."""
    control = ControlBlock(tmp_path / "control", create=True)
    views = TopicViews(StoreLayout(tmp_path), control)
    assert views.learn("t", _route(5))
    assert views.hear(_news(1, ending=[["t", 5]])) == {"t"}
    assert views.ended == {"t"}
    assert views.has_endings
    assert (views.get("t"), views.tombstone("t"), views.tombstones()) == (None, NO_END, {"t": NO_END})
    assert not views.learn("t", _route(5))
    # The answer about the next one comes before the news of the end of the first.
    assert views.learn("t", _route(6))
    assert views.hear(_news(2, deleted=[["t", 100, 5]])) == {"t"}
    assert views.ended == set(), "queue offsets of the new topic must not be forgotten"
    found = views.get("t")
    assert found is not None
    assert (found.incarnation, views.tombstone("t"), views.has_endings) == (6, 100, False)
    control.close()


def test_lost_news_of_an_end_are_made_good_by_the_files(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    table = TopicTable()
    for name, made in (("a", "1"), ("b", "2"), ("c", "3")):
        table.put(TopicConfig(name, 1, 1, attributes={"storage.created": made}))
    table.persist(layout.config / "topics.json")
    control = ControlBlock(tmp_path / "control", create=True)
    views = TopicViews(layout, control)
    # a is ending, b is gone, c was made anew; and a file of endings that is older than the topics says c, too.
    json_config.persist(layout.endings, {"a": 1, "c": 3})
    table.remove(["b"])
    table.put(TopicConfig("c", 1, 1, attributes={"storage.created": "9"}))
    table.persist(layout.config / "topics.json")
    json_config.persist(layout.tombstones, {"b": 40, "c": 50})
    control.put(Word.TOPICS_VERSION, 8)
    assert views.reload() == {"a", "b", "c"}
    assert views.ended == {"a", "b", "c"}
    found = views.get("c")
    assert found is not None
    assert (views.get("a"), views.get("b"), found.incarnation) == (None, None, 9)
    assert views.tombstones() == {"a": NO_END, "b": 40, "c": 50}
    assert views.reload() == set()
    assert views.ended == set()
    # What the dispatcher has not removed yet is not today's topic's.
    assert not views.is_cleared("c")
    control.put_dispatcher(0, DispatcherWord.TOPICS, 8)
    assert views.is_cleared("c")
    assert views.is_cleared("never deleted")
    control.close()
