"""The methods of an administrator's client that carry the settings of topics and groups from one node to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from commitmq.client.admin_results import TopicInfo
from commitmq.client.exported_config import FIXED, FORMAT, VERSION, ExportedConfig, exported_settings, is_exported
from commitmq.errors import GroupNotFoundError, ProtocolError, TopicNotFoundError
from commitmq.store.metadata.topic_config import is_system_group


class ConfigChange(NamedTuple):
    """What an import changes: ``kind`` is ``topic``, ``group`` or ``offset``, ``name`` says which.

    ``before`` and ``after`` have the settings that differ; ``before`` is None for what is new. ``error``: why the node refused
    it, else None.
    """

    kind: str
    name: str
    before: dict[str, Any] | None
    after: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ConfigImport:
    """``conflicts``: what the node can never take, a sentence each; nothing was changed then. ``applied``: the changes were
    made, except those with an error.
    """

    changes: list[ConfigChange]
    conflicts: list[str]
    applied: bool


class ConfigAdmin:
    """A part of :class:`commitmq.Admin`."""

    def export_config(self, *, offsets: bool = False) -> dict[str, Any]:
        """The settings of all topics and groups, as a JSON document, with ``offsets`` also what groups have committed.

        Topics and groups of the system, and topics of retries and dead letters, are not in it; see
        :mod:`commitmq.client.exported_config`. Users are added by ``commitmq export config --users``, on the node's machine.
        """
        topics = [one for one in self.topics() if is_exported(one.name, system=one.system)]
        settings = self._group_settings()
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "node": self.metadata()["node"],
            "exported": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "topics": [{"name": one.name, **_settings_of(one)} for one in topics],
            "groups": [{"name": name, "settings": one} for name, one in settings.items() if not is_system_group(name)],
            "offsets": None,
        }
        if offsets:
            exported = {one.name for one in topics}
            document["offsets"] = [
                {"group": one["name"], "topic": topic, "queue": queue, "offset": offset}
                for one in self.groups()
                if not is_system_group(one["name"])
                for topic, queue, offset in self._committed(one["name"])
                if topic in exported
            ]
        return document

    def import_config(self, document: object, *, offsets: bool = False, dry_run: bool = False) -> ConfigImport:
        """Give the node the topics and groups of ``document``, with ``offsets`` also what groups have committed.

        What the document does not name stays as it is, and so do users, which only ``commitmq import config`` takes. An offset
        moves ahead only. With ``dry_run`` nothing changes. Raises ValueError, which names the place, for what is no such
        document.
        """
        wanted = ExportedConfig.of(document)
        if offsets and wanted.offsets is None:
            raise ValueError("offsets: the document has none; export it with them")
        changes, conflicts = self._topic_changes(wanted)
        changes += self._group_changes(wanted)
        if offsets:
            moves, beyond = self._offset_changes(wanted)
            changes, conflicts = changes + moves, conflicts + beyond
        if dry_run or conflicts:
            return ConfigImport(changes, conflicts, applied=False)
        return ConfigImport([self._applied(one, wanted) for one in changes], [], applied=True)

    # ------------------------------------------------------------ differences

    def _topic_changes(self, wanted: ExportedConfig) -> tuple[list[ConfigChange], list[str]]:
        changes, conflicts = [], []
        known = {one.name: one for one in self.topics()}
        for name, settings in wanted.topics.items():
            now = known.get(name)
            if now is None:
                changes.append(ConfigChange("topic", name, None, settings))
                continue
            before = {**_settings_of(now), **{f"attributes.{one}": value for one, value in now.attributes.items()}}
            after = {**settings, **{f"attributes.{one}": value for one, value in settings["attributes"].items()}}
            del after["attributes"]
            for one, default in FIXED.items():
                if (value := settings["attributes"].get(one, default)) != (has := now.attributes.get(one, default)):
                    conflicts.append(f"topic {name} has {one} {has}, not {value}, and that never changes")
            differing = {one: value for one, value in after.items() if before.get(one) != value}
            if differing:
                changes.append(ConfigChange("topic", name, {one: before.get(one) for one in differing}, differing))
        return changes, conflicts

    def _group_changes(self, wanted: ExportedConfig) -> list[ConfigChange]:
        changes = []
        known = self._group_settings()
        for name, settings in wanted.groups.items():
            now = known.get(name)
            differing = (
                settings if now is None else {one: value for one, value in settings.items() if now.get(one) != value}
            )
            if now is None or differing:
                before = None if now is None else {one: now.get(one) for one in differing}
                changes.append(ConfigChange("group", name, before, differing))
        return changes

    def _offset_changes(self, wanted: ExportedConfig) -> tuple[list[ConfigChange], list[str]]:
        changes, conflicts = [], []
        committed: dict[str, dict[tuple[str, int], int]] = {}
        ends: dict[str, dict[int, int]] = {}
        for (group, topic, queue), offset in (wanted.offsets or {}).items():
            if group not in committed:
                committed[group] = {(one, number): at for one, number, at in self._committed(group)}
            if topic not in ends:
                ends[topic] = self._ends(topic)
            before, end = committed[group].get((topic, queue)), ends[topic].get(queue, 0)
            if offset > end:
                conflicts.append(
                    f"group {group} is at {offset} in queue {queue} of {topic}, which ends at {end} here:"
                    " the messages before are missing"
                )
            elif before is None or offset > before:
                name = f"{group} {topic} {queue}"
                changes.append(
                    ConfigChange("offset", name, None if before is None else {"offset": before}, {"offset": offset})
                )
        return changes, conflicts

    # ------------------------------------------------------------ the node

    def _applied(self, change: ConfigChange, wanted: ExportedConfig) -> ConfigChange:
        try:
            if change.kind == "topic":
                self._put_topic(change.name, wanted.topics[change.name])
            elif change.kind == "group":
                self._ask("coordinator", "group.config", {"group": change.name, "set": change.after})
            else:
                group, topic, queue = change.name.split(" ")
                offsets = [[topic, int(queue), change.after["offset"]]]
                self._ask("coordinator", "offset.commit", {"group": group, "offsets": offsets, "by_person": True})
        except ProtocolError as error:
            return change._replace(error=error.message)
        return change

    def _put_topic(self, name: str, settings: dict[str, Any]) -> None:
        try:
            known = TopicInfo.of(self._ask("coordinator", "topic.describe", {"topic": name})["topic"]).attributes
        except TopicNotFoundError:
            known = {}
        fields = {
            "topic": name,
            "queues": settings["write_queues"],
            "read_queues": settings["read_queues"],
            "perm": settings["perm"],
            "attributes": {**known, **settings["attributes"]},
            "update": True,
        }
        self._ask("coordinator", "topic.create", fields)

    def _group_settings(self) -> dict[str, dict[str, Any]]:
        rows = [row for page in self._pages("group.configs", {}) for row in page["configs"]]
        return {str(row["groupName"]): exported_settings(row) for row in rows}

    def _committed(self, group: str) -> list[tuple[str, int, int]]:
        try:
            return [(topic, queue, offset) for topic, queue, offset in self.group(group)["offsets"]]
        except GroupNotFoundError:
            return []

    def _ends(self, topic: str) -> dict[int, int]:
        try:
            rows = self._ask("reader", "offsets", {"topic": topic})["queues"]
        except TopicNotFoundError:
            return {}
        return {row[0]: row[2] for row in rows}

    def topics(self) -> list[TopicInfo]:
        raise NotImplementedError

    def groups(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def group(self, name: str) -> dict[str, Any]:
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        raise NotImplementedError

    def _pages(self, op: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _ask(self, role: str, op: str, fields: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        raise NotImplementedError


def _settings_of(topic: TopicInfo) -> dict[str, Any]:
    names = ("read_queues", "write_queues", "perm", "attributes")
    return {name: getattr(topic, name) for name in names}
