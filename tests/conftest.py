"""Fixtures that every suite may use: the golden stores, unpacked once, and copies that a test may write to."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from golden_stores import GOLDEN_NAMES, GoldenStore, unpack

# Projects of their own, whose tests run in environments of their own.
collect_ignore = ["fixtures"]

FOLDERS = ("spark", "crash", "interop", "contract", "counted", "unit")

# The machines that run this are shared: how long an example takes says nothing of the code.
hypothesis.settings.register_profile("commitmq", deadline=None)
hypothesis.settings.load_profile("commitmq")


def pytest_configure(config: pytest.Config) -> None:
    """Have our own pytest plugin where its entry point is not known, in an environment older than the checkout; and SIGINT for
    the programs that tests start: a shell's background job, and all that it starts, would ignore it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.pluginmanager.has_plugin("commitmq"):
        config.pluginmanager.import_plugin("commitmq.testing.pytest_plugin")


def pytest_report_header() -> str | None:
    """Take eventfd from this process where a test asks for that, and say so."""
    if not os.environ.get("COMMITMQ_TEST_WITHOUT_EVENTFD"):
        return None
    for name in [one for one in dir(os) if one.startswith(("eventfd", "EFD_"))]:
        delattr(os, name)
    return "without eventfd"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``: a file's tests share a node, so one process runs them; Spark's share a session, all of them.

    The longest files begin first.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "tests/spark" if nodeid.startswith("tests/spark/") else super()._split_scope(nodeid)

    return ByFile(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note why a test failed in the file COMMITMQ_REASONS, for the end of a long log: its last lines tell most."""
    file = os.environ.get("COMMITMQ_REASONS")
    if not file or not report.failed or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    text = report.longreprtext.splitlines()
    told = [line for line in text if line.startswith("E ")][-12:] or text[-12:]
    with open(file, "a", encoding="utf-8") as reasons:
        reasons.write("\n".join((f"{report.nodeid} ({report.when})", *(line[:600] for line in told), "")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of the folders: those whose files take longest first, so that no process is left alone at the end."""
    items.sort(key=lambda item: next((at for at, name in enumerate(FOLDERS) if f"/tests/{name}/" in str(item.path)), 9))


@pytest.fixture(autouse=True)
def _umask_stays() -> Iterator[None]:
    """A test that leaves another umask fails itself, not the tests after it in its process."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    after = os.umask(before)
    assert after == before, f"the test leaves the umask {after:04o}"


@pytest.fixture(scope="session")
def golden_stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GoldenStore]:
    """Both golden stores by name ("clean", "crash"). Shared by all tests: read only."""
    return {name: unpack(name, tmp_path_factory.mktemp(f"golden-{name}")) for name in GOLDEN_NAMES}


@pytest.fixture(params=GOLDEN_NAMES)
def golden(request: pytest.FixtureRequest, golden_stores: dict[str, GoldenStore]) -> GoldenStore:
    """Each golden store in turn. Read only."""
    return golden_stores[request.param]


@pytest.fixture
def golden_copy(golden_stores: dict[str, GoldenStore], tmp_path: Path) -> Callable[[str], GoldenStore]:
    """``golden_copy(name)``: a golden store in a folder of this test's own, which it may change."""

    def copy(name: str) -> GoldenStore:
        original = golden_stores[name]
        root = tmp_path / f"golden-{name}"
        shutil.copytree(original.root, root)
        return GoldenStore(name, root, original.messages, original.lines)

    return copy
