"""One run of a driver: its result, the processor time of both sides, and an error with its reason."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.system import BenchError, Server

_SCRIPTS = Path(__file__).resolve().parent.parent
_SHOWN_BYTES = 2000


def run_driver(
    server: Server, job: dict[str, Any], *, limit_s: float, settle_s: float = 0.0, count_cpu: bool = True
) -> dict[str, Any]:
    """The result of the driver of ``server``, with ``server_cpu_s`` and ``driver_cpu_s`` added (user + system,
    seconds).

    The server's time is read ``settle_s`` after the driver ended. Raises BenchError when the driver fails, prints no
    result or takes longer than ``limit_s``.
    """
    command = [*server.driver(), json.dumps({"address": server.address, **job})]
    if not count_cpu:
        return run_command(command, limit_s=limit_s)
    server_before, driver_before = server.cpu_seconds(), _children_cpu_s()
    result = run_command(command, limit_s=limit_s)
    # No other child of this process ends meanwhile, so the time of its ended children is the driver's.
    driver_after = _children_cpu_s()
    time.sleep(settle_s)
    result["driver_cpu_s"] = round(driver_after - driver_before, 3)
    result["server_cpu_s"] = round(server.cpu_seconds() - server_before, 3)
    return result


def run_command(command: list[str], *, limit_s: float) -> dict[str, Any]:
    """The JSON object in the last line that ``command`` prints. Raises BenchError."""
    # Freed memory stays with the driver (docs/measuring.md).
    kept = {"MALLOC_MMAP_THRESHOLD_": str(8 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}
    env = {**os.environ, **kept, "PYTHONPATH": os.pathsep.join([str(_SCRIPTS), *_python_path()])}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            # A group of its own, so that a driver that hangs can be ended with all that it started.
            start_new_session=True,
        )
    except OSError as error:
        raise BenchError(f"the driver could not be started: {error}") from error
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        _, errors = process.communicate()
        raise BenchError(f"the driver took longer than {limit_s:.0f} s\n{_end_of(errors)}") from None
    except BaseException:
        _kill_group(process)
        process.communicate()
        raise
    lines = output.splitlines()
    if process.returncode or not lines:
        raise BenchError(f"the driver ended with code {process.returncode}: {_end_of(errors)}")
    try:
        result = json.loads(lines[-1])
    except ValueError:
        raise BenchError(f"the driver printed no result but {_end_of(lines[-1])!r}") from None
    if not isinstance(result, dict):
        raise BenchError(f"the driver printed no object but {_end_of(lines[-1])!r}")
    return result


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def _python_path() -> list[str]:
    return [path for path in sys.path if path and path != str(_SCRIPTS)]


def _children_cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _end_of(text: bytes) -> str:
    return text[-_SHOWN_BYTES:].decode("utf-8", "replace").strip()
