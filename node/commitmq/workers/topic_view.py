"""A worker's copy of the topic table, kept up to date by the coordinator's news and its version word."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
import zmq

from commitmq.control import Word
from commitmq.store.topic_config import TopicConfig, TopicTable
from commitmq.workers.runtime import WorkerContext


class TopicView:
    """Topics by name. News come over PUB/SUB and may be lost; a newer ``topics_version`` makes it read the file again."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._path = context.layout.config / "topics.json"
        self._tombstones_path = context.layout.own / "deleted_topics.json"
        self.socket: zmq.Socket[bytes] = context.zmq.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"topics")
        self.socket.connect(context.layout.ipc("topics"))
        self._version = context.control.get(Word.TOPICS_VERSION)
        self._topics = TopicTable.load(self._path).topics
        self.deleted = self._load_tombstones()

    def get(self, name: str) -> TopicConfig | None:
        return self._topics.get(name)

    def unknown(self, name: str) -> bool:
        return name not in self._topics

    def learn(self, name: str, route: dict[str, Any]) -> None:
        """Take over one topic as ``topic.route`` describes it."""
        self._topics[name] = TopicConfig(
            name,
            read_queues=route["read_queues"],
            write_queues=route["write_queues"],
            perm=route["perm"],
            attributes=route.get("attributes") or {},
        )

    def hear(self) -> list[tuple[str, int]]:
        """Take the news; returns the topics deleted since, with the physical offset below which nothing is theirs."""
        gone: list[tuple[str, int]] = []
        with contextlib.suppress(zmq.Again):
            while True:
                news = orjson.loads(self.socket.recv_multipart(zmq.NOBLOCK)[1])
                for name, offset in news.get("deleted", []):
                    gone.extend(self._delete(name, offset))
                for name, route in news.get("topics", {}).items():
                    self.learn(name, {**route, "name": name})
                self._version = max(self._version, news["version"])
        if self._context.control.get(Word.TOPICS_VERSION) > self._version:
            self._version = self._context.control.get(Word.TOPICS_VERSION)
            for name, offset in self._load_tombstones().items():
                gone.extend(self._delete(name, offset))
            self._topics = TopicTable.load(self._path).topics
        return gone

    def _delete(self, name: str, offset: int) -> list[tuple[str, int]]:
        if self.deleted.get(name, -1) >= offset:
            return []
        self.deleted[name] = offset
        self._topics.pop(name, None)
        return [(name, offset)]

    def _load_tombstones(self) -> dict[str, int]:
        try:
            return {str(name): int(offset) for name, offset in orjson.loads(self._tombstones_path.read_bytes()).items()}
        except FileNotFoundError:
            return {}
