"""The long answers of the admin socket: the endpoints of the workers, and the state of every process."""

from __future__ import annotations

import shutil
from typing import Any

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, DiskFlag, DispatcherFlag, DispatcherWord, Word
from commitmq.network import ports
from commitmq.store.layout import StoreLayout
from commitmq.supervision import status
from commitmq.supervision.process_table import ProcessTable
from commitmq.supervision.status import MemoryGauge, position_and_lag, process_row
from commitmq.supervision.worker_process import Phase


def endpoints(table: ProcessTable, config: NodeConfig) -> dict[str, Any]:
    """Endpoints by kind of worker: ``[tcp, ipc]`` of writer, coordinator, cleanup, ``memory`` and each dispatcher, and
    a list of such pairs for the readers.

    A worker that is down keeps its last endpoints: it comes back at the same place. Hosts are those for clients.
    """
    told = {role: ports.advertised(worker.endpoints, config) for role, worker in table.workers.items()}
    found: dict[str, Any] = {role: told[role] for role in ("writer", "coordinator", "cleanup") if role in told}
    found.update({role: told[role] for role, worker in table.workers.items() if worker.spec.dispatcher})
    if "dispatcher-memory" in found:
        found["memory"] = found.pop("dispatcher-memory")
    found["reader"] = [told[role] for role in told if role.startswith("reader-")]
    return found


def disk_warnings(control: ControlBlock, config: NodeConfig, layout: StoreLayout) -> list[str]:
    """Sentences about sends that are refused, or soon will be, because the disk is full; empty when all is well."""
    segment_bytes = config.commit_log.segment_bytes
    flags, free = status.disk_flags(control), shutil.disk_usage(layout.root).free
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


def worker_rows(
    table: ProcessTable, control: ControlBlock, config: NodeConfig, memory: MemoryGauge
) -> list[dict[str, Any]]:
    """One row for the forkserver and one for each worker, in start order."""
    rows = []
    if table.forkserver is not None:
        phase = "ready" if table.forkserver.ready else "starting"
        pid, deaths = table.forkserver.pid, table.forkserver_deaths
        rows.append(process_row("forkserver", pid, phase, deaths, table.forkserver_cpu, memory))
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
