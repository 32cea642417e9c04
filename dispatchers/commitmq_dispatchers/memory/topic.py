"""One memory topic in its process."""

from __future__ import annotations

import mmap
from pathlib import Path

from commitmq.errors import DiskFullError
from commitmq.format.file_names import segment_name
from commitmq.store.log.append import CommitLogAppender
from commitmq.store.memory.shared_memory import PAGE_BYTES, SharedPage
from commitmq_dispatchers.memory.units import UnitFiles


class Topic:
    """One topic. ``segments``: allocated bytes of each existing segment, by its first offset, ascending."""

    __slots__ = ("appender", "folder", "head", "incoming_bytes", "map", "name", "queues", "refusal", "segments", "used")

    def __init__(self, name: str, folder: Path, head: SharedPage, appender: CommitLogAppender) -> None:
        self.name = name
        self.folder = folder
        self.head = head
        self.appender = appender
        self.queues: dict[int, UnitFiles] = {}
        self.segments: dict[int, int] = {}
        self.map: mmap.mmap | None = None  # the appender's map of the active segment
        self.incoming_bytes = 0  # size of the append under way
        self.refusal: DiskFullError | None = None  # why it got no segment
        self.used = PAGE_BYTES

    def segment_path(self, base: int) -> str:
        return f"{self.folder}/log/{segment_name(base)}"
