"""A plugin whose dispatcher does as a file says: goes well, raises, hangs, exits, eats memory, or is slow.

It also answers badly: from ``open``, from ``flush``, to questions. It records the physical offset of every record it saw
in SQLite, with its position in the same transaction: what it has in there is exactly what it dispatched, however it
ended. The file is read before every batch.
"""

from __future__ import annotations

import ast
import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commitmq import hookimpl
from commitmq.config import NodeConfig, setting
from commitmq.plugin.hookspecs import ConfigSection, DispatcherSpec, DispatcherView
from commitmq.store.log.dispatch_batch import DispatchBatch


@dataclass(frozen=True)
class Settings:
    """``mode_file`` holds one of the words of :meth:`Misbehaving._behave`, and for ``poison`` a physical offset."""

    mode_file: str = setting("")


@hookimpl
def commitmq_config() -> ConfigSection:
    return ConfigSection("misbehaving", Settings)


@hookimpl
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:
    return [DispatcherSpec("misbehaving", "misbehaving_plugin:Misbehaving")]


class Misbehaving:
    def open(self, view: DispatcherView) -> int:
        self._mode_file = Path(view.settings.mode_file)
        view.folder.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(view.folder / "seen.db")
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("CREATE TABLE IF NOT EXISTS seen (physical_offset INTEGER)")
        self._database.execute("CREATE TABLE IF NOT EXISTS position (value INTEGER)")
        self._database.execute("CREATE TABLE IF NOT EXISTS forgotten (topic TEXT)")
        row = self._database.execute("SELECT value FROM position").fetchone()
        self._position = view.position if row is None else max(int(row[0]), view.position)
        self._hoard: list[bytes] = []
        mode, argument = self._mode()
        return int(argument) if mode == "open" else self._position

    def dispatch(self, batch: DispatchBatch) -> None:
        self._behave(batch)
        offsets = [(int(offset),) for offset in batch.rows["physical_offset"].tolist()]
        with self._database:
            self._database.executemany("INSERT INTO seen VALUES (?)", offsets)
            self._database.execute("DELETE FROM position")
            self._database.execute("INSERT INTO position VALUES (?)", (batch.end,))
        self._position = batch.end

    def _behave(self, batch: DispatchBatch) -> None:
        mode, argument = self._mode()
        if mode == "raise":
            raise RuntimeError("this dispatcher always raises")
        if mode == "exit":
            os._exit(3)
        if mode == "hang":
            time.sleep(3600)
        if mode == "leak":
            while True:
                self._hoard.append(b"x" * 4_000_000)
        if mode == "slow":
            time.sleep(0.2)
        if mode in ("poison", "stubborn") and int(argument) in batch.rows["physical_offset"]:
            raise ValueError(f"the record at {argument} is poison")

    def _mode(self) -> tuple[str, str]:
        mode, _, argument = self._mode_file.read_text().partition(" ")
        return mode, argument

    def flush(self, *, thorough: bool) -> tuple[int, int]:
        mode, argument = self._mode()
        if mode == "flush":
            return ast.literal_eval(argument)  # type: ignore[no-any-return]
        return self._position, 0

    def forget(self, topic: str) -> None:
        with self._database:
            self._database.execute("INSERT INTO forgotten VALUES (?)", (topic,))

    def truncate(self, offset: int) -> None:
        if self._mode()[0] == "stubborn":
            raise NotImplementedError
        with self._database:
            self._database.execute("DELETE FROM seen WHERE physical_offset >= ?", (offset,))
            self._database.execute("DELETE FROM position")
            self._database.execute("INSERT INTO position VALUES (?)", (offset,))
        self._position = offset

    def expire(self, min_offset: int) -> None:
        with self._database:
            self._database.execute("DELETE FROM seen WHERE physical_offset < ?", (min_offset,))

    def close(self) -> None:
        self._database.close()

    def query(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("raise"):
            raise ZeroDivisionError("asked to")
        if request.get("exit"):
            raise SystemExit(3)
        if request.get("large"):
            return {"large": ["x" * 10_000_000] * 10}
        if request.get("nothing"):
            return None  # type: ignore[return-value]
        if request.get("forgotten"):
            return {"topics": [row[0] for row in self._database.execute("SELECT topic FROM forgotten")]}
        row = self._database.execute("SELECT COUNT(*), COUNT(DISTINCT physical_offset) FROM seen").fetchone()
        return {"seen": row[0], "distinct": row[1]}
