"""Sphinx settings of the site; scripts/docs builds it.

Some pages have their text outside of docs/, beside the code that they describe. A page below docs/ stands for each of them,
and holds an ``{include}`` directive alone. Links between all these files are written for a reader of the repository. The site
has other places, so :func:`for_the_site` changes the links while Sphinx reads a page.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent

project = "CommitMQ"
author = "the authors of CommitMQ"
release = version = metadata.version("commitmq")
html_title = f"CommitMQ {release}"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
# Headings have the anchors that GitHub gives them.
myst_heading_anchors = 6

# The reference lists public names one by one, because their packages load them lazily.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
# A fenced block, a piece of code within a line, or a link. Only the last has groups.
CODE_OR_LINK = re.compile(
    r"^```.*?^```$|\[([^\[\]]*)\]\(([^()\s]+)\)|(?<!`)(`+)(?!`).+?(?<!`)\3(?!`)", re.DOTALL | re.MULTILINE
)


def included() -> dict[Path, Path]:
    """The page below docs/ of each text outside of it."""
    pages = {}
    for page in DOCS.rglob("*.md"):
        for name in INCLUDE.findall(page.read_text(encoding="utf-8")):
            pages[(page.parent / name).resolve()] = page
    return pages


def with_links(text: str, of: Path, page: Path) -> str:
    """``text`` of the file ``of``, as it stands on ``page``: its relative links lead to the same places from there."""
    pages = included()

    def link(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if target is None or target.startswith("#") or re.match(r"[a-z]+:", target):
            return match[0]
        path, hash_mark, anchor = target.partition("#")
        place = (of.parent / path).resolve()
        place = pages.get(place, place)
        if place.is_relative_to(DOCS):
            return f"[{words}]({os.path.relpath(place, page.parent)}{hash_mark}{anchor})"
        # A file that is no page: the site has a copy.
        plain = words.replace("`", "")
        return f"{{download}}`{plain} <{os.path.relpath(place, page.parent)}>`" if place.is_file() else words

    return CODE_OR_LINK.sub(link, text)


def for_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put in the text that a page includes, and give all links the site's places."""
    page = Path(app.env.doc2path(docname))
    if page.suffix != ".md":
        return
    parts = INCLUDE.split(with_links(source[0], page, page))
    for index in range(1, len(parts), 2):
        of = (page.parent / parts[index]).resolve()
        app.env.note_dependency(str(of))
        parts[index] = with_links(of.read_text(encoding="utf-8"), of, page)
    source[0] = "".join(parts)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_lexer("exchange", TextLexer)  # the blocks of the protocol's page
    app.connect("source-read", for_the_site)
