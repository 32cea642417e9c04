"""Goal: a store goes to a newer version and back: nothing is lost, nothing comes twice, groups go on where they were.

Method: the wheel of a former state of this repository writes a store with its own clients, the present wheel opens it and goes
on, the former one takes it back, and the present one ends the work. Between two of them the node stops in order, or all of its
processes are killed. Both examine the store at the end.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from upgrade_program import JOBS, MESSAGES

import release
from commitmq.supervision.exit_codes import CliExit
from environments import Environment, EnvironmentNode

PROJECT = Path(__file__).resolve().parents[2]
# The first state whose kernels need no compiler at run time. A release puts its predecessor here.
FORMER = "6ce4a8ae98a21299634112a0a5281e1fc5cb3b89"
PROGRAM = str(Path(__file__).with_name("upgrade_program.py"))
BUILT_FROM = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "config",
    "deploy",
    "node",
    "plugins",
    "dispatchers",
    "hatch_build.py",
)

pytestmark = pytest.mark.timeout(600)


class InstalledNode(EnvironmentNode):
    """A node of the version that is installed in ``environment``, and its clients."""

    def __init__(self, environment: Environment, store: Path) -> None:
        super().__init__(environment, store)
        self.settings = ["network.port=0"]

    def program(self, *arguments: str) -> Any:
        done = subprocess.run(
            [self.python, PROGRAM, *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def installed(project: Path, folder: Path) -> Environment:
    """An environment in ``folder`` with the wheel of ``project``."""
    built = release.build(project, folder / "archives", umask=0o022, zone="UTC")
    environment = Environment(folder / "environment")
    environment.install(str(built.wheel))
    return environment


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    packed = subprocess.run(
        ["git", "archive", FORMER, *BUILT_FROM], cwd=PROJECT, capture_output=True, timeout=60, check=False
    )
    if packed.returncode:
        pytest.skip(f"git has no {FORMER} here: {packed.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("former")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder / "project", filter="data")
    return installed(folder / "project", folder)


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("present")
    return installed(release.copied(folder / "project"), folder)


@pytest.fixture
def nodes(former: Environment, present: Environment, tmp_path: Path) -> tuple[InstalledNode, InstalledNode]:
    """The former and the present version on one store."""
    return InstalledNode(former, tmp_path / "store"), InstalledNode(present, tmp_path / "store")


@pytest.mark.slow
def test_each_environment_has_its_own_version(former: Environment, present: Environment) -> None:
    code = "import commitmq, commitmq_plugins; print(commitmq.__file__, *list(commitmq_plugins.__path__)[:1])"
    for environment in (former, present):
        places = environment.check("-c", code).split()
        assert [Path(one).is_relative_to(environment.packages) for one in places] == [True, True], places
    sources = [(one.packages / "commitmq" / "supervision" / "service_manager.py").exists() for one in (former, present)]
    assert sources == [True, False], "they differ"


@contextlib.contextmanager
def running(node: InstalledNode) -> Iterator[None]:
    """The node is stopped at the end, unless it was killed."""
    try:
        ended = node.start()
        assert ended.returncode == 0, ended.stderr
        yield
        ended = node.stop()
        assert ended.returncode in (CliExit.OK, CliExit.NODE_UNAVAILABLE), ended.stderr
    except BaseException as error:
        error.add_note(f"--- the end of node.log ---\n{node.log_tail()}")
        raise
    finally:
        node.end()


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(False, id="in-order", marks=pytest.mark.slow),
        pytest.param(True, id="killed", marks=pytest.mark.long),
    ],
)
def test_a_store_goes_to_the_present_version_and_back(nodes: tuple[InstalledNode, InstalledNode], killed: bool) -> None:
    old, new = nodes
    stages = [("one", old), ("two", new), ("three", old), ("four", new)]
    results = []
    for number, (name, node) in enumerate(stages, 1):
        with running(node):
            results.append(node.program(node.address, name, str(MESSAGES * number)))
            if name == "four":
                results.append(node.program(node.address, "last", str(MESSAGES * number)))
            if killed and name != "four":
                node.kill_all()
    sent = [f"{name} {what}" for name, _ in stages for what in (*range(MESSAGES - 2), "in a transaction", "later")]
    jobs = [f"{name} job {number}" for name, _ in stages for number in range(JOBS)]
    for number, result in enumerate(results[:-1], 1):
        assert sorted(result["read"]) == sorted(sent[: MESSAGES * number]), stages[number - 1]
        assert result["polled"], "the group goes on"
        assert len(result["received"]) == JOBS // 2
    polled = Counter(body for result in results for body in result["polled"])
    received = Counter(body for result in results for body in result["received"])
    assert polled == Counter(sent), "each once"
    assert received == Counter(jobs), "each once"
    for node in (old, new):
        examined = node.run("store", "verify", str(node.store))
        assert examined.returncode == 0, examined.stdout + examined.stderr
