"""Headers of POP consumption."""

from __future__ import annotations

from commitmq_plugins.rocketmq.remoting.headers.header import Header, Int, Long, header


@header
class PopMessageRequestHeader(Header):
    """Request 200050. Times in ms; ``queue_id`` -1 means any; ``init_mode``: 0 from the minimum, 1 from the maximum."""

    consumer_group: str
    topic: str
    queue_id: Int
    max_msg_nums: Int
    invisible_time: Long
    poll_time: Long
    born_time: Long = 0
    init_mode: Int = 0
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str | None = None


@header
class PopMessageResponseHeader(Header):
    """The answer to 200050 and 200052, with all its fields for each code (remoting 5.3)."""

    pop_time: Long
    invisible_time: Long
    revive_qid: Int
    rest_num: Long
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


@header
class AckMessageRequestHeader(Header):
    """Request 200051. ``extra_info`` is the receipt handle, ``offset`` the queue offset."""

    consumer_group: str
    topic: str
    queue_id: Int
    extra_info: str
    offset: Long


@header
class ChangeInvisibleTimeRequestHeader(Header):
    """Request 200053. ``invisible_time`` in ms from now."""

    consumer_group: str
    topic: str
    queue_id: Int
    extra_info: str
    offset: Long
    invisible_time: Long


@header
class ChangeInvisibleTimeResponseHeader(Header):
    """The answer to 200053."""

    pop_time: Long
    invisible_time: Long
    revive_qid: Int


@header
class PeekMessageRequestHeader(Header):
    """Request 200052."""

    topic: str
    queue_id: Int
    max_msg_nums: Int
    consumer_group: str


@header
class NotificationRequestHeader(Header):
    """Request 200054."""

    consumer_group: str
    topic: str
    queue_id: Int
    poll_time: Long
    born_time: Long
    order: bool = False
    attempt_id: str | None = None


@header
class NotificationResponseHeader(Header):
    """The answer to 200054."""

    has_msg: bool
    polling_full: bool = False


@header
class PollingInfoRequestHeader(Header):
    """Request 200055."""

    consumer_group: str
    topic: str
    queue_id: Int


@header
class PollingInfoResponseHeader(Header):
    """The answer to 200055."""

    polling_num: Int
