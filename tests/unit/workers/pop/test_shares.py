"""Goal: a queue whose offset was reset begins there, and the group's other queues go on where they are.

Method: a coordinator of a few lines, which refuses as the node's does: the whole commit, or with ``partial`` the queue.
"""

from __future__ import annotations

from typing import Any

from commitmq.errors import ProtocolError
from commitmq.workers.pop.shares import Shares


class Line:
    """A coordinator: one group's offsets."""

    def __init__(self) -> None:
        self.offsets: dict[tuple[str, int], int] = {}

    def one(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "group.share":
            return {"ok": True, "max_retries": 16}
        if request["op"] == "offset.fetch":
            return {"ok": True, "offsets": [(*key, self.offsets.get(tuple(key), -1)) for key in request["queues"]]}
        stored, refused = [], []
        for (topic, queue, offset), known in zip(request["offsets"], request["known"], strict=True):
            if self.offsets.get((topic, queue), -1) < known:
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
    shares = Shares(line, "rmq_sys_REVIVE_LOG_C", 8)  # type: ignore[arg-type]
    share = shares.of("g", ["orders"])
    queues = [("orders", 0), ("orders", 1)]
    shares.load(share, queues, dict.fromkeys(queues, 0))
    share.next = dict.fromkeys(queues, 50)
    assert shares.commit([], lambda group: 1)
    assert line.offsets == dict.fromkeys(queues, 50)
    line.offsets["orders", 0] = 10  # a person resets it
    share.next = dict.fromkeys(queues, 80)  # messages were handed out meanwhile
    assert shares.commit([], lambda group: 1)
    assert line.offsets == {("orders", 0): 10, ("orders", 1): 80}
    assert share.next == {("orders", 1): 80}
    shares.load(share, queues, dict.fromkeys(queues, 0))
    assert share.next == {("orders", 0): 10, ("orders", 1): 80}
