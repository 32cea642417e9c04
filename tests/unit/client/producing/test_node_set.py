"""Goal: messages go to the nodes in turn, and past those that are avoided; a key goes to one node, whoever asks.

Method: sets of fake nodes with states that the test sets, and a count over many keys.
"""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from commitmq import InvalidMessageError, Message
from commitmq.client.producing.choice import Affinity, NodeSet
from commitmq.client.sending.line import Line
from commitmq.errors import NodeAddressError, Outcome, SendError
from commitmq.protocol.node_address import node_address, several_addresses
from fake_nodes import fake_set, refused


def chosen(nodes: NodeSet, times: int = 6, topic: str = "t") -> list[str]:
    return [nodes.attempts(topic, Affinity.FREE, "", 1e9).next().address for _ in range(times)]


def test_in_turn() -> None:
    assert chosen(fake_set()) == ["n0", "n1", "n2"] * 2


def test_past_a_node_that_is_avoided() -> None:
    nodes = fake_set()
    nodes.nodes[1].faults.answered(3.0)
    assert set(chosen(nodes)) == {"n0", "n2"}


def test_past_a_full_and_a_resting_and_a_silent_node() -> None:
    nodes = fake_set(4)
    now = nodes._clock()
    nodes.nodes[0].producer._lanes.writer.outbox.is_full = True
    nodes.nodes[1].producer._lanes.writer.lane.delivery.busy.error = refused("SYSTEM_BUSY")
    nodes.nodes[2].watches[0].sent(now - 0.6)
    assert set(chosen(nodes)) == {"n3"}
    nodes.nodes[3].calls[object()] = now - 0.6
    assert set(chosen(nodes)) == {"n1", "n2", "n3"}, "without a good one those that answer and have room"


def test_an_unreachable_node_is_the_last_choice() -> None:
    nodes = fake_set(2)
    for node in nodes.nodes:
        nodes.failed(node, refused("NODE_UNAVAILABLE"), "t")
    assert set(chosen(nodes)) == {"n0", "n1"}, "there is no other"
    nodes.nodes[0].faults.detected()
    nodes.nodes[0].faults.answered(20.0)
    assert set(chosen(nodes)) == {"n0"}


def test_a_topic_that_one_node_refuses_goes_to_the_others() -> None:
    nodes = fake_set(2)
    nodes.failed(nodes.nodes[0], refused("TOPIC_NOT_EXIST"), "t")
    assert set(chosen(nodes)) == {"n1"}
    assert set(chosen(nodes, topic="other")) == {"n0", "n1"}


def test_keys_have_homes_that_do_not_depend_on_the_order_of_the_list() -> None:
    nodes = fake_set(3)
    homes = {f"key-{number}": nodes.home(f"key-{number}").address for number in range(3000)}
    counts = Counter(homes.values())
    assert min(counts.values()) > 850, counts
    nodes.nodes.reverse()
    assert homes == {key: nodes.home(key).address for key in homes}
    del nodes.nodes[0]
    gone = "n2"
    moved = {key for key, home in homes.items() if nodes.home(key).address != home}
    assert moved == {key for key, home in homes.items() if home == gone}, "only the keys of the node that went move"


def test_what_pins_a_message() -> None:
    nodes = fake_set()
    keyed = Message(b"x", sharding_key="k")
    assert nodes.affinity_of("t", b"x", {}) == (Affinity.FREE, "")
    assert nodes.affinity_of("t", b"x", {"queue": 0}) == (Affinity.FIXED, "t\x000")
    assert nodes.affinity_of("t", b"x", {"sharding_key": "k"}) == (Affinity.KEY, "k")
    assert nodes.affinity_of("t", b"x", {"key": "k"}) == (Affinity.KEY, "k")
    assert nodes.affinity_of("t", keyed, {}) == (Affinity.KEY, "k")
    assert nodes.affinity_of("t", b"x", {"keys": "k"}) == (Affinity.FREE, "")
    with pytest.raises(InvalidMessageError, match="either"):
        nodes.affinity_of("t", b"x", {"key": "k", "keys": "k"})


def test_an_idempotent_producer_moves_nothing() -> None:
    nodes = fake_set(is_idempotent=True, may_store_twice=True)
    assert (nodes.retries, nodes.may_store_twice) == (0, False)
    assert not nodes.nodes[0].watches[0].gives_back
    assert nodes.affinity("t", None, "k")[0] is Affinity.FIXED


class Pending:
    """An outbox with messages that wait."""

    def __init__(self) -> None:
        self.failed: list[SendError] = []

    def fail_free(self, error: SendError) -> None:
        self.failed.append(error)


def test_a_silent_node_gives_back_only_while_another_one_is_good() -> None:
    nodes, pending = fake_set(2), Pending()
    watch = nodes.nodes[0].watches[0]
    watch.look(pending)
    watch.sent(nodes._clock() - 0.4)
    watch.look(pending)
    assert pending.failed == []
    watch.since = nodes._clock() - 0.6
    watch.look(pending)
    assert [(one.code, one.outcome) for one in pending.failed] == [("CLIENT_BUSY", Outcome.NOT_STORED)]
    watch.answered(nodes._clock(), float("inf"))
    watch.look(pending)
    nodes.nodes[0].calls[object()] = nodes._clock() - 0.6
    nodes.failed(nodes.nodes[1], refused("NODE_UNAVAILABLE"), "t")
    watch.look(pending)
    assert len(pending.failed) == 1
    nodes.nodes[1].faults.detected()
    watch.look(pending)
    assert len(pending.failed) == 2, "a thread waits for an answer"


def test_a_node_without_a_connection_gives_back_what_may_move() -> None:
    for nodes, given in ((fake_set(2), 1), (fake_set(2, retries=0), 0)):
        pending = Pending()
        nodes.nodes[0].watches[0].not_reached(refused("NODE_UNAVAILABLE"), pending)
        assert len(pending.failed) == given
        assert not nodes.nodes[0].faults.is_reachable


def test_the_wait_for_the_connection_looks_at_silence() -> None:
    nodes, pending = fake_set(2), Pending()
    nodes.nodes[0].calls[object()] = nodes._clock() - 0.6
    line, ticket = Line(), Line.ticket()
    first = object()
    line.extend([first, ticket])
    threading.Timer(0.4, lambda: line.remove(first)).start()
    nodes.nodes[0].watches[0].wait(line, ticket, pending)
    assert pending.failed


# ---------------------------------------------------------------- addresses


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMITMQ_NODE", raising=False)
    assert several_addresses(None) is None
    assert several_addresses("tcp://a:1") is None
    assert several_addresses("a:1, tcp://b:2") == ["tcp://a:1", "tcp://b:2"]
    assert several_addresses(["a:1"]) == ["tcp://a:1"]
    monkeypatch.setenv("COMMITMQ_NODE", "a:1,b:2")
    assert several_addresses(None) == ["tcp://a:1", "tcp://b:2"]
    with pytest.raises(NodeAddressError, match="only Producer and AsyncProducer take several"):
        node_address(None)


@pytest.mark.parametrize(
    "node", ["a:1,", "a:1,a:1", "a:1,tcp://a:1", [], [f"a:{port}" for port in range(1, 66)], "a:1,b"]
)
def test_addresses_without_sense(node: str | list[str]) -> None:
    with pytest.raises(NodeAddressError):
        several_addresses(node)


def test_one_client_is_for_one_node() -> None:
    with pytest.raises(NodeAddressError, match="make a client for each node"):
        node_address("a:1,b:2")
