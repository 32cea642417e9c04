"""Paths of everything in a store: RocketMQ's paths (spec 1.1) and the two folders that CommitMQ adds.

    commitlog/ consumequeue/ batchconsumequeue/ index/ config/ checkpoint abort lock      RocketMQ's, byte for byte
    commitmq/     durable, CommitMQ's: position sidecars, the offsets journal, tombstones of deleted topics, producers
    run/          volatile, CommitMQ's: control block, role locks, sockets, segments being made; emptied at each start

RocketMQ ignores folders it does not know, so it still opens a store that has CommitMQ's folders.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

# A Unix socket's path must fit 108 bytes with its final zero; the longest file name behind the folder is below 40.
_MAX_SOCKET_FOLDER_BYTES = 66


def fits_sockets(folder: Path) -> bool:
    """Whether the paths of Unix sockets in ``folder`` are short enough."""
    return len(os.fsencode(folder)) <= _MAX_SOCKET_FOLDER_BYTES


def why_not_utf8(path: Path) -> str:
    """Why ``path`` cannot be told to other programs in UTF-8, as in JSON and in the addresses of sockets; "" when it can."""
    name = os.fsencode(path)
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return "and this one is not: give the folder another name"
    if text != str(path):
        encoding = sys.getfilesystemencoding()
        return f"and the locale of this command has {encoding}: run it with LC_ALL=C.UTF-8, or with PYTHONUTF8=1"
    return ""


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """Paths under one store root."""

    root: Path

    @property
    def commit_log(self) -> Path:
        return self.root / "commitlog"

    @property
    def consume_queue(self) -> Path:
        return self.root / "consumequeue"

    @property
    def consume_queue_ext(self) -> Path:
        return self.root / "consumequeue_ext"

    @property
    def batch_consume_queue(self) -> Path:
        return self.root / "batchconsumequeue"

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def sidecar(self) -> Path:
        """The position from which the next recovery may begin; see :mod:`commitmq.store.recovery.sidecar`."""
        return self.root / "commitmq" / "position"

    @property
    def abort(self) -> Path:
        return self.root / "abort"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def own(self) -> Path:
        return self.root / "commitmq"

    @property
    def epoch(self) -> Path:
        """Counts the starts of a node; see :mod:`commitmq.store.store_file`."""
        return self.own / "epoch"

    @property
    def queue_ends(self) -> Path:
        """The file that lists the queues and their ends; see :mod:`commitmq.store.queues.queue_ends`."""
        return self.own / "queue_ends"

    @property
    def flush_failed(self) -> Path:
        """Exists after a failed sync by flush: the page cache is untrustworthy, the next recovery reads the device."""
        return self.own / "flush_failed"

    @property
    def writer_sync_failed(self) -> Path:
        """Exists after a failed sync by the writer, with the same meaning."""
        return self.own / "writer_sync_failed"

    @property
    def failed_syncs(self) -> tuple[Path, Path]:
        """Both notes; each has one writing process."""
        return self.flush_failed, self.writer_sync_failed

    @property
    def producers(self) -> Path:
        """Snapshot of the idempotent producers (:mod:`commitmq.store.producers`)."""
        return self.own / "producers"

    @property
    def tombstones(self) -> Path:
        """Tombstones: where in the log deleted topics ended; see :mod:`commitmq.store.metadata.topic_files`."""
        return self.own / "deleted_topics.json"

    @property
    def endings(self) -> Path:
        """Topics whose deletion is decided but not finished; see :mod:`commitmq.store.metadata.topic_files`."""
        return self.own / "deleting_topics.json"

    @property
    def cut_history(self) -> Path:
        """When and where the log ended earlier than before; see :mod:`commitmq.store.recovery.cut_history`."""
        return self.own / "cut_history"

    @property
    def store_file(self) -> Path:
        """The store's identity and the sizes of its files; see :mod:`commitmq.store.store_file`."""
        return self.own / "store.json"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def control(self) -> Path:
        return self.run / "control"

    @property
    def log(self) -> Path:
        """The log of all processes of the node; older ones are ``node.log.1`` and so on."""
        return self.own / "node.log"

    @property
    def audit(self) -> Path:
        """Folder of the audit log, one file a process; see :mod:`commitmq.security.audit`."""
        return self.own / "audit"

    @property
    def set_aside(self) -> Path:
        """Folder of the lists of messages of which no copy fits (:mod:`commitmq.workers.runtime.set_aside`)."""
        return self.own / "set_aside"

    @property
    def settings(self) -> Path:
        """Changes by ``config set``."""
        return self.own / "settings.json"

    @property
    def node_file(self) -> Path:
        """JSON about the live node: pid, admin endpoints, token. Exists only while a node runs, and after its death."""
        return self.run / "node.json"

    def counts(self, role: str) -> Path:
        """What the worker of ``role`` counted; see :mod:`commitmq.counting`."""
        return self.run / f"{role}.counts"

    def role_lock(self, role: str) -> Path:
        """The file that the worker of ``role`` holds locked while it lives."""
        return self.run / f"{role}.lock"

    @property
    def sockets(self) -> Path:
        """Folder of Unix sockets: ``run/`` itself or, if its path is too long, the short folder that its note names."""
        if fits_sockets(self.run):
            return self.run
        try:
            return Path(self.sockets_note.read_text(encoding="utf-8"))
        except OSError:
            return self.run  # no node is running

    @property
    def sockets_note(self) -> Path:
        """The path of the folder of sockets outside of the store, while a node has one."""
        return self.run / "sockets"

    @property
    def socket_record(self) -> Path:
        """The last socket folder outside of the store, and the store it belonged to: its name is used again."""
        return self.own / "sockets.json"

    def doorbell(self, role: str) -> Path:
        """Unix datagram socket that wakes the worker of ``role``."""
        return self.sockets / f"{role}.bell"

    def ipc(self, name: str) -> str:
        """ZeroMQ ipc endpoint called ``name``."""
        return f"ipc://{self.sockets / name}.ipc"

    @property
    def local_socket(self) -> Path:
        """Unix socket for single sends of this host's clients, beside the writer's ipc endpoint."""
        return self.sockets / "writer.sock"
