"""Makes this project's environment where it is missing or out of date, then runs a script in it.

    python _env.py [--extra NAME] SCRIPT [ARGUMENT…]

Runs under any Python ≥ 3.11 with nothing but its standard library. The environment is ``.venv`` in the project, or the
folder that ``COMMITMQ_VENV`` names. A stamp in it names the pyproject.toml, constraints.txt, Python and project folder
that it was made from. While they are the same, nothing is installed and no network is used. A changed kernel is compiled
here, with a message (hatch_build.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))
import hatch_build  # noqa: E402 - its folder is not this one

EXIT_UNAVAILABLE = 69  # sysexits.h EX_UNAVAILABLE: a part of the environment could not be fetched
# hatchling builds the editable install and needs editables for it; PySpark comes as a source archive, which setuptools
# builds; the kernels need Cython, and a C compiler where the machine has none. All are installed first, by the same
# constraints, because pip does not apply constraints to the build environments that it makes by itself.
BUILD_REQUIREMENTS = ["hatchling", "editables", "setuptools", *hatch_build.requirements()]
# Settings of the caller's shell that would redirect an installation or let other code into the environment.
FOREIGN_SETTINGS = ["PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"]
FOREIGN_SETTINGS += ["PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON"]
# The tests start thousands of processes, each of which would compile every module of the project anew: a node's start takes
# 1.6 times the processor time then, and each process that collects tests half a minute instead of seconds.
FOREIGN_SETTINGS += ["PYTHONDONTWRITEBYTECODE"]


class EnvironmentUnavailable(Exception):
    """The environment could not be made; the text has the reason and the remedy."""


def main(arguments: list[str]) -> int:
    """Prepare the environment and replace this process by ``arguments`` run in it; returns an exit code on failure."""
    for name in FOREIGN_SETTINGS:
        os.environ.pop(name, None)
    folder = Path(os.environ.get("COMMITMQ_VENV") or PROJECT / ".venv").absolute()
    extra = ""
    if arguments[:1] == ["--extra"]:
        extra, arguments = arguments[1], arguments[2:]
    try:
        with only_one_at_a_time():
            ensure_environment(folder)
            if extra:
                ensure_extra(folder, extra)
            ensure_kernels(folder)
    except EnvironmentUnavailable as error:
        print(f"commitmq: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        return 130
    # Commands of the environment (commitmq, ruff …) are found first, as if it had been activated.
    os.environ["VIRTUAL_ENV"] = str(folder)
    os.environ["PATH"] = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
    python = str(interpreter(folder))
    return os.execv(python, [python, *arguments])


@contextlib.contextmanager
def only_one_at_a_time() -> Iterator[None]:
    """Keep other scripts of this project waiting meanwhile: two installations into one folder would damage it."""
    fd = os.open(PROJECT, os.O_RDONLY)  # the folder itself can be locked, so no lock file is left behind
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another script prepares the environment, waiting for it …")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def ensure_environment(folder: Path) -> None:
    """Make ``folder`` an environment with the present project, unless its stamp says that it is one."""
    stamp = folder / "commitmq-environment"
    wanted = environment_digest()
    if read_text(stamp) == wanted and works(folder):
        return
    with contextlib.suppress(OSError):
        stamp.unlink()  # from here on an interrupted folder counts as unfinished
    if not works(folder):
        if folder.exists() and not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
            raise EnvironmentUnavailable(f"{folder} is not empty and no virtual environment; it stays untouched")
        say(f"making a Python {sysconfig.get_python_version()} environment in {folder} …")
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-I", "-m", "venv", str(folder)], "the environment could not be made")
    say("installing the dependencies of commitmq, once …")
    install(folder, *BUILD_REQUIREMENTS)
    install(folder, "--no-build-isolation", "--editable", f"{PROJECT}[test]")
    stamp.write_text(wanted, encoding="ascii")


def ensure_extra(folder: Path, extra: str) -> None:
    """Install an extra of the project into the environment ``folder`` unless its stamp names the extra."""
    stamp = folder / f"commitmq-extra-{extra}"
    wanted = environment_digest()
    if read_text(stamp) == wanted:
        return
    say(f"installing the dependencies of the extra {extra}, once …")
    install(folder, "--no-build-isolation", "--editable", f"{PROJECT}[{extra}]")
    stamp.write_text(wanted, encoding="ascii")


def install(folder: Path, *what: str) -> None:
    """Install by the project's constraints; raises EnvironmentUnavailable."""
    pip = [str(interpreter(folder)), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not os.access(os.path.expanduser("~"), os.W_OK):
        pip.append("--no-cache-dir")
    run(
        [*pip, "--constraint", str(PROJECT / "constraints.txt"), *what],
        "the installation failed: the first run needs a Python package index that pip can reach; later ones need none",
    )


def ensure_kernels(folder: Path) -> None:
    """Compile the kernels if one of them changed since they were compiled."""
    if not hatch_build.is_current(PROJECT):
        say("compiling the kernels …")
        run([str(interpreter(folder)), str(PROJECT / "hatch_build.py")], "the kernels could not be compiled")


def environment_digest() -> str:
    """The inputs of an environment, as one text: requirements, pins, the Python's version and the project's place."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((PROJECT / name).read_bytes())
    digest.update(f"{sys.version_info[:3]} {PROJECT}".encode())
    return digest.hexdigest()


def interpreter(folder: Path) -> Path:
    """The Python of the environment ``folder``."""
    return folder / "bin" / "python"


def works(folder: Path) -> bool:
    """True when ``folder`` holds an environment of the running Python's version that starts.

    A copied or moved environment starts but points to its old place; ``sys.prefix`` tells.
    """
    check = "import sys; print(sys.prefix, *sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [interpreter(folder), "-I", "-c", check], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return answer.stdout.strip() == f"{folder} {sys.version_info[0]} {sys.version_info[1]}"


def run(command: list[str], problem: str, *, stdout: int | None = None) -> str:
    """Run ``command``; raises EnvironmentUnavailable with ``problem`` when it fails. Returns what went to ``stdout``."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, text=True, check=False, cwd=PROJECT)
    except OSError as error:
        raise EnvironmentUnavailable(f"{problem}: {error}") from error
    if done.returncode:
        raise EnvironmentUnavailable(f"{problem} (exit code {done.returncode})")
    return done.stdout or ""


def read_text(path: Path) -> str | None:
    """The text of a small file, None when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def say(text: str) -> None:
    """Progress goes to standard error, so that the script's own output can be piped."""
    print(f"commitmq: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
