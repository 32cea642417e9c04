"""Goal: the audit log hears of each change by a person, with what was before, and of nothing that consumers do as they run.

Method: requests to a real service, as the coordinator asks about them: before they are handled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock
from commitmq.coordination.service import Change, Service
from commitmq.format.constants import DEAD_LETTER_GROUP, DEAD_LETTER_PASSES
from commitmq.store.layout import StoreLayout
from small_disk import room


class Asked:
    """A service, and what each request would change."""

    def __init__(self, root: Path) -> None:
        layout = StoreLayout(root)
        layout.run.mkdir(parents=True)
        self.service = Service(layout, NodeConfig(), ControlBlock(layout.control, create=True), 1, room())

    def change(self, op: str, **fields: Any) -> Change | None:
        return self.service.changes.of({"op": op, **fields})

    def ask(self, op: str, **fields: Any) -> None:
        self.service.handle({"op": op, **fields}, 2)
        self.service.end_turn(2)


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def test_a_topic(asked: Asked) -> None:
    made = asked.change("topic.create", topic="t", queues=2, perm=6, secret="canary")
    assert made == Change("Topic:t", None, {"queues": 2, "perm": 6})
    asked.ask("topic.create", topic="t", queues=2)
    altered = asked.change("topic.create", topic="t", queues=4, update=True)
    assert altered is not None
    wanted = {"read_queues": 4, "write_queues": 4}
    assert (altered.operation, altered.before["write_queues"], altered.after) == ("topic.update", 2, wanted)
    made = asked.change("topic.create", topic="new", queues=4, update=True)
    assert made == Change("Topic:new", None, {"queues": 4}), "there was none to update"
    deleted = asked.change("topic.delete", topic="t")
    assert deleted is not None
    assert deleted.before["name"] == "t"


def test_the_first_look_at_a_topic_makes_it(asked: Asked) -> None:
    assert asked.change("topic.route", topic="t", create=True) == Change("Topic:t")
    assert asked.change("topic.route", topic="t") is None
    asked.ask("topic.route", topic="t", create=True)
    assert asked.change("topic.route", topic="t", create=True) is None


def test_a_group(asked: Asked) -> None:
    assert asked.change("group.config", group="g") is None
    made = asked.change("group.config", group="g", set={"consumeEnable": False})
    assert made == Change("Group:g", None, {"consumeEnable": False})
    asked.ask("group.config", group="g", set={"consumeEnable": False})
    altered = asked.change("group.config", group="g", set={"consumeEnable": True})
    assert altered is not None
    assert altered.before["consumeEnable"] is False
    assert asked.change("group.delete", group="g") == Change("Group:g")
    assert asked.change("group.forbid", group="g", topic="t") is None
    assert asked.change("group.forbid", group="g", topic="t", readable=False) == Change(
        "Group:g", None, {"topic": "t", "readable": False}
    )
    assert asked.change("offset.forget", group="g") == Change("Group:g")


def test_only_a_reset_by_hand_is_a_change_of_offsets(asked: Asked) -> None:
    asked.ask("topic.create", topic="t", queues=2)
    offsets = [["t", 0, 0], ["t", 1, 0]]
    assert asked.change("offset.commit", group="g", offsets=offsets) is None
    assert asked.change("offset.commit", group="g", offsets=offsets, reset=True, member="m") is None
    reset = asked.change("offset.commit", group="g", offsets=offsets, reset=True)
    before = {"offsets": [["t", 0, -1], ["t", 1, -1]]}
    assert reset == Change("Group:g", before, {"offsets": offsets}, "group.reset")
    asked.ask("offset.commit", group="g", offsets=offsets, reset=True)
    again = asked.change("offset.commit", group="g", offsets=[["t", 0, 5]], reset=True)
    assert again is not None
    assert again.before == {"offsets": [["t", 0, 0]]}
    many = asked.change("offset.commit", group="g", offsets=[["t", 0, 5]] * 100, reset=True)
    assert many is not None
    assert (len(many.after["offsets"]), many.after["more"]) == (16, 84)


def test_a_commit_has_the_name_of_its_verb(asked: Asked) -> None:
    asked.ask("topic.create", topic="t", queues=1)
    offsets = [["t", 0, 7]]
    before = {"offsets": [["t", 0, -1]]}
    copied = {"from": "other", "offsets": offsets}
    assert asked.change("offset.commit", group="g", offsets=offsets, copied_from="other") == Change(
        "Group:g", before, copied, "group.clone"
    )
    assert asked.change("offset.commit", group="g", offsets=offsets, copied_from="other", reset=True) == Change(
        "Group:g", before, copied, "group.reset"
    )
    assert asked.change("offset.commit", group="g", offsets=offsets, by_person=True) == Change(
        "Group:g", before, {"offsets": offsets}
    )


def test_dead_letters(asked: Asked) -> None:
    letters = [["%DLQ%kitchen", 0, 7]]
    assert asked.change("offset.commit", group=DEAD_LETTER_GROUP, offsets=letters) is None, "a resend goes on"
    assert asked.change("offset.commit", group=DEAD_LETTER_GROUP, offsets=letters, by_person=True) == Change(
        "Group:kitchen", {"offsets": [["%DLQ%kitchen", 0, -1]]}, {"offsets": letters}, "dlq.purge"
    )
    assert asked.change("topic.create", topic=DEAD_LETTER_PASSES, queues=1, resends="kitchen") == Change(
        "Group:kitchen", operation="dlq.resend"
    )
    other = asked.change("topic.create", topic="t", queues=1, resends="kitchen")
    assert other == Change("Topic:t", None, {"queues": 1}), "only of the topic of resends"


@pytest.mark.parametrize("wrong", [None, 7, [], {"a": 1}])
def test_a_request_of_another_shape_is_no_change(asked: Asked, wrong: Any) -> None:
    for op in ("topic.create", "topic.route", "group.config", "offset.commit", "offset.forget", "group.join", "no"):
        assert asked.change(op, topic=wrong, group=wrong, set={}, create=True) is None
    reset = asked.change("offset.commit", group="g", reset=True, offsets=[wrong, ["t", "0", 1]])
    assert reset is not None
    assert reset.before == {"offsets": []}
