"""Goal: /metrics answers who has a token of the file, the file as it is now, and nobody else; a wrong file stops the start.

Method: files of tokens, changed and damaged meanwhile.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq_plugins.metrics.process import Tokens

OLD, NEW = "an-old-token-of-32-characters-xx", "a-new-token-of-32-characters-xxx"


def write(path: Path, *lines: str, mode: int = 0o600) -> Path:
    other = path.with_suffix(".new")
    other.write_text("\n".join(lines) + "\n")
    other.chmod(mode)
    os.replace(other, path)
    return path


def test_a_token_of_the_file_opens_and_nothing_else_does(tmp_path: Path) -> None:
    tokens = Tokens(write(tmp_path / "tokens", "# of Prometheus", "", OLD), get_log("test"))
    assert tokens.allows(f"Bearer {OLD}")
    assert tokens.allows(f"bearer  {OLD} ")
    for told in (
        "",
        OLD,
        f"Basic {OLD}",
        "Bearer",
        "Bearer ",
        f"Bearer {NEW}",
        f"Bearer {OLD}x",
        "Bearer # of Prometheus",
    ):
        assert not tokens.allows(told), told


def test_a_changed_file_counts_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", OLD)
    tokens = Tokens(path, get_log("test"))
    write(path, OLD, NEW)
    assert tokens.allows(f"Bearer {NEW}")
    write(path, NEW)
    assert not tokens.allows(f"Bearer {OLD}")
    path.unlink()
    assert tokens.allows(f"Bearer {NEW}")
    write(path, "short")
    assert tokens.allows(f"Bearer {NEW}")


def test_a_file_that_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", OLD)
    tokens = Tokens(path, get_log("test"))
    write(path, NEW, mode=0o604)
    assert tokens.allows(f"Bearer {OLD}"), "everybody could read the new ones"
    path.chmod(0o600)
    assert tokens.allows(f"Bearer {NEW}")
    assert not tokens.allows(f"Bearer {OLD}")


@pytest.mark.parametrize("lines", [(), ("# nothing",), ("short",), ("with blanks in the middle",), (OLD,) * 17])
def test_a_file_without_tokens_stops_the_start(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(StoreError, match="token"):
        Tokens(write(tmp_path / "tokens", *lines), get_log("test"))


def test_a_file_that_is_not_there_or_that_everybody_reads_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read"):
        Tokens(tmp_path / "tokens", get_log("test"))
    with pytest.raises(StoreError, match="every account"):
        Tokens(write(tmp_path / "tokens", OLD, mode=0o644), get_log("test"))
