"""Goal: a check shows a half message to nobody without the right to its topic, and nobody keeps the checks of others away.

Method: a real node with keys and users, which serves RocketMQ's clients too, and has few places for producers. A thief is in
the producer group of another's half messages, with both protocols, and in more groups than there is room for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

import commitmq
from commitmq import HalfMessage, TransactionState
from commitmq.format.message_id import UniqueIds
from commitmq.format.record import decode_record
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.frame import Command
from nodes import eventually
from robbed import Robbed, robbed_node
from rocketmq_peer import Peer, connected, heartbeat, send
from transactions import QUICK

MOST, OF_USER, MANY = 40, 10, 100


@pytest.fixture(scope="module")
def robbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robbed]:
    bounds = (f"transaction.max_producers={MOST}", f"transaction.max_producers_per_user={OF_USER}")
    with robbed_node(tmp_path_factory.mktemp("robbed"), *QUICK, *bounds) as found:
        found.add_signer("seller")
        found.add("native_seller")
        for name in ("seller", "native_seller"):
            found.store("acl", "allow", name, "Topic:secrets", "Pub")
            found.store("acl", "allow", name, "Group:*", "Pub")
        yield found


class Checked:
    """The checks of one client."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def __call__(self, command: Command) -> None:
        if command.code == RequestCode.CHECK_TRANSACTION_STATE:
            self.bodies.append(bytes(decode_record(command.body).body))

    def check(self, message: HalfMessage) -> TransactionState:
        """The same as the listener of a native producer."""
        self.bodies.append(bytes(message.body))
        return TransactionState.UNKNOWN

    async def has(self, body: bytes, beat: Command, peer: Peer) -> None:
        until = time.monotonic() + 30
        while body not in self.bodies:
            assert time.monotonic() < until, f"no check of {body!r} came, but {self.bodies}"
            await asyncio.sleep(0.2)
            await peer.ask(beat)


def half(topic: str, body: bytes, group: str) -> Command:
    command = send(topic, body, {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": UniqueIds().next()}, sys_flag=4)
    command.ext_fields["g"] = str(int(time.time() * 1000))
    return command


def checked(robbed: Robbed) -> int:
    with commitmq.Admin(robbed.ipc) as admin:
        return next(
            int((one["info"] or {}).get("checked", 0))
            for one in admin.status()["processes"]
            if one["role"] == "transaction"
        )


def test_a_check_goes_to_who_may_send_to_the_topic(robbed: Robbed) -> None:
    seen, rightful = Checked(), Checked()

    async def talk() -> None:
        async with (
            connected(robbed.port, seen) as robber,
            connected(robbed.port, rightful) as seller,
            connected(robbed.port) as owner,
        ):
            beat = robbed.signed(heartbeat("10.9.9.9@1", "x", producers=("pg",)))
            await robber.until(beat)
            await owner.until(robbed.signed(half("mine", b"own", "pg"), "owner"))
            await owner.until(robbed.signed(half("secrets", b"treasure", "pg"), "owner"))
            await seen.has(b"own", beat, robber)
            before = await asyncio.to_thread(checked, robbed)
            while await asyncio.to_thread(checked, robbed) < before + 8:
                await asyncio.sleep(0.1)
            rightful_beat = robbed.signed(heartbeat("10.9.9.9@2", "x", producers=("pg",)), "seller")
            await seller.until(rightful_beat)
            await rightful.has(b"treasure", rightful_beat, seller)
            await asyncio.sleep(1.0)
            assert set(seen.bodies) == {b"own"}
            assert set(rightful.bodies) == {b"treasure"}, "nor is that one asked about the other's"

    asyncio.run(talk())


def test_a_native_check_goes_to_who_may_send_to_the_topic(robbed: Robbed) -> None:
    seen, rightful = Checked(), Checked()
    with (
        commitmq.connect(profile="thief") as thief,
        commitmq.connect(profile="native_seller") as seller,
        thief.producer(group="thieves", transaction_listener=seen.check) as producer,
    ):
        with producer.transaction("mine", b"own") as transaction:
            transaction.unknown()

        async def talk() -> None:
            async with connected(robbed.port) as owner:
                await owner.until(robbed.signed(half("secrets", b"native treasure", "thieves"), "owner"))

        asyncio.run(talk())
        eventually(lambda: b"own" in seen.bodies, "the thief is asked about its own")
        before = checked(robbed)
        eventually(lambda: checked(robbed) > before + 8, "checks go on")
        assert set(seen.bodies) == {b"own"}
        with seller.producer(group="thieves", transaction_listener=rightful.check) as other:
            with other.transaction("secrets", b"other") as transaction:
                transaction.unknown()
            eventually(lambda: b"native treasure" in rightful.bodies, "one with the right is asked")
        assert set(seen.bodies) == {b"own"}
        assert b"own" not in rightful.bodies


def test_nobody_takes_the_places_of_others(robbed: Robbed) -> None:
    """The groups of the thief come before the others in the alphabet."""
    rightful = Checked()
    many = tuple(f"a{number:03d}" for number in range(MANY))

    async def talk() -> None:
        async with (
            connected(robbed.port) as robber,
            connected(robbed.port, rightful) as seller,
            connected(robbed.port) as owner,
        ):
            await robber.until(robbed.signed(heartbeat("10.9.9.8@1", "x", producers=many)))
            await asyncio.sleep(7)  # the server has told of them
            beat = robbed.signed(heartbeat("10.9.9.8@2", "x", producers=("zz",)), "seller")
            await seller.until(beat)
            await owner.until(robbed.signed(half("secrets", b"zz", "zz"), "owner"))
            await rightful.has(b"zz", beat, seller)

    asyncio.run(talk())
