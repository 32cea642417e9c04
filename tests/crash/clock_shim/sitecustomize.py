"""Found first on the path of a node's processes: ``time.time_ns`` and ``time.time`` are off by the seconds in a file."""

import os
import time

if "COMMITMQ_TEST_CLOCK" in os.environ:
    _path = os.environ["COMMITMQ_TEST_CLOCK"]
    _time_ns = time.time_ns

    def _shifted() -> int:
        with open(_path, encoding="ascii") as file:
            return _time_ns() + int(file.read() or "0") * 1_000_000_000

    time.time_ns = _shifted
    time.time = lambda: _shifted() / 1e9
