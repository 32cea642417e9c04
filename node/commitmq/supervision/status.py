"""The node's status in the answer of the admin socket: endpoints and settings, processes, positions, dispatchers, the
disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, DiskFlag, DispatcherFlag, DispatcherWord, Word, WorkerWord
from commitmq.network import ports
from commitmq.store.layout import StoreLayout
from commitmq.supervision.process_table import ProcessTable
from commitmq.supervision.processes import CpuMeter, MemoryGauge
from commitmq.supervision.worker_process import Phase

# A worker's own position, and the position it follows: lag is the difference in bytes of the CommitLog.
_Position = Callable[[ControlBlock, bool], tuple[int, int]]
_POSITIONS: dict[str, _Position] = {
    "writer": lambda control, _sync: (control.get(Word.WRITTEN), control.get(Word.WRITTEN)),
    "flush": lambda control, _sync: (control.get(Word.FLUSHED), control.get(Word.WRITTEN)),
    "allocate": lambda control, _sync: (control.get(Word.ALLOCATED), control.get(Word.ALLOCATED)),
    "cleanup": lambda control, _sync: (control.get(Word.MIN_OFFSET), control.get(Word.MIN_OFFSET)),
    "reput": lambda control, sync: (control.get(Word.REPUT), control.visible(sync)),
}


def endpoints(table: ProcessTable, config: NodeConfig) -> dict[str, Any]:
    """Endpoints by kind of worker: ``[tcp, ipc]`` of writer, coordinator, cleanup, ``memory`` and each dispatcher, of
    the movers that serve clients and have started, and a list of such pairs for the readers.

    A worker that is down keeps its last endpoints: it comes back at the same place. Hosts are those for clients.
    """
    told = {role: ports.advertised(worker.endpoints, config) for role, worker in table.workers.items()}
    found: dict[str, Any] = {role: told[role] for role in ("writer", "coordinator", "cleanup") if role in told}
    found.update({role: told[role] for role, worker in table.workers.items() if worker.spec.dispatcher})
    found.update({role: told[role] for role, worker in table.workers.items() if worker.spec.on_demand and told[role]})
    if "dispatcher-memory" in found:
        found["memory"] = found.pop("dispatcher-memory")
    found["reader"] = [told[role] for role in told if role.startswith("reader-")]
    return found


def settings(config: NodeConfig) -> dict[str, Any]:
    """The settings that a client must know; sizes in bytes."""
    return {
        "segment_bytes": config.commit_log.segment_bytes,
        "file_bytes": config.consume_queue.file_bytes,
        "flush_mode": config.commit_log.flush_mode,
        "transient_store_pool": config.commit_log.transient_store_pool,
        "properties_crc": config.commit_log.append_properties_crc,
        "limits": {
            "max_message_bytes": config.commit_log.max_message_bytes,
            "max_run_bytes": config.commit_log.max_run_bytes,
            "max_frame_bytes": config.network.max_frame_bytes,
            "max_pull_messages": config.reader.max_pull_messages,
            "max_pull_bytes": config.reader.max_pull_bytes,
            "max_wait_ms": config.reader.max_wait_ms,
        },
    }


def position_and_lag(
    role: str, control: ControlBlock, sync_flush: bool, dispatcher_slot: int = -1
) -> tuple[int | None, int | None]:
    """Position and lag of ``role`` in bytes; both None for a role that follows no position.

    A dispatcher's position is in its slot, and follows ``reput``.

    The two words are read one after the other, so a lag may be a moment old; it is never shown below zero.
    """
    if dispatcher_slot >= 0:
        position = control.dispatcher(dispatcher_slot, DispatcherWord.DISPATCHED)
        return position, max(0, control.get(Word.REPUT) - position)
    read = _POSITIONS.get(role)
    if read is None:
        return None, None
    position, followed = read(control, sync_flush)
    return position, max(0, followed - position)


def positions(control: ControlBlock) -> dict[str, int]:
    """The node-wide words for ``status``, by name; bytes of the CommitLog unless the name says otherwise."""
    names = (
        Word.MIN_OFFSET, Word.REPUT, Word.FLUSHED, Word.WRITTEN, Word.ALLOCATED, Word.WRITTEN_TIMESTAMP,
        Word.FLUSH_ERRNO, Word.WRITER_GENERATION, Word.TOPICS_VERSION, Word.RECOVERED_END,
    )  # fmt: skip
    words = {name.name.lower(): control.get(name) for name in names}
    words["committed"] = control.committed()
    words["dispatched"] = control.dispatcher(0, DispatcherWord.DISPATCHED)
    words["dispatched_durable"] = control.dispatcher(0, DispatcherWord.DURABLE)
    words["dispatcher_flags"] = control.dispatcher(0, DispatcherWord.FLAGS)
    return words


def disk_flags(control: ControlBlock) -> list[str]:
    """Names of the current reasons for refusing sends."""
    flags = control.get(Word.DISK_FLAGS)
    return [flag.name for flag in DiskFlag if flags & flag]


def disk_warnings(control: ControlBlock, config: NodeConfig, layout: StoreLayout) -> list[str]:
    """Sentences about sends that are refused, or soon will be, because the disk is full; empty when all is well."""
    segment_bytes = config.commit_log.segment_bytes
    flags, free = disk_flags(control), shutil.disk_usage(layout.root).free
    room = control.get(Word.ALLOCATED) - control.get(Word.WRITTEN)
    have = f"the disk of {layout.root} has {free / (1 << 20):.1f} MiB free"
    found = []
    if DiskFlag.DISK_FULL.name in flags:
        share = f"{config.disk.warning_ratio:.0%}"
        found.append(f"sends are refused: more than {share} of the disk is used (disk.warning_ratio), {have}")
    if DiskFlag.NO_SEGMENT.name in flags or (room <= segment_bytes and free < segment_bytes):
        need = f"a segment of the log needs {segment_bytes / (1 << 20):.1f} MiB (commit_log.segment_bytes), and {have}"
        way = "free some; a new store can have smaller segments, as with --profile dev"
        now = (
            "sends are refused"
            if room <= 0
            else f"sends will be refused when {room / (1 << 20):.1f} MiB more are written"
        )
        found.append(f"{now}: {need}; {way}")
    return found


def waiting_for_room(table: ProcessTable) -> list[str]:
    """A sentence for each kind of file that a process cannot write at present, because the disk has no room."""
    return [
        f"{worker.role} waits for room on the disk: {why}"
        for worker in table.workers.values()
        for why in (
            *([worker.no_room] if worker.no_room else []),
            *(f"{what}: {why}" for what, why in (worker.info.get("no_room") or {}).items()),
        )
    ]


def process_row(
    role: str, pid: int, state: str, restarts: int, cpu: CpuMeter, memory: MemoryGauge, **details: Any
) -> dict[str, Any]:
    """The common fields of every process's row; ``details`` adds position, lag, last error, endpoints."""
    return {
        "role": role,
        "pid": pid or None,
        "state": state,
        "restarts": restarts,
        "cpu_percent": cpu.percent if pid else None,
        "memory_bytes": memory.of(pid) if pid else None,
        **details,
    }


def worker_rows(
    table: ProcessTable, control: ControlBlock, config: NodeConfig, memory: MemoryGauge
) -> list[dict[str, Any]]:
    """One row for the forkserver and one for each worker, in start order."""
    rows = []
    forkserver = table.forkserver
    if forkserver.server is not None:
        rows.append(process_row("forkserver", forkserver.pid, "ready", forkserver.deaths, forkserver.cpu, memory))
    for worker in table.workers.values():
        slot = worker.spec.dispatcher_slot if worker.spec.takes_batches else -1
        position, lag = position_and_lag(worker.role, control, config.sync_flush, slot)
        rows.append(
            process_row(
                worker.role,
                worker.pid,
                str(worker.phase),
                worker.restarts,
                worker.cpu,
                memory,
                position=position,
                lag_bytes=lag,
                ready_after_ms=worker.ready_ms - table.began_ms if worker.ready_ms else None,
                endpoints=worker.endpoints,
                last_exit=worker.last_exit or None,
                last_error=worker.last_error or None,
                info=worker.info,
                refused=control.worker(worker.slot, WorkerWord.REFUSED),
            )
        )
    return rows


def progress(table: ProcessTable) -> dict[str, Any] | None:
    """The progress report of a worker that is starting: its role, and ``phase``, ``done``, ``total``, ``unit``."""
    for worker in table.workers.values():
        told = worker.info.get("progress")
        if worker.phase is Phase.STARTING and isinstance(told, dict):
            return {"role": worker.role, **told}
    return None


def remaking(table: ProcessTable) -> list[dict[str, Any]]:
    """What workers make again of damaged files while they serve: role, and the members of a progress report."""
    told = ((worker.role, worker.info.get("remaking")) for worker in table.workers.values())
    return [{"role": role, **one} for role, one in told if isinstance(one, dict)]


def dispatcher_rows(table: ProcessTable, control: ControlBlock, config: NodeConfig) -> list[dict[str, Any]]:
    """One row for each dispatcher: its plugin, its state, its position (bytes of the log), its skipped ranges.
    ``state`` is the process's state; for a ready process it is ``parked``, ``catching up`` or ``running``.
    """
    rows = []
    for worker in table.workers.values():
        slot = worker.spec.dispatcher_slot
        if slot < 0:
            continue
        words = {word.name.lower(): control.dispatcher(slot, word) for word in DispatcherWord}
        position, lag = position_and_lag(worker.role, control, config.sync_flush, slot)
        if not worker.spec.takes_batches:
            lag = 0  # memory topics follow no position that could get ahead of them
        state = str(worker.phase)
        # The parked position arrives a moment after the flag is set. A row shows both or neither.
        if words["flags"] & DispatcherFlag.PARKED and worker.info.get("parked"):
            state = "parked"
        elif worker.phase is Phase.READY:
            state = "catching up" if (lag or 0) > config.dispatch.batch_bytes else "running"
        rows.append(
            {
                "name": worker.spec.dispatcher,
                "plugin": worker.spec.plugin or None,
                "state": state,
                "position": position,
                "durable": words["durable"],
                "lag_bytes": lag,
                "restarts": worker.restarts,
                "deaths_on_record": words["deaths"],
                "skipped": worker.info.get("skipped") or [],
                "parked": worker.info.get("parked"),
                "gaps": worker.info.get("gaps") or [],
                "last_exit": worker.last_exit or None,
                "last_error": worker.last_error or None,
            }
        )
    return rows
