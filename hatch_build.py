"""Compiles the kernels (node/commitmq/kernels) into one extension module, for wheels and for editable environments.

pip asks this hook of hatchling what a build needs: Cython, and Zig's C compiler where the machine has none.
``python hatch_build.py`` compiles the module beside its sources, unless it was made from just these; the scripts of this
project do so (scripts/_env.py). The module uses Python's stable ABI, so one serves Python 3.11 and everything newer.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # the module is compiled by itself
    BuildHookInterface = object

PROJECT = Path(__file__).resolve().parent
KERNELS = Path("node", "commitmq", "kernels")
NAME = "commitmq.kernels.compiled"
MODULE = "compiled.abi3.so"
STAMP = "compiled.sources"  # the digest of what the module beside it was made from
CYTHON = "Cython>=3.1,<4"
ZIG = "ziglang>=0.13,<1"
NUMBERS = (Path("node", "commitmq", "format", "constants.py"), KERNELS / "codes.py")
ABI = ["-DPy_LIMITED_API=0x030b0000", "-DCYTHON_LIMITED_API=1"]
# -fwrapv: integers wrap around, as Java's do.
FLAGS = ["-O2", "-g0", "-fPIC", "-fwrapv", "-fvisibility=hidden", "-Wno-unreachable-code"]


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    """What hatchling calls for a wheel, an editable one included."""

    def dependencies(self) -> list[str]:
        """What pip installs for the build."""
        return requirements()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the module, and put it into the wheel."""
        root = Path(self.root)
        if version == "editable":
            ensure(root)
            return
        self._folder = tempfile.TemporaryDirectory(prefix="commitmq-build-")
        module = Path(self._folder.name, MODULE)
        build(root, module)
        build_data["force_include"][str(module)] = f"commitmq/kernels/{MODULE}"
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel has its copy."""
        if version != "editable":
            self._folder.cleanup()


def requirements() -> list[str]:
    """What a build needs beside hatchling."""
    return [CYTHON] if system_compiler() else [CYTHON, ZIG]


def system_compiler() -> list[str] | None:
    """The command of the machine's C compiler; None where it has none."""
    named = os.environ.get("CC", "").split()
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    return None


def sources(root: Path) -> list[Path]:
    """The module and the parts that it includes."""
    return sorted((root / KERNELS).glob("*.p[xy][xi]"))


def digest(root: Path) -> str:
    """Identifies everything that the module is made of."""
    found = hashlib.sha256()
    for path in (root / "hatch_build.py", *(root / name for name in NUMBERS), *sources(root)):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def is_current(root: Path) -> bool:
    """Whether the module beside the sources was made from just these."""
    stamp = root / KERNELS / STAMP
    made = (root / KERNELS / MODULE).exists()
    return made and stamp.exists() and stamp.read_text(encoding="ascii") == digest(root)


def ensure(root: Path) -> None:
    """Compile the module beside its sources unless it is current."""
    if not is_current(root):
        build(root, root / KERNELS / MODULE)
        (root / KERNELS / STAMP).write_text(digest(root), encoding="ascii")


def build(root: Path, module: Path) -> None:
    """Compile ``module``. Raises SystemExit with the reason when that cannot be done."""
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        sys.exit(
            f"commitmq: the kernels cannot be compiled: {include} has no Python.h. Install the headers of this Python (on"
            " Debian the package python3-dev), or install commitmq from a wheel."
        )
    with tempfile.TemporaryDirectory(prefix="commitmq-build-") as folder:
        for path in sources(root):
            shutil.copy(path, folder)
        Path(folder, "constants.pxi").write_text(constants(root), encoding="ascii")
        _run([sys.executable, "-m", "cython", "--module-name", NAME, "compiled.pyx", "-o", "compiled.c"], folder)
        compiler = system_compiler() or [sys.executable, "-m", "ziglang", "cc"]
        made = f"{module}.{os.getpid()}"
        _run([*compiler, *FLAGS, *ABI, f"-I{include}", "-shared", "compiled.c", "-o", made], folder)
        os.replace(made, module)


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"commitmq: the kernels cannot be compiled: {' '.join(command)}\n{done.stdout}{done.stderr}")


def constants(root: Path) -> str:
    """The numbers of two Python modules, and of their class SysFlag, for Cython: those that fit a C int."""
    found: dict[str, Any] = {}
    lines = ["cdef enum:"]
    for name in NUMBERS:
        for node in ast.parse((root / name).read_text(encoding="utf-8")).body:
            is_class = isinstance(node, ast.ClassDef) and node.name == "SysFlag"
            prefix = "SYS_FLAG_" if is_class else ""
            for one in node.body if is_class else [node]:
                if not isinstance(one, ast.AnnAssign) or one.value is None:
                    continue
                key = prefix + ast.unparse(one.target)
                try:
                    value = eval(ast.unparse(one.value), {"__builtins__": {}}, found)
                except (NameError, AttributeError, TypeError):
                    continue  # no number, or made of other modules' values
                if type(value) is int and -(1 << 31) <= value < 1 << 31:
                    found[key] = value
                    lines.append(f"    {key} = {value}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if find_spec("Cython") is None:
        sys.exit(f"commitmq: the kernels cannot be compiled: install {' and '.join(requirements())}")
    ensure(PROJECT)
