"""Goal: the shape of the project stays as it was drawn: who imports whom, what stays light, what files may not contain.

Method: imports are read from the syntax trees, so that one inside a function counts as well; lightness is looked at in
processes of their own; text rules go over every file that is, or is about to be, under version control.
"""

from __future__ import annotations

import ast
import csv
import functools
import gzip
import hashlib
import io
import itertools
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[2]
ROOTS = {
    "commitmq": PROJECT / "node" / "commitmq",
    "commitmq_dispatchers": PROJECT / "dispatchers" / "commitmq_dispatchers",
    "commitmq_plugins": PROJECT / "plugins" / "commitmq_plugins",
    "pyspark_commitmq": PROJECT / "plugins" / "pyspark_commitmq",
}


def modules() -> dict[str, Path]:
    """Every module of the three source roots by its full name."""
    found = {}
    for package, root in ROOTS.items():
        for path in sorted(root.rglob("*.py")):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def imports_of(name: str) -> set[str]:
    """Full names of the modules that module ``name`` imports, anywhere in it."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{above}.{base}".rstrip(".")
            # `from package import module` imports the module; for other names the package is what counts.
            found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)
    return found


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offences(importers: str, *forbidden: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """ "module imports module" for each import of ``forbidden`` in the modules at or below ``importers``."""
    return [
        f"{name} imports {imported}"
        for name in MODULES
        if below(name, importers)
        for imported in sorted(imports_of(name))
        if below(imported, *forbidden) and not below(imported, *allowed)
    ]


# ---------------------------------------------------------------- who imports whom


def test_the_reader_of_imports_sees_them() -> None:
    # The rules below pass on an empty graph too, so the graph itself is checked first.
    assert len(MODULES) > 20
    assert "commitmq.control" in imports_of("commitmq.workers.runtime.doorbell")
    assert "commitmq.errors" in imports_of("commitmq.workers.runtime.context"), "an import inside a function was missed"
    assert "zmq" in imports_of("commitmq.workers.runtime.context")


# What a package of the node may import of the others, from the bottom up. A module that stands alone counts as one.
BASE = {"errors", "log", "failpoints", "extras", "control"}
RULES: dict[str, set[str]] = {
    "errors": set(),
    "log": set(),
    "failpoints": {"errors"},
    "extras": {"errors"},
    "control": {"errors"},
    "counting": {"errors"},
    "ownership": {"control"},
    "format": {"errors"},
    "files": {"errors", "failpoints", "format", "log"},
    "semantics": {"errors", "format"},
    "security": {"errors", "failpoints", "files", "format.constants", "log"},
    "kernels": {"errors", "extras", "format.constants"},
    "store": {"errors", "failpoints", "files", "format", "kernels", "log", "semantics"},
    "config": {"errors", "format", "store"},
    "protocol": {"errors"},
    "network": {"config", "errors", "log", "protocol", "security", "store.access"},
    "client": {"errors", "format", "log", "protocol", "semantics", "store"},
    "coordination": BASE | {"config", "files", "format", "semantics", "store"},
    "plugin": BASE | {"config", "counting", "format", "security", "store"},
    "offline": BASE | {"config", "files", "format", "kernels", "plugin", "store"},
    "workers": BASE
    | {"config", "coordination", "counting", "files", "format", "kernels", "network", "offline", "plugin", "protocol"}
    | {"security", "semantics", "store"},
    "supervision": BASE
    | {"config", "files", "format", "kernels", "network", "plugin", "protocol", "security", "store"}
    | {"workers.runtime"},
    "testing": BASE | {"client", "config", "files", "format", "plugin", "store", "supervision"},
    "bench": BASE | {"client", "config", "files", "format", "kernels", "protocol", "store", "supervision", "testing"},
}
# Single modules that a package may import beyond its rule, and why.
EXCEPTIONS = {
    ("coordination", "supervision.node_files"): "which life of the node this is",
    ("workers", "supervision.node_files"): "which life of the node this is, and where it listens",
    ("workers", "supervision.exit_codes"): "the words of progress",
    ("workers", "supervision.discovery"): "what the process of that name does",
    ("workers", "supervision.admin_socket"): "how long the supervisor listens at the end",
    ("client", "files.atomic_file"): "a consumer that broadcasts keeps its positions in a file",
    ("client", "files.disk_space"): "the same file, on a full disk",
    ("offline", "security.access_file"): "a snapshot whose users a start would refuse",
    ("offline", "security.node_keys"): "the same of its keys",
    ("offline", "semantics.timer"): "the topic whose queue the timer wheel indexes",
    ("supervision", "semantics.movers"): "which processes start on demand",
    ("plugin", "supervision.roster"): "names that a plugin's process cannot have",
    ("plugin", "workers.runtime.context"): "the context of a plugin's worker, by its public name",
    ("plugin", "workers.runtime.run_async"): "the loop of a plugin's worker, by its public name",
}


def package_of(name: str) -> str:
    """``store`` for commitmq.store.log.append, ``errors`` for commitmq.errors, "" for commitmq itself."""
    return [*name.split("."), ""][1]


def against_the_rules(name: str, imported: set[str]) -> list[str]:
    """Which of ``imported`` module ``name`` of the node must not import."""
    package = package_of(name)
    if package not in RULES:
        return []
    found = []
    for other in sorted(imported):
        inner = other.removeprefix("commitmq.")
        if not below(other, "commitmq") or package_of(other) in (package, ""):
            continue
        if any(below(inner, allowed) for allowed in RULES[package]):
            continue
        if not any(whose == package and below(inner, module) for whose, module in EXCEPTIONS):
            found.append(f"{name} imports {other}")
    return found


def test_packages_import_what_lies_below_them() -> None:
    ours = [name for name in MODULES if below(name, "commitmq") and not below(name, "commitmq.plugin.template")]
    assert {package_of(name) for name in ours} - {"", "cli"} == set(RULES), "each package has its rule"
    assert [line for name in ours for line in against_the_rules(name, imports_of(name))] == []


def test_exceptions_are_used() -> None:
    pairs = {(package_of(name), other.removeprefix("commitmq.")) for name in MODULES for other in imports_of(name)}
    assert set(EXCEPTIONS) - pairs == set()


def test_an_import_against_the_rules_is_seen() -> None:
    assert against_the_rules("commitmq.store.log.append", {"commitmq.workers.reput"}) != []
    assert against_the_rules("commitmq.client.producer", {"commitmq.supervision.ports"}) != []
    assert against_the_rules("commitmq.workers.reput", {"commitmq.supervision.supervisor"}) != []
    assert (
        against_the_rules("commitmq.workers.reput", {"commitmq.supervision.exit_codes", "commitmq.store.layout"}) == []
    )


def circles() -> list[set[str]]:
    """Sets of modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    graph = {name: {one for one in imports_of(name) if one in MODULES and one != name} for name in MODULES}
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            part = set(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(part)

    for name in graph:
        if name not in number:
            visit(name)
    return found


def test_modules_do_not_import_each_other() -> None:
    assert circles() == []


def test_the_node_knows_neither_dispatchers_nor_plugins() -> None:
    assert offences("commitmq", "commitmq_dispatchers", "commitmq_plugins") == []


def test_dispatchers_and_plugins_use_what_a_third_party_can() -> None:
    inner = tuple(f"commitmq.{name}" for name in ("workers", "cli", "supervision", "coordination", "network"))
    assert offences("commitmq_dispatchers", *inner, "commitmq_plugins") == []
    # A command of a plugin speaks as the node's own do: exit codes, --json, tables, progress, secrets.
    spoken = (
        *(f"commitmq.cli.{name}" for name in ("options", "output", "quantity", "secret_input")),
        "commitmq.supervision.exit_codes",
    )
    assert offences("commitmq_plugins", *inner, "commitmq_dispatchers", allowed=spoken) == []


def test_the_store_has_no_sockets_and_no_processes() -> None:
    forbidden = ("zmq", "asyncio", "multiprocessing", "subprocess", "click", "rich", "psutil")
    bytes_and_files = ("commitmq.store", "commitmq.files", "commitmq.format")
    assert [line for package in bytes_and_files for line in offences(package, *forbidden)] == []
    # The socket module itself may be there: it is where Python keeps the conversions of addresses.
    opening = re.compile(r"socket\.(socket|socketpair|create_\w+)\(")
    texts = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items() if below(name, *bytes_and_files)}
    assert len(texts) > 60
    assert [name for name, text in texts.items() if opening.search(text)] == []


def test_kernels_know_nothing_but_bytes() -> None:
    assert offences("commitmq.kernels", "zmq", "socket", "subprocess", "logging", "orjson") == []


def test_few_modules_are_loose() -> None:
    loose = [path.name for path in ROOTS["commitmq"].glob("*.py") if path.name != "__init__.py"]
    assert len(loose) <= 8, loose


@pytest.mark.parametrize(
    "package", ["commitmq.errors", "commitmq.config", "commitmq.control", "commitmq.log", "commitmq.extras"]
)
def test_what_everyone_imports_needs_nothing_but_python(package: str) -> None:
    names = {name.partition(".")[0] for name in imports_of(package)}
    assert names <= set(sys.stdlib_module_names) | {"commitmq"}


# ---------------------------------------------------------------- what stays light

LIGHT = [
    (
        "import commitmq; commitmq.Producer; commitmq.Consumer; commitmq.Admin; commitmq.Message",
        ["numpy", "commitmq.kernels"],
    ),
    ("import commitmq", ["numpy", "commitmq.kernels", "zmq", "click", "rich", "psutil"]),
    ("import commitmq.cli.main", ["numpy", "commitmq.kernels", "zmq", "rich", "psutil"]),
    ("import commitmq.protocol.wire", ["numpy", "commitmq.kernels", "zmq"]),
    ("import commitmq.store.layout", ["numpy", "commitmq.kernels"]),
    ("import commitmq_plugins.spark", ["numpy", "commitmq.kernels", "zmq", "rich", "pyspark", "pyarrow"]),
    ("import commitmq_plugins.spark.commands", ["numpy", "commitmq.kernels", "zmq", "pyspark", "pyarrow"]),
    ("import commitmq.testing.pytest_plugin", ["numpy", "commitmq.kernels", "zmq", "click", "orjson", "hypothesis"]),
]


@pytest.mark.parametrize(("code", "heavy"), LIGHT, ids=[code for code, _ in LIGHT])
def test_an_import_does_not_load_what_it_does_not_need(code: str, heavy: list[str]) -> None:
    report = f"{code}\nimport sys; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# ---------------------------------------------------------------- what files contain


def project_files() -> list[Path]:
    """Files under version control or about to be, without those that git is told to ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: there is no list of the project's files")
    paths = [PROJECT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def project_texts() -> list[tuple[Path, str]]:
    texts = []
    for path in project_files():
        data = path.read_bytes()
        if b"\0" not in data[:8192] and not data.startswith(b"\x1f\x8b"):
            texts.append((path.relative_to(PROJECT), data.decode("utf-8")))
    assert len(texts) > 50, "the list of files is not what it should be"
    return texts


def lines_with(pattern: str) -> list[str]:
    compiled = re.compile(pattern)
    return [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in project_texts()
        if path.name != "LICENSE"
        for number, line in enumerate(text.splitlines(), 1)
        if compiled.search(line)
    ]


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    # Written in pieces, or this file would be the first to break the rule.
    homes = "|".join(["/ro" + "ot/", "/ho" + "me/[a-z]", "/Us" + "ers/[A-Za-z]", "/wo" + "rk/", "site-" + "packages/"])
    assert lines_with(rf"(?<![\w.$}}])({homes})") == []


def test_no_file_names_the_host_of_a_package_registry() -> None:
    hosts = ["pypi" + r"\.org", "pythonhosted" + r"\.org", "npmjs" + r"\.(org|com)", "crates" + r"\.io"]
    hosts += ["golang" + r"\.org", "repo1?" + r"\.maven\.", "maven" + r"\.org", "deb" + r"\.debian\.org"]
    assert lines_with("|".join(hosts)) == []


def test_every_module_says_what_it_is_and_every_test_module_its_goal_and_its_method() -> None:
    paths = [path for path in project_files() if path.suffix == ".py"]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    docstrings = {path: ast.get_docstring(ast.parse(text)) or "" for path, text in texts.items() if text.strip()}
    assert len(docstrings) > 50
    assert [str(path.relative_to(PROJECT)) for path, text in docstrings.items() if not text] == []
    tests = [path for path in paths if path.name.startswith("test_") and path.is_relative_to(PROJECT / "tests")]
    ours = {path: docstrings[path] for path in tests if "fixtures" not in path.parts}
    assert len(ours) > 200
    wrong = [path for path, text in ours.items() if not text.startswith("Goal: ") or "Method: " not in text]
    assert [str(path.relative_to(PROJECT)) for path in wrong] == []


def classes_of_one_name(texts: dict[str, str]) -> dict[str, list[str]]:
    """Names that several classes have, with their modules. A private class counts without its underscore."""
    places: dict[str, list[str]] = {}
    for module, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module)
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def test_classes_have_names_of_their_own() -> None:
    """One noun, one class: who looks for a name finds what it means."""
    assert classes_of_one_name({name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}) == {}


def test_a_class_with_the_name_of_another_is_seen() -> None:
    texts = {"a": "class Part: ...\nclass Whole: ...", "b": "def f():\n    class _Part: ..."}
    assert classes_of_one_name(texts) == {"Part": ["a", "b"]}


def test_test_modules_have_names_of_their_own() -> None:
    """The folders of the tests are no packages, so two modules of one name are one to pytest."""
    names = sorted(path.name for path in (PROJECT / "tests").rglob("test_*.py") if "fixtures" not in path.parts)
    assert [one for one, next_one in itertools.pairwise(names) if one == next_one] == []


def test_scripts_can_be_executed() -> None:
    for name in ("scripts/quickstart", "scripts/test", "scripts/lint", "scripts/docs", "scripts/release", ".ci/run"):
        path = PROJECT / name
        assert os.access(path, os.X_OK), f"{name} is not executable"
        assert path.read_text(encoding="utf-8").startswith("#!/bin/sh\n")


# ---------------------------------------------------------------- pinned versions


def pins() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (PROJECT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line), f"not a plain pin: {line}"
            found[canonicalize_name(name)] = version
    return found


def test_everything_the_project_pulls_in_is_pinned() -> None:
    pyproject = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*pyproject["project"]["dependencies"], *pyproject["build-system"]["requires"]]
    for extra in pyproject["project"]["optional-dependencies"].values():
        wanted += extra
    pinned = pins()
    seen: set[str] = set()
    open_requirements = [Requirement(text) for text in wanted]
    while open_requirements:
        requirement = open_requirements.pop()
        name = canonicalize_name(requirement.name)
        if name == pyproject["project"]["name"]:
            continue  # an extra that has another one in it; all of them are looked at
        assert name in pinned, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} does not allow {pinned[name]}"
        if name in seen:
            continue
        seen.add(name)
        for text in metadata.requires(name) or []:
            further = Requirement(text)
            if further.marker is None or further.marker.evaluate({"extra": ""}):
                open_requirements.append(further)
    assert len(seen) > 20
    # What builds asks for at build time only, so no metadata leads to it, and what libcst asks for on Python 3.13.
    assert set(pinned) - seen <= {"cython", "editables", "setuptools", "pyyaml-ft", "ziglang"}, (
        "pins that nothing needs"
    )


# ---------------------------------------------------------------- the data set of the quickstart


def test_the_sample_data_is_what_its_readme_says() -> None:
    folder = PROJECT / "scripts" / "data"
    packed = (folder / "flights-2013-01.csv.gz").read_bytes()
    assert len(packed) < 1024**2
    data = gzip.decompress(packed)
    rows = list(csv.DictReader(io.StringIO(data.decode("ascii"))))
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{len(rows):,} rows" in readme
    assert hashlib.sha256(data).hexdigest() in readme
    assert all(f"`{column}`" in readme for column in rows[0])
    assert len(rows) >= 10_000
    assert {(row["year"], row["month"]) for row in rows} == {("2013", "1")}
