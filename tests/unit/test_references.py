"""Goal: whoever reads "spec 3.8" or "ARCHITECTURE section 4" in the code finds that section.

Method: each such reference in a text of the project is looked up among the headings of the page that it names.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SPEC = PROJECT / "docs" / "spec"
PAGES = {
    "spec": SPEC / "rocketmq-store.md",
    "remoting": SPEC / "rocketmq-remoting.md",
    "ARCHITECTURE": PROJECT / "ARCHITECTURE.md",
}
HEADING = re.compile(r"^#{2,} (\d+(?:\.\d+)*)[. ]", re.MULTILINE)
# "spec 3.8", "spec section 10", "specs 3.8 and 3.9", "spec 3.8, 3.10"; a step or a row behind it belongs to the section.
REFERENCE = re.compile(
    r"\b([Ss]pecs?|ARCHITECTURE|remoting)(?: sections?)? (\d+(?:\.\d+)*(?:(?:, | and | to )\d+\.\d+)*)"
)


def sections(page: Path) -> set[str]:
    return set(HEADING.findall(page.read_text(encoding="utf-8")))


def references(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, page, section) of each reference in ``text``."""
    for number, line in enumerate(text.splitlines(), 1):
        for name, numbers in REFERENCE.findall(line):
            page = name if name in PAGES else "spec"
            yield from ((number, page, one) for one in re.split(", | and | to ", numbers))


def texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py", "*.md", "*.toml"],
        cwd=PROJECT,
        capture_output=True,
        check=False,
        timeout=60,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: there is no list of the project's files")
    paths = [PROJECT / name.decode() for name in listed.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def dead(text: str, place: str, known: dict[str, set[str]]) -> list[str]:
    return [
        f"{place}:{line}: {page} {section} is no heading"
        for line, page, section in references(text)
        if section not in known[page]
    ]


def test_every_reference_resolves() -> None:
    known = {name: sections(page) for name, page in PAGES.items()}
    found, lost = 0, []
    for path in texts():
        if path in PAGES.values() or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        found += sum(1 for _ in references(text))
        lost += dead(text, str(path.relative_to(PROJECT)), known)
    assert found > 150, "the search finds nothing"
    assert lost == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("(spec 3.8)", ["3.8"]),
        ("see spec section 99", ["99"]),
        ("spec 3.8, 99.1 and 4.1", ["3.8", "99.1", "4.1"]),
        ("ARCHITECTURE section 4", ["4"]),
    ],
)
def test_references_are_seen(text: str, where: list[str]) -> None:
    assert [section for _, _, section in references(text)] == where


def test_a_dead_reference_is_seen() -> None:
    known = {name: sections(page) for name, page in PAGES.items()}
    assert len(known["spec"]) > 80
    assert dead("as spec 3.99 says", "here", known) == ["here:1: spec 3.99 is no heading"]
    assert dead("as spec 3.8 says", "here", known) == []
