"""Goal: RocketMQ's own consumers share queues of our node by POP: what they acknowledge is done, all else comes again.

Method: the broker server of a real node, its name server and clients are RocketMQ's (5.4.0): plain POP requests with their
receipt handles, and push consumers to which the server assigns their queues.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest
from served import Served

from commitmq import ShareConsumer
from nodes import eventually

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(240)]


def body_of(line: dict[str, Any]) -> bytes:
    return bytes.fromhex(line["body_hex"])


def ack(served: Served, group: str, line: dict[str, Any], topic: str) -> bool:
    """As a client does it: a message that came back is acknowledged in its retry topic."""
    handle = line["properties"]["POP_CK"]
    if handle.split(" ")[4] == "1":
        topic = f"%RETRY%{group}_{topic}"
    return bool(served.ask("ack", group, topic, line["queue_id"], line["queue_offset"], handle))


def test_popped_messages_are_acknowledged_or_come_again(served: Served) -> None:
    sent = sorted(b"body %d" % number for number in range(6))
    for body in sent:
        served.ask("send", "Shared", body.decode())
    got = served.ask("pop", "sharers", "Shared", 3_000, 32)
    while len(got) < len(sent):
        got += served.ask("pop", "sharers", "Shared", 3_000, 32)
    assert sorted(map(body_of, got)) == sent
    assert served.ask("pop", "sharers", "Shared", 3_000, 32) == []
    for line in got[:5]:
        assert ack(served, "sharers", line, "Shared")

    again = served.popped("sharers", "Shared", "one comes again")
    assert [body_of(one) for one in again] == [body_of(got[5])]
    assert (again[0]["topic"], again[0]["reconsume_times"]) == ("Shared", 1)
    assert again[0]["properties"]["POP_CK"].split(" ")[4] == "1"
    assert ack(served, "sharers", again[0], "Shared")
    assert ack(served, "sharers", again[0], "Shared"), "an ack may be repeated"
    time.sleep(6)
    assert served.ask("pop", "sharers", "Shared", 5_000, 32) == []


def test_the_invisible_time_is_changed(served: Served) -> None:
    served.ask("send", "Kept", "one")
    (line,) = served.ask("pop", "keepers", "Kept", 3_000, 1)
    changed = served.ask(
        "extend", "keepers", "Kept", line["queue_id"], line["queue_offset"], line["properties"]["POP_CK"], 9_000
    )
    assert changed["status"] == "OK"
    start = time.monotonic()
    served.popped("keepers", "Kept", "it comes again")
    assert time.monotonic() - start > 7
    assert not served.ask("ack", "keepers", "Kept", 99, 0, line["properties"]["POP_CK"]), "there is no queue 99"


def test_push_consumers_pop_what_the_server_assigns(served: Served) -> None:
    sent = {f"push {number}" for number in range(40)}
    served.ask("send", "Pushed", "push 0")
    served.ask("mode", "poppers", "Pushed", "POP", 0)
    stored = json.loads((served.node.store / "config" / "messageRequestMode.json").read_text())
    assert stored["messageRequestModeMap"]["Pushed"]["poppers"]["mode"] == "POP"
    served.ask("push", "poppers", "Pushed", "*", 0)
    for body in sorted(sent - {"push 0"}):
        served.ask("send", "Pushed", body)

    def got() -> set[str]:
        return {one[0] for one in served.ask("received", "poppers")}

    eventually(lambda: got() == sent, "the consumer has all", 60)
    assert len(served.ask("received", "poppers")) == len(sent), "each once"

    os.kill(served.pid_of("worker-rocketmq_broker"), signal.SIGKILL)
    eventually(lambda: served.node.is_ready(), "the server is there again")
    served.send("Pushed", "after")
    eventually(lambda: "after" in got(), "the consumer goes on", 90)
    served.ask("stop", "poppers")
    with ShareConsumer("Pushed", group="poppers", node=served.node.address) as consumer:
        served.ask("send", "Pushed", "native")
        eventually(lambda: b"native" in [one.body for one in consumer.receive(wait_s=1)], "our consumers share with it")


def test_a_failed_message_comes_again_after_its_delay(served: Served) -> None:
    served.ask("send", "Failing", "first")
    served.ask("mode", "failers", "Failing", "POP", 0)
    served.ask("push", "failers", "Failing", "*", 1)
    eventually(lambda: served.ask("received", "failers"), "it is received", 60)
    eventually(lambda: len(served.ask("received", "failers")) == 2, "and again, after 10 s", 60)
    first, second = served.ask("received", "failers")
    assert (first[0], first[1], second[0], second[1], second[2]) == ("first", 0, "first", 1, "Failing")
