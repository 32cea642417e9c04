"""Goal: a file that is replaced has its old content or its new one, whatever fails or dies meanwhile, what is left harms
nobody, and nothing replaces a file in another way.

Method: each step of a replace fails on either side, or the process ends there, and the folder is looked at; the sources are
searched for renames that pass the module by, and each that is allowed has its reason.
"""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.files import atomic_file

PROJECT = Path(__file__).resolve().parents[3]
EARLY = (
    "disk.open.x:before",
    "disk.open.x:after",
    "x.write",
    "disk.sync.x:before",
    "disk.sync.x:after",
    "disk.replace.x:before",
)
LATE = ("disk.replace.x:after", "disk.sync_folder.x:before", "disk.sync_folder.x:after")


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def arm(text: str) -> None:
        monkeypatch.setattr(failpoints, "_points", failpoints.parse(text))
        monkeypatch.setattr(failpoints, "ACTIVE", True)

    return arm


@pytest.mark.parametrize("point", [*EARLY, *LATE])
def test_a_failure_leaves_one_whole_file_and_nothing_beside_it(
    tmp_path: Path, armed: Callable[[str], None], point: str
) -> None:
    path = tmp_path / "file"
    atomic_file.replace(path, b"first", "x")
    descriptors = len(os.listdir("/proc/self/fd"))
    armed(f"{point}=errno:EIO@1")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        atomic_file.replace(path, b"second", "x")
    assert path.read_bytes() == (b"first" if point in EARLY else b"second")
    assert os.listdir(tmp_path) == ["file"]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    atomic_file.replace(path, b"third", "x")
    assert path.read_bytes() == b"third"


@pytest.mark.parametrize("point", [*EARLY, *LATE])
def test_a_death_leaves_one_whole_file_and_the_next_replace_cleans_up(
    tmp_path: Path, armed: Callable[[str], None], point: str
) -> None:
    path = tmp_path / "file"
    atomic_file.replace(path, b"first", "x")
    if (child := os.fork()) == 0:
        armed(f"{point}=kill@1")
        atomic_file.replace(path, b"a longer second", "x")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert path.read_bytes() == (b"first" if point in EARLY else b"a longer second")
    assert set(os.listdir(tmp_path)) <= {"file", "file.new"}
    atomic_file.replace(path, b"third", "x")
    assert path.read_bytes() == b"third"
    assert os.listdir(tmp_path) == ["file"]


def test_a_short_write_is_continued(tmp_path: Path, armed: Callable[[str], None]) -> None:
    armed("x.write=short:1")
    atomic_file.replace(tmp_path / "file", b"second", "x")
    assert (tmp_path / "file").read_bytes() == b"second"


def test_syncs_are_only_for_what_must_last(tmp_path: Path, armed: Callable[[str], None]) -> None:
    armed("disk.sync.x:before=errno:EIO;disk.sync_folder.x:before=errno:EIO")
    atomic_file.replace(tmp_path / "file", b"one", "x", durable=False)
    assert (tmp_path / "file").read_bytes() == b"one"


def test_the_new_content_is_complete_before_it_takes_the_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    seen = []

    def before() -> None:
        seen.append({one.name: one.read_bytes() for one in tmp_path.iterdir()})

    atomic_file.replace(path, b"first", "x", before=before)
    atomic_file.replace(path, b"second", "x", before=before, hidden=True)
    assert seen == [{"file.new": b"first"}, {"file": b"first", ".file.new": b"second"}]
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"file": b"second"}


@pytest.mark.parametrize(("umask", "mode", "expected"), [(0, 0o640, 0o640), (0o077, 0o640, 0o600), (0, 0o600, 0o600)])
def test_the_mode_is_the_callers_and_the_umasks(tmp_path: Path, umask: int, mode: int, expected: int) -> None:
    before = os.umask(umask)
    try:
        atomic_file.replace(tmp_path / "file", b"", "x", mode=mode)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == expected


# ---------------------------------------------------------------- the sources

OTHER_RENAMES = {
    "node/commitmq/files/disk.py": "the calls themselves, and a damaged file set aside",
    "node/commitmq/files/unshare.py": "a copy takes the place of a file that has other names",
    "node/commitmq/offline/snapshot.py": "a folder that was made whole gets its name",
    "node/commitmq/supervision/supervisor.py": "log files move on by one number, each to a name that is free",
    "node/commitmq/offline/rebuild.py": "exchanges folders of rebuilt files",
    "node/commitmq/offline/rebuild_parallel.py": "moves rebuilt queues and index files to their place, where none is",
    "node/commitmq/offline/rebuild_pieces.py": "moves folders of rebuilt queues to their place, where none is",
    "node/commitmq/security/audit.py": "a full file of the audit log gets the number of its first line",
    "node/commitmq/plugin/project.py": "a folder that was made whole gets its name",
    "node/commitmq/store/index/index_file.py": "a new index file gets a name that must be free",
    "node/commitmq/store/metadata/json_config.py": "RocketMQ's .bak: the former file is kept (spec 1.4)",
    "node/commitmq/workers/allocate.py": "a new segment gets a name that must be free",
    "dispatchers/commitmq_dispatchers/memory.py": "segments and folders in shared memory get names that are free",
    "plugins/commitmq_plugins/spark/sessions.py": "several processes may make the file at once, each under a name of its own",
    "plugins/commitmq_plugins/spark/jobs/manifest.py": "a file of an export gets a name that is free, before its commit",
}


def renames(path: Path) -> list[str]:
    """Calls in the file that rename: of os, pathlib or commitmq.files.disk. A str's ``replace`` has two arguments."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        of_path = name in ("rename", "replace") and len(node.args) == 1 and not node.keywords
        if (owner in ("os", "disk") and name in ("rename", "renames", "replace")) or of_path:
            found.append(f"{path.relative_to(PROJECT)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_nothing_replaces_a_file_in_another_way() -> None:
    paths = [path for root in ("node", "dispatchers", "plugins") for path in (PROJECT / root).rglob("*.py")]
    assert len(paths) > 200
    found = {line for path in paths for line in renames(path)}
    names = {line.partition(":")[0] for line in found} - {"node/commitmq/files/atomic_file.py"}
    assert sorted(line for line in found if line.partition(":")[0] in names - OTHER_RENAMES.keys()) == []
    assert OTHER_RENAMES.keys() - names == set(), "these rename nothing any more"


def test_a_rename_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PROJECT", tmp_path)
    source = tmp_path / "source.py"
    source.write_text(
        "os.replace(a, b)\na.with_name(b).rename(c)\nnew.replace(a)\n'a'.replace('b', 'c')\nreplace(a, b=1)\n"
    )
    assert [line.partition(":")[2][:1] for line in renames(source)] == ["1", "2", "3"]
