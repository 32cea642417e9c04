"""discovery: one-shot; imports the plugins and reports the parts that they add to the supervisor. A node has one such
process.

Owns, reads, advances: nothing of the store. Sockets: none. Exit codes: 0, or any code when a plugin's import ends the
process; the supervisor then starts it again without that plugin (``params["leave_out"]``).
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

    # The output of a plugin's import must not mix with the node's own lines.
    with contextlib.redirect_stdout(sys.stderr):
        found = discover(context.config, dict(context.params.get("leave_out", {})), say)
    for name in ("plugins", "dispatchers", "workers", "filters", "config_errors"):
        for item in found[name]:
            context.tell_item(name, item)
    context.ready()
    # A plugin may have started threads, or registered exit handlers that wait. This process does not wait for them.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)
