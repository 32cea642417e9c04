"""The extras of the package: their modules, and the error for a program that needs one that is not installed.

``pip install commitmq`` installs the clients and the command line. A node, and every program that reads or repairs a
store by itself, needs the compiled kernels: ``pip install 'commitmq[node]'``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec

from commitmq.errors import MissingExtraError

# Modules that a node needs. The extra also has rich, which draws progress bars; without it there are none.
NODE_MODULES = ("isal",)
SPARK_MODULES = ("pyspark", "py4j", "pyarrow", *NODE_MODULES)
TESTING_MODULES = ("pytest", "hypothesis", *NODE_MODULES)


def is_installed(module: str) -> bool:
    """Whether ``module``, a top-level name, can be imported; it is not imported here."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def missing_for_node() -> list[str]:
    """The modules of the extra ``node`` that are not installed."""
    return [name for name in NODE_MODULES if not is_installed(name)]


def need_node(what: str) -> None:
    """Raise MissingExtraError when a module that ``what`` needs is missing; it says how to install it."""
    need(what, "node", NODE_MODULES)


def need(what: str, extra: str, modules: Iterable[str]) -> None:
    """:func:`need_node` for another ``extra``, which brings ``modules``."""
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        names = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"{what} needs {names}, which {verb} not installed: pip install 'commitmq[{extra}]'", name=missing[0]
        )
