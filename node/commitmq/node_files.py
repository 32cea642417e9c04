"""Small files about the node itself: ``run/`` and what lies in it at start, ``run/node.json``, the token, the epoch.

``run/node.json`` exists while a node runs (or died): ``pid`` and ``keeper_pid`` with their start times, ``admin``
endpoints, ``token``, ``epoch``, and the tcp port of each role, which the next supervisor of a killed node takes again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import orjson

from commitmq.errors import StoreError
from commitmq.store.json_config import sync_folder
from commitmq.store.layout import StoreLayout


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace ``path`` by ``data`` so that a reader sees the old or the new; ``durable``: also after a power cut."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        while data:
            data = data[os.write(fd, data) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    if durable:
        sync_folder(path.parent)


def read_node_file(layout: StoreLayout) -> dict[str, Any]:
    """``run/node.json``, or an empty dict when there is none or it cannot be read."""
    try:
        data = orjson.loads(layout.node_file.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return data if isinstance(data, dict) else {}


def node_life(layout: StoreLayout) -> str:
    """Names this life of the node: the same for all its processes, and after the death of any of them, until the node
    is started anew. Empty when no node runs.
    """
    node = read_node_file(layout)
    # A killed supervisor is started again by its keeper; that is the same life.
    pid, ticks = node.get("keeper_pid"), node.get("keeper_started_ticks")
    if not pid:
        pid, ticks = node.get("pid"), node.get("started_ticks")
    if not pid:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{boot}/{pid}/{ticks}"


def make_folders(layout: StoreLayout) -> None:
    """Create what must exist before anything can be locked. Raises StoreError when the system refuses."""
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        layout.own.mkdir(exist_ok=True)
        sync_folder(layout.root)
        with contextlib.suppress(PermissionError):
            # The store's own name. A parent that we may not read was not made by us.
            sync_folder(layout.root.parent)
        # Whoever may enter run/ may connect to the node's Unix sockets and read its token.
        layout.run.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot use this folder as a store: {error.strerror}", path=layout.root) from error


def empty_run_folder(layout: StoreLayout) -> None:
    """Remove everything a former node left in ``run/`` and in the folder of its sockets, which is made if needed.

    All role locks must be free. Raises StoreError when the socket folder belongs to somebody else.
    """
    layout.run.chmod(0o700)
    _remove_entries(layout.run)
    if layout.sockets != layout.run:
        with contextlib.suppress(FileExistsError):
            layout.sockets.mkdir(mode=0o700)
        # The folder lies in a place where everybody may create: it must be a real folder, ours, and closed to others.
        found = layout.sockets.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise StoreError("the folder for Unix sockets is not ours alone; remove it", path=layout.sockets)
        _remove_entries(layout.sockets)


def remove_socket_folder(layout: StoreLayout) -> None:
    """Leave nothing outside the store behind."""
    if layout.sockets != layout.run:
        shutil.rmtree(layout.sockets, ignore_errors=True)


def next_epoch(layout: StoreLayout) -> int:
    """Count one more start of a node on this store; durable before it is used, so that no epoch is given out twice."""
    path = layout.own / "epoch"
    try:
        last = int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        last = 0
    except ValueError as error:
        sentence = "the count of starts is not a number; write one at least as high as before"
        raise StoreError(sentence, path=path) from error
    write_atomically(path, f"{last + 1}\n".encode(), durable=True)
    return last + 1


def _remove_entries(folder: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
