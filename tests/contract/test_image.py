"""Goal: the image is built without an engine, holds what it says and no more, and runs a node as a container does.

Method: ``deploy/image/build`` with a wheel of ``scripts/release``; buildah opens the archive. No engine runs on every machine,
so ``unshare`` makes the namespaces and ``in_container`` the rest: process 1, account 10001, a read-only root. All of it takes
minutes, downloads Debian's packages, and needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import release
from nodes import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
BUILD = release.PROJECT / "deploy" / "image" / "build"
RUNNER = str(Path(__file__).with_name("in_container.py"))
START = ("commitmq", "start", "--store", "/var/lib/commitmq/store")
ACCOUNT = 10001
LIMIT_BYTES = 200 * 1024 * 1024


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := [name for name in ("mmdebstrap", "buildah", "unshare", "nsenter") if shutil.which(name) is None]:
        pytest.skip(f"PATH has no {', '.join(missing)}; mmdebstrap and buildah are Debian's packages of these names")
    if os.geteuid() != 0:
        pytest.skip("namespaces and mounts need root here")
    out = tmp_path_factory.mktemp("image")
    assert release.main(["--out", str(out), "--no-trial"]) == 0
    (wheel,) = out.glob("*.whl")
    done = subprocess.run(
        [BUILD, out, wheel],
        env={**os.environ, "COMMITMQ_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.oci.tar")
    return found


Buildah = Callable[..., str]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Runs buildah with a storage of its own."""
    storage = tmp_path_factory.mktemp("storage")
    command = ["buildah", "--root", str(storage / "root"), "--runroot", str(storage / "run"), "--storage-driver", "vfs"]

    def run(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    yield run
    subprocess.run([*command, "rm", "--all"], capture_output=True, check=False)


@pytest.fixture(scope="module")
def opened(archive: Path, buildah: Buildah) -> str:
    return buildah("from", f"oci-archive:{archive}")


@pytest.fixture(scope="module")
def root(opened: str, buildah: Buildah) -> Path:
    """The files of the image."""
    return Path(buildah("mount", opened))


# ---------------------------------------------------------------- what is inside


def test_the_image_says_how_it_runs(opened: str, buildah: Buildah) -> None:
    about: dict[str, Any] = json.loads(buildah("inspect", "--type", "container", opened))["OCIv1"]["config"]
    assert about["User"] == f"{ACCOUNT}:{ACCOUNT}"
    assert about["Entrypoint"] == ["commitmq"]
    assert about["Cmd"] == list(START[1:])
    assert about["Volumes"] == {"/var/lib/commitmq": {}}
    assert {port.partition("/")[0] for port in about["ExposedPorts"]} == {"7310", "9311"}
    assert about["StopSignal"] == "SIGTERM"
    assert about["Labels"]["org.opencontainers.image.version"] == metadata.version("commitmq")


def test_the_image_is_small_and_has_no_setuid(archive: Path, root: Path) -> None:
    assert archive.stat().st_size < LIMIT_BYTES
    found = [path for path in root.rglob("*") if not path.is_symlink() and path.is_file()]
    assert len(found) > 1000
    assert [str(path) for path in found if path.stat().st_mode & 0o6000] == []
    volume = (root / "var" / "lib" / "commitmq").stat()
    assert (volume.st_uid, volume.st_mode & 0o777) == (ACCOUNT, 0o700)


def test_the_bill_of_materials_is_true(root: Path) -> None:
    bill = json.loads((root / "opt/commitmq/share/commitmq/commitmq.cdx.json").read_text())
    (packages,) = (root / "opt/commitmq/lib").glob("python3*/site-packages")
    installed = {(one.name, one.version) for one in metadata.distributions(path=[str(packages)])}
    components = [bill["metadata"]["component"], *bill["components"]]
    assert {(one["name"], one["version"]) for one in components} == installed


# ---------------------------------------------------------------- a node in it


class Container:
    """One run of the image on ``volume``."""

    def __init__(self, root: Path, volume: Path, log: Path) -> None:
        self.log = log
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*namespaces, sys.executable, RUNNER, str(root), str(volume), *START],
                stdout=output,
                stderr=output,
            )

    def is_ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        return "node is ready at" in self.log.read_text()

    def first_process(self) -> int:
        """The pid of the container's process 1 outside."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """A command inside, as ``exec`` of an engine."""
        enter = [
            "nsenter",
            "--target",
            str(self.first_process()),
            "--mount",
            "--pid",
            "--net",
            "--ipc",
            "--uts",
            "--root",
            "--wd",
        ]
        account = ["--setuid", str(ACCOUNT), "--setgid", str(ACCOUNT)]
        variables = ["env", "-i", "PATH=/opt/commitmq/bin:/usr/bin:/bin"]
        return subprocess.run(
            [*enter, *account, *variables, *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def check(self, *command: str, text: str = "") -> str:
        done = self.run(*command, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> int:
        """What an engine does: SIGTERM to process 1. Returns the exit code."""
        os.kill(self.first_process(), signal.SIGTERM)
        return self._process.wait(timeout=30)

    def end(self) -> None:
        if self._process.poll() is None:
            os.kill(self.first_process(), signal.SIGKILL)
            self._process.wait(timeout=30)


def test_a_node_runs_as_in_a_container(root: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o700)
    os.chown(volume, ACCOUNT, ACCOUNT)
    first = Container(root, volume, tmp_path / "first.log")
    try:
        eventually(first.is_ready, "the node is ready", 300)
        read_only = (
            "import os; print(*(os.statvfs(one).f_flag & os.ST_RDONLY for one in ('/', '/tmp', '/var/lib/commitmq')))"
        )
        assert first.check("python3", "-c", read_only) == "1 0 0\n"
        assert first.check("id", "-u").strip() == str(ACCOUNT)
        first.check("commitmq", "produce", "greetings", text="one\n")
        ready = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9311/health/ready').status)"
        eventually(lambda: first.run("python3", "-c", ready).stdout == "200\n", "it is healthy", 60)
        status = json.loads(first.check("commitmq", "status", "--json"))
        writer = next(row["pid"] for row in status["processes"] if row["role"] == "writer")
        first.check("python3", "-c", f"import os; os.kill({writer}, 9)")
        first.check("commitmq", "produce", "greetings", text="two\n")
        assert first.stop() == 0, first.log.read_text()
    finally:
        first.end()
    second = Container(root, volume, tmp_path / "second.log")
    try:
        eventually(second.is_ready, "the node is ready again", 120)
        assert sorted(second.check("commitmq", "consume", "greetings", "--from", "earliest").split()) == ["one", "two"]
        assert second.stop() == 0
    finally:
        second.end()
