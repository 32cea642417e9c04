"""What a request changes, for the audit log: its resource, what was there before, and what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from commitmq.coordination.groups import Groups
from commitmq.coordination.offsets import GroupOffsets
from commitmq.coordination.requests import Header
from commitmq.coordination.topics import Topics, describe
from commitmq.format.constants import DEAD_LETTER_GROUP, DEAD_LETTER_PASSES, DLQ_PREFIX

_MOST_QUEUES: Final = 16
_OF_TOPICS: Final = ("queues", "read_queues", "write_queues", "perm", "attributes", "order", "sys_flag", "filter_type")


class Change(NamedTuple):
    """``before`` and ``after``: None where there is nothing. ``operation``: its name, if not the request's."""

    resource: str
    before: Any = None
    after: Any = None
    operation: str = ""


class Changes:
    """Knows the requests that change something by a person's will; what consumers do as they run is none."""

    def __init__(self, topics: Topics, groups: Groups, offsets: GroupOffsets) -> None:
        self._topics, self._groups, self._offsets = topics, groups, offsets
        self._kinds: dict[str, Callable[[Header, str], Change | None]] = {
            "topic.create": self._create,
            "topic.route": self._route,
            "topic.delete": self._delete,
            "group.config": self._config,
            "group.delete": self._group_delete,
            "group.forbid": self._forbid,
            "offset.commit": self._commit,
            "offset.forget": self._forget,
        }

    def of(self, header: Header) -> Change | None:
        """The change that ``header`` asks for; None for none, and for a request that its operation refuses. Ask before it is
        handled.
        """
        found = self._kinds.get(header["op"])
        name = header.get("topic" if header["op"].startswith("topic.") else "group")
        return None if found is None or type(name) is not str else found(header, name)

    def _topic(self, name: str) -> dict[str, Any] | None:
        known = self._topics.table.topics.get(name)
        return None if known is None else describe(known)

    def _create(self, header: Header, name: str) -> Change:
        """A topic that is made or changed; or the beginning of a resend of dead letters, whose group is in ``resends``."""
        if name == DEAD_LETTER_PASSES and type(header.get("resends")) is str:
            return Change(f"Group:{header['resends']}", operation="dlq.resend")
        before, after = self._topic(name), {key: header[key] for key in _OF_TOPICS if key in header}
        if before is None or header.get("update") is not True:
            return Change(f"Topic:{name}", before, after)
        queues = after.pop("queues", None)
        both = {} if queues is None else {"read_queues": queues, "write_queues": queues}
        return Change(f"Topic:{name}", before, {**both, **after}, "topic.update")

    def _route(self, header: Header, name: str) -> Change | None:
        """A producer's first look at a topic makes it, where the node lets it."""
        makes = header.get("create") is True and self._topics.auto_creates and name not in self._topics.table.topics
        return Change(f"Topic:{name}") if makes else None

    def _delete(self, header: Header, name: str) -> Change:
        return Change(f"Topic:{name}", self._topic(name))

    def _config(self, header: Header, name: str) -> Change | None:
        if header.get("set") is None:
            return None
        known = self._groups.table.groups.get(name)
        return Change(f"Group:{name}", None if known is None else known.to_json(), header["set"])

    def _group_delete(self, header: Header, name: str) -> Change:
        return Change(f"Group:{name}")

    def _forbid(self, header: Header, name: str) -> Change | None:
        if "readable" not in header:
            return None
        return Change(f"Group:{name}", None, {"topic": header.get("topic"), "readable": header["readable"]})

    def _commit(self, header: Header, name: str) -> Change | None:
        """A commit by hand: queues as ``[topic, queue, offset]``, -1 before for one without. ``from``: the group that was
        there before.
        """
        queues, source = header.get("offsets"), header.get("copied_from")
        by_person, resets = header.get("by_person") is True, header.get("reset") is True
        if header.get("member") is not None or type(queues) is not list:
            return None
        if not (resets or by_person or type(source) is str):
            return None
        shown = [one for one in queues[:_MOST_QUEUES] if _is_queue(one)]
        before = [[topic, queue, self._offsets.staged_offset(name, topic, queue)] for topic, queue, _ in shown]
        more = {"more": len(queues) - len(shown)} if len(queues) > len(shown) else {}
        if name == DEAD_LETTER_GROUP and by_person:
            name = shown[0][0].removeprefix(DLQ_PREFIX) if shown else name
            return Change(f"Group:{name}", {"offsets": before}, {"offsets": shown, **more}, "dlq.purge")
        operation = "group.reset" if resets else "group.clone" if type(source) is str else ""
        copied = {"from": source} if type(source) is str else {}
        return Change(f"Group:{name}", {"offsets": before}, {**copied, "offsets": shown, **more}, operation)

    def _forget(self, header: Header, name: str) -> Change:
        return Change(f"Group:{name}")


def _is_queue(one: Any) -> bool:
    return type(one) is list and [type(part) for part in one] == [str, int, int]
