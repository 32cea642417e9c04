"""Compile every kernel, or load it from numba's cache, in this process: ``python -m commitmq.kernels.warm``.

Installing runs this once (about ten seconds); the forkserver imports it so that all workers share the loaded code.
"""

from __future__ import annotations

import importlib
import time

_MODULES = ("words", "raw", "run", "walk", "tags", "columns", "index", "units", "arrow", "marks")


def warm() -> float:
    """Import all kernel modules; eager signatures make the import compile or load them. Returns the seconds it took."""
    started = time.perf_counter()
    for name in _MODULES:
        importlib.import_module(f"commitmq.kernels.{name}")
    return time.perf_counter() - started


if __name__ == "__main__":
    import sys

    sys.stdout.write(f"kernels ready in {warm():.1f} s\n")
