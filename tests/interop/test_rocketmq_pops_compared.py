"""Goal: what pops of our node say of the messages that are left, and of those that came back, RocketMQ's broker says too.

Method: one conversation by the frames of the protocol with both, each with enableRetryTopicV2 (tests/support/pop_answers).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from broker import Broker

from nodes import free_ports
from pop_answers import EXPECTED, pop_answers

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(240)]


def test_rocketmqs_broker_says_the_same_of_pops(tmp_path: Path, rocketmq_broker: Callable[..., Broker]) -> None:
    port = free_ports(4)
    with rocketmq_broker(tmp_path / "theirs", listenPort=port, enableRetryTopicV2="true", autoCreateTopicEnable="true"):
        assert asyncio.run(pop_answers(port)) == EXPECTED
