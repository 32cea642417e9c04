"""Goal: the doctor finds nothing wrong with a healthy broker of RocketMQ, and leaves nothing behind in it.

Method: `commitmq rocketmq doctor --write` against RocketMQ's own name server and broker, and then against the same broker with
settings that clients stumble over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broker import Broker

from nodes import commitmq

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(240)]


def doctor(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    ended = commitmq("rocketmq", "doctor", *arguments, "--timeout", "10", "--json")
    assert ended.stderr == ""
    return ended.returncode, json.loads(ended.stdout)["findings"]


def test_a_healthy_broker(tmp_path: Path, rocketmq_broker: Callable[..., Broker]) -> None:
    with rocketmq_broker(tmp_path / "store", enablePropertyFilter="true") as broker:
        names = broker.ask("names")
        code, findings = doctor(names, "--write", "--topic", "TBW102")
        assert [one for one in findings if one["state"] != "ok"] == []
        assert code == 0
        found = {one["check"]: one["detail"] for one in findings}
        assert {"send", "pull", "commit an offset", "pull with a SQL filter", "POP and acknowledge"} <= found.keys()
        assert "V5_4_0" in found["broker"]
        assert "TLS" in found
        assert found["delete what the trial made"] == "topic, group and offsets are gone"
    kept = "".join(path.read_text() for path in (tmp_path / "store" / "config").glob("*.json"))
    assert "COMMITMQ_DOCTOR" not in kept, "neither topic nor group nor offsets are in RocketMQ's files"


@pytest.mark.long
def test_settings_that_clients_stumble_over(tmp_path: Path, rocketmq_broker: Callable[..., Broker]) -> None:
    # (With timerWheelEnable=false RocketMQ cannot delete a topic, and the doctor says so.)
    settings = {"enablePropertyFilter": "false", "brokerIP1": "0.0.0.0"}
    with rocketmq_broker(tmp_path / "store", **settings) as broker:
        code, findings = doctor(broker.ask("names"), "--write")
    assert code == 1
    wrong = [one for one in findings if one["state"] != "ok"]
    assert {one["check"]: one["state"] for one in wrong} == {
        "address": "failed",
        "SQL filters": "warning",
        "pull with a SQL filter": "unknown",
    }, wrong
