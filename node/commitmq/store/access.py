"""Access to a store: with every umask only its owner may read it, unless the store's own folder admits a group.

Messages are in the files, so files are 0600 and folders 0700. The processes of a node, the offline verbs and the tasks
of jobs that write to a store all set their umask by :func:`umask_of`, so no file is missed.

To share a store with a group, set the permissions of its folder before its first use: ``chgrp GROUP STORE; chmod 2750
STORE``. Files are then 0640 and folders 2750 of that group, and its members can map the log. Only the store's owner
ever writes. A folder that is merely open to others (0755, say) shares nothing: folders get that mode by default.

Files made by an earlier version or by RocketMQ keep their permissions: another account may rely on them. The node names
such folders when it starts.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.store.layout import StoreLayout

_BEFORE_THE_FIRST_START: Final = frozenset({"config", "commitmq", "lock", "run", "lost+found"})
"""What users, node keys and a start that was refused leave in a folder that is no store yet."""


@contextlib.contextmanager
def refusals_told(root: Path) -> Iterator[None]:
    """Turn OSErrors in the block (a folder that this account may not enter) into a StoreError about ``root``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot use this folder as a store: {error.strerror}", path=root) from error


def require_store(layout: StoreLayout) -> None:
    """Raise StoreError unless ``layout`` is a store that this account may enter."""
    with refusals_told(layout.root):
        if not layout.commit_log.is_dir():
            raise StoreError("this is no store: it has no folder commitlog", path=layout.root)


def require_store_or_new(layout: StoreLayout) -> None:
    """As :func:`require_store`, but a folder that was never started will do: it has no other files."""
    with refusals_told(layout.root):
        if layout.commit_log.is_dir():
            return
        others = sorted({one.name for one in layout.root.iterdir()} - _BEFORE_THE_FIRST_START)
    if others:
        raise StoreError(
            f"this is no store, and no empty folder for one: it has no folder commitlog, but {', '.join(others[:3])}. Name the"
            " store's folder, or start a node on it first (`commitmq start`)",
            path=layout.root,
        )


def shares_with_group(root: Path) -> bool:
    """Whether the folder ``root`` admits its group to the store: set-group-id, and open to that group."""
    try:
        mode = root.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_ISGID) and mode & 0o050 == 0o050


def umask_of(root: Path) -> int:
    """The umask for every process that makes files in the store at ``root``."""
    return 0o027 if shares_with_group(root) else 0o077


def keep_private(root: Path) -> None:
    """Set this process's umask to the store's; for a process that does nothing else."""
    os.umask(umask_of(root))


@contextlib.contextmanager
def private_files(root: Path) -> Iterator[None]:
    """Set the store's umask during the block, in a process that has other work too."""
    before = os.umask(umask_of(root))
    try:
        yield
    finally:
        os.umask(before)


def close_own_folders(layout: StoreLayout) -> None:
    """Close the two folders that only CommitMQ uses to other accounts. Raises OSError."""
    wanted = 0o2750 if shares_with_group(layout.root) else 0o700
    for folder in (layout.own, layout.run):
        folder.chmod(wanted)


def open_folders(layout: StoreLayout) -> list[Path]:
    """Folders with messages that unintended accounts can read: made by RocketMQ or by an earlier version."""
    unwanted = umask_of(layout.root)
    if not layout.root.stat().st_mode & unwanted & 0o011:
        return []  # no other account gets that far
    folders = (layout.commit_log, layout.consume_queue, layout.batch_consume_queue, layout.index, layout.config)
    return [folder for folder in folders if folder.is_dir() and folder.stat().st_mode & unwanted & 0o055]
