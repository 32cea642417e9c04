"""Goal: the list of clients has who is connected, page by page, and no client makes it large or is in it twice.

Method: the real service on real files, without sockets; gateways are requests of the test, and the clock is the test's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq.config import NodeConfig, from_mapping
from commitmq.control import ControlBlock
from commitmq.coordination.service import Service
from commitmq.errors import ProtocolError
from commitmq.semantics.rates import FORGET_MS, MAX_CHARACTERS, MAX_NAMES, shortened
from commitmq.store.layout import StoreLayout
from small_disk import room

ROW = {"user": "", "language": "java", "version": "5.4.0", "topics": [], "left_out": 0, "heard_ms_ago": 0}


class Coordinator:
    def __init__(self, root: Path, config: NodeConfig) -> None:
        layout = StoreLayout(root)
        layout.run.mkdir(parents=True)
        self.now_ms = 1_000_000
        self.service = Service(layout, config, ControlBlock(layout.control, create=True), self.now_ms, room())

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        answer = self.service.handle({"op": op, **fields}, self.now_ms)
        self.service.end_turn(self.now_ms)
        return answer.fields()

    def tell(self, *rows: dict[str, Any], instance: str = "one", gone: tuple[str, ...] = ()) -> None:
        self.ask("client.heard", gateway="rocketmq", instance=instance, clients=list(rows), gone=list(gone))

    def pages(self, **fields: Any) -> Iterator[dict[str, Any]]:
        page: dict[str, Any] = {"next": None}
        while page["next"] is not None or "clients" not in page:
            page = self.ask("client.list", **fields, after=page["next"])
            yield page

    def ids(self, **fields: Any) -> list[str]:
        return [row["id"] for page in self.pages(**fields) for row in page["clients"]]


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return Coordinator(
        tmp_path, from_mapping({"groups": {"max_listed_clients": 5, "session_timeout_ms": FORGET_MS * 2}})
    )


def row(name: str, connection: str, **more: Any) -> dict[str, Any]:
    return {**ROW, "id": name, "connection": connection, "consumes": [], "produces": [], **more}


def test_clients_and_members_are_listed_by_what_is_asked_for(coordinator: Coordinator) -> None:
    coordinator.tell(
        row("b", "h:2", consumes=["kitchen"], topics=["orders"], user="shop"), row("a", "h:1", produces=["waiters"])
    )
    for member in ("m1", "m2"):
        coordinator.ask("group.join", group="kitchen", member=member, topics=["orders"])
    coordinator.ask(
        "group.join", group="kitchen", member="b", topics=["orders"], instance="one"
    )  # the gateway's member
    assert coordinator.ids() == coordinator.ids(limit=1) == ["a", "b", "m1", "m2"]
    assert coordinator.ids(group="kitchen", limit=2) == ["b", "m1", "m2"]
    assert coordinator.ids(group="waiters") == ["a"]
    assert coordinator.ids(topic="orders") == ["b", "m1", "m2"]
    assert coordinator.ids(user="shop") == coordinator.ids(client_id="b") == coordinator.ids(text="SHOP") == ["b"]
    assert coordinator.ids(gateway="native") == ["m1", "m2"]
    assert coordinator.ids(text="h:1") == ["a"]
    (native,) = coordinator.ask("client.list", client_id="m2")["clients"]
    assert (native["gateway"], native["consumes"], native["topics"]) == ("native", ["kitchen"], ["orders"])
    (producer,) = coordinator.ask("client.list", client_id="a")["clients"]
    assert producer == {
        **ROW, "id": "a", "gateway": "rocketmq", "address": "h:1", "consumes": (), "produces": ("waiters",), "topics": (),
        "queues": None,
    }  # fmt: skip


def test_clients_that_left_and_those_of_a_dead_gateway_are_gone(coordinator: Coordinator) -> None:
    coordinator.tell(row("a", "h:1"), row("b", "h:2"))
    coordinator.tell(gone=("h:1",))
    assert coordinator.ids() == ["b"]
    coordinator.tell(row("c", "h:3"), instance="two")
    assert coordinator.ids() == ["c"]
    coordinator.now_ms += FORGET_MS
    assert coordinator.ids() == []


def test_one_liar_is_one_client_and_a_full_table_says_so(coordinator: Coordinator) -> None:
    for number in range(100):
        coordinator.tell(row(f"name {number}", "h:1"))
    assert coordinator.ids() == ["name 99"]
    assert coordinator.ask("client.list")["complete"]
    coordinator.now_ms += 1
    coordinator.tell(*(row(f"c{number}", f"h:{number + 2}") for number in range(5)))
    assert coordinator.ids() == [f"c{number}" for number in range(5)]
    assert not coordinator.ask("client.list")["complete"]
    coordinator.now_ms += FORGET_MS
    assert coordinator.ask("client.list")["complete"]


def test_names_that_were_left_out_make_a_list_incomplete(coordinator: Coordinator) -> None:
    coordinator.tell(row("a", "h:1", left_out=3))
    assert coordinator.ask("client.list")["complete"]
    assert not coordinator.ask("client.list", group="perhaps")["complete"]


def test_what_is_kept_of_a_client_is_bounded() -> None:
    names = [f"group {number:04}" for number in range(1_000)]
    lists, left_out = shortened(100, names, ["x" * MAX_CHARACTERS], ["t"])
    assert [len(one) for one in lists] == [MAX_NAMES, 0, 1]
    assert left_out == 1_000 - MAX_NAMES + 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": None},
        {"consumes": "kitchen"},
        {"produces": [1]},
        {"topics": ["t"] * (MAX_NAMES + 1)},
        {"user": "x" * (MAX_CHARACTERS + 1)},
        {"heard_ms_ago": -1},
        {"left_out": "many"},
    ],
)
def test_what_is_no_client_is_refused(coordinator: Coordinator, wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(wrong)) + "|clients"):
        coordinator.tell({**row("a", "h:1"), **wrong})
    with pytest.raises(ProtocolError, match="gateway"):
        coordinator.ask("client.heard", gateway="native", instance="x", clients=[])
    with pytest.raises(ProtocolError, match="gone"):
        coordinator.tell(gone=(1,))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="after"):
        coordinator.ask("client.list", after=["elsewhere", "", "", ""])
    assert coordinator.ids() == []
