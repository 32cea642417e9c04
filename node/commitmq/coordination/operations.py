"""The operations of the coordinator, by what they change or read.

The operation ``group.broadcast``: a consumer of a group that broadcasts asks whether it may (remoting 4.2, step 7).

Such a consumer is no member: it reads all queues, and keeps its positions itself.

The operations on connected clients: ``client.heard`` is a gateway's, ``client.list`` says who is connected.

A list has the clients of gateways (:mod:`.clients`), then the members of groups that speak the node's own protocol.
Producers of that protocol tell nobody of themselves, so no list has them.

The operations on topics: ``topic.route``, ``create``, ``own``, ``reply``, ``list``, ``describe`` and ``delete``.

The operation ``group.share``: a group whose consumers share queues (RocketMQ's POP).

A group is *assigned* while it has members, each with queues of its own, or *shared* while the process ``pop`` delivers
its messages. Mixed use would give a message to two consumers, so the second kind is refused. ``pop`` repeats the
request while it works for the group; the lease ends by itself when it stops.

Resets: ``pop`` keeps in memory where a group continues, ahead of the committed offsets. So each reset of a shared group
gets the next number, which ``Word.GROUP_RESETS`` has before the reset is answered. ``pop`` compares that word before
each look for messages, and learns by this operation which queues were reset behind the number that it has ``heard``. It
begins them again, and a commit of what it did before is FENCED. A lost answer changes nothing: the queues are told
until the number is heard. A coordinator that starts does not know the resets before; ``pop`` finds those that set an
offset back by comparing, within 2 s.

The operations on settings of groups in ``subscriptionGroup.json``, under RocketMQ's names.

``group.config`` shows and changes them, ``group.configs`` lists those of all groups, ``group.delete`` forgets them, and
``group.forbid`` says which topics a group must not read.

Queues whose committed offset was reset while a member of the group reads them: the member begins them *again*.

A reset gives the queue to its holder a second time, with a new generation. So a commit that the holder sent before it
knew is FENCED. The answers to the holder name the queue until the holder has read one of them, which its next
generation says. It drops the queue then, without a commit, and begins at the committed offset.

When the coordinator dies between a reset and these answers, its successor does not know of the reset. Members that come
back compare the committed offsets with their own, and a commit names the offset that its member knew; so the reset
stays.

The operations on committed offsets: ``offset.commit``, ``offset.fetch`` and ``offset.forget``.

The operations on groups: ``group.join``, ``heartbeat``, ``leave``, ``list``, ``describe``, ``positions`` and
``retry_topics``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.coordination import requests
from commitmq.coordination import topics as topic_rules
from commitmq.coordination.groups import GroupCoordinator, check_forbidden_size, check_name
from commitmq.coordination.listing import MAX_ENTRIES, NATIVE, Client, ClientFilter, GatewayClients, Listing, shown
from commitmq.coordination.membership import MAX_STRATEGY_CHARACTERS, AllocationTable, Member, Membership, Queue, View
from commitmq.coordination.offsets import EndOffsets, GroupOffsets
from commitmq.coordination.requests import Answer, Fields, Header, Operations, Part
from commitmq.coordination.subscriptions import SQL, Subscriptions
from commitmq.coordination.topics import TopicManager, describe
from commitmq.errors import ProtocolError, StoreError
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq.log import get_log
from commitmq.semantics.rates import (
    FORGET_MS,
    MAX_CHARACTERS,
    MAX_CLIENTS_A_REQUEST,
    MAX_NAMES,
    shortened,
)
from commitmq.semantics.reply import reply_topic
from commitmq.store.metadata.topic_config import STORAGE_MEMORY, STORAGE_TYPE


class BroadcastOperations:
    """The operations of broadcasting consumers; :attr:`operations` has it by name."""

    def __init__(self, groups: GroupCoordinator, broker_name: str) -> None:
        self._groups, self._broker_name = groups, broker_name
        self.operations: Operations = {"group.broadcast": self._broadcast}

    def _broadcast(self, header: Header, now_ms: int) -> Answer:
        group = requests.text(header, "group")
        self._groups.use(group)
        if not self._groups.config_of(group).settings.get("consumeBroadcastEnable", True):
            raise ProtocolError("NO_PERMISSION", f"group {group} may not broadcast: its consumeBroadcastEnable is off")
        return Answer(lambda: {"broker": self._broker_name})


_MOST_ROWS = 200
_MOST_GONE = 10_000
_PARTS = ("clients", "members")


class ClientOperations:
    """The operations on connected clients; :attr:`operations` has them by name."""

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups
        self.clients = GatewayClients(lambda: groups.config.max_listed_clients)
        self.who: Callable[[str, str], tuple[str, str]] = lambda group, member: ("", "")
        """User and address of a member that speaks the node's own protocol."""
        self.operations: Operations = {"client.heard": self._heard, "client.list": self._list}

    def _heard(self, header: Header, now_ms: int) -> Answer:
        gateway, instance = requests.text(header, "gateway"), requests.text(header, "instance")
        if gateway == NATIVE:
            raise requests.refuse("gateway", f"another name than {NATIVE}", gateway)
        told = requests.objects(header, "clients", MAX_CLIENTS_A_REQUEST)
        gone = header.get("gone") or []
        if type(gone) is not list or len(gone) > _MOST_GONE or not all(type(one) is str for one in gone):
            raise requests.refuse("gone", f"a list of at most {_MOST_GONE} connections", gone)
        clients = sorted((_client(gateway, one, now_ms) for one in told), key=lambda one: one.heard_ms)
        self.clients.tell(gateway, instance, clients, gone, now_ms)
        return Answer(dict)

    def _list(self, header: Header, now_ms: int) -> Answer:
        names = {field: requests.optional_text(header, field) for field in ("topic", "group", "user", "gateway")}
        client_id, text = requests.optional_text(header, "client_id"), requests.optional_text(header, "text")
        wanted = ClientFilter(**names, id=client_id, text=None if text is None else text.lower())
        after, limit = requests.cursor(header, str, str, str, str), requests.limit(header, _MOST_ROWS)
        if after and after[0] not in _PARTS:
            raise requests.refuse("after", "the value of next in the page before", after)
        return Answer(lambda: self._page(wanted, after, limit, now_ms))

    def _page(self, wanted: ClientFilter, after: list[str], limit: int, now_ms: int) -> Fields:
        part, *key = after or [_PARTS[0], "", "", ""]
        rows: list[Fields] = []
        complete = self.clients.is_complete(wanted, now_ms)
        if part == "clients":
            found, more = self.clients.page(wanted, tuple(key), limit, now_ms)
            rows = [shown(one, now_ms) for one in found]
            if more:
                return {"clients": rows, "complete": complete, "next": ["clients", *found[-1].key]}
            key = ["", "", ""]
        behind = key[0], key[1]
        for place, row in self._members(wanted, behind, now_ms):
            if len(rows) == limit:
                return {"clients": rows, "complete": complete, "next": ["members", *behind, ""]}
            rows.append(row)
            behind = place
        return {"clients": rows, "complete": complete, "next": None}

    def _members(
        self, wanted: ClientFilter, behind: tuple[str, str], now_ms: int
    ) -> Iterator[tuple[tuple[str, str], Fields]]:
        """Group and name of each member behind these, and its row. A gateway's members are in the table of clients."""
        if wanted.gateway not in (None, NATIVE):
            return
        for name in self._groups.names_from(behind[0]) if wanted.group is None else (wanted.group,):
            group = self._groups.membership(name)
            for member in () if group is None else sorted(group.members):
                assert group is not None
                one = group.members[member]
                if (name, member) <= behind or self.clients.speaks_through(one.instance):
                    continue
                user, address = self.who(name, member)
                if wanted.takes((NATIVE, address), member, user, (name,), one.topics):
                    [topics], left_out = shortened(0, one.topics)
                    row = {
                        **dict.fromkeys(("language", "version"), ""),
                        "id": member,
                        "gateway": NATIVE,
                        "address": address,
                        "user": user,
                        "consumes": [name],
                        "produces": [],
                        "topics": topics,
                        "left_out": left_out,
                        "queues": len(one.held),
                        "heard_ms_ago": now_ms - one.heard_ms,
                    }
                    yield (name, member), row


def _client(gateway: str, told: Header, now_ms: int) -> Client:
    """What a gateway tells of one client. Raises ProtocolError."""
    fields = {name: told.get(name) for name in ("id", "connection", "user", "language", "version")}
    lists = {name: told.get(name) for name in ("consumes", "produces", "topics")}
    ago_ms = requests.integer(told, "heard_ms_ago", 0, FORGET_MS)
    left_out = requests.integer(told, "left_out", 0, 1 << 31)
    for field, value in fields.items():
        if type(value) is not str:
            raise requests.refuse(field, "a string", value)
    for field, names in lists.items():
        if type(names) is not list or len(names) > MAX_NAMES or not all(type(one) is str for one in names):
            raise requests.refuse(field, f"a list of at most {MAX_NAMES} names", names)
    texts = [*fields.values(), *(one for names in lists.values() for one in names or ())]
    if sum(len(one) for one in texts if one) > MAX_CHARACTERS:
        raise requests.refuse("clients", f"of clients with at most {MAX_CHARACTERS} characters each", told)
    return Client(
        (gateway, str(fields["connection"])),
        str(fields["id"]),
        str(fields["user"]),
        str(fields["language"]),
        str(fields["version"]),
        tuple(lists["consumes"] or ()),
        tuple(lists["produces"] or ()),
        tuple(lists["topics"] or ()),
        left_out,
        now_ms - ago_ms,
    )


_MAX_NUMBER: Final = (1 << 63) - 1


class TopicOperations:
    """The operations on topics; :attr:`operations` has them by name."""

    def __init__(
        self,
        topics: TopicManager,
        offsets: GroupOffsets,
        listing: Listing,
        control: ControlBlock,
        *,
        config: NodeConfig,
        failed: Callable[[StoreError, int], None],
    ) -> None:
        """``failed`` is called with an error of the topics' files and the monotonic time in ms."""
        self._topics, self._offsets, self._listing, self._control = topics, offsets, listing, control
        self._memory_enabled = config.memory.enable
        self._reply_topic = reply_topic(config.network.cluster_name)
        self._reply_queues = config.topics.reply_queues
        self._failed = failed
        self.operations: Operations = {
            "topic.route": self._route,
            "topic.create": self._create,
            "topic.own": self._own,
            "topic.reply": self._reply,
            "topic.list": self._list,
            "topic.describe": self._describe,
            "topic.delete": self._delete,
        }

    def _route(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        topic = self._topics.route(name, create=requests.flag(header, "create"))
        return Answer(lambda: {"topic": describe(topic)}, self._needed(name))

    def _needed(self, name: str) -> Part | None:
        return "topics" if self._topics.is_staged(name) else None

    def _create(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        perm = requests.optional_integer(header, "perm", 0, 7)
        attributes = requests.mapping(header, "attributes")
        if attributes and attributes.get(STORAGE_TYPE) == STORAGE_MEMORY and not self._memory_enabled:
            raise ProtocolError("INVALID_PARAMETER", "this node serves no memory topics: memory.enable is off")
        queues = requests.optional_integer(header, "queues", 1, topic_rules.MAX_QUEUES)
        created = self._topics.create(
            name,
            queues,
            perm=6 if perm is None else perm,
            attributes=attributes,
            update=requests.flag(header, "update"),
            incarnation=requests.optional_integer(header, "incarnation", 0, _MAX_NUMBER),
            further=_further(header),
        )
        topic = self._topics.get(name)
        return Answer(lambda: {"created": created, "topic": describe(topic)}, self._needed(name))

    def _own(self, header: Header, now_ms: int) -> Answer:
        """The topics of the transaction process, which asks for them when it begins."""
        self._topics.make_own(topic_rules.TRANSACTION_TOPICS)
        staged = any(self._topics.is_staged(name) for name in topic_rules.TRANSACTION_TOPICS)
        return Answer(lambda: {"topics": list(topic_rules.TRANSACTION_TOPICS)}, "topics" if staged else None)

    def _reply(self, header: Header, now_ms: int) -> Answer:
        """The topic of replies. RocketMQ makes it when it starts, with one queue; here the first requester does."""
        self._topics.ensure(self._reply_topic, self._reply_queues)
        topic = self._topics.get(self._reply_topic)
        return Answer(lambda: {"topic": describe(topic)}, self._needed(topic.name))

    def _list(self, header: Header, now_ms: int) -> Answer:
        after = requests.optional_text(header, "after") or ""
        limit = requests.limit(header, MAX_ENTRIES)
        return Answer(lambda: self._listing.topics(after, limit))

    def _describe(self, header: Header, now_ms: int) -> Answer:
        topic = self._topics.get(requests.text(header, "topic"))
        groups = sorted(self._offsets.table.groups_of(topic.name))
        return Answer(lambda: {"topic": {**describe(topic), "groups": groups}}, self._needed(topic.name))

    def _delete(self, header: Header, now_ms: int) -> Answer:
        name = requests.text(header, "topic")
        incarnation = requests.optional_integer(header, "incarnation", 0, _MAX_NUMBER)
        deletions = self._topics.deletions
        deletions.prune(self._control.get(Word.MIN_OFFSET), self._control.dispatcher(0, DispatcherWord.TOPICS))
        try:
            ending = self._topics.delete(name, incarnation)
        except StoreError as error:
            # Writing earlier staged changes may have failed: their requests must be refused too.
            self._failed(error, now_ms)
            raise
        if ending is None:
            return Answer(lambda: {"deleted": name, "tombstone": deletions.tombstones.get(name)})
        return Answer(
            lambda: {"deleted": name, "incarnation": ending, "tombstone": deletions.tombstones.get(name)},
            "topics",
            (name, ending),
        )


def _further(header: Header) -> dict[str, Any]:
    """What RocketMQ's tools set of a topic beside the rest: only the fields that the request has."""
    found: dict[str, Any] = {}
    for field in ("read_queues", "write_queues"):
        if (count := requests.optional_integer(header, field, 1, topic_rules.MAX_QUEUES)) is not None:
            found[field] = count
    if "order" in header:
        found["order"] = requests.flag(header, "order")
    if (flags := requests.optional_integer(header, "sys_flag", 0, topic_rules.MAX_SYS_FLAG)) is not None:
        found["sys_flag"] = flags
    if (kind := requests.optional_text(header, "filter_type")) is not None:
        if kind not in topic_rules.FILTER_TYPES:
            raise requests.refuse("filter_type", f"one of {', '.join(topic_rules.FILTER_TYPES)}", kind)
        found["filter_type"] = kind
    return found


LEASE_MS: Final = 15_000
_REVIVE_PREFIX: Final = "rmq_sys_REVIVE_LOG_"
_TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
_MAX_REVIVE_QUEUES: Final = 256
_LEASES: Final = 1_024
_RESETS_AN_ANSWER: Final = 2_000


class ShareOperations:
    """The operations of share consumers; :attr:`operations` has it by name."""

    def __init__(self, groups: GroupCoordinator, topics: TopicManager, control: ControlBlock) -> None:
        self._groups, self._topics, self._control = groups, topics, control
        self._resets: dict[
            str, dict[tuple[str, int], int]
        ] = {}  # group -> queue -> number, in the order of the numbers
        self._until_ms: dict[str, int] = {}
        self._look_at = _LEASES
        self.operations: Operations = {"group.share": self._share}

    def check_assigned(self, group: str, now_ms: int) -> None:
        """ProtocolError NO_PERMISSION while the consumers of ``group`` share queues."""
        until_ms = self._until_ms.get(group)
        if until_ms is None:
            return
        if until_ms > now_ms:
            raise ProtocolError(
                "NO_PERMISSION",
                f"the consumers of group {group} share queues (ShareConsumer), so it takes no members (Consumer): use"
                f" another group, or try again {LEASE_MS // 1000} s after the last of them has closed",
            )
        del self._until_ms[group]
        self._resets.pop(group, None)

    def is_shared(self, group: str, now_ms: int) -> bool:
        """Whether the consumers of ``group`` share queues."""
        return self._until_ms.get(group, 0) > now_ms

    def note_resets(self, group: str, queues: Iterable[tuple[str, int]], now_ms: int) -> None:
        """Offsets of ``group`` were reset: if it is shared, ``pop`` begins ``queues`` again before it delivers more."""
        if not self.is_shared(group, now_ms):
            return
        resets = self._resets.setdefault(group, {})
        for queue in queues:
            number = self._control.get(Word.GROUP_RESETS) + 1
            resets.pop(queue, None)
            resets[queue] = number
            self._control.put(Word.GROUP_RESETS, number)

    def check_heard(self, group: str, queue: tuple[str, int], heard: int | None) -> None:
        """ProtocolError FENCED for a commit of ``pop`` that has not heard of the last reset of ``queue``."""
        if heard is not None and self._resets.get(group, {}).get(queue, 0) > heard:
            raise ProtocolError(
                "FENCED", f"queue {queue[1]} of topic {queue[0]} in group {group}: its offset was reset"
            )

    def _unheard(self, group: str, heard: int) -> tuple[list[tuple[str, int]], int]:
        """The queues that were reset behind number ``heard``, and the number to hear next. What was heard is forgotten."""
        left = {queue: number for queue, number in self._resets.get(group, {}).items() if number > heard}
        if left:
            self._resets[group] = left
        else:
            self._resets.pop(group, None)
        told = list(left.items())[:_RESETS_AN_ANSWER]
        whole = len(told) == len(left)
        return [queue for queue, _ in told], self._control.get(Word.GROUP_RESETS) if whole else told[-1][1]

    def _share(self, header: Header, now_ms: int) -> Answer:
        """``topics``: the group's pop retry topics. ``revive``: the revive topic, of ``revive_queues`` queues. Without
        ``lease`` the group's kind is neither checked nor changed. ``heard``: the number of the last reset
        that the caller knows. With ``renew`` nothing is made, so that what an operator deleted stays deleted until a
        consumer receives again.
        """
        group = requests.text(header, "group")
        renews = requests.flag(header, "renew")
        if renews and group not in self._groups.table.groups:
            raise ProtocolError("GROUP_NOT_EXIST", f"group {group} was deleted")
        self._groups.use(group)
        if requests.flag(header, "lease") and (membership := self._groups.membership(group)) is not None:
            raise ProtocolError(
                "NO_PERMISSION",
                f"group {group} has {len(membership.members)} members (Consumer), each with queues of its own, so its"
                " consumers cannot share queues (ShareConsumer): use another group",
            )
        config = self._groups.config_of(group)
        if config.retry_queues < 1:
            raise ProtocolError("NO_PERMISSION", f"group {group} keeps no failed messages: its retryQueueNums is 0")
        names = requests.names(header, "topics")
        heard = requests.optional_integer(header, "heard", 0, _MAX_NUMBER)
        revive = requests.text(header, "revive")
        queues = requests.optional_integer(header, "revive_queues", 1, _MAX_REVIVE_QUEUES) or 1
        mine = (f"{RETRY_PREFIX}{group}_", f"{RETRY_PREFIX}{group}+")
        for name in (*(name for name in names if not name.startswith(mine)), revive):
            if name != revive or not name.startswith(_REVIVE_PREFIX):
                raise ProtocolError("INVALID_PARAMETER", f"{name!r:.200} is no topic of a group that shares queues")
        wanted = {**dict.fromkeys(names, 1), DLQ_PREFIX + group: 1, revive: queues, _TIMER_TOPIC: 1}
        for name, count in wanted.items():
            if renews and not self._topics.exists(name):
                raise ProtocolError("TOPIC_NOT_EXIST", f"topic {name} of group {group} was deleted")
            self._topics.ensure(name, count)
        if requests.flag(header, "lease"):
            self._forget_old(now_ms)
            self._until_ms[group] = now_ms + LEASE_MS
        staged = any(self._topics.is_staged(name) for name in wanted)
        fields: Fields = {
            "max_retries": config.max_retries,
            "priority_factor": config.priority_factor,
            "lease_ms": LEASE_MS,
        }
        if heard is not None:
            fields["resets"], fields["heard"] = self._unheard(group, heard)
        return Answer(lambda: fields, "topics" if staged else None)

    def _forget_old(self, now_ms: int) -> None:
        """Drop the leases that have ended, when there are twice as many as after the last time. One that lasts stays.
        There are not more than `pop.max_groups`, the groups for which ``pop`` renews them, and those that end now.
        """
        if len(self._until_ms) >= self._look_at:
            self._until_ms = {name: until for name, until in self._until_ms.items() if until > now_ms}
            self._resets = {name: resets for name, resets in self._resets.items() if name in self._until_ms}
            self._look_at = max(_LEASES, 2 * len(self._until_ms))


class GroupConfigOperations:
    """The operations on group settings; :attr:`operations` has it by name."""

    def __init__(self, groups: GroupCoordinator, shares: ShareOperations | None = None) -> None:
        """``shares`` knows the groups whose consumers share queues; None for none."""
        self._groups, self._shares = groups, shares
        self._log = get_log("coordinator")
        self.operations: Operations = {
            "group.config": self._config,
            "group.configs": self._configs,
            "group.delete": self._delete,
            "group.forbid": self._forbid,
        }

    def _config(self, header: Header, now_ms: int) -> Answer:
        """Without ``set`` the settings of a group that exists. With it they are changed, and a group may be made so; the
        answer comes when the file has them.
        """
        name = requests.text(header, "group")
        check_name(name)
        changes = header.get("set")
        if changes is None:
            known = self._groups.table.groups.get(name)
            if known is None:
                raise ProtocolError("GROUP_NOT_EXIST", f"there is no group {name!r}")
            fields = {"config": known.to_json()}
            return Answer(lambda: fields)
        if type(changes) is not dict:
            raise requests.refuse("set", "an object of settings", changes)
        self._groups.configure(name, changes)
        self._log.info("group configured", group=name, **{str(key)[:100]: value for key, value in changes.items()})
        fields = {"config": self._groups.config_of(name).to_json()}
        return Answer(lambda: fields, "groups")

    def _configs(self, header: Header, now_ms: int) -> Answer:
        """A page of the settings of all groups, by name, with what each must not read, and the version of them all.
        With ``unreadable`` of those that must not read everything: the switched off ones, and those of forbiddenTable.
        """
        after, limit = requests.optional_text(header, "after") or "", requests.limit(header, MAX_ENTRIES)
        table = self._groups.table
        asked = (
            table.groups
            if not requests.flag(header, "unreadable")
            else table.groups.keys() & (table.disabled | table.forbidden.keys())
        )
        names = sorted(asked)
        at = bisect_right(names, after)
        page = names[at : at + limit]
        fields = {
            "configs": [table.groups[name].to_json() for name in page],
            "forbidden": {name: table.forbidden[name] for name in page if name in table.forbidden},
            "version": table.version.to_json(),
            "next": page[-1] if at + limit < len(names) else None,
        }
        return Answer(lambda: fields)

    def _delete(self, header: Header, now_ms: int) -> Answer:
        """The settings of a group go. Members stay; whoever joins makes the group again. With ``unused`` a group that has
        consumers stays: NO_PERMISSION.
        """
        name = requests.text(header, "group")
        check_name(name)
        if requests.flag(header, "unused"):
            self._check_unused(name, now_ms)
        deleted = self._groups.unwritten.remove(self._groups.table, name)
        if deleted:
            self._log.info("group deleted", group=name)
        return Answer(lambda: {"deleted": deleted}, "groups" if self._groups.is_configured else None)

    def _check_unused(self, name: str, now_ms: int) -> None:
        membership = self._groups.membership(name)
        if membership is not None and (count := len(membership.members) or len(membership.awaited)):
            raise ProtocolError("NO_PERMISSION", f"group {name} has {count} members: close them first, or force it")
        if self._shares is not None and self._shares.is_shared(name, now_ms):
            sentence = (
                f"the consumers of group {name} share queues (ShareConsumer): try again {LEASE_MS // 1000} s after the last"
                " of them has closed, or force it"
            )
            raise ProtocolError("NO_PERMISSION", sentence)

    def _forbid(self, header: Header, now_ms: int) -> Answer:
        """Without ``readable`` only the answer."""
        name, topic = requests.text(header, "group"), requests.text(header, "topic")
        check_name(name)
        if "readable" in header:
            readable = requests.flag(header, "readable")
            if not readable:
                check_forbidden_size(self._groups.table, name, topic, self._groups.config)
            self._groups.use(name, consuming=False)
            bits = self._groups.unwritten.forbid(self._groups.table, name, topic, readable=readable)
            return Answer(lambda: {"forbidden": bits}, "groups")
        known = self._groups.table.forbidden.get(name) or {}
        return Answer(lambda: {"forbidden": int(known.get(topic, 0))})


def begin_anew(group: Membership, queue: Queue) -> None:
    """Let the member that holds ``queue`` begin it again. Without one nothing happens."""
    holder = group.holders.get(queue)
    if holder is None:
        return
    member = group.members[holder]
    group.generation += 1
    member.held[queue] = member.anew[queue] = group.generation
    member.claims.discard(queue)
    member.told = None  # its next answer has the new generation


def to_begin_anew(member: Member, read_generation: int) -> list[Queue]:
    """The queues that ``member`` must start over; ``read_generation`` is the newest that it has read."""
    if not member.anew:
        return []
    for queue, generation in list(member.anew.items()):
        if read_generation >= generation or queue not in member.held:
            del member.anew[queue]
    return sorted(member.anew)


class OffsetOperations:
    """The operations on committed offsets; :attr:`operations` has them by name."""

    def __init__(
        self,
        offsets: GroupOffsets,
        groups: GroupCoordinator,
        topics: TopicManager,
        ends: EndOffsets,
        shares: ShareOperations,
    ) -> None:
        self._offsets, self._groups, self._topics, self._ends, self._shares = offsets, groups, topics, ends, shares
        self.operations: Operations = {
            "offset.commit": self._commit,
            "offset.fetch": self._fetch,
            "offset.forget": self._forget,
        }

    def _commit(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.optional_text(header, "member")
        generation = requests.optional_integer(header, "generation", 0, _MAX_NUMBER)
        offsets = requests.offsets(header, "offsets")
        reset, begin, partial_ = (requests.flag(header, name) for name in ("reset", "begin", "partial"))
        anew = requests.flag(header, "running") and reset and member is None
        incarnations = requests.incarnations(header, "incarnations")
        known = requests.known_offsets(header, "known", len(offsets))
        generations = requests.known_offsets(header, "log_generations", len(offsets))
        heard = requests.optional_integer(header, "heard", 0, _MAX_NUMBER)
        self._groups.check_member(group, member, requests.optional_text(header, "instance") or "")
        wanted: list[tuple[str, int, int]] = []
        refused: list[tuple[str, int, str, str]] = []
        # All entries are checked before any is staged: a commit happens as a whole or not at all, except with
        # ``partial``.
        for number, (topic, queue, offset) in enumerate(offsets):
            try:
                # A commit for a deleted topic says nothing about the next topic of the same name.
                self._topics.check_incarnation(topic, incarnations.get(topic))
                self._topics.check_queue(topic, queue)
                if not anew and (not begin or member is None):  # any member may set where the group begins
                    self._groups.check_owner(group, member, (topic, queue), generation)
                self._shares.check_heard(group, (topic, queue), heard)
                if known is not None:
                    self._check_known(group, topic, queue, known[number])
            except ProtocolError as error:
                if not partial_ or error.code == "UNKNOWN_MEMBER":
                    raise
                refused.append((topic, queue, error.code, error.message))
                continue
            learnt = -1 if generations is None else generations[number]
            wanted.append((topic, queue, self._within(topic, queue, offset, learnt)))
        self._groups.use(group, consuming=False)
        # Offsets may go back in three cases: when a reset asks for it; in memory topics, which begin again with the
        # node, so that a consumer that lived on is right; and when the committed offset lies behind the queue's end.
        free = [one for one in wanted if reset or self._topics.is_memory(one[0]) or self._is_ahead(group, *one[:2])]
        stored = self._offsets.stage(group, wanted, lower=[one[:2] for one in free], only_new=begin)
        if anew and (membership := self._groups.membership(group)) is not None:
            for topic, queue, _ in wanted:
                begin_anew(membership, (topic, queue))
        # (Commits with ``partial`` are those of one client that continues, if none asks for its members too.)
        if anew or (reset and member is None and not partial_):
            self._shares.note_resets(group, [one[:2] for one in wanted], now_ms)
        return Answer(lambda: {"stored": stored, **({"refused": refused} if partial_ else {})}, "offsets")

    def _check_known(self, group: str, topic: str, queue: int, known: int) -> None:
        """Raise FENCED when the group's offset lies below the one that the member knew: an operator has reset it since,
        and messages that the member read after that must not undo the reset.
        """
        stored = self._offsets.staged_offset(group, topic, queue)
        if stored < known and not self._topics.is_memory(topic):
            raise ProtocolError(
                "FENCED",
                f"queue {queue} of topic {topic} in group {group}: its offset was reset from {known} to {max(stored, 0)}",
            )

    def _within(self, name: str, queue: int, offset: int, generation: int = -1) -> int:
        """``offset``, or the queue's end when ``offset`` lies behind it: its end now, and at the cuts of the log since
        ``generation``, in which the offset was learnt; -1 when that is not known.
        """
        topic = self._topics.get(name)
        if generation >= 0 and (cut := self._ends.end_since(topic, queue, generation)) is not None:
            offset = min(offset, cut)
        end = self._ends.end(topic, queue, offset, self._topics.deletions.tombstones.get(name, 0))
        return offset if end is None else min(offset, end)

    def _is_ahead(self, group: str, topic: str, queue: int) -> bool:
        """Whether the committed offset lies behind the queue's end."""
        stored = self._offsets.staged_offset(group, topic, queue)
        return stored > 0 and self._within(topic, queue, stored) < stored

    def _fetch(self, header: Header, now_ms: int) -> Answer:
        group = requests.text(header, "group")
        check_name(group)
        queues = requests.queues(header, "queues")
        generation = self._ends.cuts.generation
        # Read after the turn's sync: a client that sends a commit and a fetch without waiting gets the committed
        # offset.
        return Answer(
            lambda: {
                "offsets": [(topic, queue, self._offsets.fetch(group, topic, queue)) for topic, queue in queues],
                "incarnations": self._topics.incarnations({topic for topic, _ in queues}),
                "log_generation": generation,
            }
        )

    def _forget(self, header: Header, now_ms: int) -> Answer:
        """An administrator deletes the group with its offsets."""
        group = requests.text(header, "group")
        check_name(group)
        self._offsets.stage_forget(group)
        return Answer(dict, "offsets")


_SESSION_TIMEOUT_MIN_MS = 200
_SESSION_TIMEOUT_MAX_MS = 30 * 60_000
_MIN_HEARTBEAT_MS = 50
# While queues change hands members come this much more often, so that a rebalance takes little more than one interval.
_REBALANCE_SPEEDUP = 10
_MAX_HEARTBEATS = 1_000


class GroupOperations:
    """The operations of group members; :attr:`operations` has them by name."""

    def __init__(
        self,
        groups: GroupCoordinator,
        topics: TopicManager,
        subscriptions: Subscriptions,
        listing: Listing,
        shares: ShareOperations,
        broker_name: str,
    ) -> None:
        self._groups, self._topics, self._subscriptions, self._listing = groups, topics, subscriptions, listing
        self._shares = shares
        self._broker_name = broker_name
        self._log = get_log("coordinator")
        self.who: Callable[[], str | None] = lambda: None
        """The user of the request that is handled at the moment; None for nobody."""
        self.operations: Operations = {
            "group.join": self._join,
            "group.heartbeat": self._heartbeat,
            "group.heartbeats": self._heartbeats,
            "group.leave": self._leave,
            "group.list": self._list,
            "group.describe": self._describe,
            "group.positions": self._positions,
            "group.retry_topics": self._retry_topics,
        }

    def _join(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        wanted = requests.names(header, "topics")
        self._groups.check_topics(len(wanted))
        for name in wanted:
            topic_rules.check_name(name)
        timeout_ms = requests.optional_integer(
            header, "session_timeout_ms", _SESSION_TIMEOUT_MIN_MS, _SESSION_TIMEOUT_MAX_MS
        )
        timeout_ms = self._groups.config.session_timeout_ms if timeout_ms is None else timeout_ms
        owned = requests.queues(header, "owned", optional=True)
        generation = requests.optional_integer(header, "generation", 0, _MAX_NUMBER) or 0
        kind, expression = requests.selector(header, "filter")
        instance = requests.optional_text(header, "instance") or ""
        named = requests.optional_text(header, "strategy", MAX_STRATEGY_CHARACTERS)
        strategy = None if named is None else AllocationTable(named, self._broker_name)
        self._shares.check_assigned(group, now_ms)
        user = self.who() or ""
        membership = self._groups.membership(group)
        known = None if membership is None else membership.members.get(member)
        # The node's own account, and its processes, have no user.
        if user and known is not None and known.user != user:
            sentence = f"group {group}: {member!r} is the name of another user's consumer: choose another"
            raise ProtocolError("FENCED", sentence)
        view = self._groups.join(group, member, wanted, owned, timeout_ms, now_ms, generation, instance, strategy)
        joined = self._groups.membership(group)
        assert joined is not None
        joined.members[member].user = user
        # The retry topic is read without a filter: its messages have passed one, or come from an ordered consumer.
        filtered = [name for name in wanted if name != RETRY_PREFIX + group]
        self._subscriptions.join(group, filtered, expression if kind == SQL else None)
        self._log.info("member joined", group=group, member=member, topics=len(wanted))
        missing = sorted(name for name in wanted if not self._topics.exists(name))
        more: Fields = {"kept": view.kept, "missing": missing, **self._anew(group, member, generation)}
        more |= self._members(header, group, view, generation)
        return Answer(lambda: {**self._view(view, timeout_ms), **more})

    def _heartbeat(self, header: Header, now_ms: int) -> Answer:
        instance = requests.optional_text(header, "instance") or ""
        view, timeout_ms, more = self._heard(header, instance, now_ms, requests.queues(header, "owned"))
        return Answer(lambda: {**self._view(view, timeout_ms), **more})

    def _heartbeats(self, header: Header, now_ms: int) -> Answer:
        """Heartbeats of a gateway's members. The answer has only those that have to learn something."""
        instance = requests.optional_text(header, "instance") or ""
        changed: list[tuple[int, View, int, Fields]] = []
        refused: list[tuple[int, str, str]] = []
        for index, one in enumerate(requests.objects(header, "members", _MAX_HEARTBEATS)):
            try:
                owned = None if one.get("owned") is None else requests.queues(one, "owned")
                view, timeout_ms, more = self._heard({**one, "members": True}, instance, now_ms, owned)
            except ProtocolError as error:
                refused.append((index, error.code, error.message))
                continue
            if more or view.revoke or view.generation != one["generation"]:
                changed.append((index, view, timeout_ms, more))
        return Answer(
            lambda: {
                "changed": [[index, {**self._view(view, ms), **more}] for index, view, ms, more in changed],
                "refused": refused,
            }
        )

    def _heard(self, header: Header, instance: str, now_ms: int, owned: list[Queue] | None) -> tuple[View, int, Fields]:
        """One heartbeat: the answer for the member, its session's length and further fields."""
        group, member = requests.text(header, "group"), requests.text(header, "member")
        generation = requests.integer(header, "generation", 0, _MAX_NUMBER)
        self._groups.check_enabled(group)
        view = self._groups.heartbeat(group, member, generation, owned, now_ms, instance)
        membership = self._groups.membership(group)
        assert membership is not None
        more = self._anew(group, member, generation)
        more |= self._members(header, group, view, generation)
        return view, membership.member_of(member).session_timeout_ms, more

    def _members(self, header: Header, group: str, view: View, generation: int) -> Fields:
        """Names and instances of all members, for a gateway that asks for them: when they may be others than before."""
        membership = self._groups.membership(group)
        if not requests.flag(header, "members") or membership is None or view.generation == generation:
            return {}
        return {"members": [[name, one.instance] for name, one in sorted(membership.members.items())]}

    def _anew(self, group: str, member: str, generation: int) -> Fields:
        membership = self._groups.membership(group)
        queues = [] if membership is None else to_begin_anew(membership.member_of(member), generation)
        return {"anew": queues} if queues else {}

    def _view(self, view: View, session_timeout_ms: int) -> Fields:
        # Three heartbeats fit into every session, so that one lost heartbeat ends nothing.
        interval_ms = max(_MIN_HEARTBEAT_MS, min(self._groups.config.heartbeat_interval_ms, session_timeout_ms // 3))
        soon_ms = max(_MIN_HEARTBEAT_MS, interval_ms // _REBALANCE_SPEEDUP)
        return {
            "generation": view.generation,
            "assigned": view.assigned,
            "incarnations": self._topics.incarnations({topic for topic, _ in view.assigned}),
            "revoke": view.revoke,
            "heartbeat_interval_ms": interval_ms,
            "next_heartbeat_ms": interval_ms if view.settled else soon_ms,
            "session_timeout_ms": session_timeout_ms,
        }

    def _leave(self, header: Header, now_ms: int) -> Answer:
        group, member = requests.text(header, "group"), requests.text(header, "member")
        self._groups.leave(group, member, requests.optional_text(header, "instance") or "")
        self._log.info("member left", group=group, member=member)
        return Answer(dict)

    def _list(self, header: Header, now_ms: int) -> Answer:
        after, limit = requests.cursor(header, str, str), requests.limit(header, MAX_ENTRIES)
        return Answer(lambda: self._listing.groups(after, limit))

    def _positions(self, header: Header, now_ms: int) -> Answer:
        after, limit = requests.cursor(header, str, str, int), requests.limit(header, MAX_ENTRIES)
        return Answer(lambda: self._listing.positions(after, limit))

    def _describe(self, header: Header, now_ms: int) -> Answer:
        name, limit = requests.text(header, "group"), requests.limit(header, MAX_ENTRIES)
        after = requests.part_cursor(header)
        described = self._listing.describe_group(name, after, limit, now_ms)
        described["group"]["broker"] = self._broker_name  # by which strategies tell the queues of nodes apart
        return Answer(lambda: described)

    def _retry_topics(self, header: Header, now_ms: int) -> Answer:
        group = requests.text(header, "group")
        self._groups.use(group)
        config = self._groups.config_of(group)
        if config.retry_queues < 1:
            # RocketMQ drops the failed messages of such a group. A program that handles messages should know.
            raise ProtocolError("NO_PERMISSION", f"group {group} keeps no failed messages: its retryQueueNums is 0")
        retry, dead = RETRY_PREFIX + group, DLQ_PREFIX + group
        wanted = {retry: min(config.retry_queues, topic_rules.MAX_QUEUES)}
        if not requests.flag(header, "only_retry"):
            wanted[dead] = 1
        for name, queues in wanted.items():
            if not self._topics.exists(name):
                self._topics.create(name, queues)
        staged = any(self._topics.is_staged(name) for name in wanted)
        fields = {"retry": retry, "dead": dead, "max_retries": config.max_retries}
        return Answer(lambda: fields, "topics" if staged else None)
