"""Goal: a store goes to a newer version and back: nothing is lost, nothing comes twice, groups go on where they were.

Method: a former state of this repository writes a store with its own clients, the present one opens it and goes on, the former
one takes it back, and the present one ends the work. Between two of them the node stops in order, or all of its processes are
killed. Both examine the store at the end.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from upgrade_program import JOBS, MESSAGES

from nodes import Node, environment, started

PROJECT = Path(__file__).resolve().parents[2]
# The state before packages were made. A release puts its predecessor here.
FORMER = "a736359b8d6dc5f5e0d467da5b026c2be2f41eff"
PROGRAM = str(Path(__file__).with_name("upgrade_program.py"))
ROOTS = ("node", "plugins", "dispatchers")

pytestmark = pytest.mark.timeout(600)


class OfVersion(Node):
    """A node and its clients with the sources below ``sources``; None: the present ones."""

    sources: Path | None = None

    def environment(self, **extra: str) -> dict[str, str]:
        found = environment(**extra)
        if self.sources is not None:
            found["PYTHONPATH"] = os.pathsep.join([*(str(self.sources / name) for name in ROOTS), found["PYTHONPATH"]])
        return found

    def program(self, *arguments: str) -> Any:
        done = subprocess.run(
            [sys.executable, PROGRAM, *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the former state, with the compiled kernels of the present one, which it uses if its own are the same."""
    command = ["git", "archive", FORMER, *ROOTS]
    packed = subprocess.run(command, cwd=PROJECT, capture_output=True, timeout=60, check=False)
    if packed.returncode:
        reason = f"git has no {FORMER} here: {packed.stderr.decode().strip()}"
        if os.environ.get("COMMITMQ_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("former")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    for compiled in (PROJECT / "node" / "commitmq" / "kernels" / "__pycache__").glob("kernels-*"):
        shutil.copytree(compiled, folder / compiled.relative_to(PROJECT), symlinks=True)
    return folder


@pytest.fixture
def nodes(former: Path, tmp_path: Path) -> tuple[OfVersion, OfVersion]:
    """The former and the present version on one store."""
    settings = ["network.port=0"]
    old, new = (OfVersion(tmp_path / "store", *settings) for _ in range(2))
    old.sources = former
    return old, new


@pytest.mark.slow
def test_the_former_version_is_another_one(nodes: tuple[OfVersion, OfVersion], former: Path) -> None:
    old, new = nodes
    code = "import commitmq, commitmq_plugins; print(commitmq.__file__, list(commitmq_plugins.__path__)[0])"
    for node, root in ((old, former), (new, PROJECT)):
        done = subprocess.run(
            [sys.executable, "-c", code], env=node.environment(), capture_output=True, text=True, check=True
        )
        assert all(Path(one).is_relative_to(root) for one in done.stdout.split()), done.stdout


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(False, id="in-order", marks=pytest.mark.slow),
        pytest.param(True, id="killed", marks=pytest.mark.long),
    ],
)
def test_a_store_goes_to_the_present_version_and_back(nodes: tuple[OfVersion, OfVersion], killed: bool) -> None:
    old, new = nodes
    stages = [("one", old), ("two", new), ("three", old), ("four", new)]
    results = []
    for number, (name, node) in enumerate(stages, 1):
        with started(node):
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
