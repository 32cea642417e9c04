"""Where a send goes: its topic, queue and what its records have in common; found once for each kind of send of a connection.

Most fields of a producer's sends are the same each time. They are checked at the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

from commitmq.format.constants import Host, Property, SysFlag
from commitmq.format.message_id import pack_host
from commitmq.store.log.record_form import RecordForm
from commitmq.store.log.run_check import MessageIllegalError, RunCheck
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH, STORAGE_MEMORY, STORAGE_TYPE, TopicConfig
from commitmq_plugins.rocketmq.broker.send_refusal import Refusal
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.headers.sending import SendMessageRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection

_COMPRESSION: Final = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK
_TRANSACTION: Final = 0xC
CLIENTS: Final = 1
USERS: Final = 2
_MAX_KNOWN: Final = 256  # of a connection
_MAX_NAME_LENGTH: Final = 1_024
_MAX_RUN_KEYS: Final = 100_000
_MAX_LONG: Final = (1 << 63) - 1
# Of the short names, those whose values are the same in each send, as far as storing depends on them. Born time and
# properties (g and i) are not among them.
_CONSTANT: Final = itemgetter("a", "b", "c", "d", "e", "f", "h", "j", "k")


class RunKey:
    """What all records of a run have in common. Two keys are never equal. ``client`` is the sender, where senders have rates,
    and ``user`` the user, where users have; otherwise they are empty.
    """

    __slots__ = ("ack", "client", "queue", "role", "topic", "user", "v6")

    def __init__(self, role: str, topic: str, queue: int, ack: str, v6: bool, client: str = "", user: str = "") -> None:
        self.role, self.topic, self.queue, self.ack, self.v6 = role, topic, queue, ack, v6
        self.client, self.user = client, user


class Target(NamedTuple):
    """``flushed`` and ``memory``: the run of a message whose sender waits for the flush, and of one that does not.

    ``version``: of the topics, when it was made. ``rates``: who had rates then, of CLIENTS and USERS.
    """

    topic: str
    queue: int
    flushed: RunKey
    memory: RunKey
    form: RecordForm
    is_batch: bool
    is_inner: bool
    version: int
    rates: int


class Known(NamedTuple):
    """A send whose fields were checked before."""

    target: Target
    born_ms: int
    properties: str


class SendTargets:
    """All targets. Raises :class:`Refusal` for a send that no queue takes."""

    def __init__(self, check: RunCheck, *, is_sync: bool, rates: Callable[[], int]) -> None:
        """``is_sync``: the node flushes before it answers, unless a message does not wait. ``rates``: who has rates now, a sum
        of CLIENTS and USERS: their messages are several runs then.
        """
        self._check, self._is_sync, self._rates = check, is_sync, rates
        self._keys: dict[tuple[str, str, int, str, bool, str, str], RunKey] = {}

    def known(self, connection: Connection, command: Command, version: int) -> Known | None:
        """The target of a send like an earlier one of the connection; None for another send."""
        fields = command.ext_fields
        try:
            target = connection.memo[self._name(command)]
            born_ms = int(fields["g"])
        except (KeyError, ValueError):
            return None
        text = fields.get("i", "")
        is_as_then = target.version == version and target.rates == self._rates()
        if not is_as_then or not 0 <= born_ms <= _MAX_LONG or Property.PRIORITY in text:
            return None
        return Known(target, born_ms, text)

    def remember(self, connection: Connection, command: Command, target: Target) -> None:
        """The connection's next sends with these fields have this target."""
        if len(connection.memo) >= _MAX_KNOWN:
            connection.memo.clear()
        try:
            name = self._name(command)
        except KeyError:
            return  # with long names, which old clients send
        if sum(len(part) for part in name if isinstance(part, str)) <= _MAX_NAME_LENGTH:
            connection.memo[name] = target

    @staticmethod
    def _name(command: Command) -> tuple[Any, ...]:
        fields = command.ext_fields
        return (command.code, fields.get("l"), fields.get("m"), *_CONSTANT(fields))

    def find(
        self, connection: Connection, code: int, header: SendMessageRequestHeader, topic: TopicConfig, queue: int, version: int
    ) -> Target:  # fmt: skip
        """The target of a send to ``queue`` of ``topic``. Raises Refusal."""
        batch = is_batch(code, header)
        if batch and header.sys_flag & _TRANSACTION:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, "a batch cannot be part of a transaction")
        born_host = _born_host(*connection.peer)
        try:
            form = RecordForm(
                self._check,
                header.topic.encode(),
                queue,
                sys_flag=header.sys_flag & _COMPRESSION if header.sys_flag & SysFlag.COMPRESSED else 0,
                flag=header.flag,
                born_host=born_host,
                reconsume_times=max(0, header.reconsume_times or 0),
            )
        except MessageIllegalError as error:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        role = "memory" if topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY else "writer"
        v6 = len(born_host) == 20
        rates = self._rates()
        sender = connection.name if rates & CLIENTS else "", connection.user if rates & USERS else ""
        memory = self._key(role, header.topic, queue, "memory", v6, *sender)
        return Target(
            header.topic,
            queue,
            self._key(role, header.topic, queue, "flushed", v6, *sender) if self._is_sync else memory,
            memory,
            form,
            batch,
            batch and topic.attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH,
            version,
            rates,
        )

    def _key(self, *parts: Any) -> RunKey:
        key = self._keys.get(parts)
        if key is None:
            if len(self._keys) >= _MAX_RUN_KEYS:
                self._keys.clear()
            key = self._keys[parts] = RunKey(*parts)
        return key


def is_batch(code: int, header: SendMessageRequestHeader) -> bool:
    """Whether a send has a batch of messages in its body."""
    return bool(header.batch) or code == RequestCode.SEND_BATCH_MESSAGE


@lru_cache(maxsize=4_096)
def _born_host(ip: str, port: int) -> bytes:
    return pack_host(Host(ip, port))
