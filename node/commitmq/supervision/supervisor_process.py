"""The supervisor as a process, which the keeper starts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from commitmq import config as node_config
from commitmq import failpoints
from commitmq import log as log_module
from commitmq.config import NodeConfig
from commitmq.store.access import keep_private
from commitmq.store.layout import StoreLayout
from commitmq.supervision.console import console_report, pipe_report
from commitmq.supervision.exit_codes import CliExit
from commitmq.supervision.processes import pass_interpreter_on, set_process_name
from commitmq.supervision.supervisor import Supervisor


def read_config(fd: int) -> NodeConfig:
    """The configuration in memory file ``fd``, which stays open for the next supervisor."""
    return node_config.loads(os.pread(fd, os.fstat(fd).st_size, 0))


def main(arguments: list[str]) -> int:
    """``python -m commitmq.supervision.supervisor_process STORE CONFIG_FD READY_FD MODE KEEPER_PID LIFE``."""
    store, config_fd, ready_fd, mode, keeper_pid, life = arguments
    log_module.configure()
    set_process_name("cmq-supervisor")
    pass_interpreter_on()
    failpoints.play("supervisor")
    for fd in (int(config_fd), int(ready_fd)):
        if fd >= 0:
            os.set_inheritable(fd, False)
    report = (pipe_report if mode == "background" else console_report)(int(ready_fd))
    events: set[str] = set()

    def tell(message: dict[str, Any]) -> None:
        events.add(message["event"])
        report(message)

    keep_private(Path(store))
    log_module.follow(StoreLayout(Path(store)).log)
    supervisor: Supervisor | None = None
    try:
        supervisor = Supervisor(
            Path(store),
            read_config(int(config_fd)),
            keeper_pid=int(keeper_pid),
            background=mode == "background",
            report=tell,
            config_fd=int(config_fd),
            life=life,
        )
        code = int(supervisor.run())
    except Exception as error:  # the exit code must be right after any failure, and the workers end with the lifelines
        log_module.get_log("supervisor").exception("supervisor crashed", error=repr(error))
        if "ready" in events:
            os.kill(os.getpid(), signal.SIGKILL)  # the keeper starts the next one, as after any other kill
        report({"event": "failed", "error": f"the supervisor crashed: {error!r}", "code": int(CliExit.CRASHED)})
        code = int(CliExit.CRASHED)
    if supervisor is not None:
        supervisor.last_word(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
