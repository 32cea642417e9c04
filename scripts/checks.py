"""The checks that every change must pass, in the order in which they fail fastest: ruff, mypy, pytest.

    checks.py lint [--fix]
    checks.py test [--no-lint] [PYTEST ARGUMENT…]

Run through scripts/lint and scripts/test, which prepare the environment. The exit code is that of the first check that
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
SOURCES = ["hatch_build.py", "node", "plugins", "dispatchers", "tests", "scripts", "docs", "examples"]


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; returns the exit code."""
    os.chdir(PROJECT)  # settings of all tools are in the project's pyproject.toml
    command, *rest = arguments
    if command == "lint":
        return lint(fix="--fix" in rest)
    if rest[:1] == ["--no-lint"]:
        rest = rest[1:]
    else:
        collecting = None if rest else collect()
        code = lint(fix=False)
        if collecting is not None:
            if code:
                collecting.kill()
            collecting.wait()
        if code:
            return code
    if not rest:
        # Four at a time: most tests wait for processes. A file's tests stay together, because they share a node, and come
        # in order, the short ones last. Named tests run one after the other.
        rest = ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    if not any(argument.startswith("-m") for argument in rest):
        rest = ["-m", "not slow and not long", *rest]
    return check("pytest", *rest)


def collect() -> subprocess.Popen[bytes]:
    """Import all tests beside the checks, which use one processor, so that they are compiled once. In a new clone each of the
    processes that run them would do that otherwise, all at the same time: half a minute of a processor each.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def lint(*, fix: bool) -> int:
    """Linter, formatter and type checker; with ``fix`` the first two make their repairs."""
    format_mode = [] if fix else ["--check", "--diff"]
    return (
        check("ruff", "check", "--quiet", *(["--fix"] if fix else []), *SOURCES)
        or check("ruff", "format", "--quiet", *format_mode, *SOURCES)
        or check("mypy")
    )


def check(tool: str, *arguments: str) -> int:
    """Run one tool as a module of this environment; returns its exit code."""
    print(f"── {tool} {' '.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", tool, *arguments], check=False).returncode
    # A tool ended by a signal has a negative code; a shell would see it as 128 + the signal, and so do our callers.
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
