"""The node's refusals in RocketMQ's numbers (spec 5.4).

What is common to the refusals of sends and of other requests for a topic (remoting 3.2).
"""

from __future__ import annotations

import re
from typing import Final

from commitmq.errors import ProtocolError
from commitmq.store.metadata.topic_config import PERM_INHERIT, PERM_READ, PERM_WRITE, TopicConfig
from commitmq_plugins.rocketmq.broker.node import topic_refusal
from commitmq_plugins.rocketmq.remoting.codes import ResponseCode

_CODES: Final = {
    "MESSAGE_ILLEGAL": ResponseCode.MESSAGE_ILLEGAL,
    "PROPERTIES_SIZE_EXCEEDED": ResponseCode.MESSAGE_ILLEGAL,
    "WHEEL_TIMER_MSG_ILLEGAL": ResponseCode.MESSAGE_ILLEGAL,
    "FRAME_TOO_LARGE": ResponseCode.MESSAGE_ILLEGAL,
    "SERVICE_NOT_AVAILABLE": ResponseCode.SERVICE_NOT_AVAILABLE,
    "CREATE_MAPPED_FILE_FAILED": ResponseCode.SYSTEM_ERROR,
    "SYSTEM_BUSY": ResponseCode.SYSTEM_BUSY,
    "TOPIC_NOT_EXIST": ResponseCode.TOPIC_NOT_EXIST,
    "GROUP_NOT_EXIST": ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    "NO_PERMISSION": ResponseCode.NO_PERMISSION,
    "INVALID_PARAMETER": ResponseCode.INVALID_PARAMETER,
    "LIMIT_EXCEEDED": ResponseCode.SYSTEM_ERROR,
    "ILLEGAL_OPERATION": ResponseCode.ILLEGAL_OPERATION,
    "FLUSH_DISK_TIMEOUT": ResponseCode.FLUSH_DISK_TIMEOUT,
}

_WRONG_FILTER: Final = re.compile(r"(?:a|the) (?:filter|tag filter|tag expression|\S+ filter is wrong)\b")
"""How the sentences of a reader begin that refuse an expression."""


def response_code(code: str) -> int:
    """RocketMQ's number for a code of the node; SYSTEM_ERROR for one that it has no number for."""
    return int(_CODES.get(code, ResponseCode.SYSTEM_ERROR))


def filter_refusal(code: str, sentence: str, kind: str) -> tuple[int, str] | None:
    """Code and remark when a reader refused the filter of a pull, and None for another refusal (spec 9.4).

    An expression that cannot be parsed has SUBSCRIPTION_PARSE_FAILED, a type of filter that the node does not have
    SYSTEM_ERROR, as with RocketMQ's ``enablePropertyFilter`` off.
    """
    if code != "INVALID_PARAMETER":
        return None
    if sentence.startswith("this node has no filter type"):
        return int(ResponseCode.SYSTEM_ERROR), f"The broker does not support consumer to filter message by {kind}"
    if _WRONG_FILTER.match(sentence):
        return int(ResponseCode.SUBSCRIPTION_PARSE_FAILED), sentence
    return None


def refusal_of(error: ProtocolError) -> tuple[int, str]:
    """Code and remark of the answer to a request that the node refused."""
    return response_code(error.code), error.message


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
