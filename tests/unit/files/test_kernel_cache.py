"""Goal: every process finds a folder for compiled kernels that it can use and trust, or says of each why not.

Method: the places are folders of the test's own in every state: complete or empty, writable or not, ours or anybody's.
One small kernel is really compiled into them, by processes that obey permissions also where the tests run as root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from accounts import bare_environment, obeying, read_only_copy
from commitmq.files import kernel_cache
from commitmq.kernels import warm
from commitmq.supervision.exit_codes import CliExit

LOAD = """
import sys
from pathlib import Path
from commitmq.files import kernel_cache
if len(sys.argv) > 1:
    kernel_cache.use_store(Path(sys.argv[1]))
from commitmq.kernels import tags
print(kernel_cache.choose().origin, kernel_cache.choose().folder)
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home, a package and a store of the test's own; nothing chosen before counts."""
    (tmp_path / "package").mkdir()
    key = kernel_cache.key()
    monkeypatch.setattr(kernel_cache, "SOURCES", tmp_path / "package")
    monkeypatch.setattr(kernel_cache, "key", lambda: key)
    monkeypatch.setattr(kernel_cache, "_state", {"store": None})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    kernel_cache.choose.cache_clear()
    yield tmp_path
    kernel_cache.choose.cache_clear()


def place(folder: Path) -> Path:
    return folder / f"kernels-{kernel_cache.key()}"


def fill(folder: Path, *, whole: bool = True) -> Path:
    """A folder that claims to have every kernel."""
    folder.mkdir(parents=True)
    for parent in (folder, folder.parent):
        parent.chmod(0o700)
    (folder / "walk.nbi").write_bytes(b"12345")
    (folder / "complete").write_bytes(orjson.dumps({"walk.nbi": 5 if whole else 6}))
    return folder


def test_the_package_comes_first_then_the_home_then_the_store(places: Path) -> None:
    kernel_cache.use_store(places / "store")
    assert [one.origin for one in kernel_cache.candidates()] == ["package", "user cache", "store"]
    assert not list(places.rglob("kernels-*")), "to look changes nothing"
    assert kernel_cache.choose().origin == "package"
    assert place(places / "package/__pycache__").is_dir()


def test_what_has_every_kernel_is_used_wherever_it_is(places: Path) -> None:
    kernel_cache.use_store(places / "store")
    (places / "store").mkdir()
    whole = fill(place(places / "store/commitmq/kernels"))
    (places / "store/commitmq").chmod(0o700)
    assert kernel_cache.choose() == kernel_cache.KernelCache(whole, "store", True)


def test_a_folder_that_lost_a_part_is_filled_again(places: Path) -> None:
    fill(place(places / "package/__pycache__"), whole=False)
    chosen = kernel_cache.choose()
    assert (chosen.origin, chosen.complete) == ("package", False)


@pytest.mark.parametrize("where", ["folder", "parent"])
def test_machine_code_that_others_could_have_written_is_never_run(places: Path, where: str) -> None:
    whole = fill(place(places / "home/commitmq"))
    (whole if where == "folder" else whole.parent).chmod(0o777)
    (places / "package").rmdir()
    found = {one.origin: one for one in kernel_cache.candidates()}["user cache"]
    assert found.problem is not None
    assert "can be written by other accounts" in found.problem


def test_a_symbolic_link_is_not_followed(places: Path) -> None:
    whole = fill(places / "elsewhere")
    (places / "home/commitmq").mkdir(parents=True, mode=0o700)
    place(places / "home/commitmq").symlink_to(whole)
    found = {one.origin: one for one in kernel_cache.candidates()}["user cache"]
    assert "is a symbolic link" in str(found.problem)


def test_a_folder_of_another_account_is_never_run(places: Path) -> None:
    whole = fill(place(places / "home/commitmq"))
    if os.geteuid() != 0:
        pytest.skip("giving a folder away needs root")
    os.chown(whole, 65_534, 65_534)
    found = {one.origin: one for one in kernel_cache.candidates()}["user cache"]
    assert "belongs to another account" in str(found.problem)


def load_a_kernel(package: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return run_python(package, "-c", LOAD, *arguments, **extra)


def run_python(package: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*obeying(), sys.executable, *arguments],
        env=bare_environment(package, HOME="/nonexistent", PYTHONDONTWRITEBYTECODE="1", **extra),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_without_a_home_and_a_package_to_write_to_the_store_has_the_kernels(tmp_path: Path) -> None:
    """The named defect: numba stopped such a process with "no locator available"."""
    package = read_only_copy(tmp_path / "site", compiled=False)
    (tmp_path / "store").mkdir()
    done = load_a_kernel(package, str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"store {tmp_path}/store/commitmq/kernels/kernels-"), done.stdout
    assert list((tmp_path / "store").rglob("tags*.nbc")), "it was compiled to be kept"


def test_with_nothing_to_write_to_a_process_compiles_for_itself_and_says_where_it_looked(tmp_path: Path) -> None:
    package = read_only_copy(tmp_path / "site", compiled=False)
    (tmp_path / "temporary").mkdir()
    done = load_a_kernel(package, TMPDIR=str(tmp_path / "temporary"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"temporary folder {tmp_path}/temporary/"), done.stdout
    assert str(package) in done.stderr, "it names what it could not use"
    assert "commitmq kernels warm" in done.stderr
    assert not list((tmp_path / "temporary").iterdir()), "it leaves nothing"


def test_with_nothing_to_write_to_whoever_compiles_for_others_is_refused_before(tmp_path: Path) -> None:
    package = read_only_copy(tmp_path / "site", compiled=False)
    (tmp_path / "temporary").mkdir()
    words = ("-m", "commitmq.cli.main", "kernels")
    done = run_python(package, *words, "warm", TMPDIR=str(tmp_path / "temporary"))
    assert (done.returncode, done.stdout) == (CliExit.FAILURE, "")
    (told,) = done.stderr.splitlines()
    assert f"{package}/commitmq/kernels/__pycache__" in told
    assert "cannot be written" in told
    assert "as the owner of the installation" in told
    assert not list((tmp_path / "temporary").iterdir())
    listed = run_python(package, *words, "where", "--json", TMPDIR=str(tmp_path / "temporary"))
    assert [row["origin"] for row in orjson.loads(listed.stdout)] == ["package", "store", "temporary folder"]


def test_what_an_installation_compiled_is_read_where_it_cannot_be_written(tmp_path: Path) -> None:
    warm.warm()
    if kernel_cache.choose().origin != "package":
        pytest.skip("this installation keeps its kernels elsewhere")
    package = read_only_copy(tmp_path / "site", compiled=True)
    done = load_a_kernel(package)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"package {package}/commitmq/kernels/__pycache__/kernels-"), done.stdout
