"""Goal: RocketMQ's own clients end transactions, are asked about open ones, look messages up, cancel and reply at our node.

Method: the broker server of a real node, its name server and clients are RocketMQ's (5.4.0). What the node has in the end is
read with its own reader.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from broker import RefusedError
from served import Served

from commitmq import Producer
from nodes import eventually

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(240)]


def test_transactions_end_and_are_asked_about(served: Served) -> None:
    committed = served.ask("half", "pg", "Orders", "yes", "commit")
    assert (committed["status"], committed["queue_offset"]) == ("SEND_OK", 0)
    served.ask("half", "pg-no", "Orders", "no", "rollback")
    eventually(lambda: served.bodies("Orders") == [b"yes"], "the first is committed")

    served.ask("half", "pg-open", "Orders", "open", "unknown")
    eventually(lambda: "open" in served.ask("asked", "pg-open"), "the producer is asked")
    assert served.bodies("Orders") == [b"yes"]

    before = len(served.ask("asked", "pg-open"))
    os.kill(served.pid_of("worker-rocketmq_broker"), signal.SIGKILL)
    eventually(lambda: len(served.ask("asked", "pg-open")) > before, "it is asked again after the server's death", 60)
    os.kill(served.pid_of("transaction"), signal.SIGKILL)
    before = len(served.ask("asked", "pg-open"))
    eventually(lambda: len(served.ask("asked", "pg-open")) > before, "and after that of the transaction process", 60)
    assert served.bodies("Orders") == [b"yes"]


def test_messages_are_found_by_key_unique_key_and_id(served: Served) -> None:
    sent = [served.ask("send", "Found", f"body {number}", "KEYS", f"k{number} all") for number in range(3)]
    one = sent[1]
    eventually(lambda: len(served.found("key", "Found", "all")) == 3, "the index has all")
    assert served.found("key", "Found", "k1") == [b"body 1"]
    assert served.found("unique", "Found", one["msg_id"]) == [b"body 1"]
    assert served.found("view", "Found", one["offset_msg_id"]) == [b"body 1"]
    assert served.found("key", "Found", "other") == []


def test_a_timer_message_is_cancelled(served: Served) -> None:
    kept = served.ask("send", "Timed", "comes", "TIMER_DELAY_SEC", "4")
    gone = served.ask("send", "Timed", "cancelled", "TIMER_DELAY_SEC", "4")
    assert kept["recall_handle"] != gone["recall_handle"]
    assert served.ask("recall", "Timed", gone["recall_handle"]) == gone["msg_id"]
    with pytest.raises(RefusedError, match=r"topic not match|not exist"):
        served.ask("recall", "Other", gone["recall_handle"])
    eventually(lambda: served.bodies("Timed") == [b"comes"], "the other one is delivered")
    time.sleep(1.5)
    assert served.bodies("Timed") == [b"comes"]


def test_a_reply_finds_its_requester(served: Served) -> None:
    served.ask("send", "Questions", "first")
    served.ask("answer", "repliers", "Questions")
    assert served.ask("request", "Questions", "who?", 15_000) == "re: who?"
    with Producer(node=served.node.address, group="native") as producer:
        assert producer.request("Questions", b"and you?", timeout_s=15).body == b"re: and you?"
