"""The operations on settings of groups in ``subscriptionGroup.json``, under RocketMQ's names.

``group.config`` shows and changes them, ``group.configs`` lists those of all groups, ``group.delete`` forgets them, and
``group.forbid`` says which topics a group must not read.
"""

from __future__ import annotations

from bisect import bisect_right

from commitmq.coordination import requests
from commitmq.coordination.answers import Answer, Operations
from commitmq.coordination.group_settings import check_forbidden_size, check_name
from commitmq.coordination.groups import Groups
from commitmq.coordination.listing import MAX_ENTRIES
from commitmq.coordination.requests import Header
from commitmq.coordination.share_operations import LEASE_MS, ShareOperations
from commitmq.errors import ProtocolError
from commitmq.log import get_log


class GroupConfigOperations:
    """See the module; :attr:`operations` has it by name."""

    def __init__(self, groups: Groups, shares: ShareOperations | None = None) -> None:
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
