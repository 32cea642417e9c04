"""The answers of the admin socket to ``metadata`` and ``status``, and their measurements."""

from __future__ import annotations

import os
from typing import Any

from commitmq.config import NodeConfig
from commitmq.protocol import wire
from commitmq.supervision import status
from commitmq.supervision.admin_socket import AdminSocket
from commitmq.supervision.exposure import Exposure
from commitmq.supervision.keeper_watch import KeeperWatch
from commitmq.supervision.node_store import NodeStore
from commitmq.supervision.process_table import ProcessTable
from commitmq.supervision.processes import CpuMeter, MemoryGauge
from commitmq.supervision.roster import Roster
from commitmq.workers.runtime.context import monotonic_ms

_CPU_SAMPLE_MS = 2_000


class AdminAnswers:
    """Reads the supervisor's parts; changes nothing but its own meters."""

    def __init__(
        self, store: NodeStore, table: ProcessTable, keeper: KeeperWatch, admin: AdminSocket, exposure: Exposure
    ) -> None:
        self._store, self._table, self._keeper, self._admin = store, table, keeper, admin
        self._exposure = exposure
        self._layout, self._config, self._control = store.layout, store.fitted.config, store.control
        self.roster = Roster()
        self._sampled_ms = 0
        self._memory = MemoryGauge(self._layout.root, self._config.supervisor.status_age_ms)
        self._cpu = {"supervisor": CpuMeter(), "keeper": CpuMeter()}

    def configure(self, config: NodeConfig) -> None:
        """Show the settings of ``config`` from now on."""
        self._config = config

    def tick(self, now_ms: int) -> None:
        """Measure CPU use when it is time."""
        if now_ms - self._sampled_ms >= _CPU_SAMPLE_MS:
            self._sample(now_ms)

    def _sample(self, now_ms: int) -> None:
        self._sampled_ms = now_ms
        self._table.sample(now_ms)
        self._cpu["supervisor"].sample(os.getpid(), now_ms)
        self._cpu["keeper"].sample(self._keeper.live_pid, now_ms)

    def metadata(self, header: dict[str, Any]) -> bytes:
        """Where the workers listen, and the settings that a client must know."""
        return wire.ok(
            header["id"],
            node=f"{os.uname().nodename}:{os.getpid()}",
            token=self._store.token,
            epoch=self._store.epoch,
            store=str(self._layout.root),
            store_id=self._store.fitted.store_id,
            endpoints=status.endpoints(self._table, self._config),
            **status.settings(self._config),
        )

    def status(self, header: dict[str, Any], state: str) -> bytes:
        """Every process, the positions, dispatchers and plugins; ``state`` is the node's."""
        now_ms = monotonic_ms()
        if now_ms - self._sampled_ms > _CPU_SAMPLE_MS // 2:
            self._sample(now_ms)
        recovered = self.recovered()
        return wire.ok(
            header["id"],
            node={
                "state": state,
                "store": str(self._layout.root),
                "store_id": self._store.fitted.store_id,
                "index_problem": self._store.fitted.index_problem,
                "token": self._store.token,
                "epoch": self._store.epoch,
                "admin": self._admin.endpoints,
                "flush_mode": self._config.commit_log.flush_mode,
                "progress": status.progress(self._table),
                "remaking": status.remaking(self._table),
                "keeper": self._keeper.state,
                "refuses_sends": self._config.flow.refuse_sends,
                "security": self._exposure.security(),
                "listeners": self._listeners(),
                "insecure_listeners": self._exposure.listeners,
                "insecure": self._exposure.warnings,
                "audit_faults": self.audit_faults(),
                "cuts": recovered.get("cuts", []),
                "cuts_kept": recovered.get("cuts_kept", 0),
                "generation": recovered.get("generation", 0),
                "log_cuts": recovered.get("log_cuts", 0),
                "positions_lowered": recovered.get("positions_lowered", 0),
                "log_ends": recovered.get("log_ends", []),
                "last_log_cut": recovered.get("last_log_cut"),
            },
            processes=self._process_rows(state),
            positions=status.positions(self._control),
            disk_flags=status.disk_flags(self._control),
            disk_warnings=self._disk_warnings(),
            dispatchers=status.dispatcher_rows(self._table, self._control, self._config),
            plugins=self.roster.reports,
        )

    def _listeners(self) -> dict[str, str]:
        """Where the node listens, by name: its own protocol, and the workers of plugins."""
        prefix = "worker-"
        workers = [one for one in self._table.workers.values() if one.role.startswith(prefix) and one.endpoints]
        return {
            "native": self._admin.endpoints[0],
            **{one.role.removeprefix(prefix): str(one.endpoints[0]) for one in workers},
        }

    def recovered(self) -> dict[str, Any]:
        """Recovery's report of its work; empty before."""
        worker = self._table.workers.get("recovery")
        return {} if worker is None else worker.info

    def audit_faults(self) -> list[str]:
        """Why processes cannot write their audit logs, at present."""
        told = [self._exposure.audit.fault, *(str(one.info.get("audit") or "") for one in self._table.workers.values())]
        return [one for one in told if one]

    def _disk_warnings(self) -> list[str]:
        disk = status.disk_warnings(self._control, self._config, self._layout)
        return [*disk, *status.waiting_for_room(self._table)]

    def start_warnings(self) -> list[str]:
        """What whoever started the node must know: open listeners, the disk, a drain, and what the start cut."""
        disk = self._disk_warnings()
        recovered = self.recovered()
        cut, lowered = recovered.get("cut_now"), recovered.get("lowered_now")
        drained = ["the node is drained and refuses sends, until `commitmq drain off` (flow.refuse_sends)"]
        told = [*self._exposure.warnings, *disk, *(drained if self._config.flow.refuse_sends else [])]
        return [*told, *([f"this start cut the log. {cut}"] if cut else []), *([str(lowered)] if lowered else [])]

    def _process_rows(self, state: str) -> list[dict[str, Any]]:
        memory = self._memory
        rows = []
        if self._keeper.live_pid:
            restarts = self._keeper.restarts
            rows.append(status.process_row("keeper", self._keeper.pid, "ready", restarts, self._cpu["keeper"], memory))
        rows.append(status.process_row("supervisor", os.getpid(), state, 0, self._cpu["supervisor"], memory))
        return rows + status.worker_rows(self._table, self._control, self._config, memory)
