"""Goal: a node has whole keys or none, whatever fails while they are made; keys are made once.

Method: errors and deaths at each step of the file, then another try.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.security.node_keys import load_node_keys, make_node_keys, node_key_path

POINTS = [
    f"disk.{call}.node_key:{side}"
    for call in ("open", "sync", "replace", "sync_folder")
    for side in ("before", "after")
]
POINTS += [
    f"disk.{call}.node_key_configured:{side}" for call in ("open", "sync_folder") for side in ("before", "after")
]


@contextlib.contextmanager
def active(text: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "ACTIVE", True)
        patch.setattr(failpoints, "_points", failpoints.parse(text))
        yield


def again(root: Path) -> None:
    """Whatever the first try left, the next one ends with whole keys of its own or of the first."""
    found = load_node_keys(root)
    if found is None:
        assert make_node_keys(root) == load_node_keys(root)
        is_gone(root)
        return
    with pytest.raises(FileExistsError):
        make_node_keys(root)
    assert load_node_keys(root) == found
    is_gone(root)


def is_gone(root: Path) -> None:
    """Keys that are lost are neither passed over nor made anew, until the note of them is removed too."""
    path, before = node_key_path(root), node_key_path(root).read_bytes()
    path.unlink()
    for look in (load_node_keys, make_node_keys):
        with pytest.raises(StoreError, match=r"keys are gone.*Put back a copy.*or remove .*node\.key\.configured too"):
            look(root)
    path.write_bytes(before)
    path.chmod(0o600)
    assert load_node_keys(root) is not None
    path.unlink()
    path.with_name("node.key.configured").unlink()
    assert load_node_keys(root) is None


@pytest.mark.parametrize("point", POINTS)
def test_an_error_leaves_whole_keys_or_none(tmp_path: Path, point: str) -> None:
    with active(f"{point}=errno:EIO"), pytest.raises(StoreError, match=r"cannot (make|note that) the node"):
        make_node_keys(tmp_path)
    again(tmp_path)


def _die(root: Path, point: str) -> None:
    with active(f"{point}=kill"):
        make_node_keys(root)


@pytest.mark.parametrize("point", POINTS)
def test_a_death_leaves_whole_keys_or_none(tmp_path: Path, point: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=_die, args=(tmp_path, point))
    process.start()
    process.join(20)
    assert process.exitcode == -9
    again(tmp_path)


def test_what_others_can_read_is_refused_and_a_message_has_no_secret(tmp_path: Path) -> None:
    keys = make_node_keys(tmp_path)
    path = node_key_path(tmp_path)
    path.chmod(0o640)
    with pytest.raises(StoreError, match="chmod 600"):
        load_node_keys(tmp_path)
    path.chmod(0o600)
    path.write_text(path.read_text().replace(keys.public, "short"))
    with pytest.raises(StoreError, match="damaged") as caught:
        load_node_keys(tmp_path)
    assert keys.secret.reveal() not in str(caught.value)
    with pytest.raises(FileExistsError):
        make_node_keys(tmp_path)
    assert "short" in path.read_text(), "the evidence stays"
