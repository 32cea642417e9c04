"""What is common to the refusals of sends and of other requests for a topic (remoting 3.2)."""

from __future__ import annotations

from typing import Final

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
