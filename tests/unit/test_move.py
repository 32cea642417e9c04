"""Goal: scripts/move.py merges, moves and renames without changing what code means, and refuses what it cannot.

Method: plans on a small made-up package, whose result is read and imported.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[2]
FILES = {
    "node/shop/__init__.py": '"""A shop."""\n',
    "node/shop/till/__init__.py": '"""The till."""\n',
    "node/shop/till/coin.py": '"""A coin.\n\nIt is round.\n"""\n\nfrom __future__ import annotations\n\n'
    'import math\n\n_CENTS = 100\n\n\nclass Coin:\n    """See the module. It has a value."""\n\n'
    "    def cents(self, euros: float) -> int:\n        return math.floor(euros * _CENTS)\n",
    "node/shop/till/drawer.py": '"""The drawer of coins."""\n\nfrom __future__ import annotations\n\n'
    "from typing import TYPE_CHECKING\n\nfrom shop.till import coin\nfrom shop.till.coin import Coin as Money\n\n"
    "if TYPE_CHECKING:\n    from shop import rules\n\n_CENTS = 100\n\n\n"
    "def opened(rule: rules.Rule | None = None) -> int:\n    from shop.till.coin import Coin\n\n"
    "    assert Money is coin.Coin is Coin\n    return Money().cents(2.5)\n",
    "node/shop/rules.py": '"""Rules. See shop.till.drawer."""\n\n\nclass Rule:\n    """A rule."""\n',
    "tests/test_shop.py": "from shop.till import coin, drawer\n\nWHERE = 'shop.till.drawer.opened'\n\n\ndef test() -> None:\n"
    "    assert drawer.opened() == coin.Coin().cents(2.5)\n",
    "docs/shop.md": "[till](../node/shop/till/drawer.py), `till/coin.py`, `till.coin`, shop.till.coiner\n",
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("move_tool", PROJECT / "scripts" / "move.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["move_tool"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


def planned(tool: ModuleType, root: Path, plan: str) -> list[str]:
    refused: list[str] = tool.run(tool.Project(root, {"shop": "node"}), plan)
    return refused


def run(root: Path) -> str:
    code = "import test_shop; test_shop.test(); print(test_shop.WHERE)"
    environment = {"PYTHONPATH": f"{root / 'node'}:{root / 'tests'}"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_merge_into_the_module_of_the_package(tool: ModuleType, shop: Path) -> None:
    assert planned(tool, shop, "in shop\nmerge till.drawer till.coin -> till | The till and its coins.\n") == []
    assert run(shop) == "shop.till.opened"
    assert not (shop / "node/shop/till").exists()
    text = (shop / "node/shop/till.py").read_text()
    assert text.startswith('"""The till and its coins.\n\nThe drawer of coins.\n"""')
    assert '"""A coin.\n\n    It is round.\n\n    It has a value.\n    """' in text
    assert text.count("_CENTS = 100") == 1
    assert text.index("class Coin") < text.index("def opened"), "what others need comes first"
    assert "from shop.till" not in text
    assert "from shop import rules" in text[text.index("if TYPE_CHECKING") :]
    assert "See shop.till." in (shop / "node/shop/rules.py").read_text()
    assert (shop / "docs/shop.md").read_text() == "[till](../node/shop/till.py), `till.py`, `till`, shop.till.coiner\n"


def test_moves_and_names(tool: ModuleType, shop: Path) -> None:
    plan = "in shop\nmove till -> desk\nname desk.coin.Coin -> Cent  # a comment\nname desk.drawer.opened -> count\n"
    assert planned(tool, shop, plan) == []
    assert run(shop) == "shop.desk.drawer.count"
    assert "class Cent:" in (shop / "node/shop/desk/coin.py").read_text()


def test_two_meanings_of_a_name_are_refused(tool: ModuleType, shop: Path) -> None:
    drawer = shop / "node/shop/till/drawer.py"
    drawer.write_text(drawer.read_text().replace("_CENTS = 100", "_CENTS = 10"))
    before = {path: path.read_text() for path in shop.rglob("*.*") if path.is_file()}
    (refusal,) = planned(tool, shop, "merge shop.till.drawer shop.till.coin -> shop.till.coin\n")
    assert "_CENTS: shop.till.coin; shop.till.drawer" in refusal
    assert {path: path.read_text() for path in shop.rglob("*.*") if path.is_file()} == before
    assert (
        planned(tool, shop, "in shop\nname till.drawer._CENTS -> _TENTHS\nmerge till.drawer till.coin -> till.coin\n")
        == []
    )
    assert run(shop) == "shop.till.coin.opened"
