"""Loops over raw bytes, compiled by numba, and nothing else: no files, no sockets, no policy.

Importing any module here loads numba (about 0.3 s); the CLI and clients that send single messages must not do that.
numba comes with the extra ``commitmq[node]``; without it the import raises MissingExtraError, which is an ImportError.

:mod:`commitmq.files.kernel_cache` chooses the folder of the compiled code and says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commitmq.extras import need_node
from commitmq.files import kernel_cache

need_node("this part of commitmq")

from numba.core import caching  # noqa: E402 - need_node has already reported a missing numba


class _KernelLocator(caching._CacheLocator):
    """Tells numba the cache folder of every function of this package: the one folder chosen for all of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._py_file = inspect.getfile(function)  # for numba's warnings
        self._line = function.__code__.co_firstlineno
        self._folder = str(kernel_cache.choose().folder)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _KernelLocator | None:
        return cls(py_func) if Path(py_file).parent == kernel_cache.SOURCES else None

    def get_cache_path(self) -> str:
        return self._folder

    def ensure_cache_path(self) -> None:
        """The folder was checked when it was chosen; a complete one need not be writable."""

    def get_source_stamp(self) -> str:
        return kernel_cache.key()

    def get_disambiguator(self) -> str:
        return str(self._line)


_known: list[Any] = caching.CacheImpl._locator_classes
_known.insert(0, _KernelLocator)
