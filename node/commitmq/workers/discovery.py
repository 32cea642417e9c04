"""discovery: one-shot; imports the plugins and tells the supervisor what they add. The only such process of a node.

Owns, reads, advances: nothing of the store. Sockets: none. Exit codes: 0; or whatever a plugin's import does to the
process, which the supervisor answers by asking again without that plugin (``params["leave_out"]``).
"""

from __future__ import annotations

import contextlib
import os
import sys

from commitmq.supervision.discovery import discover
from commitmq.workers.runtime.context import WorkerContext

ROLE = "discovery"


def run(context: WorkerContext) -> None:
    """Ask every plugin, report, end."""

    def say(name: str) -> None:
        context.heartbeat()
        context.tell(loading=name)

    # What a plugin prints while it is imported must not get between the node's own lines.
    with contextlib.redirect_stdout(sys.stderr):
        found = discover(context.config, dict(context.params.get("leave_out", {})), say)
    for name in ("plugins", "dispatchers", "workers", "filters", "config_errors"):
        for item in found[name]:
            context.tell_item(name, item)
    context.ready()
    # A plugin may have started threads, or registered exit handlers that wait: none of that is ours to wait for.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)
