"""``python coordinator_process.py STORE LIFELINE_FD CONFIG_JSON [MAX_FILE_BYTES]``: the real worker of the coordinator.

With MAX_FILE_BYTES no file may grow beyond it until SIGUSR1 comes: a disk that is full for a while, for one process.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
from pathlib import Path

from commitmq import log
from commitmq.config import from_mapping
from commitmq.workers import coordinator
from commitmq.workers.runtime import context as runtime


def _limit(size_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    log.configure()
    lifeline = socket.socket(fileno=int(sys.argv[2]))
    config = from_mapping(json.loads(sys.argv[3]))
    if len(sys.argv) > 4:
        signal.signal(signal.SIGUSR1, lambda number, frame: _limit(resource.RLIM_INFINITY))
        signal.signal(signal.SIGUSR2, lambda number, frame: _limit(int(sys.argv[4])))
    sys.exit(runtime.main(coordinator.ROLE, coordinator.run, Path(sys.argv[1]), config, lifeline, {"port": 0}))
