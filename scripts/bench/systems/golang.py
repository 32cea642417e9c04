"""Programs in Go: the drivers of ``scripts/bench/go`` and the servers that are modules there, built once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from bench.system import CACHE, BenchError

MODULE = Path(__file__).resolve().parent.parent / "go"
_BUILT = CACHE / "go"
_COPY = CACHE / "go-module"
_BUILT_WITHIN_S = 900
_SHOWN_BYTES = 2000


def missing() -> str | None:
    """The reason why nothing can be built here; None when it can."""
    return None if shutil.which("go") else "no Go: the command go is not on the PATH"


def program(package: str) -> Path:
    """The file of ``package``'s program, which :func:`build` makes."""
    return _BUILT / _name(package)


def build(package: str) -> None:
    """Build ``package`` (``./driver`` of the module, or the path of one it requires), unless it is built from the same
    sources already. Go fetches modules by its own settings. Raises BenchError.

    It is built in a copy, where Go writes down what go.mod leaves to it: the versions of what its requirements require,
    which follow from theirs, and the checksums, which it gets from where it gets the modules."""
    stamp = _BUILT / f"{_name(package)}.sources"
    wanted = _digest()
    if program(package).exists() and stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
        return
    _BUILT.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    command = ["go", "build", "-mod=mod", "-o", str(program(package)), package]
    try:
        shutil.copytree(MODULE, _COPY, dirs_exist_ok=True)
        done = subprocess.run(
            command, cwd=_COPY, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BUILT_WITHIN_S, check=False
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


def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted([*MODULE.rglob("*.go"), MODULE / "go.mod"]):
        digest.update(str(path.relative_to(MODULE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
