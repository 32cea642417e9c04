"""``python reader_process.py STORE LIFELINE_FD CONFIG_JSON``: the real worker of the role reader-0."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from commitmq import log
from commitmq.config import from_mapping
from commitmq.workers.reader import process as reader
from commitmq.workers.runtime import context as runtime

if __name__ == "__main__":
    log.configure()
    lifeline = socket.socket(fileno=int(sys.argv[2]))
    config = from_mapping(json.loads(sys.argv[3]))
    sys.exit(runtime.main("reader-0", reader.run, Path(sys.argv[1]), config, lifeline, {"port": 0}))
