"""Small files about the node itself: the ``run/`` folder at start, ``run/node.json``, the token, the epoch.

``run/node.json`` exists while a node runs, and after its death. It has ``pid`` and ``keeper_pid`` with their start
times, ``admin`` endpoints, ``token``, ``epoch``, and the tcp port of each role, which the next supervisor of a killed
node takes again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import orjson

from commitmq.errors import StoreError
from commitmq.files import atomic_file, disk
from commitmq.files.disk import sync_folder
from commitmq.files.disk_space import is_private
from commitmq.store.access import close_own_folders
from commitmq.store.layout import StoreLayout, fits_sockets, why_not_utf8
from commitmq.store.store_file import read_epoch
from commitmq.supervision.processes import lock_holder


def read_node_file(layout: StoreLayout) -> dict[str, Any]:
    """``run/node.json``, or an empty dict when there is none or it cannot be read."""
    try:
        data = orjson.loads(layout.node_file.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return data if isinstance(data, dict) else {}


def node_life(layout: StoreLayout) -> str:
    """A name for this life of the node. It is the same for all processes of the node, and after the death of any of
    them, until the node is started again. Empty when no node runs.
    """
    node = read_node_file(layout)
    # A keeper restarts a killed supervisor, and a supervisor restarts a killed keeper: both stay in the same life.
    life = node.get("life") or (f"{node['pid']}/{node.get('started_ticks')}" if node.get("pid") else "")
    if not life:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{boot}/{life}"


def make_folders(layout: StoreLayout) -> None:
    """Create the folders that must exist before anything can be locked. Raises StoreError when the system refuses, or when the
    path cannot be told to clients.
    """
    if why := why_not_utf8(layout.root):
        raise StoreError(f"a node's store needs a path in UTF-8, {why}", path=layout.root)
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        layout.own.mkdir(exist_ok=True)
        sync_folder(layout.root)
        with contextlib.suppress(PermissionError):
            # Make the store's own name durable. A parent that this account may not read was not created here.
            sync_folder(layout.root.parent)
        layout.run.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot use this folder as a store: {error.strerror}", path=layout.root) from error


def empty_run_folder(layout: StoreLayout) -> None:
    """Remove all files of an earlier node in ``run/`` and in its socket folder. Create a socket folder if one is
    needed. All role locks must be free.
    """
    # An account that may enter run/ can read the node's token; only the owner can connect to its sockets.
    close_own_folders(layout)
    sockets = layout.sockets
    if sockets != layout.run and sockets == _former_socket_folder(layout) and is_private(sockets):
        # Kept, because clients must find a restarted supervisor at the same addresses.
        _remove_entries(sockets)
        _remove_entries(layout.run, keep=layout.sockets_note.name)
        return
    clear_run_folder(layout)
    if not fits_sockets(layout.run):
        _make_socket_folder(layout)


def clear_run_folder(layout: StoreLayout) -> None:
    """Remove every socket, lock and page of an ended node. The next node uses nothing in ``run/``."""
    remove_socket_folder(layout)
    _remove_entries(layout.run)


def _make_socket_folder(layout: StoreLayout) -> None:
    """A folder with a short path, whose random name is noted in ``run/`` first, so that a node that dies leaves no
    unknown folder.

    It lies in a folder where every account may create files. No other account can create it earlier or enter it. The
    store's last name is taken again if it is free: clients that outlive a stop look there.
    """
    folders = [Path(one) for one in (tempfile.gettempdir(), "/tmp") if not why_not_utf8(Path(one))]
    short = [one for one in folders if fits_sockets(one / ("commitmq-" + "0" * 16))]
    if not short:
        raise StoreError("the path is too long for Unix sockets, and so is that of TMPDIR", path=layout.run)
    former = _former_socket_folder(layout)
    folder = former if former is not None and former.parent in short else None
    while True:
        folder = folder or short[0] / f"commitmq-{secrets.token_hex(8)}"
        try:
            _record_socket_folder(layout, folder)
            folder.mkdir(mode=0o700)
        except FileExistsError:
            folder = None
            continue
        except OSError as error:
            raise StoreError(f"cannot make a folder for Unix sockets: {error.strerror}", path=folder) from error
        return


def _record_socket_folder(layout: StoreLayout, folder: Path) -> None:
    """Write down that ``folder`` belongs to this store: in ``run/`` for as long as it exists, and for later lives."""
    if folder != _former_socket_folder(layout):
        root = layout.root.stat()
        record = {"folder": str(folder), "device": root.st_dev, "inode": root.st_ino}
        atomic_file.replace(layout.socket_record, json.dumps(record).encode(), "socket_record", mode=0o600)
    atomic_file.replace(layout.sockets_note, os.fsencode(folder), "node_file", durable=False, mode=0o600)


def _former_socket_folder(layout: StoreLayout) -> Path | None:
    """This store's last socket folder; None for a copy of a store, which must not touch the original's folder."""
    try:
        record = json.loads(layout.socket_record.read_bytes())
        root = layout.root.stat()
        if (record["device"], record["inode"]) == (root.st_dev, root.st_ino):
            return Path(record["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # without the old name a new folder will do
    return None


def remove_socket_folder(layout: StoreLayout) -> None:
    """Remove the folder outside the store that the note in ``run/`` names, if it belongs to this account alone."""
    folder = layout.sockets
    if folder == layout.run:
        return
    if folder == _former_socket_folder(layout) and is_private(folder):
        shutil.rmtree(folder, ignore_errors=True)
    layout.sockets_note.unlink(missing_ok=True)


def next_epoch(layout: StoreLayout) -> int:
    """Count one more start of a node on this store: durable before it is used, so no epoch comes twice."""
    path = layout.epoch
    last = read_epoch(path)
    atomic_file.replace(path, f"{last + 1}\n".encode(), "epoch", mode=0o600)
    return last + 1


def _remove_entries(folder: Path, *, keep: str = "") -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == keep:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif not (entry.name.endswith(".lock") and lock_holder(Path(entry.path)) is not None):
                # A held lock is the only sign for the next node of a process that has not ended yet.
                disk.unlink(entry.path, "run")
