"""Fixture of the interop tests: RocketMQ's classes, built once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rocketmq
from broker import Broker, ClientTool, ClusterTool
from java_project import INTEROP, missing_tools
from mqadmin import Admin
from served import Served, serve

RunRocketMQ = Callable[..., rocketmq.Run]


@pytest.fixture(scope="session")
def _class_path() -> str:
    missing = missing_tools()
    if missing:
        reason = f"RocketMQ's classes cannot run: PATH has no {', '.join(missing)}"
        if os.environ.get("COMMITMQ_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return INTEROP.build()


@pytest.fixture
def run_rocketmq(_class_path: str) -> RunRocketMQ:
    """``run_rocketmq(root, verb, …)``: see :func:`rocketmq.run`."""

    def run(root: Path, *arguments: str, **options: Any) -> rocketmq.Run:
        return rocketmq.run(_class_path, root, *arguments, **options)

    return run


@pytest.fixture
def run_rocketmq_on_each(_class_path: str) -> Callable[..., dict[Path, rocketmq.Run]]:
    """``run_rocketmq_on_each(roots)``: see :func:`rocketmq.run_each`."""
    return partial(rocketmq.run_each, _class_path)


@pytest.fixture
def judge_by_rocketmq(_class_path: str) -> Callable[..., list[dict[str, Any]]]:
    """``judge_by_rocketmq(cases)``: see :func:`rocketmq.judge`."""
    return partial(rocketmq.judge, _class_path)


@pytest.fixture
def rocketmq_subscriptions(_class_path: str) -> Callable[[Path], list[dict[str, Any]]]:
    """``rocketmq_subscriptions(path)``: see :func:`rocketmq.subscriptions`."""
    return partial(rocketmq.subscriptions, _class_path)


@pytest.fixture
def rocketmq_broker(_class_path: str) -> Callable[..., Broker]:
    """``rocketmq_broker(root, **settings)``: a :class:`broker.Broker` on the store ``root``."""
    return partial(Broker, _class_path)


@pytest.fixture(scope="session")
def rocketmq_broker_of_session(_class_path: str) -> Callable[..., Broker]:
    """``rocketmq_broker`` for fixtures that serve several tests."""
    return partial(Broker, _class_path)


@pytest.fixture(scope="session")
def mqadmin_of(_class_path: str) -> Callable[..., Admin]:
    """``mqadmin_of(home, names, broker)``: an :class:`mqadmin.Admin` of one cluster."""
    return partial(Admin, _class_path)


@pytest.fixture
def mqadmin(_class_path: str, tmp_path: Path) -> Iterator[Admin]:
    """RocketMQ's mqadmin, whose commands name their cluster themselves."""
    with Admin(_class_path, tmp_path / "mqadmin") as admin:
        yield admin


@pytest.fixture
def rocketmq_clients(_class_path: str) -> Callable[..., ClientTool]:
    """``rocketmq_clients(folder, port, address)``: a :class:`broker.ClientTool`."""
    return partial(ClientTool, _class_path)


@pytest.fixture
def cluster_tool(_class_path: str) -> Callable[..., ClusterTool]:
    """``cluster_tool(folder, address, serves=…)``: a :class:`broker.ClusterTool`."""
    return partial(ClusterTool, _class_path)


@pytest.fixture
def served(tmp_path: Path, rocketmq_clients: Callable[..., ClientTool]) -> Iterator[Served]:
    """A node with the broker server, and RocketMQ's clients of it."""
    with serve(tmp_path, rocketmq_clients) as found:
        yield found
