"""Goal: what a group has in flight is told by queue, of receives with and without order, in pages of bounded size.

Method: check points and ordered states set by hand, and the operation's answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from commitmq.config import PopConfig
from commitmq.errors import ProtocolError
from commitmq.protocol import wire
from commitmq.semantics.pop import first_pop
from commitmq.semantics.pop_revive import CheckPoint, CheckPointKey
from commitmq.store.layout import StoreLayout
from commitmq.workers.pop import orders as orders_module
from commitmq.workers.pop import revival as module
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.points import CheckPoints, OpenCheckPoint
from commitmq.workers.pop.revival import InFlight
from small_disk import room

NOW = 1_800_000_000_000
REVIVE = {"topic": "rmq_sys_REVIVE_LOG_c", "unread": 0, "waiting": 0}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CheckPoints, Orders]:
    for one in (module, orders_module):
        monkeypatch.setattr(one, "now_ms", lambda: NOW)
    StoreLayout(tmp_path).own.mkdir()
    return CheckPoints(PopConfig()), Orders(StoreLayout(tmp_path), MagicMock(), room(), PopConfig())


def asked(parts: tuple[CheckPoints, Orders], **fields: Any) -> dict[str, Any]:
    answers, queues = MagicMock(), MagicMock()
    queues.lag.return_value = REVIVE
    InFlight(*parts, queues, answers).answer(b"c", {"id": 1, "group": "g", **fields})
    return dict(wire.parse_answer(answers.send.call_args.args[1]))


def point(topic: str, queue: int, count: int, group: str = "g") -> OpenCheckPoint:
    key = CheckPointKey(topic, group, queue, 0, NOW, "b")
    return OpenCheckPoint(CheckPoint(key, 60_000, tuple(range(count))), 0, b"c", 0)


def test_both_kinds_of_receives_count_and_other_groups_do_not(parts: tuple[CheckPoints, Orders]) -> None:
    points, orders = parts
    for one in (point("a", 1, 3), point("%RETRY%g_a", 0, 2), point("a", 1, 9, group="other")):
        points.add(one)
    first = points.by_key[CheckPointKey("a", "g", 1, 0, NOW, "b")]
    points.settle(first, 0)
    state = first_pop(NOW, 60_000, [5, 6, 7], NOW)
    orders.put(OrderKey("b", "g", 0), state.changed(6, NOW, NOW))
    orders.put(OrderKey("b", "other", 0), state)
    told = asked(parts)
    assert told["queues"] == [["a", "%RETRY%g_a", 0, 2], ["a", "a", 1, 2], ["b", "b", 0, 2]]
    assert (told["messages"], told["next"]) == (6, None)
    assert told["revive"] == {**REVIVE, "late_ms": 0}


def test_pages_are_bounded_and_follow_each_other(parts: tuple[CheckPoints, Orders]) -> None:
    for queue in range(700):
        parts[0].add(point("a", queue, 1))
    first = asked(parts)
    assert (len(first["queues"]), first["next"], first["messages"]) == (500, ["a", 499], 700)
    second = asked(parts, after=first["next"])
    assert [row[2] for row in second["queues"]] == list(range(500, 700))
    assert second["next"] is None
    for wrong in ("a", ["a"], [1, "a"]):
        with pytest.raises(ProtocolError, match="after must be"):
            asked(parts, after=wrong)
