"""Goal: every file and every word of the control block has one writing process, and the tables that say so are true.

Method: each place in the code that puts a word is found in the syntax trees, also where the word's name was bound to another
one before or runs through a loop, and compared with commitmq.ownership; the tables in ARCHITECTURE.md are made anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import ownership
from commitmq.control import DispatcherWord, Word, WorkerWord
from commitmq.ownership import Role

PROJECT = Path(__file__).resolve().parents[2]
ROOTS = (PROJECT / "node", PROJECT / "dispatchers", PROJECT / "plugins")
KINDS: dict[str, Any] = {"Word": Word, "DispatcherWord": DispatcherWord, "WorkerWord": WorkerWord}
PUTS = {"put": 0, "put_dispatcher": 1, "put_worker": 1}
# Any worker runs these; they put words of the slot of the process that they run in.
ANYONE = {
    "commitmq.workers.runtime.context",
    "commitmq.workers.runtime.expired_segments",
}


def words_in(tree: ast.AST) -> list[Word | DispatcherWord | WorkerWord]:
    """Members of the three enumerations that ``tree`` names."""
    return [
        KINDS[node.value.id][node.attr]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in KINDS
    ]


def bound(tree: ast.Module) -> dict[str, list[Word | DispatcherWord | WorkerWord]]:
    """Names that stand for words in a module: ``_A = int(Word.A)``, ``_A, _B = …``, ``for word in (Word.A, Word.B)``."""
    found: dict[str, list[Word | DispatcherWord | WorkerWord]] = {}

    def note(target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, part in zip(target.elts, value.elts, strict=True):
                note(one, part)
        elif isinstance(target, ast.Name) and words_in(value):
            found.setdefault(target.id, []).extend(words_in(value))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                note(target, node.value)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            note(node.target, node.iter)
    return found


def puts(text: str) -> Iterator[tuple[int, Word | DispatcherWord | WorkerWord]]:
    """(line, word) of every place in a module that puts a word."""
    tree = ast.parse(text)
    names = bound(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PUTS):
            continue
        place = PUTS[node.func.attr]
        if len(node.args) <= place:
            continue
        argument = node.args[place]
        words = words_in(argument) or (names.get(argument.id, []) if isinstance(argument, ast.Name) else [])
        yield from ((node.lineno, word) for word in words)


def modules() -> Iterator[tuple[str, str]]:
    for root in ROOTS:
        for path in sorted(root.rglob("*.py")):
            yield ".".join(path.relative_to(root).with_suffix("").parts), path.read_text(encoding="utf-8")


def expected(word: Word | DispatcherWord | WorkerWord) -> Role:
    if isinstance(word, Word):
        return ownership.WORDS[word]
    return ownership.DISPATCHER_WORDS[word] if isinstance(word, DispatcherWord) else ownership.WORKER_WORDS[word]


def strangers(name: str, text: str) -> list[str]:
    """Places in module ``name`` that put a word of another process."""
    role = ownership.MODULES.get(name)
    found = []
    for line, word in puts(text):
        owner = expected(word)
        if name in ANYONE:
            right = owner is Role.EACH
        elif role is Role.RECOVERY:
            right = True  # it runs before all others
        else:
            right = role is not None and owner in (role, Role.EACH)
        if not right:
            found.append(
                f"{name}:{line} puts {word.name}, a word of {owner}; {name} runs in {role or 'no known process'}"
            )
    return found


def test_every_word_has_one_writing_process() -> None:
    assert set(ownership.WORDS) == set(Word), "each word needs its process in commitmq.ownership.WORDS"
    assert [place for name, text in modules() for place in strangers(name, text)] == []


def test_the_search_finds_what_puts_words() -> None:
    # The rule passes on an empty list too, so what the search finds is checked first.
    found = {name: list(puts(text)) for name, text in modules()}
    assert {name for name, places in found.items() if places} == set(ownership.MODULES) - {
        "commitmq.control",  # the magic, by index
        "commitmq.supervision.worker_process",
    } | ANYONE
    words = {word for places in found.values() for _, word in places if isinstance(word, Word)}
    assert words == set(Word) - {Word.MAGIC}


@pytest.mark.parametrize(
    "text",
    [
        "control.put(Word.FLUSHED, 1)",
        "_A, _B = int(Word.WRITTEN), int(Word.FLUSHED)\ncontrol.put(_B, 1)",
        "for word in (Word.FLUSHED,):\n    control.put(word, 1)",
        "control.put_worker(slot, WorkerWord.RESTARTS, 1)",
    ],
)
def test_a_word_of_another_process_is_seen(text: str) -> None:
    assert strangers("commitmq.workers.writer.process", text) != []
    assert (
        strangers("commitmq.workers.writer.process", text.replace("FLUSHED", "WRITTEN").replace("RESTARTS", "PID"))
        == []
    )


@pytest.mark.parametrize(
    ("name", "table"),
    [("files", ownership.files_table()), ("cuts", ownership.cuts_table()), ("words", ownership.words_table())],
)
def test_architecture_has_the_table(name: str, table: str) -> None:
    page = (PROJECT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert f"<!-- {name} -->\n{table}<!-- end -->" in page, "make it anew: python -m commitmq.ownership"


def test_the_first_pattern_decides() -> None:
    assert ownership.owner_of("commitmq/dispatchers/index/files.json") == ownership.owner_of(
        "commitmq/dispatchers/index.json"
    )
    assert ownership.owner_of("somewhere/else") is None
    patterns = [owner.pattern for owner in ownership.FILES]
    assert len(patterns) == len(set(patterns))
