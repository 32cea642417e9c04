"""The settings of groups: legal names, sizes, what a setting forbids, and changed settings until the file has them."""

from __future__ import annotations

from typing import Any

import orjson

from commitmq.config import GroupsConfig
from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.store.metadata.group_config import GroupConfig, GroupTable
from commitmq.store.metadata.topic_config import validate_group


class UnwrittenSettings:
    """Groups whose settings were changed in a table and are not in its file yet, with their settings in the file, and the
    topics that they must not read there.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[GroupConfig | None, dict[str, Any] | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._before)

    def note(self, table: GroupTable, name: str) -> None:
        """Call it before the group is changed."""
        if name not in self._before:
            forbidden = table.forbidden.get(name)
            self._before[name] = table.groups.get(name), None if forbidden is None else dict(forbidden)

    def remove(self, table: GroupTable, name: str) -> bool:
        """Forget the settings of a group; whoever uses it makes it again. False when there were none."""
        known = table.groups.get(name)
        if known is None:
            return False
        self.note(table, name)
        table.remove(name)
        return True

    def forbid(self, table: GroupTable, name: str, topic: str, *, readable: bool) -> int:
        """Say whether an existing group may read ``topic``. Returns its bits of ``forbiddenTable``."""
        self.note(table, name)
        return table.forbid(name, topic, readable=readable)

    def clear(self) -> None:
        """The file has them."""
        self._before.clear()

    def take_back(self, table: GroupTable) -> list[str]:
        """The file could not be written: nothing was changed. Returns the names of groups that do not exist then."""
        removed = []
        for name, (group, forbidden) in self._before.items():
            if group is not None:
                table.put(group)
            else:
                table.remove(name)
                removed.append(name)
            table.put_forbidden(name, forbidden)
        self._before.clear()
        return removed


def check_name(name: str) -> None:
    """ProtocolError INVALID_PARAMETER unless ``name`` is a legal group name."""
    try:
        validate_group(name)
    except InvalidMessageError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error


def check_enabled(name: str, group: GroupConfig | None) -> None:
    """ProtocolError NO_PERMISSION when an administrator has switched the group off."""
    if group is not None and not group.consume_enabled:
        raise ProtocolError(
            "NO_PERMISSION",
            f"group {name} may not consume: its consumeEnable is off"
            f" (`commitmq group config {name} --set consumeEnable=true` switches it on)",
        )


def check_size(table: GroupTable, known: GroupConfig | None, group: GroupConfig, config: GroupsConfig) -> None:
    """ProtocolError LIMIT_EXCEEDED when the settings of one group, or of all, would be too large. A smaller one passes."""
    before, size = 0 if known is None else known.object_bytes, group.object_bytes
    _check_room(table, group.name, size, max(0, size - before), config)


def check_forbidden_size(table: GroupTable, name: str, topic: str, config: GroupsConfig) -> None:
    """The same for one more topic that a group must not read."""
    known = table.forbidden.get(name) or {}
    if topic not in known:
        more = len(orjson.dumps(topic)) + 4
        _check_room(table, name, len(orjson.dumps(known)) + more, more, config)


def _check_room(table: GroupTable, name: str, size: int, more: int, config: GroupsConfig) -> None:
    if more and size > (most := config.max_group_settings_bytes):
        raise ProtocolError(
            "LIMIT_EXCEEDED",
            f"the settings of group {name} would have {size} bytes, at most {most} are allowed"
            " (groups.max_group_settings_bytes)",
        )
    if more and table.object_bytes + more > (most := config.max_settings_bytes):
        raise ProtocolError(
            "LIMIT_EXCEEDED",
            f"the settings of all groups would have {table.object_bytes + more} bytes, at most {most} are allowed"
            " (groups.max_settings_bytes)",
        )


def changed(name: str, known: GroupConfig | None, changes: dict[str, object]) -> GroupConfig:
    """The group with other settings. ProtocolError INVALID_PARAMETER for a setting or a value that is none."""
    try:
        return (known or GroupConfig(name)).changed(changes)
    except ValueError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error
