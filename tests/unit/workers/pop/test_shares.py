"""Goal: a queue whose offset was reset begins there, and the group's other queues go on where they are.

Method: a coordinator of a few lines, which refuses as the node's does: the whole commit, or with ``partial`` the queue.
"""

from __future__ import annotations

from typing import Any

import pytest

from commitmq.errors import ProtocolError
from commitmq.semantics.pop import RetryNames
from commitmq.workers.pop.shares import Shares


class Line:
    """A coordinator: one group's offsets."""

    def __init__(self) -> None:
        self.offsets: dict[tuple[str, int], int] = {}
        self.incarnation = 1
        self.number = 0
        self.is_deleted = False
        self.shared: list[bool] = []
        self.resets: dict[tuple[str, int], int] = {}

    def reset(self, topic: str, queue: int, offset: int) -> None:
        self.offsets[topic, queue] = offset
        self.number += 1
        self.resets[topic, queue] = self.number

    def one(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "group.share":
            self.shared.append(bool(request.get("renew")))
            if self.is_deleted and request.get("renew"):
                raise ProtocolError("TOPIC_NOT_EXIST", "it was deleted")
            told = [key for key, number in self.resets.items() if number > (request["heard"] or 0)]
            return {"ok": True, "max_retries": 16, "resets": told, "heard": self.number}
        if request["op"] == "offset.fetch":
            offsets = [(*key, self.offsets.get(tuple(key), -1)) for key in request["queues"]]
            return {"ok": True, "offsets": offsets, "incarnations": {"orders": self.incarnation}}
        stored, refused = [], []
        known_offsets = request.get("known", [-1] * len(request["offsets"]))
        for (topic, queue, offset), known in zip(request["offsets"], known_offsets, strict=True):
            made = request.get("incarnations", {}).get(topic, self.incarnation)
            unheard = self.resets.get((topic, queue), 0) > request.get("heard", self.number)
            if unheard or self.offsets.get((topic, queue), -1) < known or made != self.incarnation:
                refused.append((topic, queue, "FENCED", "its offset was reset"))
            else:
                stored.append((topic, queue, offset))
        if refused and not request.get("partial"):
            raise ProtocolError("FENCED", "its offset was reset")
        self.offsets.update({(topic, queue): offset for topic, queue, offset in stored})
        return {"ok": True, "stored": stored, "refused": refused}

    def ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answers = []
        for request in requests:
            try:
                answers.append(self.one(request))
            except ProtocolError as error:
                answers.append({"ok": False, "code": error.code, "error": error.message})
        return answers


def test_a_reset_of_one_queue_leaves_the_others_alone() -> None:
    line = Line()
    shares = Shares(line, "rmq_sys_REVIVE_LOG_C", 8, 100)  # type: ignore[arg-type]
    share = shares.of("g", ["orders"])
    queues = [("orders", 0), ("orders", 1)]
    shares.load(share, queues, dict.fromkeys(queues, 0))
    share.next = dict.fromkeys(queues, 50)
    assert shares.commit([], lambda share: True)
    assert line.offsets == dict.fromkeys(queues, 50)
    line.offsets["orders", 0] = 10  # a person resets it
    share.next = dict.fromkeys(queues, 80)  # messages were handed out meanwhile
    assert shares.commit([], lambda share: True)
    assert line.offsets == {("orders", 0): 10, ("orders", 1): 80}
    assert share.next == {("orders", 1): 80}
    shares.load(share, queues, dict.fromkeys(queues, 0))
    assert share.next == {("orders", 0): 10, ("orders", 1): 80}


@pytest.mark.parametrize("offset", [10, 50, 90])
def test_the_next_look_begins_where_a_queue_was_reset(offset: int) -> None:
    """Also at the offset that was committed last, which tells nothing by itself."""
    line = Line()
    shares = Shares(line, "rmq_sys_REVIVE_LOG_C", 8, 100, lambda: line.number)  # type: ignore[arg-type]
    share = shares.of("g", ["orders"])
    queues = [("orders", 0), ("orders", 1)]
    shares.load(share, queues, dict.fromkeys(queues, 0))
    share.next = dict.fromkeys(queues, 50)
    assert shares.commit([], lambda share: True)
    share.next = dict.fromkeys(queues, 80)  # messages were handed out, and their offsets are not committed
    line.reset("orders", 0, offset)
    assert shares.of("g", ["orders"]) is share
    shares.load(share, queues, dict.fromkeys(queues, 0))
    assert share.next == {("orders", 0): offset, ("orders", 1): 80}
    share.next["orders", 0] += 1
    assert shares.of("g", ["orders"]) is share  # (it is told once)
    assert share.next == {("orders", 0): offset + 1, ("orders", 1): 80}


def test_a_commit_from_before_a_reset_does_not_undo_it() -> None:
    line = Line()
    shares = Shares(line, "rmq_sys_REVIVE_LOG_C", 8, 100, lambda: line.number)  # type: ignore[arg-type]
    share = shares.of("g", ["orders"])
    shares.load(share, [("orders", 0)], {("orders", 0): 0})
    share.next["orders", 0] = 50
    assert shares.commit([], lambda share: True)
    share.next["orders", 0] = 80
    line.reset("orders", 0, 50)
    assert shares.commit([], lambda share: True)
    assert line.offsets == {("orders", 0): 50}
    shares.load(shares.of("g", ["orders"]), [("orders", 0)], {("orders", 0): 0})
    assert share.next == {("orders", 0): 50}


def test_offsets_of_a_deleted_topic_are_not_those_of_the_next_one_of_its_name() -> None:
    line = Line()
    shares = Shares(line, "rmq_sys_REVIVE_LOG_C", 8, 100)  # type: ignore[arg-type]
    share = shares.of("g", ["orders"])
    queues = [("orders", 0), ("orders", 1)]
    shares.load(share, queues, dict.fromkeys(queues, 0))
    share.next["orders", 0] = 50  # handed out and not committed yet when the topic goes
    line.incarnation = 2
    assert shares.commit([], lambda share: True)
    assert line.offsets == {("orders", 1): 0} or not line.offsets
    with pytest.raises(ProtocolError, match="recreated"):
        share.next["orders", 1] = 7
        shares.load(share, queues, dict.fromkeys(queues, 0))
    shares.load(share, queues, dict.fromkeys(queues, 0))
    assert share.next == dict.fromkeys(queues, 0)


def test_what_was_handed_out_before_a_death_does_not_undo_a_later_reset() -> None:
    line = Line()
    shares = Shares(line, "rmq_sys_REVIVE_LOG_C", 8, 100)  # type: ignore[arg-type]
    shares.handed_out = {("g", "orders", 0): 50}
    shares.commit_handed_out()
    assert line.offsets == {("orders", 0): 50}
    line.offsets["orders", 0] = 10  # a person resets it while nobody receives
    share = shares.of("g", ["orders"])
    shares.load(share, [("orders", 0)], {("orders", 0): 0})
    assert share.next == {("orders", 0): 10}


def test_a_renewal_makes_nothing_again_that_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commitmq.workers.pop.shares._RENEW_MS", 0)
    line = Line()
    shares = Shares(line, "rmq_sys_REVIVE_LOG_C", 1, 10, lambda: line.number)  # type: ignore[arg-type]
    shares.of("g", ["orders"])
    assert shares.commit([], lambda share: True)
    assert line.shared == [False, True], "made by the first receive, and renewed"
    line.is_deleted = True
    assert shares.commit([], lambda share: True)
    assert shares.commit([], lambda share: True)
    assert line.shared == [False, True, True], "no renewal after the refusal"
    shares.of("g", ["orders"])
    assert line.shared == [False, True, True, False], "the next receive makes them again"


def test_a_group_learns_its_settings_and_names_the_retry_topics_of_the_second_form() -> None:
    asked: list[list[str]] = []

    class Asking(Line):
        factor = 30

        def one(self, request: dict[str, Any]) -> dict[str, Any]:
            answer = super().one(request)
            if request["op"] == "group.share":
                asked.append(request["topics"])
                answer |= {"priority_factor": self.factor, "max_retries": 2}
            return answer

    line = Asking()
    names = RetryNames(v2=True)
    shares = Shares(line, "rmq_sys_REVIVE_LOG_C", 8, 100, lambda: line.number, names=names)  # type: ignore[arg-type]
    share = shares.of("g", ["orders"])
    assert asked == [["%RETRY%g+orders"]]
    assert (share.priority_factor, share.max_retries) == (30, 2)
    line.factor = 60
    share.renew_ms = 0
    assert shares.commit([], lambda share: True)
    assert share.priority_factor == 60, "a change acts with the next renewal"
