"""Fresh Python environments for tests that install something as its user would, with pip and without a network.

An :class:`Environment` sees what this one has installed (numpy, pytest, the build backend …) and this project's sources, by
way of a ``.pth`` file; what a test installs goes into the environment alone, entry points included. A :class:`BareEnvironment`
has nothing but what a user of the package gets.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib import import_module, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from commitmq.testing.node_process import NodeProcess

_PIP = ("--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
_PROJECT = Path(__file__).resolve().parents[2]
_OURS = ("commitmq", "commitmq_dispatchers", "commitmq_plugins")


class Environment:
    """One environment in ``folder``; ``python`` is its interpreter."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = str(folder / "bin" / "python")
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        self._fill()

    def _fill(self) -> None:
        """Put in what the environment has from the start."""
        sources = {str(Path(next(iter(import_module(name).__path__))).parent) for name in _OURS}
        seen = [*sorted(sources), *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
        (self.packages / "what_the_tests_have.pth").write_text("\n".join(seen), encoding="utf-8")

    def variables(self, **extra: str) -> dict[str, str]:
        """The environment variables of a shell in which it is active."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
        return {**kept, "VIRTUAL_ENV": str(self.folder), **extra}

    def install(self, *arguments: str) -> None:
        """``pip install ARGUMENTS``; what they need must be there already."""
        self.check("-m", "pip", "--python", self.python, *_PIP, *arguments, python=sys.executable)

    def run(
        self, *arguments: str, python: str = "", cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python ARGUMENTS``; output and exit code are in the result."""
        return subprocess.run(
            [python or self.python, *arguments],
            env=self.variables(**extra),
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def check(self, *arguments: str, python: str = "", cwd: Path | None = None, **extra: str) -> str:
        """Run ``python ARGUMENTS``, which must succeed; returns its standard output."""
        done = self.run(*arguments, python=python, cwd=cwd, **extra)
        assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def pytest(self, folder: Path, *arguments: str) -> str:
        """Run the tests of the project in ``folder``; they must pass. Returns the report."""
        plugin = []
        if not any(point.name == "commitmq" for point in metadata.entry_points(group="pytest11")):
            plugin = ["-p", "commitmq.testing.pytest_plugin"]  # this environment is older than the entry point
        # Dispatchers sync at each batch: what is shown here does not depend on the disk, and a busy one takes minutes.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=memory) as base:
            options = ["-p", "no:cacheprovider", "--basetemp", f"{base}/tests", *plugin]
            return self.check("-m", "pytest", *options, *arguments, cwd=folder)


class BareEnvironment(Environment):
    """One that has nothing of this environment: :meth:`install_project` makes it what ``pip install commitmq`` makes."""

    def _fill(self) -> None:
        pass

    def install_project(self, wheel: Path | None = None, *extras: str) -> None:
        """Install the project's own wheel, and what it requires with ``extras``, as this environment has that."""
        wheel = wheel or self._built()
        self.install(str(wheel))
        (own,) = metadata.distributions(path=[str(self.packages)])
        for name in _required(own, extras):
            self._copy(metadata.distribution(name))
        self.check("-m", "pip", "--python", self.python, "check", python=sys.executable)
        self.check("-m", "compileall", "-q", str(self.packages))  # as pip does

    def _built(self) -> Path:
        wheels = self.folder / "wheels"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "wheel",
            "--quiet",
            "--no-index",
            "--no-deps",
        ]
        command = [*pip, "--no-build-isolation", "--wheel-dir", str(wheels), str(_PROJECT)]
        subprocess.run(command, check=True, timeout=300, cwd=self.folder)
        (wheel,) = wheels.glob("commitmq-*.whl")
        return wheel

    def _copy(self, distribution: metadata.Distribution) -> None:
        """Install ``distribution`` as it is here, but for its commands; its compiled Python stays valid, as times stay."""
        for file in distribution.files or ():
            if ".." not in file.parts:
                target = self.packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # compiled Python may be gone
                    shutil.copy2(file.locate(), target)

    def distributions(self) -> set[str]:
        """The names of all that is installed."""
        return {canonicalize_name(one.name) for one in metadata.distributions(path=[str(self.packages)])}

    def size_bytes(self) -> int:
        """What all that is installed takes."""
        return sum(path.stat().st_size for path in self.packages.rglob("*") if path.is_file())


def _required(distribution: metadata.Distribution, extras: tuple[str, ...] = ()) -> set[str]:
    """The names of what ``distribution`` requires with ``extras``, and what that requires, as this environment has it."""
    found: set[str] = set()
    open_ones = [(distribution, extras)]
    while open_ones:
        one, wanted = open_ones.pop()
        for text in one.requires or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            marker = requirement.marker
            if name in found or not (marker is None or any(marker.evaluate({"extra": it}) for it in ("", *wanted))):
                continue
            found.add(name)
            open_ones.append((metadata.distribution(name), tuple(requirement.extras)))
    return found


class EnvironmentNode(NodeProcess):
    """A node that runs in an environment of its own."""

    def __init__(self, environment: Environment, store: Path, *settings: str) -> None:
        super().__init__(store, *settings)
        self.python = environment.python
        self._variables = environment.variables

    def environment(self, **extra: str) -> dict[str, str]:
        return self._variables(**extra)
