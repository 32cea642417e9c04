"""Goal: each everyday verb of administration works for a user with exactly the rights of its row, and for nobody with less.

Method: a real node with keys. A user without a policy is refused by the name of the first resource that it lacks; with the
policies of the row, but for the last, it still is; with all of them the same call succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import commitmq
from commitmq import Admin, ProtocolError
from keyed_node import KeyedNode, keyed
from nodes import commitmq as commitmq_verb
from nodes import eventually

TOPIC, GROUP = "orders", "billing"
AT_ONCE_S = 4.0  # a verb waits 5 s and more for an answer
CLUSTER = ("Cluster:DefaultCluster", "Get")
LAG = [(f"Group:{GROUP}", "Get"), (f"Topic:{TOPIC}", "Get")]

Call = Callable[[Admin], Any]
CASES: dict[str, tuple[Call, list[tuple[str, str]]]] = {
    "client list": (lambda admin: admin.clients(), [CLUSTER]),
    "topic offset": (lambda admin: admin.offsets(TOPIC, int(time.time() * 1000)), [(f"Topic:{TOPIC}", "Get")]),
    "topic time": (lambda admin: admin.message_at(TOPIC, 0, 0), [(f"Topic:{TOPIC}", "Get")]),
    "topic list": (lambda admin: admin.topics(), [("Topic:*", "List")]),
    "group config": (lambda admin: admin.group_config(GROUP), [(f"Group:{GROUP}", "Get")]),
    "group config --set": (
        lambda admin: admin.group_config(GROUP, {"retryMaxTimes": 3}),
        [(f"Group:{GROUP}", "Update")],
    ),
    "group create": (
        lambda admin: admin.group_create("new"),
        [("Group:new", "Create")],
    ),
    "group lag": (lambda admin: admin.group_lag(GROUP), LAG),
    "group pop": (lambda admin: admin.group_in_flight(GROUP), [(f"Group:{GROUP}", "Get")]),
    "group plan": (lambda admin: admin.group_plan(GROUP, 3), LAG),
    "group reset": (
        lambda admin: admin.reset_offsets(GROUP, TOPIC, "latest"),
        [(f"Topic:{TOPIC}", "Update"), (f"Group:{GROUP}", "Update")],
    ),
    "group delete": (
        lambda admin: admin.group_delete(GROUP, offsets=True),
        [(f"Group:{GROUP}", "Delete")],
    ),
    "transaction list": (lambda admin: admin.transactions(), [CLUSTER]),
    "export config": (
        lambda admin: admin.export_config(),
        [("Topic:*", "List"), ("Group:*", "List")],
    ),
    "topic delete": (lambda admin: admin.topic_delete("gone"), [("Topic:gone", "Delete")]),
}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedNode]:
    with keyed(KeyedNode(tmp_path_factory.mktemp("rights"))) as found:
        found.add("root", "--super")
        yield found


def refused(admin: Admin, call: Call) -> str:
    with pytest.raises(ProtocolError) as error:
        call(admin)
    assert error.value.code == "NO_PERMISSION", error.value
    return error.value.message


def allowed(admin: Admin, call: Call) -> bool:
    try:
        call(admin)
    except ProtocolError as error:
        assert error.code == "NO_PERMISSION", error
        return False
    return True


@pytest.mark.parametrize("verb", CASES)
def test_a_verb_needs_what_its_row_says(secured: KeyedNode, verb: str) -> None:
    call, policies = CASES[verb]
    user = "user-" + verb.replace(" ", "-").replace("--", "")
    profile = secured.add(user)
    assert profile.name == user
    with commitmq.connect(profile="root") as connection:
        connection.admin().topic_create(TOPIC, queues=1)
        connection.admin().topic_create("gone", queues=1)
        with connection.producer() as producer:
            producer.send(TOPIC, b"one")
        connection.admin().reset_offsets(GROUP, TOPIC, "earliest")
    with commitmq.connect(profile=user) as connection:
        admin = connection.admin()
        assert f"no entry of user {user} allows" in refused(admin, call)
        for resource, action in policies[:-1]:
            secured.store("acl", "allow", user, resource, action)
        time.sleep(0.4)  # a change acts within 200 ms
        assert policies[-1][0] in refused(admin, call), "the last right is needed too"
        secured.store("acl", "allow", user, *policies[-1])
        eventually(lambda: allowed(admin, call), f"{user} may with all of {policies}", 5)


@pytest.mark.parametrize("verb", ["status", "doctor", "config show", "drain on", "top --once", "topic list"])
def test_a_verb_without_a_profile_says_at_once_that_it_needs_one(secured: KeyedNode, verb: str) -> None:
    began = time.monotonic()
    ended = commitmq_verb(*verb.split(), "--node", f"tcp://{secured.host_port}")
    assert "AUTHENTICATION_FAILED: the peer at" in ended.stderr
    assert "lets nobody in without keys" in ended.stderr
    assert time.monotonic() - began < AT_ONCE_S
