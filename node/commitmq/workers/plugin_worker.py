"""worker-NAME: runs one worker of a plugin.

Owns, reads, advances, sockets: the plugin's. Exit codes: workers.runtime.context.ExitCode. ``params["factory"]`` names the
function, which gets this process's context and follows the rules of every worker (see
:class:`commitmq.plugin.hookspecs.WorkerSpec`).
"""

from __future__ import annotations

import os
from typing import Any, cast

from commitmq.plugin.loading import resolve, settings
from commitmq.workers.runtime.context import WorkerContext

ROLE = "worker"


def run(context: WorkerContext) -> None:
    """Call the plugin's function. An exception ends the process, and the supervisor starts it again with back-off."""
    if not context.params.get("is_server"):
        os.nice(context.config.dispatch.plugin_niceness)
    context.params["settings"] = settings(context.config, str(context.params["plugin"]))
    cast("Any", resolve(str(context.params["factory"])))(context)
