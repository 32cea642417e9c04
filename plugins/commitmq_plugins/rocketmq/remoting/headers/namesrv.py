"""Headers of requests to a name server, and of a broker's to it."""

from __future__ import annotations

from commitmq_plugins.rocketmq.remoting.headers.header import Header, Int, Long, header


@header
class PutKVConfigRequestHeader(Header):
    """Request 100. A missing namespace or key has an answer of its own."""

    namespace: str | None = None
    key: str | None = None
    value: str | None = None


@header
class KVConfigRequestHeader(Header):
    """Requests 101 and 102."""

    namespace: str
    key: str


@header
class GetKVConfigResponseHeader(Header):
    """The answer to 101."""

    value: str | None = None


@header
class NamespaceRequestHeader(Header):
    """Request 219."""

    namespace: str


@header
class BrokerRequestHeader(Header):
    """Requests 104 and 322: one member of a broker's group. ``broker_id`` 0 is the master."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Long


@header
class RegisterBrokerRequestHeader(Header):
    """Request 103. A broker below 5.0 does not send ``enable_acting_master`` at all.

    ``whole_topic_table`` is this node's own: the topics are all that the broker has. Other name servers ignore it.
    """

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Long
    ha_server_addr: str | None = None
    heartbeat_timeout_millis: Long | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: Int = 0
    whole_topic_table: bool | None = None


@header
class RegisterBrokerResponseHeader(Header):
    """The answer to 103: for a slave, where its master is."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


@header
class QueryDataVersionResponseHeader(Header):
    """The answer to 322."""

    changed: bool


@header
class BrokerNameRequestHeader(Header):
    """Requests 205 and 327."""

    broker_name: str


@header
class WipeWritePermOfBrokerResponseHeader(Header):
    """The answer to 205."""

    wipe_topic_count: Int


@header
class AddWritePermOfBrokerResponseHeader(Header):
    """The answer to 327."""

    add_topic_count: Int


@header
class DeleteTopicFromNamesrvRequestHeader(Header):
    """Request 216."""

    topic: str
    cluster_name: str | None = None


@header
class GetTopicsByClusterRequestHeader(Header):
    """Request 224."""

    cluster: str


@header
class GetBrokerMemberGroupRequestHeader(Header):
    """Request 901."""

    cluster_name: str
    broker_name: str


@header
class BrokerHeartbeatRequestHeader(Header):
    """Request 904."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: Long | None = None
    heartbeat_timeout_mills: Long | None = None
