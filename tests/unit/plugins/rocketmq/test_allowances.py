"""Goal: one connection makes no more groups and topics than it may, whatever it names, and others are not affected.

Method: the allowances alone, with objects in the place of connections.
"""

from __future__ import annotations

import gc
from typing import cast

import pytest

from commitmq.errors import ProtocolError
from commitmq_plugins.rocketmq.broker.allowances import Allowances
from commitmq_plugins.rocketmq.remoting.server import Connection
from commitmq_plugins.rocketmq.settings import RocketMQSettings


class Anyone:
    """In the place of a connection."""


def someone() -> Connection:
    return cast("Connection", Anyone())


def allowances() -> Allowances:
    return Allowances(RocketMQSettings(max_groups_per_connection=3, max_topics_per_connection=2))


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
