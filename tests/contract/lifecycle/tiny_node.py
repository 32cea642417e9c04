"""``python tiny_node.py STORE KEEPER_PID [section.key=value …]``: a real supervisor over workers that do nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from commitmq import config, log
from commitmq.supervision.console import pipe_report
from commitmq.supervision.roster import start_order
from commitmq.supervision.supervisor import Supervisor

if __name__ == "__main__":
    log.configure()
    values = config.load(None, sys.argv[3:])
    sys.exit(
        Supervisor(
            Path(sys.argv[1]),
            values,
            keeper_pid=int(sys.argv[2]),
            report=pipe_report(1),
            modules=dict.fromkeys(start_order(values), "tiny_worker"),
        ).run()
    )
