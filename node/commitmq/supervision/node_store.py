"""The store in the hands of a node: taken with its lock, claimed with ``abort``, and returned.

Until recovery has ended well the store still belongs to its previous user: a start that fails or is interrupted before
that leaves ``abort``, checkpoint and sidecar as it found them. Then :meth:`NodeStore.claim` makes ``abort`` with a
token of this node. Only from there on does a process of this node write files that a later recovery trusts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import orjson

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.config.fitting import fit
from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.log import Log
from commitmq.network.gate import raise_descriptor_limit
from commitmq.store import shared_memory
from commitmq.store.access import StoreLock, open_folders
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log import transient_pool
from commitmq.store.recovery import abort_file
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.supervision import node_files
from commitmq.supervision.exit_codes import CliExit, StartFailed
from commitmq.supervision.keeper_watch import KeeperWatch
from commitmq.supervision.processes import free_locks, start_time_ticks
from commitmq.supervision.worker_process import WorkerProcess

ORPHAN_PATIENCE_S = 5.0
# With fewer descriptors the reserve of a port is smaller than what a burst may take before the gate learns of it
# (network.descriptors), and libzmq's listener ends a process that has none left.
_ENOUGH_DESCRIPTORS: Final = 4_096


class NodeStore:
    """One store, from its lock to its release. The steps come in the order of the methods."""

    def __init__(self, root: Path, log: Log) -> None:
        self.layout = StoreLayout(root.absolute())
        self._log = log
        self.owner = abort_file.new_token()
        """This node's token, which it writes into ``abort``."""
        self.claimed = False
        self.shown: int | None = None
        """The end of the log that the previous node had published; None where that is gone."""
        self._run_is_ours = False  # no process of an earlier node uses the files in run/ any more

    def lock(self) -> None:
        """Raises StoreError, StoreLockedError: then nothing is locked."""
        node_files.make_folders(self.layout)
        self._lock = StoreLock(self.layout.lock)
        self._lock.acquire()

    def fit(self, config: NodeConfig) -> NodeConfig:
        """Take the store's sizes. Raises StoreError, before any change, when the configuration asks for others."""
        self.fitted = fit(self.layout, config)
        return self.fitted.config

    def take_over(self) -> dict[str, int]:
        """End the processes that an earlier node left, and begin ``run/`` again. Returns the ports of its roles, which
        this node takes again where the configuration leaves them open. Raises StoreError.
        """
        layout, config = self.layout, self.fitted.config
        try:
            killed = free_locks(layout.run.glob("*.lock"), ORPHAN_PATIENCE_S)
        except BlockingIOError as error:
            raise StoreError(f"a worker of an earlier node cannot be ended: {error}", path=layout.run) from error
        for name, pid in killed:
            self._log.warning("killed a worker of an earlier node", lock=name, pid=pid)
        found: dict[str, int] = {}
        if config.network.port == 0:
            remembered = node_files.read_node_file(layout).get("ports")
            found = {str(role): int(port) for role, port in remembered.items()} if remembered else {}
        self._run_is_ours = True
        self.shown = _written_before(layout)
        node_files.empty_run_folder(layout)
        if config.memory.enable:
            shared_memory.claim(layout, config.memory.folder)
        self.epoch = node_files.next_epoch(layout)
        self.control = ControlBlock(layout.control, create=True)
        return found

    def write_token(self) -> None:
        """Write ``run/token``: a client that can read it proves that it is on the same machine."""
        self.token = secrets.token_hex(16)
        atomic_file.replace(self.layout.run / "token", self.token.encode(), "node_file", durable=False)

    def write_node_file(self, keeper: KeeperWatch, endpoints: list[str], ports: dict[str, int]) -> None:
        """Write ``run/node.json``: the supervisor's process, the admin socket's address, the ports of the roles."""
        content = orjson.dumps(
            {
                "pid": os.getpid(),
                "started_ticks": start_time_ticks(os.getpid()),
                "keeper_pid": keeper.pid,
                "keeper_started_ticks": start_time_ticks(keeper.pid) if keeper.pid else None,
                "life": keeper.life,
                "admin": endpoints,
                "token": self.token,
                "epoch": self.epoch,
                "ports": ports,
            }
        )
        atomic_file.replace(self.layout.node_file, content, "node_file", durable=False, mode=0o600)

    def look_back(self) -> None:
        """Find how the previous node ended, and tell what of the store and of this account an operator should change."""
        self.previous = abort_file.read_token(self.layout.abort)
        self.was_clean = self.previous is None
        if readable := open_folders(self.layout):
            self._log.warning(
                "other accounts can read this store, as it was made by RocketMQ or an earlier version",
                folders=", ".join(folder.name for folder in readable),
                advice=f"chmod -R go-rwx {self.layout.root}",
            )
        if (descriptors := raise_descriptor_limit()) < _ENOUGH_DESCRIPTORS:
            self._log.warning(
                "a process of this node may open few files: it refuses connections early, and a burst of hundreds of new"
                " ones within some milliseconds can end it, after which it is started again",
                descriptors=descriptors,
                advice=f"LimitNOFILE={_ENOUGH_DESCRIPTORS} or more in the service, ulimit -n in a shell",
            )

    def remember_sizes(self) -> None:
        """Store the sizes after recovery: they are proven right, and the next start need not look for them."""
        try:
            self.fitted.remember(self.layout)
        except StoreError as error:
            self._log.warning("the sizes of the store's files are looked for again at the next start", why=str(error))

    def claim(self) -> None:
        """Write ``abort`` with this node's token: from now on this node changes the store. Raises StartFailed."""
        try:
            if failpoints.ACTIVE:
                failpoints.hit("supervisor.before_abort")
            abort_file.create(self.layout.abort, os.getpid(), self.owner)
        except OSError as error:
            raise StartFailed(f"cannot make {self.layout.abort}: {error.strerror}", CliExit.START_FAILED) from error
        self.claimed = True

    # ------------------------------------------------------------ the end

    def is_closed_in_order(self, workers: Iterable[WorkerProcess]) -> bool:
        """Whether all records that this node wrote, or found when it recovered, are flushed and dispatched."""
        # A plugin that does not end in order harms only itself.
        unclean = [worker.role for worker in workers if worker.unclean and not worker.spec.plugin]
        written, flushed = self.control.get(Word.WRITTEN), self.control.get(Word.FLUSHED)
        # The dispatched position alone is not enough: after a failed sync the units may be only in the page cache.
        dispatched = self.control.dispatcher(0, DispatcherWord.DISPATCHED)
        dispatched = min(dispatched, self.control.dispatcher(0, DispatcherWord.DURABLE))
        flush_errno = self.control.get(Word.FLUSH_ERRNO)
        if unclean or flush_errno or not written == flushed == dispatched:
            self._log.error(
                "the store is not closed in order",
                unclean_workers=",".join(unclean),
                written=written,
                flushed=flushed,
                dispatched=dispatched,
                flush_errno=flush_errno,
            )
            return False
        return True

    def remove_pool(self) -> None:
        """Free the memory of the transient store pool, unless it holds records that are not in the log's files."""
        control = self.control
        if control.get(Word.POOL_BUFFERS) and control.get(Word.COMMITTED) == control.get(Word.WRITTEN):
            try:
                transient_pool.remove(self.layout)
            except (OSError, StoreError) as error:
                self._log.warning("cannot remove the transient store pool", error=str(error))

    def confirm_queues(self) -> None:
        """Bring the checkpoint up to the durable positions of ConsumeQueues and index; flush wrote it last before their
        final flush.

        All workers have ended, so the file has no other writer. Without this RocketMQ and CommitMQ's recovery would
        begin further back than they must after a later crash.
        """
        control = self.control
        queues, index = (control.dispatcher(slot, DispatcherWord.DURABLE_TIMESTAMP) for slot in (0, 1))
        try:
            checkpoint = Checkpoint.load(self.layout.checkpoint)
            checkpoint.logics_msg_timestamp = max(checkpoint.logics_msg_timestamp, queues)
            checkpoint.index_msg_timestamp = index or checkpoint.index_msg_timestamp
            Sidecar(
                control.get(Word.FLUSHED),
                control.get(Word.WRITTEN_TIMESTAMP),
                control.dispatcher(0, DispatcherWord.DURABLE),
                control.get(Word.CRC_FROM),
                self.fitted.config.commit_log.segment_bytes,
                self.owner,
            ).save_with(self.layout.sidecar, checkpoint, self.layout.checkpoint)
        except (OSError, StoreError) as error:
            self._log.warning("cannot write the final checkpoint", error=str(error))

    def unclaim(self) -> None:
        """The store is closed in order: remove ``abort``."""
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.before_abort_unlink")
        abort_file.remove(self.layout.abort)

    def leave(self) -> None:
        """Remove all but the store's own files, however the node ended. None of its processes lives by now."""
        if not self._run_is_ours:
            return
        try:
            node_files.clear_run_folder(self.layout)
            shared_memory.release(self.layout)
        except OSError as error:
            self._log.warning("something of the node could not be removed", error=str(error))

    def release(self) -> None:
        self._lock.release()


def _written_before(layout: StoreLayout) -> int | None:
    try:
        control = ControlBlock(layout.control)
    except (OSError, StoreError):
        return None
    try:
        # 0 until a recovery has found the end.
        return control.get(Word.WRITTEN) or None
    finally:
        control.close()
