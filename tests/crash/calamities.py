"""What befalls a machine while a node runs on it, for tests to make happen."""

from __future__ import annotations

import mmap
from pathlib import Path

from nodes import environment

SHIM = Path(__file__).parent / "power_shim"


class WrongClock:
    """A wall clock that tests may set wrong, of every process that is started with :attr:`environment`.

    The monotonic clock goes on as it is, as it does on a machine whose time is set. This process keeps the right time.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        self._path = path
        with path.open("r+b") as file:
            self._off_ns = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    @property
    def environment(self) -> dict[str, str]:
        """Variables for ``Node.start`` or ``start_node``."""
        return {"PYTHONPATH": f"{SHIM}:{environment()['PYTHONPATH']}", "COMMITMQ_WRONG_CLOCK": str(self._path)}

    def set(self, seconds: float) -> None:
        """From now on the clock is ``seconds`` ahead of the right time, behind it where negative."""
        self._off_ns[0] = int(seconds * 1_000_000_000)

    def right(self) -> None:
        """From now on the clock is right."""
        self.set(0)
