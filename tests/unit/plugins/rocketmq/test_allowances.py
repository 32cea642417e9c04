"""Goal: one client makes no more groups and topics than it may, whatever it names, and others are not affected.

Method: the allowances alone, with objects in the place of connections, and a clock of the test's.
"""

from __future__ import annotations

import gc
import time
from typing import cast

import pytest

from commitmq.errors import ProtocolError
from commitmq_plugins.rocketmq import RocketMQSettings
from commitmq_plugins.rocketmq.broker.assignment import QueueLocks
from commitmq_plugins.rocketmq.broker.registry import Registry
from commitmq_plugins.rocketmq.broker.rights import Allowances
from commitmq_plugins.rocketmq.remoting.bodies import ConsumerData, HeartbeatData
from commitmq_plugins.rocketmq.remoting.codes import LanguageCode
from commitmq_plugins.rocketmq.remoting.server import RemotingConnection, place_of


class Anyone:
    """In the place of a connection."""

    def __init__(self, host: str) -> None:
        self.peer = host, 1


def someone(host: str = "10.0.0.1") -> RemotingConnection:
    return cast("RemotingConnection", Anyone(host))


def allowances(**settings: int) -> Allowances:
    few = {"max_groups_per_connection": 3, "max_topics_per_connection": 2}
    return Allowances(RocketMQSettings(**{**few, **settings}))  # type: ignore[arg-type]


def test_each_name_counts_once_and_the_limit_names_its_setting() -> None:
    table, one = allowances(), someone()
    for _ in range(10):
        table.groups(one, ["a", "b"])
    table.groups(one, ["c"])
    with pytest.raises(ProtocolError, match="max_groups_per_connection") as caught:
        table.groups(one, ["d"])
    assert caught.value.code == "LIMIT_EXCEEDED"
    table.groups(one, ["a", "b", "c"])  # what it has made it may name again
    table.topic(one, "t1")
    table.topic(one, "t2")
    with pytest.raises(ProtocolError, match="max_topics_per_connection"):
        table.topic(one, "t3")


def test_too_many_at_once_charge_nothing() -> None:
    table, one = allowances(), someone()
    with pytest.raises(ProtocolError):
        table.groups(one, ["a", "b", "c", "d"])
    table.groups(one, ["x", "y", "z"])


def test_others_have_their_own_and_an_ended_connection_leaves_nothing() -> None:
    table, one, other = allowances(), someone(), someone()
    table.groups(one, ["a", "b", "c"])
    table.groups(other, ["d", "e", "f"])
    del one, other
    gc.collect()
    assert len(table._groups) == 0


def test_a_name_of_any_length_is_not_kept() -> None:
    with pytest.raises(ProtocolError, match="at most 255 characters") as caught:
        allowances().groups(someone(), ["x" * 1_000_000])
    assert len(caught.value.message) < 300


def test_a_client_that_connects_again_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    table = allowances(max_new_names_per_second=1)
    for number in range(30):  # a minute's names, of groups and of topics
        table.groups(someone(), [f"a{number}"])
        table.topic(someone(), f"t{number}")
    again = someone()
    for _ in range(2):
        with pytest.raises(ProtocolError, match="max_new_names_per_second") as caught:
            table.groups(again, ["b"])
        assert caught.value.code == "SYSTEM_BUSY"
    table.groups(someone("10.0.0.2"), ["b"])  # another address has its own rate
    now_s[0] += 2.0
    table.groups(again, ["b"])
    for _ in range(10):
        table.groups(again, ["b"])  # what it has made costs nothing
    table.topic(again, "t")
    with pytest.raises(ProtocolError, match="max_new_names_per_second"):
        table.topic(again, "t2")


def test_the_addresses_of_one_ipv6_network_are_one_client() -> None:
    assert place_of("2001:db8:1:2::7") == place_of("2001:db8:1:2:ffff::1%eth0") == "2001:db8:1:2::/64"
    assert place_of("2001:db8:1:3::7") != place_of("2001:db8:1:2::7")
    assert place_of("10.0.0.1") == "10.0.0.1"
    assert place_of("::no address") == "::no address"


def test_a_connection_and_an_address_are_in_so_many_groups() -> None:
    table, one, other = (
        allowances(max_memberships_per_connection=5, max_memberships_per_address=8),
        someone(),
        someone(),
    )
    table.memberships(one, 5)
    with pytest.raises(ProtocolError, match="max_memberships_per_connection"):
        table.memberships(one, 6)
    table.memberships(other, 3)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="max_memberships_per_address"):
            table.memberships(other, 4)
    elsewhere = someone("10.0.0.2")
    table.memberships(elsewhere, 5)
    for _ in range(2):
        table.left(one)
    table.memberships(other, 5)
    table.left(other)
    assert list(table._memberships.values()) == list(table._of_place.values()) == [5]


def test_no_place_has_more_than_its_share_of_the_locks() -> None:
    locks = QueueLocks(lease_ms=1_000, max_locks=10, max_of_place=4)
    queues = [("t", queue) for queue in range(20)]
    assert len(locks.lock("g", ("", "greedy"), queues, 0, "here")) == 4
    assert len(locks.lock("g2", ("", "greedy@2"), queues, 0, "here")) == 0
    assert len(locks.lock("other", ("", "good"), queues[:4], 0, "there")) == 4
    assert len(locks.lock("g", ("", "greedy"), queues[:4], 900, "here")) == 4  # it renews what it has
    locks.unlock("g", ("", "greedy"), queues[:1])
    assert len(locks.lock("g2", ("", "greedy@2"), queues, 900, "here")) == 1
    assert len(locks.lock("g3", ("", "greedy@3"), queues, 2_000, "here")) == 4, "locks that are over make room"
    assert len(locks) == 4


def heartbeat(client_id: str, groups: list[str], producers: list[str]) -> HeartbeatData:
    return HeartbeatData(client_id, producers, [ConsumerData(one) for one in groups])


def test_a_client_that_takes_another_id_is_no_member_twice() -> None:
    registry: Registry[str] = Registry()
    for number in range(100):
        data = heartbeat(f"id{number}", ["g"], ["p"])
        assert registry.memberships("link", data) == 2
        changes = registry.heartbeat("link", data, LanguageCode.JAVA, 1, 0)
        assert changes.left == ([("g", f"id{number - 1}", "link")] if number else [])
    assert registry.groups["g"].client_ids == ["id99"]
    assert registry.client("id99") == "link"
    assert len(registry._clients) == 1
    assert registry.memberships("link", heartbeat("id99", ["g", "g2"], ["p", "p2"])) == 4
    registry.closed("link")
    assert len(registry) == len(registry._clients) == len(registry.groups) == len(registry.producers) == 0
