"""Test helpers for plugins: a real node as a pytest fixture, and the tests that every dispatcher must pass.

* The fixtures ``commitmq_node``, ``commitmq_node_factory``, ``commitmq_shared_node`` and ``commitmq_topic`` exist
  wherever CommitMQ is installed with pytest; see :mod:`commitmq.testing.pytest_plugin`.
* :class:`DispatcherContract` is a class of tests to inherit from; it needs hypothesis (the extra ``testing``).
* :func:`start_node` gives a node outside the fixtures, for instance one that a whole module shares.

Names are loaded when they are first used: pytest imports this package in every project that has CommitMQ installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commitmq.testing.contract import DispatcherContract
    from commitmq.testing.node import CommitMQNode, start_node

__all__ = ["CommitMQNode", "DispatcherContract", "start_node"]

_HOMES = {
    "CommitMQNode": "commitmq.testing.node",
    "DispatcherContract": "commitmq.testing.contract",
    "start_node": "commitmq.testing.node",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "DispatcherContract":
        from commitmq.extras import TESTING_MODULES, need

        need("DispatcherContract", "testing", TESTING_MODULES)
    return getattr(import_module(_HOMES[name]), name)
