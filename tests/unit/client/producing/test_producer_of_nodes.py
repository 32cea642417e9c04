"""Goal: each message that a producer with several nodes reports as stored was taken by one node; others get the right outcome.

Method: the producer over fake nodes whose answers the test writes; synchronous, asynchronous, batches, and the twin for
asyncio.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from typing import Any

import pytest

import commitmq
from commitmq import (
    BatchSendError,
    CommitMQError,
    ExactlyOnce,
    FaultStrategy,
    InvalidMessageError,
    Message,
    Outcome,
    Producer,
    SendError,
    SendResult,
)
from commitmq.client.producer import TopicUnknownError
from commitmq.client.producing import several_nodes
from commitmq.client.producing.several_nodes import become_several
from commitmq.client.sending.options import ProducerOptions
from commitmq.client.sending.outbox import NoRoom
from commitmq.errors import NodeAddressError
from fake_nodes import FakeProducer, refused

AWAY = "NODE_UNAVAILABLE"
DEFAULTS = {
    **dict.fromkeys(ProducerOptions.__annotations__),
    "ack": "flushed",
    "timeout_s": 10.0,
    "retries": 2,
    "retry_may_store_twice": False,
}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a producer with fake nodes n0, n1, …, the first of which is the next in turn."""
    monkeypatch.setattr("commitmq.client.producing.choice.answers", lambda address, timeout_s: False)
    producers: list[Any] = []

    def made(count: int = 2, **settings: Any) -> Any:
        producer: Any = object.__new__(Producer)
        addresses = [f"n{number}" for number in range(count)]
        become_several(producer, FakeProducer, addresses, {**DEFAULTS, **settings})  # type: ignore[arg-type]
        producer._nodes._turn = count - 1
        producers.append(producer)
        return producer

    yield made
    for producer in producers:
        producer.close(0)


def fakes(producer: Any) -> list[FakeProducer]:
    return [node.producer for node in producer._nodes.nodes]


def counts(producer: Any) -> list[int]:
    return [len(fake.sent) for fake in fakes(producer)]


# ---------------------------------------------------------------- one message


def test_messages_go_in_turn_and_results_name_their_nodes(make: Callable[..., Any]) -> None:
    producer = make(3)
    results = [producer.send("t", b"x") for _ in range(6)]
    assert [one.node for one in results] == ["n0", "n1", "n2"] * 2
    assert isinstance(producer, Producer)
    assert repr(results[0]).endswith(", n0)")


@pytest.mark.parametrize("way", ["send", "send_async"])
def test_what_is_not_stored_goes_to_another_node(make: Callable[..., Any], way: str) -> None:
    producer = make()
    fakes(producer)[0].script.append(refused("SYSTEM_ERROR"))
    sent = getattr(producer, way)("t", b"x", tags="a")
    result = sent if way == "send" else sent.result(60)
    assert (result.node, counts(producer)) == ("n1", [1, 1])
    assert fakes(producer)[1].sent[0][1]["tags"] == "a"


@pytest.mark.parametrize("way", ["send", "send_async"])
def test_an_unknown_fate_is_the_callers(make: Callable[..., Any], way: str) -> None:
    producer = make()
    fakes(producer)[0].script.append(refused("CONNECTION_LOST", Outcome.UNKNOWN))
    with pytest.raises(SendError) as caught:
        sent = getattr(producer, way)("t", b"x")
        sent.result(60)
    assert (caught.value.outcome, counts(producer)) == (Outcome.UNKNOWN, [1, 0])


def test_with_leave_it_goes_on(make: Callable[..., Any]) -> None:
    producer = make(retry_may_store_twice=True)
    fakes(producer)[0].script.append(refused("CONNECTION_LOST", Outcome.UNKNOWN))
    assert producer.send("t", b"x").node == "n1"
    assert fakes(producer)[0].sent[0][1]["timeout_s"] == pytest.approx(3.0), "one try has a part of the time"


def test_a_bad_message_is_raised_at_once(make: Callable[..., Any]) -> None:
    producer = make()
    fakes(producer)[0].script.append(InvalidMessageError("bad"))
    with pytest.raises(InvalidMessageError):
        producer.send("t", b"")
    assert counts(producer) == [1, 0]
    fakes(producer)[1].script.append(refused("MESSAGE_ILLEGAL"))
    with pytest.raises(SendError, match="MESSAGE_ILLEGAL"):
        producer.send("t", b"x")


def test_while_no_node_is_there_a_send_waits_for_its_time(make: Callable[..., Any]) -> None:
    producer = make()
    for fake in fakes(producer):
        fake.script.extend([refused(AWAY)] * 1000)
    began = time.monotonic()
    with pytest.raises(commitmq.NodeUnavailableError):
        producer.send("t", b"x", timeout_s=0.4)
    assert 0.1 < time.monotonic() - began < 10.0
    sent = producer.send_async("t", b"x", timeout_s=0.4)
    with pytest.raises(SendError) as caught:
        sent.result(60)
    assert caught.value.outcome is Outcome.NOT_STORED
    for fake in fakes(producer):
        fake.script.clear()
    assert producer.send("t", b"x").node


def test_a_queue_waits_for_its_own_node(make: Callable[..., Any]) -> None:
    producer = make()
    home = producer._nodes.home("t\x000").producer
    home.script.extend([refused(AWAY)] * 2)
    assert producer.send("t", b"x", queue=0).node == home.address
    assert sorted(counts(producer)) == [0, 3]


def test_an_idempotent_message_stays(make: Callable[..., Any]) -> None:
    producer = make(delivery=ExactlyOnce())
    fakes(producer)[0].script.append(refused("SYSTEM_ERROR"))
    with pytest.raises(SendError):
        producer.send("t", b"x")
    assert counts(producer) == [1, 0]


def test_a_receipt_leads_to_its_node(make: Callable[..., Any]) -> None:
    producer = make()
    cancelled: list[str] = []
    for fake in fakes(producer):
        fake.cancel = lambda receipt, timeout_s, at=fake.address: cancelled.append(at)  # type: ignore[attr-defined]
    producer.send("t", b"x")
    producer.cancel(producer.send("t", b"x", delay=5))
    assert cancelled == ["n1"]
    for receipt in (SendResult("t", 0, 0, 0, 0, "", "", "flushed"), "a handle"):
        with pytest.raises(InvalidMessageError, match="names no node"):
            producer.cancel(receipt)
    with pytest.raises(InvalidMessageError, match="does not name its node"):
        producer.reply(Message(b"x"), b"y")


# ---------------------------------------------------------------- asynchronous


def test_callbacks_and_flush(make: Callable[..., Any]) -> None:
    producer = make()
    fakes(producer)[0].script.append(refused(AWAY))
    told: list[Any] = []
    producer.send_async("t", b"x", on_delivery=lambda error, result: told.append((error, result.node)))
    producer.flush(60)
    assert told == [(None, "n1")]
    assert not producer._failovers.open


def test_a_callback_must_not_wait_and_may_send(make: Callable[..., Any]) -> None:
    producer = make()
    fakes(producer)[0].script.append(refused(AWAY))
    seen: list[Any] = []
    done = threading.Event()

    def called(_future: Any) -> None:
        try:
            producer.send("t", b"y")
        except CommitMQError as error:
            seen.append(str(error))
        seen.append(producer.send_async("t", b"z"))
        done.set()

    # The mover makes the second try, so it is the mover that calls.
    first = producer.send_async("t", b"x")
    first.add_done_callback(called)
    assert done.wait(60)
    if len(seen) == 2:
        assert "must not wait" in seen[0]
    assert seen[-1].result(60).node


def test_flush_tells_what_is_pending(make: Callable[..., Any]) -> None:
    producer = make()
    fakes(producer)[0].holds = True
    sent = producer.send_async("t", b"x")
    with pytest.raises(TimeoutError, match="1 messages"):
        producer.flush(0.05)
    assert not wait([sent], timeout=0).done
    assert sent.cancel()
    assert sent.cancelled()
    producer.flush(1)
    with pytest.raises(CancelledError):
        sent.result(0)


def test_a_message_between_two_nodes_can_be_withdrawn_and_is_failed_at_the_end(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commitmq.client.producing.choice.MAX_REST_S", 300.0)
    producer = make(timeout_s=600.0)
    for fake in fakes(producer):
        fake.script.extend([refused("SYSTEM_BUSY", retry_after_ms=300_000)] * 2)
    first, second = producer.send_async("t", b"a"), producer.send_async("t", b"b")
    deadline = time.monotonic() + 60
    while len(producer._failovers._due) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert first.cancel()
    assert first.cancelled()
    producer.close(0)
    with pytest.raises(SendError, match="CLIENT_CLOSED") as caught:
        second.result(60)
    assert caught.value.outcome is Outcome.NOT_STORED
    assert all(fake.is_closed for fake in fakes(producer))
    with pytest.raises(CommitMQError, match="closed"):
        producer.send("t", b"x")


# ---------------------------------------------------------------- batches


def test_a_batch_moves_as_a_whole(make: Callable[..., Any]) -> None:
    producer = make()
    fakes(producer)[0].script.append(refused("CREATE_MAPPED_FILE_FAILED"))
    result = producer.send_batch("t", [b"a", b"b"], tags="x")
    assert [one.node for one in result] == ["n1", "n1"]
    assert [fake.sent[0][0] for fake in fakes(producer)] == [[b"a", b"b"]] * 2


def test_a_batch_that_is_partly_stored_stays(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    producer = make(retry_may_store_twice=True)

    def part(topic: str, messages: Any, **_: Any) -> Any:
        error = BatchSendError(refused("SYSTEM_ERROR"), acks=[], stored=1, unknown=0, total=2, stored_prefix=1)
        return fakes(producer)[0]._future(lambda: (_ for _ in ()).throw(error))

    monkeypatch.setattr(fakes(producer)[0], "send_batch_async", part)
    with pytest.raises(BatchSendError) as caught:
        producer.send_batch("t", [b"a", b"b"])
    assert (caught.value.stored, counts(producer)) == (1, [0, 0])


def test_the_keys_of_a_batch_go_to_their_homes_and_results_keep_the_order(make: Callable[..., Any]) -> None:
    producer = make(3)
    keys = [f"k{number}" for number in range(40)]
    tags = [f"t{number}" for number in range(40)]
    bodies = [b"%d" % number for number in range(40)]
    result = producer.send_batch("t", bodies, key=keys, tags=tags)
    assert [one.node for one in result] == [producer._nodes.home(key).address for key in keys]
    for fake in fakes(producer):
        messages, fields = fake.sent[0]
        at = [bodies.index(body) for body in messages]
        assert at == sorted(at)
        assert fields["sharding_keys"] == fields["keys"] == [keys[one] for one in at]
        assert fields["tags"] == [tags[one] for one in at]
    single = producer.send("t", b"x", sharding_key="k3")
    assert single.node == result[3].node


def test_a_part_that_fails_is_counted(make: Callable[..., Any]) -> None:
    producer = make(2)
    keys = [f"k{number}" for number in range(20)]
    fakes(producer)[1].script.append(refused("MESSAGE_ILLEGAL"))
    with pytest.raises(BatchSendError) as caught:
        producer.send_batch("t", [b"x"] * 20, sharding_keys=keys)
    at_first = sum(producer._nodes.home(key).address == "n0" for key in keys)
    assert 0 < at_first < 20
    assert (caught.value.stored, caught.value.total) == (at_first, 20)
    assert caught.value.outcome is Outcome.STORED


def test_a_bad_message_in_a_part_stops_all_parts(make: Callable[..., Any]) -> None:
    producer = make(2)
    keys = [f"k{number}" for number in range(20)]
    with pytest.raises(InvalidMessageError):
        producer.send_batch("t", [b"x"] * 19 + [b""], sharding_keys=keys)
    assert counts(producer) == [0, 0]


# ---------------------------------------------------------------- asyncio


def key_of(producer: Any, address: str) -> str:
    """A sharding key whose home is the node at ``address``."""
    return next(key for key in map(str, range(100)) if producer._nodes.home(key).address == address)


def test_the_twin(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own = make(2)
    monkeypatch.setattr("commitmq.client.aio_producer.Producer", lambda *_arguments, **_settings: own)

    async def run() -> None:
        producer: Any = commitmq.AsyncProducer("n0,n1")
        nodes = fakes(own)
        nodes[0].script.append(refused("SYSTEM_ERROR"))
        assert (await producer.send("t", b"x")).node == "n1"
        nodes[0].script.append(refused("CONNECTION_LOST", Outcome.UNKNOWN))
        nodes[1].script.append(refused("CONNECTION_LOST", Outcome.UNKNOWN))
        with pytest.raises(SendError, match="CONNECTION_LOST"):
            await producer.send("t", b"x")
        for fake in nodes:
            fake.script.clear()
            fake.script.extend([refused(AWAY)] * 1000)
        with pytest.raises(commitmq.NodeUnavailableError):
            await producer.send("t", b"x", timeout_s=0.3)
        for fake in nodes:
            fake.script.clear()
        full, asked = nodes[0], nodes[1]
        full.script.extend([NoRoom(3), NoRoom(3)])
        sent = producer.send_async("t", b"x", sharding_key=key_of(own, "n0"))
        await asyncio.sleep(0.05)
        assert not sent.done(), "it waits for room at its own node"
        full.tell_room()
        assert (await sent).node == "n0"
        asked.script.extend([TopicUnknownError(), TopicUnknownError()])
        assert (await producer.send("t", b"x", sharding_key=key_of(own, "n1"))).node == "n1"
        assert asked.looked_up == ["t"]
        keys = [f"k{number}" for number in range(20)]
        result = await producer.send_batch("t", [b"x"] * 20, sharding_keys=keys)
        assert [one.node for one in result] == [own._nodes.home(key, only_reachable=True).address for key in keys]
        told: list[Any] = []
        producer.send_async("t", b"x", on_delivery=lambda error, result: told.append(error))
        await producer.flush(60)
        assert told == [None]
        nodes[0].holds = nodes[1].holds = True
        held = producer.send_async("t", b"x")
        with pytest.raises(TimeoutError):
            await producer.flush(0.05)
        assert held.cancel()
        await producer.close(0)
        assert nodes[0].is_closed
        with pytest.raises(CommitMQError, match="closed"):
            await producer.send("t", b"x")

    asyncio.run(run())


# ---------------------------------------------------------------- the public way


def test_addresses_make_such_a_producer() -> None:
    class Own(Producer):
        """A program's own kind."""

    with Own("127.0.0.1:1,127.0.0.1:2", retries=1, fault_strategy=FaultStrategy(connect_timeout_s=0.1)) as producer:
        assert isinstance(producer, Own)
        assert isinstance(producer, several_nodes.SeveralNodes)
        assert repr(producer) == "Producer(['tcp://127.0.0.1:1', 'tcp://127.0.0.1:2'], ack='flushed')"
        with pytest.raises(commitmq.NodeUnavailableError):
            producer.send("t", b"x", timeout_s=0.3)
    with Producer("127.0.0.1:1") as plain:
        assert type(plain) is Producer


@pytest.mark.parametrize(
    "settings", [{"retries": -1}, {"retries": 1.0}, {"fault_strategy": 3}, {"ack": "soon"}, {"timeout_s": 0}]
)
@pytest.mark.parametrize("node", ["127.0.0.1:1", "127.0.0.1:1,127.0.0.1:2"])
@pytest.mark.parametrize("kind", [Producer, commitmq.AsyncProducer])
def test_bad_settings(kind: Any, node: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        kind(node, **settings)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError):
        commitmq.AsyncProducer("127.0.0.1:1,127.0.0.1:2", max_pendin=3)  # type: ignore[call-arg]


def test_other_clients_take_one_node() -> None:
    for make in (commitmq.Admin, commitmq.connect, lambda node: commitmq.Reader("t", node=node)):
        with pytest.raises(NodeAddressError, match="only Producer and AsyncProducer"):
            make("127.0.0.1:1,127.0.0.1:2")
