"""Texts that tools store in a name server, by namespace and key: ``kvConfig.json`` (remoting 7.3)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from commitmq.files import atomic_file
from commitmq_plugins.rocketmq.remoting.errors import RemotingError
from commitmq_plugins.rocketmq.remoting.fastjson import as_map, as_text, dumps, load_object

ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"
MAX_BYTES: Final = 1 << 20


class KVConfigFullError(RemotingError):
    """The texts together would have more bytes than allowed."""


class KVConfig:
    """All texts. A change is on the device when its call returns; a file that cannot be written raises OSError."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Reads the file. Raises BodyError if it has another content, OSError if it cannot be read."""
        self._path, self._max_bytes = path, max_bytes
        self._table: dict[str, dict[str, str]] = {}
        if path.exists():
            members = load_object(path.read_bytes())
            self._table = as_map(
                members.get("configTable"),
                "configTable",
                lambda one: as_map(one, "a namespace", lambda text: as_text(text, "a value")),
            )

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All texts of a namespace, None if there never was one."""
        found = self._table.get(namespace)
        return None if found is None else dict(found)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Raises KVConfigFullError."""
        table = {name: dict(texts) for name, texts in self._table.items()}
        table.setdefault(namespace, {})[key] = value
        self._store(table)

    def delete(self, namespace: str, key: str) -> None:
        """Nothing happens for a key that is not there."""
        if key in self._table.get(namespace, {}):
            table = {name: dict(texts) for name, texts in self._table.items()}
            del table[namespace][key]
            self._store(table)

    def _store(self, table: dict[str, dict[str, str]]) -> None:
        data = dumps({"configTable": table})
        if len(data) > self._max_bytes:
            raise KVConfigFullError(
                f"the stored texts would take {len(data)} bytes, at most {self._max_bytes} are allowed"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.replace(self._path, data, "namesrv.kv_config")
        self._table = table
