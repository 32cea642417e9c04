"""Loops over raw bytes, compiled by numba, and nothing else: no files, no sockets, no policy.

Importing any module here loads numba (about 0.3 s); clients that send single messages and the CLI must not.

numba caches machine code beside the sources and looks at the time stamp of the function's own file only. These modules
inline each other's functions, so a change in one would leave the others' machine code stale: the cache is dropped when any
source here changed.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path


def _drop_stale_cache() -> None:
    folder = Path(__file__).parent
    cache = folder / "__pycache__"
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    mark = cache / "kernels.sha256"
    # Where the folder is read-only numba keeps its cache elsewhere, and nobody edits the sources either.
    with contextlib.suppress(OSError):
        if not mark.exists() or mark.read_text() != digest.hexdigest():
            for stale in [*cache.glob("*.nbi"), *cache.glob("*.nbc")]:
                stale.unlink(missing_ok=True)
            cache.mkdir(exist_ok=True)
            mark.write_text(digest.hexdigest())


_drop_stale_cache()
