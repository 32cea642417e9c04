"""The manifest of an export: which files belong to it, and how far of each queue they go.

    ROOT/_commitmq/lock                              held by the export that runs
    ROOT/_commitmq/commits/00000000000000000001.json one for each step that was finished, in order
    ROOT/topic=orders/date=2026-11-21/part-….parquet the data

A commit says files and positions at once, and appears as a whole: it is written and synced under another name and then linked
to its own, which fails if somebody else was first. Whatever dies before that has exported nothing, and leaves files that no
commit names, which the next export deletes. Data files are whole and synced before their commit appears, so who reads
what the manifest names never meets a part of a file.

A commit is JSON: ``version`` (1), ``number``, ``made_ms``, ``form`` (what columns and bodies look like; the same in all),
``files`` (``path`` below ROOT, ``topic``, ``date``, ``rows``, ``bytes``, ``first_ms``, ``last_ms``), ``positions``
(store, topic, queue: the offset behind the last message that is exported; only of queues that changed), ``gaps``
(messages that were missing), ``bounds`` (store: the physical offset below which its messages were looked at),
``incarnations`` (store, topic: which topic of that name the positions are of), ``queues`` (topic: how many it has) and
``stores`` (a store's identity: the name that its positions have here). The last three are missing in what earlier versions
wrote.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from commitmq import failpoints
from commitmq.errors import CommitMQError

VERSION: Final = 1
FOLDER: Final = "_commitmq"
PART_PREFIX: Final = "part-"
UNFINISHED_PREFIX: Final = ".part-"

Positions = dict[tuple[str, str, int], int]
"""(store, topic, queue) -> the queue offset behind the last message that is exported."""


class ExportError(CommitMQError):
    """An export cannot go on where it is asked to; the sentence says why and what to do."""


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
        """Its name until it is committed: one that no reader of the folder takes for data."""
        folder, _, name = self.path.rpartition("/")
        return f"{folder}/{UNFINISHED_PREFIX}{name.removeprefix(PART_PREFIX)}"


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What stores say of themselves. ``incarnations``: store, topic: which topic of that name it is; ``queues``: topic: how
    many queues it has, whether they hold messages or not; ``stores``: a store's identity: its name in an export, which stays
    when it is read by another one.
    """

    incarnations: dict[str, dict[str, str]] = field(default_factory=dict)
    queues: dict[str, int] = field(default_factory=dict)
    stores: dict[str, str] = field(default_factory=dict)

    def update(self, other: StoreFacts) -> None:
        """What ``other`` says is newer."""
        for store, topics in other.incarnations.items():
            self.incarnations.setdefault(store, {}).update(topics)
        self.queues.update(other.queues)
        self.stores.update(other.stores)


@dataclass(frozen=True, slots=True)
class Commit:
    """One step of an export, as its file has it."""

    number: int
    made_ms: int
    form: dict[str, Any]
    files: list[DataFile]
    positions: Positions
    gaps: list[dict[str, Any]] = field(default_factory=list)
    bounds: dict[str, int] = field(default_factory=dict)
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
            "bounds": self.bounds,
            "incarnations": self.facts.incarnations,
            "queues": self.facts.queues,
            "stores": self.facts.stores,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Commit:
        """Raises ExportError for one of a later version; KeyError and TypeError for what is none."""
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
            data["bounds"],
            StoreFacts(data.get("incarnations", {}), data.get("queues", {}), data.get("stores", {})),
        )


class Manifest:
    """The commits below ``root``, in order. Reading needs no lock; :meth:`commit` and :meth:`clean` do."""

    def __init__(self, root: Path) -> None:
        """Raises ExportError for commits that cannot be read or are not all there. No folder is an empty manifest."""
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
        """How the data looks; None before the first commit."""
        return self.commits[0].form if self.commits else None

    @property
    def files(self) -> list[DataFile]:
        """All files, in the order of their commits."""
        return [file for commit in self.commits for file in commit.files]

    @property
    def positions(self) -> Positions:
        """How far each queue is exported."""
        found: Positions = {}
        for commit in self.commits:
            found.update(commit.positions)
        return found

    @property
    def bounds(self) -> dict[str, int]:
        """How far each store's log was looked at."""
        found: dict[str, int] = {}
        for commit in self.commits:
            found.update(commit.bounds)
        return found

    @property
    def facts(self) -> StoreFacts:
        """What is known of the stores."""
        found = StoreFacts()
        for commit in self.commits:
            found.update(commit.facts)
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only export here. Raises ExportError when another one is. The lock ends with the process."""
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
        """Delete data files that no commit names, and what was left half-written; returns how many data files."""
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
        bounds: Mapping[str, int] | None = None,
        facts: StoreFacts | None = None,
    ) -> Commit:
        """Make ``files``, which are there under their unfinished names, and ``positions`` part of the export."""
        for file in files:
            if failpoints.ACTIVE:
                failpoints.hit("export.before_rename")
            os.rename(self.root / file.unfinished_path, self.root / file.path)
        for folder in {(self.root / file.path).parent for file in files}:
            sync_folder(folder)
        number, now = len(self.commits) + 1, time.time_ns() // 1_000_000
        made = Commit(number, now, form, list(files), positions, list(gaps), dict(bounds or {}), facts or StoreFacts())
        if failpoints.ACTIVE:
            failpoints.hit("export.before_commit")
        try:
            publish(self._folder / f"{made.number:020}.json", made.to_json())
        except FileExistsError as error:
            raise ExportError(f"another export has made commit {made.number} of {self.root} meanwhile") from error
        if failpoints.ACTIVE:
            failpoints.hit("export.after_commit")
        self.commits.append(made)
        return made


def publish(path: Path, data: Any) -> None:
    """Write JSON so that ``path`` is either not there or whole, also after a power cut. Raises FileExistsError."""
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
    """Make it and its parents, so that a power cut does not take back their names."""
    missing = []
    at = folder
    while not at.is_dir():
        missing.append(at)
        at = at.parent
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        sync_folder(one.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
