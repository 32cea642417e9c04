"""Headers of pulls, look-ups and offsets."""

from __future__ import annotations

from commitmq_plugins.rocketmq.remoting.headers.header import Header, Int, Long, header


@header
class PullMessageRequestHeader(Header):
    """Requests 11 and 361."""

    consumer_group: str
    topic: str
    queue_id: Int
    queue_offset: Long
    max_msg_nums: Int
    sys_flag: Int
    commit_offset: Long
    suspend_timeout_millis: Long
    sub_version: Long
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: Int | None = None
    request_source: Int | None = None
    proxy_froward_client_id: str | None = None


@header
class PullMessageResponseHeader(Header):
    """The answer to a pull; needed for each code that is not a refusal (remoting 1.1)."""

    suggest_which_broker_id: Long
    next_begin_offset: Long
    min_offset: Long
    max_offset: Long
    offset_delta: Long | None = None
    topic_sys_flag: Int | None = None
    group_sys_flag: Int | None = None
    forbidden_type: Int | None = None


@header
class QueryMessageRequestHeader(Header):
    """Request 12. ``index_type``: K keys, U unique key, T tag."""

    topic: str
    key: str
    max_num: Int
    begin_timestamp: Long
    end_timestamp: Long
    index_type: str | None = None
    last_key: str | None = None


@header
class QueryMessageResponseHeader(Header):
    """The answer to 12."""

    index_last_update_timestamp: Long
    index_last_update_phyoffset: Long


@header
class ViewMessageRequestHeader(Header):
    """Request 33. ``offset`` is physical."""

    offset: Long
    topic: str | None = None


@header
class QueryConsumeQueueRequestHeader(Header):
    """Request 321."""

    topic: str
    queue_id: Int
    index: Long
    count: Int
    consumer_group: str | None = None


@header
class QueryConsumerOffsetRequestHeader(Header):
    """Request 14."""

    consumer_group: str
    topic: str
    queue_id: Int
    set_zero_if_not_found: bool | None = None


@header
class UpdateConsumerOffsetRequestHeader(Header):
    """Request 15. A missing queue or offset has an answer of its own."""

    consumer_group: str
    topic: str
    queue_id: Int | None = None
    commit_offset: Long | None = None


@header
class SearchOffsetRequestHeader(Header):
    """Request 29. ``boundary_type`` is LOWER or UPPER."""

    topic: str
    queue_id: Int
    timestamp: Long
    boundary_type: str | None = None

    @property
    def is_upper(self) -> bool:
        return self.boundary_type is not None and self.boundary_type.upper() == "UPPER"


@header
class GetMaxOffsetRequestHeader(Header):
    """Request 30. ``committed`` is ignored, as RocketMQ does (remoting 9)."""

    topic: str
    queue_id: Int
    committed: bool = True


@header
class QueueRequestHeader(Header):
    """Requests 31 and 32: one queue."""

    topic: str
    queue_id: Int


@header
class OffsetResponseHeader(Header):
    """The answer to 14, 29, 30 and 31."""

    offset: Long


@header
class GetEarliestMsgStoretimeResponseHeader(Header):
    """The answer to 32; -1 if there is no message."""

    timestamp: Long


@header
class ResetOffsetRequestHeader(Header):
    """Requests 222 and 220. ``queue_id`` -1 means all queues."""

    topic: str
    group: str
    timestamp: Long
    is_force: bool = False
    queue_id: Int = -1
    offset: Long | None = None


@header
class GetConsumerStatusRequestHeader(Header):
    """Requests 223 and 221."""

    topic: str
    group: str
    client_addr: str | None = None


@header
class CloneGroupOffsetRequestHeader(Header):
    """Request 314."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False
