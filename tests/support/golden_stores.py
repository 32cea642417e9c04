"""The golden stores' constants and the object that the fixtures of conftest.py hand out."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commitmq.store.layout import StoreLayout

_ARCHIVES = Path(__file__).parents[1] / "golden"
GOLDEN_NAMES = ("clean", "crash")
# With the third one, which has what a plain client does not send: transactions, delays, retries and dead letters.
ALL_GOLDEN_NAMES = (*GOLDEN_NAMES, "semantics")
GOLDEN_SEGMENT_BYTES = 131_072
GOLDEN_QUEUE_FILE_BYTES = 1_000


@dataclass(frozen=True)
class GoldenStore:
    """One unpacked golden store; ``messages`` are the lines of its messages.jsonl, decoded."""

    name: str
    root: Path
    messages: list[dict[str, Any]]
    lines: list[str]

    @property
    def layout(self) -> StoreLayout:
        return StoreLayout(self.root)


def unpack(name: str, folder: Path) -> GoldenStore:
    """Unpack golden store ``name`` into ``folder``."""
    with tarfile.open(_ARCHIVES / f"rocketmq-5.4.0-{name}.tar.gz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:  # Python 3.11 before 3.11.4; the archives are our own
            archive.extractall(folder)
    lines = (folder / "messages.jsonl").read_text(encoding="utf-8").splitlines()
    return GoldenStore(name, folder / "store", [json.loads(line) for line in lines], lines)
