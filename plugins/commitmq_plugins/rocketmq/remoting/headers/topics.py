"""Headers of requests about topics, brokers and statistics."""

from __future__ import annotations

from commitmq_plugins.rocketmq.remoting.headers.header import Header, Int, header


@header
class TopicRequestHeader(Header):
    """Requests 105, 202, 215, 217, 300 and 351: one topic."""

    topic: str
    accept_standard_json_only: bool = False


@header
class CreateTopicRequestHeader(Header):
    """Request 17. ``attributes``: ``+key=value`` and ``-key`` with commas between."""

    topic: str
    default_topic: str | None = None
    read_queue_nums: Int = 16
    write_queue_nums: Int = 16
    perm: Int = 6
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int = 0
    order: bool = False
    attributes: str | None = None
    force: bool = False


@header
class GetAllTopicConfigRequestHeader(Header):
    """Request 21. Without any field everything is wanted."""

    topic_seq: Int | None = None
    data_version: str | None = None
    max_topic_num: Int | None = None


@header
class GetAllTopicConfigResponseHeader(Header):
    """The answer to 21."""

    total_topic_num: Int


@header
class GetBrokerConfigResponseHeader(Header):
    """The answer to 26: the text of the configuration's data version."""

    version: str


@header
class ViewBrokerStatsDataRequestHeader(Header):
    """Request 315."""

    stats_name: str
    stats_key: str


@header
class GetConsumeStatsInBrokerHeader(Header):
    """Request 317."""

    is_order: bool = False
