"""Programs in Go: the drivers of ``scripts/bench/go`` and the servers that are modules there, built once.

The interop tests build the programs of another module (``module``) by the same functions.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from bench.system import CACHE, BenchError

MODULE = Path(__file__).resolve().parent.parent / "go"
_BUILT_WITHIN_S = 900
_SHOWN_BYTES = 2000


def missing() -> str | None:
    """The reason why nothing can be built here; None when it can."""
    return None if shutil.which("go") else "no Go: the command go is not on the PATH"


def program(package: str, module: Path = MODULE) -> Path:
    """The file of ``package``'s program, which :func:`build` makes."""
    return _built(module) / _name(package)


def _built(module: Path) -> Path:
    return CACHE / ("go" if module == MODULE else f"go-{module.parent.name}")


def build(package: str, module: Path = MODULE) -> None:
    """Build ``package`` (``./driver`` of the module, or the path of one it requires), unless it is built from the same
    sources already. Go fetches modules by its own settings. Raises BenchError.

    It is built in a copy, where Go writes down what go.mod leaves to it: the versions of what its requirements require,
    which follow from theirs, and the checksums, which it gets from where it gets the modules."""
    built = _built(module)
    stamp, copy = built / f"{_name(package)}.sources", built.with_name(f"{built.name}-module")
    wanted = _digest(module)
    if program(package, module).exists() and stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
        return
    built.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    command = ["go", "build", "-mod=mod", "-o", str(program(package, module)), package]
    try:
        shutil.copytree(module, copy, dirs_exist_ok=True)
        done = subprocess.run(
            command, cwd=copy, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BUILT_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr[-_SHOWN_BYTES:].decode('utf-8', 'replace').strip()}")
    stamp.write_text(wanted, encoding="ascii")


def required(module: str) -> str:
    """The version of ``module`` that go.mod asks for, without the leading v."""
    for line in (MODULE / "go.mod").read_text(encoding="utf-8").splitlines():
        words = line.removeprefix("require ").split()
        if len(words) > 1 and words[0] == module:
            return words[1].removeprefix("v")
    raise BenchError(f"go.mod does not require {module}")


def _name(package: str) -> str:
    """``github.com/…/nats-server/v2`` is the program nats-server, as for Go itself."""
    *rest, last = package.split("/")
    return rest[-1] if last.startswith("v") and last[1:].isdigit() else last


def _digest(module: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*module.rglob("*.go"), module / "go.mod"]):
        digest.update(str(path.relative_to(module)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
