"""Loops over raw bytes, compiled ahead by Cython, and nothing else: no files, no sockets, no policy.

    codes.py        numbers and the row type that kernels and callers share
    compiled.pyx    the module; its parts are the *.pxi files beside it
    compiled.pyi    the types of its functions

The build compiles them (``hatch_build.py``). They need isal, which comes with the extra ``commitmq[node]``; without it the
import raises MissingExtraError, which is an ImportError.
"""

from __future__ import annotations

from importlib.util import find_spec

from commitmq.errors import MissingExtraError
from commitmq.extras import need_node

need_node("this part of commitmq")

if find_spec("commitmq.kernels.compiled") is None:
    raise MissingExtraError(
        "this installation of commitmq has no compiled kernels: install it by pip, from a wheel or its sources, or run"
        " `python hatch_build.py` in a clone",
        name="commitmq.kernels.compiled",
    )
