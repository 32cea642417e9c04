"""Goal: `commitmq plugins new` writes a project of the name it is given, or says why it does not and writes nothing.

Method: names and folders of all kinds; that the project works is shown by the tutorial's test, which installs and uses one.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from commitmq.cli.main import VERBS
from commitmq.plugin.project import PluginProjectError, write
from nodes import commitmq


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["order-totals", "order_totals"])
def test_everything_has_the_new_name(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path, set(VERBS))
    assert folder == tmp_path / "order-totals"
    files = texts(folder)
    assert sorted(files) == [
        "README.md",
        "pyproject.toml",
        "src/order_totals/__init__.py",
        "src/order_totals/command.py",
        "src/order_totals/dispatcher.py",
        "tests/test_order_totals.py",
    ]
    assert not [path for path, text in files.items() if "example" in text.lower()]
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "order-totals"
    assert project["entry-points"]["commitmq"] == {"order_totals": "order_totals"}
    assert "class OrderTotals(SqliteDispatcher):" in files["src/order_totals/dispatcher.py"]
    for path, text in files.items():
        if path.endswith(".py"):
            ast.parse(text)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Orders", "is no name for a plugin"),
        ("1st", "is no name for a plugin"),
        ("two words", "is no name for a plugin"),
        ("../elsewhere", "is no name for a plugin"),
        ("", "is no name for a plugin"),
        ("a--b", "is no name for a plugin"),
        ("größe", "is no name for a plugin"),
        ("x" * 41, "is no name for a plugin"),
        ("class", "Python module class"),
        ("json", "Python module json"),
        ("numpy", "Python module numpy"),
        ("commitmq", "Python module commitmq"),
        ("topic", "there is a verb `commitmq topic` already"),
        ("consume-queue", "a dispatcher of the node itself"),
    ],
)
def test_a_name_that_does_not_do(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(PluginProjectError, match=why):
        write(name, tmp_path, set(VERBS))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "order-totals").mkdir()
    (tmp_path / "order-totals" / "mine").write_text("work of years")
    ended = commitmq("plugins", "new", "order-totals", "--into", str(tmp_path))
    assert ended.returncode != 0
    assert "order-totals exists already" in ended.stderr
    assert texts(tmp_path) == {"order-totals/mine": "work of years"}
