"""Builds what is published, and tries it as its first user does.

    scripts/release [--out DIR] [--no-trial]

1. The source archive and the wheel are built twice, from two copies of the tree that differ in place, umask, time zone and
   times of files. All bytes must be equal, and the wheel that is built from the source archive must be the same wheel.
2. The wheel must hold the files of the packages that git knows, and ``share/``; nothing else.
3. The wheel is installed into a new environment, with the versions of constraints.txt, outside of the project. There a node
   starts in an empty folder, takes a message and gives it back. ``--no-trial`` leaves this out; it needs a package index.
4. DIR (default: dist) gets both archives, the SBOM of that environment (CycloneDX) and ``SHA256SUMS``.

``SOURCE_DATE_EPOCH`` is the time of all files in the archives; by default it is the time of the last commit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import sbom

PROJECT = Path(__file__).resolve().parent.parent
ROOTS = {
    "commitmq": "node",
    "commitmq_plugins": "plugins",
    "pyspark_commitmq": "plugins",
    "commitmq_dispatchers": "dispatchers",
}
FIRST_MESSAGE_WITHIN_S = 10.0
"""Of the processors, from the start of the first node to its first message read."""
_STEP_WITHIN_S = 600


class NotReleasable(Exception):
    """What is wrong with the archives or their trial."""


@dataclass(frozen=True)
class Archives:
    wheel: Path
    source: Path


def main(arguments: list[str]) -> int:
    """Do all steps; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PROJECT / "dist", help="the folder of the archives (default: dist)")
    parser.add_argument("--no-trial", action="store_true", help="do not install the wheel and start a node from it")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="commitmq-release-") as work:
            release(Path(work), options.out, trial=not options.no_trial)
    except NotReleasable as error:
        print(f"scripts/release: {error}", file=sys.stderr)
        return 1
    return 0


def release(work: Path, out: Path, *, trial: bool) -> None:
    """Build, check, try and hand over; raises NotReleasable."""
    made = build_twice(work)
    check_wheel(made.wheel)
    print(f"built twice with equal bytes: {made.wheel.name}, {made.source.name}")
    out.mkdir(parents=True, exist_ok=True)
    results = [made.wheel, made.source]
    if trial:
        python = install(made.wheel, work / "trial")
        first = first_message(python, work / "empty")
        used = f"{first.seconds:.0f} s, {first.processor_s:.0f} of a processor"
        print(f"from the wheel, in an empty folder: first message after {used}")
        if first.processor_s > FIRST_MESSAGE_WITHIN_S:
            raise NotReleasable(
                f"the first message takes {first.processor_s:.0f} s, more than {FIRST_MESSAGE_WITHIN_S:.0f}"
            )
        results.append(work / f"commitmq-{made.wheel.name.split('-')[1]}.cdx.json")
        results[-1].write_bytes(sbom.document(sbom.installed(python), "commitmq", ("node",), epoch()))
    lines = []
    for path in results:
        shutil.copyfile(path, out / path.name)
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    (out / "SHA256SUMS").write_text("".join(lines), encoding="ascii")
    print(f"{out}: {', '.join(path.name for path in results)}, SHA256SUMS")


# ---------------------------------------------------------------- archives


def project_files() -> list[str]:
    """What git knows or will know of the project; in an unpacked source archive, all that is there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, check=False)
    if listed.returncode == 0:
        names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    else:
        names = {str(path.relative_to(PROJECT)) for path in PROJECT.rglob("*")}
    return sorted(name for name in names if (PROJECT / name).is_file())


def epoch() -> int:
    """Seconds since 1970: the time that all files in the archives have."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    command = ["git", "log", "-1", "--format=%ct"]
    said = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    return int(said.stdout) if said.returncode == 0 else 1_700_000_000


def build_twice(work: Path) -> Archives:
    """Both archives, and that nothing but the project's files decides their bytes."""
    first = build(copied(work / "one"), work / "first", umask=0o022, zone="UTC")
    second = build(copied(work / "another" / "place", old=True), work / "second", umask=0o077, zone="Asia/Kolkata")
    for one, other in ((first.wheel, second.wheel), (first.source, second.source)):
        if one.read_bytes() != other.read_bytes():
            raise NotReleasable(f"{one.name} has other bytes the second time{difference(one, other)}")
    with tarfile.open(first.source) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    third = build(unpacked, work / "third", umask=0o022, zone="UTC")
    if third.wheel.read_bytes() != first.wheel.read_bytes():
        raise NotReleasable(f"the source archive makes another wheel{difference(first.wheel, third.wheel)}")
    return first


def copied(folder: Path, *, old: bool = False) -> Path:
    """A copy of the project in ``folder``; with ``old`` its files are of another day."""
    for name in project_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, target)
        if old:
            os.utime(target, (1_000_000_000, 1_000_000_000))
    return folder


def build(project: Path, out: Path, *, umask: int, zone: str) -> Archives:
    """Let the build backend make both archives of ``project``."""
    out.mkdir(parents=True)
    code = (
        "import os, sys; from hatchling import build; os.umask(int(sys.argv[2]));"
        " build.build_sdist(sys.argv[1]); build.build_wheel(sys.argv[1])"
    )
    variables = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch()), "TZ": zone, "PYTHONHASHSEED": str(umask)}
    run([sys.executable, "-c", code, str(out), str(umask)], "the build failed", cwd=project, env=variables)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Archives(wheel, source)


def difference(one: Path, other: Path) -> str:
    """The first names in which two wheels differ, as the end of a sentence; "" for other archives."""
    if one.suffix != ".whl":
        return ""
    with zipfile.ZipFile(one) as left, zipfile.ZipFile(other) as right:
        contents = [{name: archive.read(name) for name in archive.namelist()} for archive in (left, right)]
    names = contents[0].keys() | contents[1].keys()
    found = sorted(name for name in names if contents[0].get(name) != contents[1].get(name))
    return f": {', '.join(found[:5]) or 'only times or permissions'}"


# ---------------------------------------------------------------- what is inside


def expected_files() -> set[str]:
    """Names inside the wheel, without those of its ``.dist-info``."""
    found = set()
    for name in project_files():
        root, *rest = PurePosixPath(name).parts
        if rest and rest[0] in ROOTS and ROOTS[rest[0]] == root and not name.endswith((".pyx", ".pxi")):
            found.add("/".join(rest))
        elif root == "deploy":
            found.add(f"share/commitmq/{name}")
    return found | {"share/commitmq/node.toml", "commitmq/kernels/compiled.abi3.so"}


def check_wheel(wheel: Path) -> None:
    """That the wheel holds what a user needs and nothing else; raises NotReleasable."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    found = {
        name.partition(".data/data/")[2] or name
        for name in names
        if PurePosixPath(name).parts[0].endswith(".dist-info") is False
    }
    expected = expected_files()
    if missing := sorted(expected - found):
        raise NotReleasable(f"the wheel lacks {', '.join(missing[:5])}")
    if more := sorted(found - expected):
        raise NotReleasable(f"the wheel holds {', '.join(more[:5])}, which are no files of its packages")
    for line in ("Name: commitmq", "License-Expression: Apache-2.0", "Description-Content-Type: text/markdown"):
        if line not in metadata.splitlines():
            raise NotReleasable(f"the wheel's METADATA has no line {line!r}")
    if ".dist-info/licenses/LICENSE" not in "".join(names):
        raise NotReleasable("the wheel has no licence")


# ---------------------------------------------------------------- the trial


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel and what a node needs; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(PROJECT / "constraints.txt")]
    run([*pip, *constraints, f"commitmq[node] @ {wheel.as_uri()}"], "the wheel cannot be installed", cwd=folder)
    run([str(python), "-m", "pip", "check"], "the installed versions do not fit together", cwd=folder)
    return python


@dataclass(frozen=True)
class FirstMessage:
    """From the start of the first node to its first message read: by the clock, and of the processors."""

    seconds: float
    processor_s: float


def first_message(python: Path, folder: Path) -> FirstMessage:
    """Start a node in the new empty ``folder``, send a message, read it, stop. Raises NotReleasable.

    The processor time is what is limited, because other programs do not change it; it counts the stop too.
    """
    folder.mkdir(parents=True)
    command = str(python.with_name("commitmq"))
    home = {"HOME": str(folder), "PATH": os.defpath, "LANG": "C.UTF-8"}
    used, started = _used_by_children(), time.monotonic()
    start = [command, "start", "--store", "demo", "--set", "network.port=0"]  # the usual one may be taken
    with subprocess.Popen(start, cwd=folder, env=home, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        try:
            words = next((line.split() for line in node.stdout if line.startswith("node is ready at ")), None)
            if words is None:
                raise NotReleasable("the node does not start")
            at = ["--node", words[4]]  # node is ready at tcp://127.0.0.1:40123
            run([command, "produce", "greetings", *at], "no message can be sent", cwd=folder, env=home, text="hello\n")
            consume = [command, "consume", "greetings", *at, "--from", "earliest", "--limit", "1"]
            came = run(consume, "no message can be read", cwd=folder, env=home)
            seconds = time.monotonic() - started
        finally:
            node.terminate()
            node.stdout.read()
    if node.returncode:
        raise NotReleasable(f"the node ended with exit code {node.returncode}")
    if came != "hello\n":
        raise NotReleasable(f"sent hello, read {came!r}")
    return FirstMessage(seconds, _used_by_children() - used)


def _used_by_children() -> float:
    """Processor seconds of the children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(command: list[str], problem: str, *, cwd: Path, env: dict[str, str] | None = None, text: str = "") -> str:
    """Run a command with ``text`` on its standard input; returns its standard output. Raises NotReleasable."""
    done = subprocess.run(
        command, cwd=cwd, env=env, input=text, capture_output=True, text=True, timeout=_STEP_WITHIN_S, check=False
    )
    if done.returncode:
        raise NotReleasable(f"{problem} (exit code {done.returncode}): {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
