"""The manifest of an export: the files that belong to it, and the exported position of each queue.

    ROOT/_commitmq/lock                              held by the running export
    ROOT/_commitmq/commits/00000000000000000001.json one for each finished step, in order
    ROOT/topic=orders/date=2026-11-21/part-….parquet the data

A commit holds files and positions together, and appears as a whole: it is written and synced under another name and
then linked to its own name, which fails if another process was first. A run that dies before that has exported nothing.
It leaves files that no commit names, and the next export deletes them. Data files are complete and synced before their
commit appears, so a reader of the manifest's files never sees an incomplete file.

A commit is JSON: ``version`` (2), ``number``, ``made_ms``, ``form`` (columns and bodies; the same in all commits),
``files`` (``path`` below ROOT, ``topic``, ``date``, ``rows``, ``bytes``, ``first_ms``, ``last_ms``), ``positions``
(store, topic, queue: the offset behind the last exported message; only of queues that changed), ``gaps`` (missing
messages), ``incarnations`` (store, topic: the incarnation of the topic that the positions belong to), ``generations``
(store, topic: the store's generation that they belong to), ``queues`` (topic: its number of queues) and ``stores`` (a
store's identity: the name of the store in this manifest).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from commitmq import failpoints
from commitmq.errors import CommitMQError
from commitmq.files.disk import sync_folder

VERSION: Final = 2
FOLDER: Final = "_commitmq"
PART_PREFIX: Final = "part-"
UNFINISHED_PREFIX: Final = ".part-"

Positions = dict[tuple[str, str, int], int]
"""(store, topic, queue) -> the queue offset behind the last exported message."""


class ExportError(CommitMQError):
    """An export cannot continue in this folder; the sentence has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of an export. ``path`` is relative to its root; times are store times, milliseconds since 1970."""

    path: str
    topic: str
    date: str
    rows: int
    bytes: int
    first_ms: int
    last_ms: int

    @property
    def unfinished_path(self) -> str:
        """Its name until it is committed: no reader of the folder takes it for data."""
        folder, _, name = self.path.rpartition("/")
        return f"{folder}/{UNFINISHED_PREFIX}{name.removeprefix(PART_PREFIX)}"


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Facts about the stores. ``incarnations``: store, topic: the topic's incarnation; ``generations``: store, topic: the
    store's generation when the topic was read; ``queues``: topic: its number of queues, empty ones included; ``stores``: a
    store's identity: its name in an export, which stays when it is read by another name.
    """

    incarnations: dict[str, dict[str, str]] = field(default_factory=dict)
    generations: dict[str, dict[str, int]] = field(default_factory=dict)
    queues: dict[str, int] = field(default_factory=dict)
    stores: dict[str, str] = field(default_factory=dict)

    def update(self, other: StoreFacts) -> None:
        """Take over the facts of ``other``, which are newer."""
        for store, topics in other.incarnations.items():
            self.incarnations.setdefault(store, {}).update(topics)
        for store, of_topics in other.generations.items():
            self.generations.setdefault(store, {}).update(of_topics)
        self.queues.update(other.queues)
        self.stores.update(other.stores)


@dataclass(frozen=True, slots=True)
class Commit:
    """One step of an export, with the fields of its file."""

    number: int
    made_ms: int
    form: dict[str, Any]
    files: list[DataFile]
    positions: Positions
    gaps: list[dict[str, Any]] = field(default_factory=list)
    facts: StoreFacts = field(default_factory=StoreFacts)

    def to_json(self) -> dict[str, Any]:
        positions: dict[str, dict[str, dict[str, int]]] = {}
        for (store, topic, queue), offset in self.positions.items():
            positions.setdefault(store, {}).setdefault(topic, {})[str(queue)] = offset
        return {
            "version": VERSION,
            "number": self.number,
            "made_ms": self.made_ms,
            "form": self.form,
            "files": [asdict(one) for one in self.files],
            "positions": positions,
            "gaps": self.gaps,
            **asdict(self.facts),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Commit:
        """Raises ExportError for a commit of a later version; KeyError and TypeError for other data."""
        if data["version"] != VERSION:
            raise ExportError(f"the manifest has version {data['version']}; this program knows {VERSION}")
        return cls(
            data["number"],
            data["made_ms"],
            data["form"],
            [DataFile(**one) for one in data["files"]],
            {
                (store, topic, int(queue)): offset
                for store, topics in data["positions"].items()
                for topic, queues in topics.items()
                for queue, offset in queues.items()
            },
            data["gaps"],
            StoreFacts(data["incarnations"], data["generations"], data["queues"], data["stores"]),
        )


class Manifest:
    """The commits below ``root``, in order. Reading needs no lock; :meth:`commit` and :meth:`clean` need it."""

    def __init__(self, root: Path) -> None:
        """Raises ExportError for unreadable or missing commits. A missing folder is an empty manifest."""
        self.root = root
        self._folder = root / FOLDER / "commits"
        self.commits: list[Commit] = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found = Commit.from_json(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, KeyError, TypeError) as error:
                raise ExportError(f"{path} is no commit of an export: {error}") from error
            if found.number != len(self.commits) + 1:
                raise ExportError(f"{path} says it is commit {found.number}, {len(self.commits) + 1} was expected")
            self.commits.append(found)

    @property
    def form(self) -> dict[str, Any] | None:
        """The form of the data; None before the first commit."""
        return self.commits[0].form if self.commits else None

    @property
    def files(self) -> list[DataFile]:
        return [file for commit in self.commits for file in commit.files]

    @property
    def positions(self) -> Positions:
        """The exported position of each queue."""
        found: Positions = {}
        for commit in self.commits:
            found.update(commit.positions)
        return found

    @property
    def facts(self) -> StoreFacts:
        """The known facts about the stores."""
        found = StoreFacts()
        for commit in self.commits:
            found.update(commit.facts)
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the export. Raises ExportError when another export has the lock. The lock ends with the process."""
        make_folder(self._folder)
        descriptor = os.open(self.root / FOLDER / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ExportError(f"another export or import works on {self.root}") from error
            yield
        finally:
            os.close(descriptor)

    def clean(self) -> int:
        """Delete data files that no commit names, and half-written files. Returns the number of data files."""
        known = {one.path for one in self.files}
        deleted = 0
        for path in [
            *self.root.glob(f"topic=*/date=*/{PART_PREFIX}*"),
            *self.root.glob(f"topic=*/date=*/{UNFINISHED_PREFIX}*"),
        ]:
            if str(path.relative_to(self.root)) not in known:
                path.unlink(missing_ok=True)
                deleted += 1
        for path in self._folder.glob(".*"):
            path.unlink(missing_ok=True)
        return deleted

    def commit(
        self,
        form: dict[str, Any],
        files: Sequence[DataFile],
        positions: Positions,
        gaps: Sequence[dict[str, Any]] = (),
        facts: StoreFacts | None = None,
    ) -> Commit:
        """Add ``files``, which exist under their unfinished names, and ``positions`` to the export."""
        for file in files:
            if failpoints.ACTIVE:
                failpoints.hit("export.before_rename")
            os.rename(self.root / file.unfinished_path, self.root / file.path)
        for folder in {(self.root / file.path).parent for file in files}:
            sync_folder(folder)
        number, now = len(self.commits) + 1, time.time_ns() // 1_000_000
        made = Commit(number, now, form, list(files), positions, list(gaps), facts or StoreFacts())
        if failpoints.ACTIVE:
            failpoints.hit("export.before_commit")
        try:
            publish(self._folder / f"{made.number:020}.json", made.to_json())
        except FileExistsError as error:
            raise ExportError(f"another export has made commit {made.number} of {self.root} in the meantime") from error
        if failpoints.ACTIVE:
            failpoints.hit("export.after_commit")
        self.commits.append(made)
        return made


def publish(path: Path, data: Any) -> None:
    """Write JSON so that ``path`` is either absent or complete, also after a power cut. Raises FileExistsError."""
    unfinished = path.parent / f".{path.name}.{os.getpid()}"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(data, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(unfinished, path)
    finally:
        unfinished.unlink()
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create the folder and its parents, so that a power cut does not remove their names."""
    missing = []
    at = folder
    while not at.is_dir():
        missing.append(at)
        at = at.parent
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        sync_folder(one.parent)
