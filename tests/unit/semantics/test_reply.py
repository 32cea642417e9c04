"""Goal: a reply finds its requester by RocketMQ's properties.

Method: the replies of the golden store are made anew from its requests; missing properties are refused.
"""

from __future__ import annotations

import pytest

from commitmq.errors import InvalidMessageError
from commitmq.semantics.reply import (
    expires_at,
    is_request,
    queue_of_requester,
    receiver_of,
    reply_to,
    reply_topic,
    request_properties,
    requester_id,
)
from pending_store import PendingStore


def test_a_reply_has_the_properties_of_rocketmqs(pending: PendingStore) -> None:
    replies = {one.properties["CORRELATION_ID"]: one for one in pending.of(reply_topic("C"))}
    requests = pending.of("PendingRpc")
    assert len(requests) == len(replies) == 2
    added = {"UNIQ_KEY", "MSG_REGION", "TRACE_ON"}  # by the client that sent the reply, and by the broker
    for request in requests:
        stored = replies[request.properties["CORRELATION_ID"]]
        made = reply_to(request.properties)
        assert made.topic == stored.topic
        assert made.properties == {name: value for name, value in stored.properties.items() if name not in added}
        assert receiver_of(made.properties) == request.properties["REPLY_TO_CLIENT"]


def test_a_request_carries_id_client_and_time_to_live() -> None:
    properties = request_properties("id-1", "10.0.0.5@1", 3_000)
    assert properties == {"CORRELATION_ID": "id-1", "REPLY_TO_CLIENT": "10.0.0.5@1", "TTL": "3000"}
    assert is_request(properties)
    assert not is_request({"CORRELATION_ID": "id-1"})
    assert receiver_of(properties) is None, "a request is no reply"
    assert [expires_at(properties, 100), expires_at({}, 100), expires_at({"TTL": "x"}, 100)] == [3_100, None, None]
    with pytest.raises(InvalidMessageError):
        request_properties("id-1", "c", 0)


def test_without_the_cluster_there_is_no_reply() -> None:
    request = request_properties("id-1", "c", 1)
    with pytest.raises(InvalidMessageError, match="CLUSTER"):
        reply_to(request)
    with pytest.raises(InvalidMessageError, match="no request"):
        reply_to({"CLUSTER": "C", "CORRELATION_ID": "id-1"})


def test_the_id_of_a_requester_names_its_queue() -> None:
    assert queue_of_requester(requester_id(12, "a1b2")) == 12
    for foreign in ("10.0.0.1@77#123", "commitmq@x", "commitmq@x@", "commitmq@x@²", "10.0.0.1@3"):
        assert queue_of_requester(foreign) is None
