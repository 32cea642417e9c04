"""What is common to the refusals of sends and of other requests for a topic (remoting 3.2)."""

from __future__ import annotations

from typing import Final

from commitmq.store.metadata.topic_config import PERM_INHERIT, PERM_READ, PERM_WRITE, TopicConfig
from commitmq_plugins.rocketmq.broker.names import topic_refusal
from commitmq_plugins.rocketmq.remoting.codes import ResponseCode

FAQ: Final = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
REGION: Final = "DefaultRegion"
SEND_FIELDS: Final = {"MSG_REGION": REGION, "TRACE_ON": "true"}
"""Fields of every answer to a send, refusals included."""


class Refusal(Exception):
    """The send is refused with this code and remark."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code, self.remark = code, remark


def check_name(name: str) -> None:
    """Raises Refusal for a name that no topic can have (spec store 2.7)."""
    refused = topic_refusal(name)
    if refused is not None:
        raise Refusal(ResponseCode.INVALID_PARAMETER, refused)


def topic_text(topic: TopicConfig) -> str:
    """As RocketMQ's refusals show a topic."""
    perm = "".join(letter if topic.perm & bit else "-" for letter, bit in (("R", PERM_READ), ("W", PERM_WRITE)))
    shown = ", ".join(f"{name}={value}" for name, value in topic.settings.items())
    return (
        f"TopicConfig [topicName={topic.name}, readQueueNums={topic.read_queues}, writeQueueNums={topic.write_queues},"
        f" perm={perm}{'X' if topic.perm & PERM_INHERIT else '-'}, topicFilterType={topic.filter_type},"
        f" topicSysFlag={topic.sys_flag}, order={str(topic.order).lower()}, attributes={{{shown}}}]"
    )
