"""Goal: the sizes and positions of a record, a unit and a filler, and their magics and bits, have one definition, in format/.

Method: the syntax trees of the store, the kernels and what works on their bytes are searched for the numbers themselves, where
they stand beside a position or a size, and for a second struct or dtype of the same fields.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]
FOLDERS = (
    "node/commitmq/store",
    "node/commitmq/kernels",
    "node/commitmq/offline",
    "node/commitmq/client",
    "dispatchers/commitmq_dispatchers",
    "plugins/commitmq_plugins",
)
# Sizes that only these structures have; magics, signed and not.
TELLING = {91, 46, 0xDAA320A7, 0xDAA320AB, 0xCBD43194, 626843481, 626843477, 875286124, 0x700, 0x701}
# Positions and sizes that say something beside a position only: ``at + 28``.
POSITIONS = {20, 28, 36, 40, 48, 56, 60, 68, 72}
STARTS = {"at", "position", "offset", "start", "target", "source"}
STRUCTS = {">qiq", ">qi", ">iqii"}
ALLOWED = {
    "plugins/commitmq_plugins/rocketmq/remoting/codes.py": {46},  # the request CHECK_CLIENT_CONFIG
}


def numbers(tree: ast.AST) -> set[int]:
    """Suspicious integers: TELLING ones anywhere, POSITIONS added to the start of something."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in TELLING:
            found.add(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, ast.Constant):
            left = ast.unparse(node.left)
            value = node.right.value
            if isinstance(value, int) and value in POSITIONS and left in STARTS:
                found.add(value)
    return found


def second_definitions(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Struct", "dtype")):
            text = ast.unparse(node)
            is_unit = "'physical_offset', '>i8'" in text or "['physical_offset', 'size', 'tags_code']" in text
            if is_unit or any(isinstance(one, ast.Constant) and one.value in STRUCTS for one in node.args):
                found.append(text)
    return found


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (PROJECT / folder).rglob("*.py"))


def test_no_number_of_the_format_stands_elsewhere() -> None:
    assert len(sources()) > 100
    found = {}
    for path in sources():
        name = str(path.relative_to(PROJECT))
        wrong = numbers(ast.parse(path.read_text(encoding="utf-8"))) - ALLOWED.get(name, set())
        if wrong:
            found[name] = wrong
    assert found == {}, "take them from commitmq.format.constants"


def test_the_units_have_one_definition() -> None:
    found = {str(path.relative_to(PROJECT)): second_definitions(ast.parse(path.read_text())) for path in sources()}
    assert {name: lines for name, lines in found.items() if lines} == {}, "take it from commitmq.format.units"


@pytest.mark.parametrize("line", ["x = 91", "load8(log, at + 28)", "magic == -626843481"])
def test_a_number_is_seen(line: str) -> None:
    assert numbers(ast.parse(line))


@pytest.mark.parametrize(
    "line", ["U = struct.Struct('>qiq')", "U = np.dtype([('physical_offset', '>i8'), ('size', '>i4')])"]
)
def test_a_second_definition_is_seen(line: str) -> None:
    assert second_definitions(ast.parse(line))
