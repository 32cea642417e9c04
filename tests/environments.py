"""Fresh Python environments for tests that install a plugin as its user would, with pip and without a network.

An environment sees what this one has installed (numpy, pytest, the build backend …) and this project's sources, by way of a
``.pth`` file; what a test installs goes into the environment alone, entry points included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib import import_module, metadata
from pathlib import Path

from commitmq.testing.node import DirectNodeProcess

_PIP = ("--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
_OURS = ("commitmq", "commitmq_dispatchers", "commitmq_plugins")


class Environment:
    """One environment in ``folder``; ``python`` is its interpreter."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = str(folder / "bin" / "python")
        sources = {str(Path(next(iter(import_module(name).__path__))).parent) for name in _OURS}
        seen = [*sorted(sources), *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
        site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(site, "what_the_tests_have.pth").write_text("\n".join(seen), encoding="utf-8")

    def variables(self, **extra: str) -> dict[str, str]:
        """The environment variables of a shell in which it is active."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
        return {**kept, "VIRTUAL_ENV": str(self.folder), **extra}

    def install(self, *arguments: str) -> None:
        """``pip install ARGUMENTS``; what they need must be there already."""
        self.check("-m", "pip", "--python", self.python, *_PIP, *arguments, python=sys.executable)

    def check(self, *arguments: str, python: str = "", cwd: Path | None = None, **extra: str) -> str:
        """Run ``python ARGUMENTS``, which must succeed; returns its standard output."""
        done = subprocess.run(
            [python or self.python, *arguments],
            env=self.variables(**extra),
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
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


class EnvironmentNode(DirectNodeProcess):
    """A node that runs in an environment of its own."""

    def __init__(self, environment: Environment, store: Path, *settings: str) -> None:
        super().__init__(store, *settings)
        self.python = environment.python
        self._variables = environment.variables

    def environment(self, **extra: str) -> dict[str, str]:
        return self._variables(**extra)
