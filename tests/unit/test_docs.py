"""Goal: the documentation is whole: every link leads to a place, every page is in the site, and the site builds.

Method: a Markdown parser finds the links and headings of every page under version control; no link out of the repository is
followed. Pages are compared with the toctrees, and public names with the API reference. The slow test runs Sphinx.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import commitmq
import commitmq.plugin

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
PARSER = MarkdownIt("commonmark").enable("table")
# A report of a measurement stays as the measurement made it.
NOT_OURS = "scripts/bench/results/"
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")
DIRECTIVE = re.compile(r"\{(\w+)\}\s*(.*)")


def pages() -> list[Path]:
    """Every Markdown file under version control, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=PROJECT,
        capture_output=True,
        check=False,
        timeout=60,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: there is no list of the project's files")
    names = [name.decode() for name in listed.stdout.split(b"\0") if name]
    return [PROJECT / name for name in names if not name.startswith(NOT_OURS) and (PROJECT / name).is_file()]


@functools.cache
def parsed(path: Path) -> list[Token]:
    return PARSER.parse(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- links


def links(path: Path) -> Iterator[tuple[int, str]]:
    """``(line, target)`` of each link and picture, and of each file that a directive names."""
    for token in parsed(path):
        line = token.map[0] + 1 if token.map else 0
        for child in token.children or ():
            if child.type == "link_open":
                yield line, str(child.attrGet("href"))
            elif child.type == "image":
                yield line, str(child.attrGet("src"))
        if token.type == "fence" and (directive := DIRECTIVE.fullmatch(token.info.strip())) and directive[2]:
            yield line, directive[2]


def slug(heading: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """The anchors of a page, and of the texts that it includes, as far as they are there."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    tokens = parsed(path)
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            inline = tokens[index + 1].children or []
            name = slug("".join(child.content for child in inline if child.type in ("text", "code_inline")))
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
        elif token.type == "fence" and token.info.startswith("{include}"):
            text = path.parent / token.info.partition("}")[2].strip()
            found |= anchors(text) if text.exists() else set()
    return found


def dead_links(paths: Iterable[Path], root: Path) -> list[str]:
    dead = []
    for path in paths:
        for line, target in links(path):
            if ELSEWHERE.match(target):
                continue
            name, _, anchor = target.partition("#")
            place = (path.parent / name).resolve() if name else path
            here = f"{path.relative_to(root)}:{line}: {target}"
            if not place.exists():
                dead.append(f"{here}: there is no such file")
            elif anchor and (place.suffix != ".md" or anchor not in anchors(place)):
                dead.append(f"{here}: there is no such heading")
    return dead


def test_every_link_leads_to_a_place() -> None:
    found = pages()
    relative = [target for path in found for _, target in links(path) if not ELSEWHERE.match(target)]
    assert len(found) > 20, "the search finds no pages"
    assert len(relative) > 50, "the search finds no links"
    assert sum("#" in target for target in relative) > 5, "the search finds no anchors"
    assert dead_links(found, PROJECT) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "docs" / "other.md"
    other.parent.mkdir()
    other.write_text("# One `word`, two\n\n## Part\n\n## Part\n\n[back](../page.md#top-of-it) [gone](page.md)\n")
    page.write_text(
        "# Top of it\n\n[a](docs/other.md#one-word-two) [b](docs/other.md#part-1) [c](#top-of-it) [d](docs)\n\n"
        "`[code](is-none.md)` [e](https://example.org/x)\n\n```text\n[neither](is-this.md)\n```\n\n"
        "[f](docs/other.md#part-2)\n\n[g](#top)\n\n| a |\n|---|\n| ![h](picture.png) |\n\n```{include} absent.md\n```\n"
    )
    assert dead_links([page, other], tmp_path) == [
        "page.md:11: docs/other.md#part-2: there is no such heading",
        "page.md:13: #top: there is no such heading",
        "page.md:17: picture.png: there is no such file",
        "page.md:19: absent.md: there is no such file",
        "docs/other.md:7: page.md: there is no such file",
    ]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("3. The order of positions", "3-the-order-of-positions"),
        ("Verify, rebuild, repair", "verify-rebuild-repair"),
        ("A send's `outcome` (of 2026)", "a-sends-outcome-of-2026"),
    ],
)
def test_anchors_are_those_of_the_site(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


# ---------------------------------------------------------------- the site


def sources() -> set[Path]:
    """Every page of the site."""
    return {path for kind in ("*.md", "*.rst") for path in DOCS.rglob(kind) if "_build" not in path.parts}


def in_toctrees(page: Path) -> set[Path]:
    """The pages that the toctrees of ``page`` lead to, directly or through others; with ``page`` itself."""
    found = {page}
    for token in parsed(page) if page.suffix == ".md" else ():
        if token.type != "fence" or token.info.strip() != "{toctree}":
            continue
        for name in token.content.split("\n"):
            if name and not name.startswith(":"):
                below = [page.parent / f"{name}{suffix}" for suffix in (".md", ".rst")]
                found.update(*(in_toctrees(path) for path in below if path.exists()))
    return found


def test_every_page_is_in_a_toctree() -> None:
    assert len(sources()) > 15
    assert sources() - in_toctrees(DOCS / "index.md") == set()


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.rst")))
    described = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (\S+)$", text, flags=re.MULTILINE))
    # Names that both packages have are described once.
    both = set(commitmq.__all__) & set(commitmq.plugin.__all__)
    assert both == {"CommitMQError", "ConfigError", "FilterError", "hookimpl"}
    wanted = {f"commitmq.{name}" for name in commitmq.__all__ if name != "hookimpl"}
    wanted |= {f"commitmq.plugin.{name}" for name in commitmq.plugin.__all__ if name not in both - {"hookimpl"}}
    assert wanted - described == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run([*command, str(DOCS), str(site)], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert {path.relative_to(DOCS).with_suffix("") for path in sources()} <= built
    # The reference has the docstrings, the protocol's page the text beside the code, and a link leads to a page.
    assert "was not acknowledged" in (site / "api" / "index.html").read_text(encoding="utf-8")
    assert "OUT_OF_ORDER_SEQUENCE" in (site / "protocol.html").read_text(encoding="utf-8")
    assert 'href="protocol.html"' in (site / "architecture.html").read_text(encoding="utf-8")
