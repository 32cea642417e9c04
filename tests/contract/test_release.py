"""Goal: what is published comes out of the project's files alone, byte for byte, and is all that a first user needs.

Method: ``scripts/release`` itself builds and checks. The wheel goes into an environment that has nothing of this one but
copies of what the wheel requires; there a node starts in an empty folder. Wheels that lack a file or have one too many, and a
build that differs, must be refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import release
import sbom
from environments import BareEnvironment

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    assert release.main(["--out", str(folder), "--no-trial"]) == 0
    return folder


@pytest.fixture(scope="module")
def wheel(out: Path) -> Path:
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> BareEnvironment:
    made = BareEnvironment(tmp_path_factory.mktemp("environment"))
    made.install_project(wheel, "node")
    return made


@pytest.mark.slow
def test_archives_are_built_twice_with_equal_bytes(out: Path) -> None:
    names = sorted(path.name for path in out.iterdir())
    assert names == ["SHA256SUMS", "commitmq-0.1.0-cp311-abi3-linux_x86_64.whl", "commitmq-0.1.0.tar.gz"]
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=out, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count(": OK")) == (0, 2)


@pytest.mark.slow
def test_a_wheel_that_lacks_a_file_is_refused(wheel: Path, tmp_path: Path) -> None:
    lacking = "share/commitmq/node.toml"
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if not name.endswith(lacking):
                new.writestr(name, old.read(name))
    with pytest.raises(release.NotReleasable, match=f"lacks {lacking}"):
        release.check_wheel(changed)


@pytest.mark.slow
def test_a_wheel_with_a_file_too_many_is_refused(wheel: Path, tmp_path: Path) -> None:
    changed = tmp_path / wheel.name
    changed.write_bytes(wheel.read_bytes())
    with zipfile.ZipFile(changed, "a") as archive:
        archive.writestr("commitmq/notes.txt", "mine")
    with pytest.raises(release.NotReleasable, match=r"holds commitmq/notes\.txt"):
        release.check_wheel(changed)


@pytest.mark.slow
def test_a_build_that_differs_is_named(wheel: Path, tmp_path: Path) -> None:
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + (b"\n" if name == "commitmq/log.py" else b""))
    assert release.difference(wheel, changed) == ": commitmq/log.py"


@pytest.mark.slow
def test_a_first_message_from_an_empty_folder(environment: BareEnvironment, tmp_path: Path) -> None:
    first = release.first_message(Path(environment.python), tmp_path / "empty")
    print(first)  # noqa: T201
    assert 0.5 < first.processor_s < release.FIRST_MESSAGE_WITHIN_S
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["demo"], "nothing else was left behind"


@pytest.mark.slow
def test_the_administrator_s_files_are_in_the_environment(environment: BareEnvironment) -> None:
    share = environment.folder / "share" / "commitmq"
    project = release.PROJECT
    assert (share / "node.toml").read_bytes() == (project / "config" / "node.toml").read_bytes()
    shipped = {str(path.relative_to(share / "deploy")) for path in (share / "deploy").rglob("*") if path.is_file()}
    ours = [name.removeprefix("deploy/") for name in release.project_files() if name.startswith("deploy/")]
    assert shipped == set(ours)


@pytest.mark.long
@pytest.mark.parametrize("compiler", [True, False], ids=["with a compiler", "without one"])
def test_a_clone_is_installed_by_pip(compiler: bool, tmp_path: Path) -> None:
    """Needs a package index; where there is no compiler pip fetches one of 100 MB for the build."""
    venv.create(tmp_path / "environment", with_pip=True)
    python = str(tmp_path / "environment" / "bin" / "python")
    environment = {"HOME": str(tmp_path), "PATH": os.defpath if compiler else str(tmp_path / "nothing")}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP"))}
    project = release.copied(tmp_path / "project")
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", str(project)]
    subprocess.run(command, env=environment, check=True, timeout=500)
    program = "import numpy; from commitmq.kernels import compiled; print(compiled.__file__)"
    modules = os.pathsep.join([sysconfig.get_path("purelib", vars={"base": tmp_path / "environment"}), *sys.path[1:]])
    done = subprocess.run(
        [python, "-c", program], env={"PYTHONPATH": modules}, capture_output=True, text=True, timeout=60, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "environment")


# ---------------------------------------------------------------- the bill of materials


@pytest.mark.slow
def test_the_bill_has_what_is_installed(environment: BareEnvironment) -> None:
    bill = json.loads(sbom.document(sbom.installed(Path(environment.python)), "commitmq", ("node",), 1_000_000_000))
    listed = environment.check(
        "-m", "pip", "--python", environment.python, "list", "--format", "json", python=sys.executable
    )
    installed = {(one["name"], one["version"]) for one in json.loads(listed)}
    components = [bill["metadata"]["component"], *bill["components"]]
    assert {(one["name"], one["version"]) for one in components} == installed
    assert bill["metadata"]["timestamp"] == "2001-09-09T01:46:40Z"
    references = {one["bom-ref"] for one in components}
    assert {one["ref"] for one in bill["dependencies"]} == references
    assert {name for one in bill["dependencies"] for name in one["dependsOn"]} <= references
    assert all(one.get("licenses") for one in components), [
        one["name"] for one in components if not one.get("licenses")
    ]


def distribution(name: str, *requires: str, version: str = "1.0") -> dict[str, object]:
    return {"name": name, "version": version, "licence": "MIT", "classes": [], "summary": "", "requires": list(requires),
            "sha256": "0" * 64}  # fmt: skip


def test_a_bill_follows_extras_and_leaves_out_what_nobody_asked_for() -> None:
    found = [
        distribution("root", "a", 'b[more]; extra == "node"', 'c; extra == "other"'),
        distribution("A"),
        distribution("b", 'D.d; extra == "more"', 'gone; python_version < "3"'),
        distribution("c"),
        distribution("d-d"),
    ]
    bill = json.loads(sbom.document(found, "root", ("node",), 0))
    assert [one["name"] for one in bill["components"]] == ["A", "b", "d-d"]
    assert bill["dependencies"][-1] == {
        "ref": "pkg:pypi/root@1.0",
        "dependsOn": ["pkg:pypi/a@1.0", "pkg:pypi/b@1.0"],
    }
    assert sbom.document(found, "root", ("node",), 0) == sbom.document(found[::-1], "root", ("node",), 0)


def test_a_bill_of_an_incomplete_environment_is_refused() -> None:
    with pytest.raises(KeyError, match="missing"):
        sbom.document([distribution("root", "missing")], "root", (), 0)


# ---------------------------------------------------------------- the tools of users


@pytest.fixture(scope="module")
def installers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands pipx and uv, in an environment of their own."""
    folder = tmp_path_factory.mktemp("installers")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "pipx", "uv"]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"pipx and uv cannot be installed: {done.stderr.strip()[-300:]}")
    return folder / "bin"


@pytest.mark.long
@pytest.mark.parametrize("tool", ["pipx", "uv"])
def test_the_command_alone(tool: str, installers: Path, wheel: Path, tmp_path: Path) -> None:
    home, commands = tmp_path / "home", tmp_path / "commands"
    constraints = str(release.PROJECT / "constraints.txt")
    places = {
        "PIPX_HOME": home / "pipx",
        "PIPX_BIN_DIR": commands,
        "UV_TOOL_DIR": home / "uv",
        "UV_TOOL_BIN_DIR": commands,
    }
    variables = {
        **os.environ,
        **{name: str(place) for name, place in places.items()},
        "HOME": str(home),
        "PIP_CONSTRAINT": constraints,
        "UV_CONSTRAINT": constraints,
    }
    install = {"pipx": ["pipx", "install"], "uv": ["uv", "tool", "install"]}[tool]
    command = [
        str(installers / install[0]),
        *install[1:],
        "--python",
        sys.executable,
        f"commitmq[node] @ {wheel.as_uri()}",
    ]
    done = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in commands.iterdir()] == ["commitmq"], "no other command is put into the way"
    assert release.first_message(commands / "python", tmp_path / "empty").processor_s < release.FIRST_MESSAGE_WITHIN_S
