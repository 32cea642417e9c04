"""Starts the comparison: ``scripts/bench/run`` does it in the project's environment."""

from __future__ import annotations

import sys
from pathlib import Path

# The folder above this package, so that its modules are found as ``bench.…`` however this file was started.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.bench import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
