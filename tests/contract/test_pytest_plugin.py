"""Goal: the fixtures of commitmq.testing do what plugins/TUTORIAL.md says, in a project that knows nothing of this one.

Method: pytest runs a small test file in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from nodes import environment

TESTS = '''
import os
import pytest

MODULE = """
from commitmq import hookimpl
from commitmq.plugin.hookspecs import DispatcherSpec

@hookimpl
def commitmq_dispatchers(config):
    return [DispatcherSpec("broken", "not_installed:Missing")]
"""

@pytest.fixture(scope="session", autouse=True)
def module(tmp_path_factory):
    import sys
    folder = tmp_path_factory.mktemp("module")
    (folder / "not_installed.py").write_text(MODULE)
    sys.path.insert(0, str(folder))

@pytest.mark.commitmq(settings=["topics.default_queues=1"], plugins=["not_installed"])
def test_life(commitmq_node):
    node = commitmq_node
    first = node.send("T", "one")
    assert node.wait_until_dispatched("consume_queue")["position"] > first.physical_offset
    assert node.admin.topic("T").write_queues == 1
    assert node.status()["dispatchers"] and node.dispatcher("broken")["plugin"] == "not_installed"
    with pytest.raises(AssertionError, match="there is no dispatcher 'absent'; there are"):
        node.dispatcher("absent")
    node.crash()
    assert not node.is_running
    node.restart()
    node.send("T", b"two")
    assert node.run("consume", "T", "--from", "earliest").output == "one\\ntwo\\n"
    node.stop()
    assert not node.is_running
    assert "stopped" in node.log()

def test_shared(commitmq_shared_node, commitmq_topic):
    assert commitmq_topic.startswith("test_shared-")
    assert commitmq_shared_node.send(commitmq_topic, "one", queue=3).queue_offset == 0

@pytest.mark.parametrize("value", ["a/b", "é"])
def test_shared_again(commitmq_shared_node, commitmq_topic, value):
    assert [one.name for one in commitmq_shared_node.admin.topics() if not one.system] == [commitmq_topic]

def test_failure(commitmq_node):
    assert commitmq_node.address == "somewhere else"

@pytest.mark.commitmq("not_installed")
def test_wrong_marker(commitmq_node):
    pass

@pytest.mark.commitmq(plugins=["nosuch"])
def test_missing_plugin(commitmq_node):
    pass

@pytest.mark.parametrize("name", ["nosuch", "my=nosuch", "os.nosuch", "nosuch.deep"])
def test_missing_plugins(commitmq_node_factory, name):
    with pytest.raises(AssertionError, match="there is no module '.*nosuch.*' for the plugin"):
        commitmq_node_factory(plugins=[name])

def test_wrong_setting(commitmq_node_factory):
    with pytest.raises(AssertionError, match="there is no key topics.colour"):
        commitmq_node_factory(settings=["topics.colour=3"])
'''


@pytest.mark.slow
def test_the_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    known = any(point.name == "commitmq" for point in metadata.entry_points(group="pytest11"))
    # An environment that is older than the entry point is told by hand.
    plugin = [] if known else ["-p", "commitmq.testing.pytest_plugin"]
    variables = {name: value for name, value in environment().items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", *plugin, str(tmp_path)],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    report = done.stdout
    assert "1 failed, 9 passed, 2 errors" in report, report
    assert "FAILED test_mine.py::test_failure" in report
    assert "end of node.log of" in report
    assert "node is ready admin=" in report, "the log of the node is part of the failure"
    assert "there is no module 'nosuch' for the plugin 'nosuch'" in report
    assert "the marker commitmq takes settings=[…] and plugins=[…]" in report
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if os.fsencode(tmp_path) in _read(path)]
    assert left == [], "nothing of a node is left behind"


def test_pytest_finds_the_plugin_in_an_installation() -> None:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    entry_points = tomllib.loads(project.read_text())["project"]["entry-points"]
    assert entry_points["pytest11"] == {"commitmq": "commitmq.testing.pytest_plugin"}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
