"""Goal: what an admin answers can be read by attributes.

Method: rows made from answers of this node, of an older one and of a newer one.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict

import orjson
import pytest

from commitmq import Lag, TopicDescription, TopicInfo
from commitmq.client.admin_results import QueueBounds

ANSWER = {
    "name": "orders",
    "read_queues": 4,
    "write_queues": 2,
    "perm": 6,
    "attributes": {"storage.type": "memory"},
    "incarnation": 7,
    "system": False,
}


def test_a_row_is_an_object() -> None:
    topic = TopicInfo.of(ANSWER)
    assert (topic.name, topic.write_queues, topic.attributes) == ("orders", 2, {"storage.type": "memory"})
    assert asdict(topic) == ANSWER
    with pytest.raises(FrozenInstanceError):
        topic.perm = 4  # type: ignore[misc]
    assert orjson.loads(orjson.dumps(topic)) == ANSWER


def test_older_and_newer_nodes_are_understood() -> None:
    assert TopicInfo.of({**ANSWER, "colour": "red"}) == TopicInfo.of(ANSWER)
    older = {name: value for name, value in ANSWER.items() if name not in ("incarnation", "system")}
    assert TopicInfo.of(older).incarnation == 0
    with pytest.raises(TypeError, match="perm"):
        TopicInfo.of({name: value for name, value in ANSWER.items() if name != "perm"})


def test_a_description_is_the_settings_and_the_groups() -> None:
    described = TopicDescription.of({**ANSWER, "groups": ["g"]})
    assert isinstance(described, TopicInfo)
    assert asdict(described) == {**ANSWER, "groups": ["g"]}
    assert described.groups == ["g"]


def test_rows_of_queues() -> None:
    queue, low, high, by_time = QueueBounds(3, 10, 20, None)
    assert (queue, low, high, by_time) == (3, 10, 20, None)
    lag = Lag("orders", 3, None, 20, 10, None, None)
    assert list(asdict(lag)) == ["topic", "queue", "committed", "end", "lag", "member", "problem"]
