"""The file in which a broadcasting consumer keeps its positions: RocketMQ's ``offsets.json`` (remoting 6.6).

``{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:12}}``: an object is a key, which only RocketMQ's JSON
library writes. ``incarnations`` is CommitMQ's addition, which RocketMQ skips: positions of a topic that was recreated
must not count. A file of RocketMQ has none, and its positions count. So is ``logGenerations``, a list of ``[topic,
queue id, generation of the log]``: a position that the log has lost since is lowered.

The content is replaced in one step and synced, so after a power cut there is the old file or the new one. A lock on
``offsets.lock`` beside it keeps a second consumer out, as long as the first one lives.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from commitmq.errors import DiskFullError, StoreError
from commitmq.files import atomic_file
from commitmq.files.disk_space import is_no_space

Queue = tuple[str, int]

FILE_NAME: Final = "offsets.json"
_BACKUP: Final = "offsets.json.bak"  # RocketMQ's
_LOCK: Final = "offsets.lock"
_FOLDER: Final = Path(".commitmq", "positions")
_MODE: Final = 0o700
_ENTRY: Final = re.compile(r'(\{\s*"(?:brokerName|queueId|topic)"[^{}]*\})\s*:\s*"?(-?\d+)"?')
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_.@-]{1,255}", re.ASCII)


@dataclass(slots=True)
class SavedOffsets:
    """The next offset of each queue, and, as far as known, the incarnations of the topics that they belong to and the
    generations of the log in which they were learnt.
    """

    offsets: dict[Queue, int] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    log_generations: dict[Queue, int] = field(default_factory=dict)


def check_member(member: str) -> str:
    """``member`` itself, which names a folder. Raises ValueError."""
    if not _NAME.fullmatch(member) or set(member) == {"."}:
        raise ValueError(f"member {member!r} names a folder here: use letters, digits and % | _ - . @")
    return member


def default_folder() -> Path:
    """``~/.commitmq/positions``; for an account without a home, a folder of its own in ``/var/tmp``, which outlives a reboot.

    Raises StoreError when that folder belongs to another account.
    """
    home = os.path.expanduser("~")
    if home != "~" and os.path.isdir(home) and os.access(home, os.W_OK):
        return Path(home) / _FOLDER
    # (Not the folder of TMPDIR or /tmp, which is emptied at a start.)
    base = Path("/var/tmp") if os.path.isdir("/var/tmp") else Path(tempfile.gettempdir())
    folder = base / f"commitmq-{os.getuid()}"
    try:
        folder.mkdir(mode=_MODE, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise StoreError("the folder belongs to another account; name one with positions_folder=…", path=folder)
    except OSError as error:
        raise _refused(folder, error) from error
    return folder / "positions"


class PositionFile:
    """The file of one consumer. It is locked from the constructor to :meth:`close`."""

    def __init__(self, folder: str | Path | None, member: str, group: str) -> None:
        """The file is ``folder/member/group/offsets.json``. Raises StoreError when another consumer has it, or by the disk."""
        base = default_folder() if folder is None else Path(folder)
        self._folder = base.absolute() / check_member(member) / group
        self.path = self._folder / FILE_NAME
        self._pid = os.getpid()
        try:
            self._folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
            self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refused(self._folder, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise _refused(self._folder, error) from error
            raise StoreError(
                f"another consumer of group {group!r} broadcasts as member {member!r} and keeps its positions here: give"
                " each consumer a member=… of its own",
                path=self._folder,
            ) from None

    def load(self) -> SavedOffsets:
        """The kept positions; none for a new consumer. Raises StoreError for a file that cannot be understood."""
        for path in (self.path, self._folder / _BACKUP):
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError) as error:
                raise _refused(path, error) from error
            if text.strip():
                return parsed(text, path)
        return SavedOffsets()

    def store(self, positions: SavedOffsets, broker_name: str) -> None:
        """Replace the file. Raises StoreError; then the old content is still there, or the new one."""
        try:
            atomic_file.replace(self.path, written(positions, broker_name).encode(), "broadcast_positions")
        except OSError as error:
            raise _refused(self.path, error) from error

    def close(self) -> None:
        """Let others have the file. Closing twice is allowed."""
        if self._lock >= 0:
            if self._pid == os.getpid():
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child has the descriptor too
            os.close(self._lock)
            self._lock = -1


def parsed(text: str, path: Path) -> SavedOffsets:
    """The positions in the text of a file. Raises StoreError."""
    positions = SavedOffsets()

    def entry(found: re.Match[str]) -> str:
        key = json.loads(found[1])
        positions.offsets[str(key["topic"]), int(key["queueId"])] = int(found[2])
        return f'"{len(positions.offsets)}":0'

    try:
        rest: dict[str, Any] = json.loads(_ENTRY.sub(entry, text))
        if len(rest.get("offsetTable", {})) != len(positions.offsets):
            raise ValueError("entries of another shape")
        positions.incarnations = {str(topic): int(one) for topic, one in rest.get("incarnations", {}).items()}
        positions.log_generations = {
            (str(topic), int(queue)): int(one) for topic, queue, one in rest.get("logGenerations", [])
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"the positions cannot be understood ({error}): restore the file, or remove it to begin at start=…",
            path=path,
        ) from error
    positions.offsets = {queue: offset for queue, offset in positions.offsets.items() if offset >= 0}
    return positions


def written(positions: SavedOffsets, broker_name: str) -> str:
    """The text of a file."""
    entries = [
        f"\t\t{json.dumps({'brokerName': broker_name, 'queueId': queue, 'topic': topic})}:{offset}"
        for (topic, queue), offset in sorted(positions.offsets.items())
    ]
    incarnations = json.dumps(positions.incarnations, sort_keys=True)
    generations = json.dumps([[*queue, one] for queue, one in sorted(positions.log_generations.items())])
    head = '{\n\t"incarnations":' + incarnations + ',\n\t"logGenerations":' + generations
    return head + ',\n\t"offsetTable":{\n' + ",\n".join(entries) + "\n\t}\n}\n"


def _refused(path: Path, error: Exception) -> StoreError:
    kind = DiskFullError if is_no_space(error) else StoreError
    return kind(
        f"the positions of a broadcasting consumer cannot be kept: {error}; name a folder with positions_folder=…",
        path=path,
    )
