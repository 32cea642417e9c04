"""Goal: what groups may read is learned when it has changed; a coordinator that is away stops nobody whom it let in before.

Method: a node whose coordinator answers, refuses or is silent; the word of the control block is a number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.errors import ProtocolError
from commitmq.log import get_log
from commitmq_plugins.rocketmq.broker import offsets
from commitmq_plugins.rocketmq.broker.offsets import GroupReads


class Node:
    """``word`` counts changes. The coordinator does not answer while ``away``."""

    def __init__(self) -> None:
        self.word, self.off, self.groups, self.asked = 1, set[str](), {"known"}, 0
        self.away: ProtocolError | None = None
        self.silent = False
        self.control = SimpleNamespace(get=lambda word: self.word)
        self.config = SimpleNamespace(groups=SimpleNamespace(auto_create=False))

    async def ask(self, role: str, op: str, **fields: Any) -> dict[str, Any]:
        self.asked += 1
        if self.silent:
            await asyncio.sleep(60)
        if self.away is not None:
            raise self.away
        if op == "group.config":
            if fields["group"] not in self.groups:
                raise ProtocolError("GROUP_NOT_EXIST", "there is none")
            return {"config": {}}
        configs = [{"groupName": name, "consumeEnable": False} for name in sorted(self.off)]
        return {"configs": configs, "forbidden": {"f": {"t": 4, "u": 2}}, "version": {}, "next": None}


def play(work: Callable[[Node, GroupReads], Awaitable[None]]) -> None:
    async def run() -> None:
        node = Node()
        reads = GroupReads(node, get_log("test"))  # type: ignore[arg-type]
        await work(node, reads)
        await reads.close()

    asyncio.run(run())


AWAY = ProtocolError("SERVICE_NOT_AVAILABLE", "it died")


def test_a_change_is_learned_once_for_all_who_ask() -> None:
    async def work(node: Node, reads: GroupReads) -> None:
        await asyncio.gather(*(reads.refresh() for _ in range(10)))
        assert (node.asked, reads.is_current) == (1, True)
        assert reads.may_consume("g")
        assert not reads.may_read("f", "t")
        assert reads.may_read("f", "u")
        node.word, node.off = 2, {"g"}
        assert not reads.is_current
        seen: list[bool] = []
        reads.when_current(lambda: seen.append(reads.may_consume("g")))
        await reads.refresh()
        await asyncio.sleep(0.01)
        assert (node.asked, seen) == (2, [False])

    play(work)


def test_while_the_coordinator_is_away_what_was_known_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "_WAIT_S", 0.05)
    monkeypatch.setattr(offsets, "_PAUSE_S", 0.0)

    async def work(node: Node, reads: GroupReads) -> None:
        node.off = {"g"}
        await reads.refresh()
        node.word, node.off, node.away = 2, set(), AWAY
        await reads.refresh()
        assert not reads.may_consume("g")
        node.away = None
        await reads.refresh()
        assert reads.may_consume("g")
        node.word, node.silent = 3, True
        await reads.refresh()
        assert reads.may_consume("g")
        assert not reads.is_current

    play(work)


def test_a_group_that_nobody_knows_is_let_in_by_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "_FOUND_S", 0.0)

    async def work(node: Node, reads: GroupReads) -> None:
        assert not await reads.is_missing("known")
        assert await reads.is_missing("other")
        node.away = AWAY
        assert not await reads.is_missing("known")
        with pytest.raises(ProtocolError):
            await reads.is_missing("other")
        node.away = None
        node.groups.clear()
        assert await reads.is_missing("known"), "it was deleted"
        node.away = AWAY
        with pytest.raises(ProtocolError):
            await reads.is_missing("known")

    play(work)
