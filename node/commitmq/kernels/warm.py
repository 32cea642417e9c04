"""Compiles every kernel, or loads the compiled ones: ``python -m commitmq.kernels.warm``.

Installing runs this once (up to a minute); the forkserver imports it so that all workers share the loaded code.
"""

from __future__ import annotations

import importlib
import time

from commitmq.files import kernel_cache


def warm() -> float:
    """Import all kernel modules; eager signatures make the import compile or load them. Returns the seconds it took."""
    started = time.perf_counter()
    with kernel_cache.compiling(kernel_cache.choose()):
        for name in kernel_cache.MODULES:
            importlib.import_module(f"commitmq.kernels.{name}")
    return time.perf_counter() - started


if __name__ == "__main__":
    import sys

    sys.stdout.write(f"{kernel_cache.choose().folder}\n")
    seconds = warm()
    sys.stderr.write(f"kernels ready in {seconds:.1f} s\n")
