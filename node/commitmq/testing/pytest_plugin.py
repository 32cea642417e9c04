"""The pytest plugin ``commitmq``: nodes as fixtures.

    commitmq_node           a ready node, in a temporary folder, for one test
    commitmq_node_factory   makes them: commitmq_node_factory(settings=["topics.default_queues=1"], plugins=["my.module"])
    commitmq_shared_node    one for all tests of a run, so it starts only once: use a topic of your own in it,
    commitmq_topic          a new topic of four queues in the shared node, deleted after the test

The marker ``commitmq`` gives ``commitmq_node`` its settings and its plugins, which need not be installed; several of them
(a function's, a class's, a module's ``pytestmark``) add up:

    @pytest.mark.commitmq(settings=["plugins.mine.depth=3"], plugins=["mine"])
    def test_mine(commitmq_node): ...

A failing test shows the end of the log of each node that lives at that moment. pytest loads this module in every
project of an environment that has CommitMQ, so it imports nothing before a fixture is used; ``-p no:commitmq`` keeps it
out.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from commitmq.testing.node import CommitMQNode

    NodeFactory = Callable[..., CommitMQNode]

_NODE_MODULE = "commitmq.testing.node"
_NUMBERS = itertools.count(1)

# Its assertions fail in other projects, and should report as much there as they do here.
pytest.register_assert_rewrite("commitmq.testing.contract")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "commitmq(settings=(), plugins=()): settings and plugins of the node in the fixture commitmq_node"
    )


@pytest.fixture
def commitmq_node_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFactory]:
    """``commitmq_node_factory(settings=…, plugins=…)``: a ready node, each on a store of its own.

    ``settings`` are ``section.key=value``; ``plugins`` are modules (or ``name=module``) that need not be installed. All
    nodes end with the test.
    """
    from commitmq.testing.node import start_node

    with ExitStack() as stack:
        # Short folders: a Unix socket's path has 107 bytes.
        yield lambda *, settings=(), plugins=(): stack.enter_context(
            start_node(tmp_path_factory.mktemp("cmq"), settings, plugins)
        )


@pytest.fixture
def commitmq_node(request: pytest.FixtureRequest, commitmq_node_factory: NodeFactory) -> CommitMQNode:
    """A ready node; the marker ``commitmq`` gives it settings and plugins."""
    settings: list[str] = []
    plugins: list[str] = []
    for marker in reversed(list(request.node.iter_markers("commitmq"))):
        settings += marker.kwargs.get("settings", ())
        plugins += marker.kwargs.get("plugins", ())
        if marker.args or marker.kwargs.keys() - {"settings", "plugins"}:
            raise pytest.UsageError("the marker commitmq takes settings=[…] and plugins=[…]")
    return commitmq_node_factory(settings=settings, plugins=list(dict.fromkeys(plugins)))


@pytest.fixture(scope="session")
def commitmq_shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommitMQNode]:
    """A ready node that all tests of this process share; without settings and plugins of its own."""
    from commitmq.testing.node import start_node

    with start_node(tmp_path_factory.mktemp("cmq")) as node:
        yield node


@pytest.fixture
def commitmq_topic(request: pytest.FixtureRequest, commitmq_shared_node: CommitMQNode) -> Iterator[str]:
    """The name of a topic in ``commitmq_shared_node`` that no other test uses: it begins with the test's own name."""
    own = re.sub(r"[^A-Za-z0-9_-]", "-", request.node.name)[:80]
    name = f"{own}-{next(_NUMBERS)}"
    commitmq_shared_node.admin.topic_create(name, 4)
    yield name
    commitmq_shared_node.admin.topic_delete(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and _NODE_MODULE in sys.modules:
        for node in sys.modules[_NODE_MODULE].live_nodes():
            report.sections.append((f"end of node.log of {node.store}", node.log_tail()))
    return report
