"""Found first on the path of every process of a node whose disk is recorded or whose clock is wrong.

``COMMITMQ_POWER_STORE`` starts the recorder, see power_recorder. ``COMMITMQ_WRONG_CLOCK`` names a file of 8 bytes: an
int64 in the machine's byte order, the nanoseconds by which ``time.time`` and ``time.time_ns`` are off from now on. It is
mapped, so that all processes jump at once and a look at the clock costs no system call. ``calamities.WrongClock`` writes it.
"""

import os

if "COMMITMQ_WRONG_CLOCK" in os.environ:
    import mmap
    import time

    with open(os.environ["COMMITMQ_WRONG_CLOCK"], "rb") as _file:
        _off_ns = memoryview(mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)).cast("q")
    _right_ns = time.time_ns
    time.time_ns = lambda: _right_ns() + _off_ns[0]
    time.time = lambda: (_right_ns() + _off_ns[0]) / 1e9

if "COMMITMQ_POWER_STORE" in os.environ:
    import power_recorder

    power_recorder.Recorder(os.environ["COMMITMQ_POWER_STORE"], os.environ["COMMITMQ_POWER_RECORD"]).install()
