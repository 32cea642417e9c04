"""The headers of requests and answers, by their fields.

Typed headers: dataclasses whose fields are converted from and to the texts of ``extFields``.

        class SearchOffsetRequestHeader(Header):
        topic: str                          # required
        queue_id: Int                       # 32 bits
        timestamp: Long                     # 64 bits
        boundary_type: str | None = None    # optional

A field's name on the wire is its name in Java's spelling (``queueId``); ``WIRE`` names the exceptions. A value must be
a number that fits its type, or FieldError names field and value; a boolean is true for "true" in any case and false for
everything else (remoting 1.1). Unknown fields are ignored, those that every request may carry (ns, nsd, bname, oway, lo)
among them. Absent optional fields have their defaults; those that are None are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, Self, dataclass_transform, get_type_hints

from commitmq_plugins.rocketmq.remoting.frame import FieldError

Int = Annotated[int, 32]
Long = Annotated[int, 64]

_Reader = Callable[[str], Any]
_REQUIRED: Any = object()
_LONGEST = 500


@dataclass_transform()
class Header:
    """Base of all headers. It makes each a dataclass, with the conversions of its fields."""

    WIRE: ClassVar[Mapping[str, str]] = {}
    """Names on the wire that are not the field's own name in Java's spelling."""

    _plan: ClassVar[tuple[tuple[str, _Reader, Any], ...]] = ()
    _names: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init_subclass__(cls) -> None:
        made: Any = dataclass(cls)
        hints = get_type_hints(made, include_extras=True)
        plan, names = [], []
        for one in fields(made):
            wire = cls.WIRE.get(one.name) or java_name(one.name)
            plan.append((wire, _reader(hints[one.name]), _REQUIRED if one.default is MISSING else one.default))
            names.append((wire, one.name))
        cls._plan, cls._names = tuple(plan), tuple(names)

    @classmethod
    def decode(cls, ext_fields: Mapping[str, str]) -> Self:
        """The header in ``ext_fields``. Raises FieldError for a missing or a wrong field."""
        get = ext_fields.get
        values: list[Any] = []
        wire, text = "", None
        try:
            for wire, read, default in cls._plan:
                text = get(wire)
                if text is None:
                    if default is _REQUIRED:
                        raise FieldError(f"the custom field <{wire}> is null", wire)
                    values.append(default)
                else:
                    values.append(text if read is str else read(text))
        except ValueError as error:
            raise FieldError(
                f"the custom field <{wire}> has the wrong value {text!r:.100}: {error}", wire, text or ""
            ) from error
        return cls(*values)

    def encode(self) -> dict[str, str]:
        """The texts of all fields that are not None."""
        texts: dict[str, str] = {}
        for wire, name in self._names:
            value = getattr(self, name)
            if value is None:
                continue
            if value is True:
                texts[wire] = "true"
            elif value is False:
                texts[wire] = "false"
            else:
                texts[wire] = str(value)
        return texts


def java_name(name: str) -> str:
    """``name`` in Java's spelling."""
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def _reader(hint: Any) -> _Reader:
    """The conversion for a field's type; for an optional field that of the type without None."""
    for other in getattr(hint, "__args__", ()):
        if other is type(None):
            hint = next(one for one in hint.__args__ if one is not type(None))
            break
    if hint is str:
        return str
    if hint is bool:
        return _boolean
    if hint is float:
        return float
    return {Int: _int, Long: _long}[hint]


def _boolean(text: str) -> bool:
    return text == "true" or text.lower() == "true"


def _int(text: str) -> int:
    value = int(text)
    if not -0x8000_0000 <= value <= 0x7FFF_FFFF:
        raise ValueError("it does not fit 32 bits")
    return value


def _long(text: str) -> int:
    value = int(text)
    if not -0x8000_0000_0000_0000 <= value <= 0x7FFF_FFFF_FFFF_FFFF:
        raise ValueError("it does not fit 64 bits")
    return value


class UnregisterClientRequestHeader(Header):
    """Request 35: a client leaves one group."""

    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None

    WIRE: ClassVar[Mapping[str, str]] = {"client_id": "clientID"}


class ConsumerGroupRequestHeader(Header):
    """Requests 38, 40 and 203."""

    consumer_group: str


class ProducerGroupRequestHeader(Header):
    """Request 204."""

    producer_group: str


class GroupRequestHeader(Header):
    """Requests 343 and 352."""

    group: str


class GroupTopicRequestHeader(Header):
    """Requests 303 and 345."""

    group: str
    topic: str


class DeleteSubscriptionGroupRequestHeader(Header):
    """Request 207."""

    group_name: str
    clean_offset: bool = False


class UpdateGroupForbiddenRequestHeader(GroupTopicRequestHeader):
    """Request 353."""

    readable: bool | None = None


class GetConsumeStatsRequestHeader(ConsumerGroupRequestHeader):
    """Request 208. ``topic_list`` has semicolons between topics."""

    topic: str | None = None
    topic_list: str | None = None


class GetConsumerRunningInfoRequestHeader(ConsumerGroupRequestHeader):
    """Request 307, to a broker and from it to the client."""

    client_id: str
    jstack_enable: bool = False


class ConsumeMessageDirectlyResultRequestHeader(ConsumerGroupRequestHeader):
    """Request 309, to a broker and from it to the client."""

    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: Int | None = None
    group_sys_flag: Int | None = None


class PutKVConfigRequestHeader(Header):
    """Request 100. A missing namespace or key has an answer of its own."""

    namespace: str | None = None
    key: str | None = None
    value: str | None = None


class NamespaceRequestHeader(Header):
    """Request 219."""

    namespace: str


class KVConfigRequestHeader(NamespaceRequestHeader):
    """Requests 101 and 102."""

    key: str


class GetKVConfigResponseHeader(Header):
    """The answer to 101."""

    value: str | None = None


class BrokerRequestHeader(Header):
    """Requests 104 and 322: one member of a broker's group. ``broker_id`` 0 is the master."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Long


class RegisterBrokerRequestHeader(BrokerRequestHeader):
    """Request 103. A broker below 5.0 does not send ``enable_acting_master`` at all.

    ``whole_topic_table`` is this node's own: the topics are all that the broker has. Other name servers ignore it.
    """

    ha_server_addr: str | None = None
    heartbeat_timeout_millis: Long | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: Int = 0
    whole_topic_table: bool | None = None


class RegisterBrokerResponseHeader(Header):
    """The answer to 103: for a slave, where its master is."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class QueryDataVersionResponseHeader(Header):
    """The answer to 322."""

    changed: bool


class BrokerNameRequestHeader(Header):
    """Requests 205 and 327."""

    broker_name: str


class WipeWritePermOfBrokerResponseHeader(Header):
    """The answer to 205."""

    wipe_topic_count: Int


class AddWritePermOfBrokerResponseHeader(Header):
    """The answer to 327."""

    add_topic_count: Int


class DeleteTopicFromNamesrvRequestHeader(Header):
    """Request 216."""

    topic: str
    cluster_name: str | None = None


class GetTopicsByClusterRequestHeader(Header):
    """Request 224."""

    cluster: str


class GetBrokerMemberGroupRequestHeader(Header):
    """Request 901."""

    cluster_name: str
    broker_name: str


class BrokerHeartbeatRequestHeader(Header):
    """Request 904."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: Long | None = None
    heartbeat_timeout_mills: Long | None = None


class GroupQueueRequestHeader(Header):
    """Request 200055, and what others begin with: a queue in which a group reads."""

    consumer_group: str
    topic: str
    queue_id: Int


class PopMessageRequestHeader(GroupQueueRequestHeader):
    """Request 200050. Times in ms; ``queue_id`` -1 means any; ``init_mode``: 0 from the minimum, 1 from the maximum."""

    max_msg_nums: Int
    invisible_time: Long
    poll_time: Long
    born_time: Long = 0
    init_mode: Int = 0
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str | None = None


class AckMessageRequestHeader(GroupQueueRequestHeader):
    """Request 200051. ``extra_info`` is the receipt handle, ``offset`` the queue offset."""

    extra_info: str
    offset: Long


class ChangeInvisibleTimeRequestHeader(AckMessageRequestHeader):
    """Request 200053. ``invisible_time`` in ms from now."""

    invisible_time: Long


class ChangeInvisibleTimeResponseHeader(Header):
    """The answer to 200053."""

    pop_time: Long
    invisible_time: Long
    revive_qid: Int


class QueueRequestHeader(Header):
    """Requests 31 and 32, and what others begin with: one queue."""

    topic: str
    queue_id: Int


class PeekMessageRequestHeader(QueueRequestHeader):
    """Request 200052."""

    max_msg_nums: Int
    consumer_group: str


class NotificationRequestHeader(GroupQueueRequestHeader):
    """Request 200054."""

    poll_time: Long
    born_time: Long
    order: bool = False
    attempt_id: str | None = None


class NotificationResponseHeader(Header):
    """The answer to 200054."""

    has_msg: bool
    polling_full: bool = False


class PullMessageRequestHeader(GroupQueueRequestHeader):
    """Requests 11 and 361."""

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


class QueryMessageRequestHeader(Header):
    """Request 12. ``index_type``: K keys, U unique key, T tag."""

    topic: str
    key: str
    max_num: Int
    begin_timestamp: Long
    end_timestamp: Long
    index_type: str | None = None
    last_key: str | None = None


class QueryMessageResponseHeader(Header):
    """The answer to 12."""

    index_last_update_timestamp: Long
    index_last_update_phyoffset: Long


class ViewMessageRequestHeader(Header):
    """Request 33. ``offset`` is physical."""

    offset: Long
    topic: str | None = None


class QueryConsumeQueueRequestHeader(QueueRequestHeader):
    """Request 321."""

    index: Long
    count: Int
    consumer_group: str | None = None


class QueryConsumerOffsetRequestHeader(GroupQueueRequestHeader):
    """Request 14."""

    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffsetRequestHeader(Header):
    """Request 15. A missing queue or offset has an answer of its own."""

    consumer_group: str
    topic: str
    queue_id: Int | None = None
    commit_offset: Long | None = None


class SearchOffsetRequestHeader(QueueRequestHeader):
    """Request 29. ``boundary_type`` is LOWER or UPPER."""

    timestamp: Long
    boundary_type: str | None = None

    @property
    def is_upper(self) -> bool:
        return self.boundary_type is not None and self.boundary_type.upper() == "UPPER"


class GetMaxOffsetRequestHeader(QueueRequestHeader):
    """Request 30. ``committed`` is ignored, as RocketMQ does (remoting 9)."""

    committed: bool = True


class ResetOffsetRequestHeader(Header):
    """Requests 222 and 220. ``queue_id`` -1 means all queues."""

    topic: str
    group: str
    timestamp: Long
    is_force: bool = False
    queue_id: Int = -1
    offset: Long | None = None


class GetConsumerStatusRequestHeader(Header):
    """Requests 223 and 221."""

    topic: str
    group: str
    client_addr: str | None = None


class CloneGroupOffsetRequestHeader(Header):
    """Request 314."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


class UserRequestHeader(Header):
    """Requests 3001 to 3004."""

    username: str | None = None


class ListUsersRequestHeader(Header):
    """Request 3005."""

    filter: str | None = None


class AclRequestHeader(Header):
    """Requests 3006 to 3009."""

    subject: str | None = None
    policy_type: str | None = None
    resource: str | None = None


class ListAclsRequestHeader(Header):
    """Request 3010."""

    subject_filter: str | None = None
    resource_filter: str | None = None


class SendMessageRequestHeader(Header):
    """Requests 10 and 324, and the fields of all other sends."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int
    queue_id: Int
    sys_flag: Int
    born_timestamp: Long
    flag: Int
    properties: str | None = None
    reconsume_times: Int | None = None
    unit_mode: bool = False
    max_reconsume_times: Int | None = None
    batch: bool = False
    broker_name: str | None = None

    WIRE: ClassVar[Mapping[str, str]] = {"broker_name": "bname"}


class SendMessageRequestHeaderV2(SendMessageRequestHeader):
    """Requests 310, 320 and 325: the same fields under one-letter names."""

    WIRE: ClassVar[Mapping[str, str]] = {
        "producer_group": "a",
        "topic": "b",
        "default_topic": "c",
        "default_topic_queue_nums": "d",
        "queue_id": "e",
        "sys_flag": "f",
        "born_timestamp": "g",
        "flag": "h",
        "properties": "i",
        "reconsume_times": "j",
        "unit_mode": "k",
        "max_reconsume_times": "l",
        "batch": "m",
        "broker_name": "n",
    }


def decode_send(ext_fields: Mapping[str, str]) -> SendMessageRequestHeader:
    """The header of any send: with letters if there is an ``a``, else with long names (remoting 3.1)."""
    kind = SendMessageRequestHeaderV2 if "a" in ext_fields else SendMessageRequestHeader
    return kind.decode(ext_fields)


class ConsumerSendMsgBackRequestHeader(Header):
    """Request 36. ``offset`` is the record's physical offset."""

    offset: Long
    group: str
    delay_level: Int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int | None = None


class EndTransactionRequestHeader(Header):
    """Request 37. ``commit_or_rollback``: 0 unknown, 8 commit, 12 roll back."""

    producer_group: str
    tran_state_table_offset: Long
    commit_log_offset: Long
    commit_or_rollback: Int
    msg_id: str
    from_transaction_check: bool = False
    transaction_id: str | None = None
    topic: str | None = None


class CheckTransactionStateRequestHeader(Header):
    """Request 39, to a producer. ``topic`` is the topic of half messages."""

    tran_state_table_offset: Long
    commit_log_offset: Long
    topic: str | None = None
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    broker_name: str | None = None

    WIRE: ClassVar[Mapping[str, str]] = {"broker_name": "bname"}


class ReplyMessageRequestHeader(Header):
    """Request 326, to the producer that waits for a reply. Hosts are texts ``ip:port``."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int
    queue_id: Int
    sys_flag: Int
    born_timestamp: Long
    flag: Int
    born_host: str
    store_host: str
    store_timestamp: Long
    properties: str | None = None
    reconsume_times: Int | None = None
    unit_mode: bool = False


class RecallMessageRequestHeader(Header):
    """Request 370."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


class TopicRequestHeader(Header):
    """Requests 105, 202, 215, 217, 300 and 351: one topic."""

    topic: str
    accept_standard_json_only: bool = False


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


class ViewBrokerStatsDataRequestHeader(Header):
    """Request 315."""

    stats_name: str
    stats_key: str


class GetConsumeStatsInBrokerHeader(Header):
    """Request 317."""

    is_order: bool = False
