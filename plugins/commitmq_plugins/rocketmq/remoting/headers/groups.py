"""Headers of requests about consumer groups, producer groups and their clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from commitmq_plugins.rocketmq.remoting.headers.header import Header, Int, header


@header
class UnregisterClientRequestHeader(Header):
    """Request 35: a client leaves one group."""

    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None

    WIRE: ClassVar[Mapping[str, str]] = {"client_id": "clientID"}


@header
class ConsumerGroupRequestHeader(Header):
    """Requests 38, 40 and 203."""

    consumer_group: str


@header
class ProducerGroupRequestHeader(Header):
    """Request 204."""

    producer_group: str


@header
class GroupRequestHeader(Header):
    """Requests 343 and 352."""

    group: str


@header
class GroupTopicRequestHeader(Header):
    """Requests 303 and 345."""

    group: str
    topic: str


@header
class GetAllSubscriptionGroupRequestHeader(Header):
    """Request 201. Without any field everything is wanted."""

    group_seq: Int | None = None
    data_version: str | None = None
    max_group_num: Int | None = None


@header
class GetAllSubscriptionGroupResponseHeader(Header):
    """The answer to 201."""

    total_group_num: Int


@header
class DeleteSubscriptionGroupRequestHeader(Header):
    """Request 207."""

    group_name: str
    clean_offset: bool = False


@header
class UpdateGroupForbiddenRequestHeader(Header):
    """Request 353."""

    group: str
    topic: str
    readable: bool | None = None


@header
class GetConsumeStatsRequestHeader(Header):
    """Request 208. ``topic_list`` has semicolons between topics."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


@header
class GetConsumerRunningInfoRequestHeader(Header):
    """Request 307, to a broker and from it to the client."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


@header
class ConsumeMessageDirectlyResultRequestHeader(Header):
    """Request 309, to a broker and from it to the client."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: Int | None = None
    group_sys_flag: Int | None = None
