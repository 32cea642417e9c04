"""The audit log of a process, from its settings; and who sent a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from commitmq.config import NodeConfig
from commitmq.log import Log
from commitmq.security.audit import AuditLimits, AuditLog


def audit_log(
    folder: Path, role: str, config: NodeConfig, log: Log, told: Callable[[str], object] | None = None
) -> AuditLog:
    """The audit log of the process ``role`` in ``folder``, which is the store's ``commitmq/audit``."""
    limits = AuditLimits(**{one.name: getattr(config.audit, one.name) for one in fields(AuditLimits)})
    return AuditLog(folder, role, log, limits, told=told)
