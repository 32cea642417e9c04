"""Moves, merges and renames modules and names of this project, and rewrites everything that mentions them.

    python scripts/move.py PLAN

A plan is a text file with one step a line; ``#`` begins a comment. Names after ``in PACKAGE`` are relative to PACKAGE:

    in commitmq.store
    merge log.append log.run_check log.run_pieces -> log.append | Appends to the CommitLog.
    merge headers.* -> headers
    move queue_list -> queues.lists
    name queues.lists.QueueList -> TopicQueues

``merge`` unites modules in the order of their dependencies. The text after ``|`` becomes the first line of the
docstring; the docstrings of the parts follow as paragraphs, or go to a class that says "See the module." Imports are
united, imports between the parts disappear, imports inside functions stay there. ``move`` gives a module or a package
another place. ``name`` renames something that a module defines, also a private name. A step that would change the
meaning of a name (two parts define or import it differently, or it hides a builtin) is refused before any file changes;
a ``name`` step before it helps.

Rewritten are modules, tests, scripts, examples, documents and settings: imports, dotted names in strings and texts, and
paths. Bare file names in texts are not. Afterwards run ``scripts/lint --fix``. A plan can run again on a newer
checkout.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

ROOTS = {
    "commitmq": "node",
    "commitmq_plugins": "plugins",
    "commitmq_dispatchers": "dispatchers",
    "pyspark_commitmq": "plugins",
}
TEXTS = {".py", ".pyi", ".md", ".toml", ".txt", ".sh", ".cfg", ".yml", ".yaml", ".service", ".html", ".rst", ""}
# Diaries and generated files keep the words of their time.
LEFT_ALONE = ("CHANGELOG.md", "constraints.txt", "scripts/bench/results/", "tests/unit/test_move.py", "scripts/move.py")


class Refused(Exception):
    """A step that would change what the code means; the text says which names."""


@dataclass
class Part:
    """A module that is merged into another one, taken apart."""

    name: str
    docstring: str
    imports: list[cst.SimpleStatementLine]
    typing: list[cst.SimpleStatementLine]
    body: list[cst.BaseCompoundStatement | cst.SimpleStatementLine]
    main: list[cst.BaseCompoundStatement | cst.SimpleStatementLine]
    footer: str
    needs: set[str] = field(default_factory=set)
    """The other parts whose code must come before."""


class Project:
    """The files of a checkout, and the modules among them."""

    def __init__(self, root: Path, roots: dict[str, str] = ROOTS) -> None:
        self.root = root
        self.roots = roots

    def path(self, module: str) -> Path:
        """The file of a module or package, whether it exists or not."""
        place = self.root / self.roots[module.split(".")[0]] / module.replace(".", "/")
        package = place / "__init__.py"
        return package if package.exists() else place.with_suffix(".py")

    def below(self, package: str) -> list[str]:
        """All modules inside ``package``, without itself."""
        folder = self.root / self.roots[package.split(".")[0]] / package.replace(".", "/")
        found = []
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
            inner = inner.removesuffix("__init__").removesuffix(".")
            if inner:
                found.append(f"{package}.{inner}")
        return found

    def texts(self) -> Iterator[Path]:
        """Every file in which a module may be mentioned."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self.root, capture_output=True, check=True).stdout.decode()
        for name in listed.split("\0"):
            path = self.root / name
            if name and not name.startswith(LEFT_ALONE) and path.suffix in TEXTS and path.is_file():
                yield path


# ---------------------------------------------------------------- reading a module


def dotted(node: cst.BaseExpression | None) -> str:
    """``a.b.c`` of a name or an attribute, "" for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return ""


def is_import(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.Import | cst.ImportFrom)


def taken_apart(name: str, code: str) -> Part:
    """The docstring, imports, imports for the type checker and statements of a module."""
    module = cst.parse_module(code)
    part = Part(name, ast.get_docstring(ast.parse(code)) or "", [], [], [], [], "")
    body = list(module.body)
    if part.docstring:
        body = body[1:]
    for line in body:
        if isinstance(line, cst.SimpleStatementLine) and is_import(line):
            first = line.body[0]
            if not (isinstance(first, cst.ImportFrom) and dotted(first.module) == "__future__"):
                part.imports.append(line)
        elif isinstance(line, cst.If) and dotted(line.test) == "TYPE_CHECKING" and all(map(is_import, line.body.body)):
            part.typing += [one for one in line.body.body if isinstance(one, cst.SimpleStatementLine)]
        elif isinstance(line, cst.If) and module.code_for_node(line.test) == '__name__ == "__main__"':
            part.main.append(line)
        elif isinstance(line, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            part.body.append(line)
    part.footer = "".join(module.code_for_node(one) for one in module.footer)
    return part


def bound_by_imports(statements: Iterable[cst.CSTNode]) -> dict[str, str]:
    """What imports bind: the local name, and the dotted name behind it."""
    found = {}
    for line in statements:
        for one in ast.parse(cst.Module([]).code_for_node(line).strip()).body:
            for alias in one.names if isinstance(one, ast.Import | ast.ImportFrom) else []:
                before = f"{one.module}." if isinstance(one, ast.ImportFrom) else ""
                found[alias.asname or alias.name] = before + alias.name
    return found


def defined(line: cst.CSTNode) -> set[str]:
    """Names that a statement at the top of a module defines."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(cst.Module([]).code_for_node(line))]
    while waiting:
        one = waiting.pop()
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(one.name)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            names.add(one.id)
        elif isinstance(one, ast.alias):
            names.add(one.asname or one.name)
        elif not isinstance(one, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda):
            waiting += ast.iter_child_nodes(one)
    return names


# ---------------------------------------------------------------- rewriting code


class ImportRewriter(cst.CSTTransformer):
    """Gives imported modules their new places, and the names by which they are used with them.

    ``inside`` names modules that are part of the module at hand: their imports disappear, ``part.name`` becomes ``name``.
    """

    def __init__(self, places: dict[str, str], taken: set[str], inside: Set[str] = frozenset()) -> None:
        self.places = places
        self.taken = taken
        self.inside = inside
        self.renamed: dict[str, str] = {}
        self.modules: set[str] = set()

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine] | cst.RemovalSentinel:
        one = updated_node.body[0]
        if not isinstance(one, cst.ImportFrom) or isinstance(one.names, cst.ImportStar):
            return updated_node
        module, kept, made = dotted(one.module), [], []
        for alias in one.names:
            old, local = f"{module}.{alias.evaluated_name}", alias.evaluated_alias
            if old in self.inside:
                self.modules.add(local or alias.evaluated_name)
            elif module in self.inside:
                if local and local != alias.evaluated_name:
                    self.renamed[local] = alias.evaluated_name
            elif old in self.places:
                made.append(self.placed(old, local))
            else:
                kept.append(alias)
        if len(kept) == len(one.names):
            return updated_node
        lines = [cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine) for text in dict.fromkeys(made)]
        if kept:
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            lines.insert(0, updated_node.with_changes(body=[one.with_changes(names=kept)]))
        elif lines:
            lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        return cst.FlattenSentinel(lines) if lines else cst.RemoveFromParent()

    def placed(self, old: str, local: str | None) -> str:
        """The import of a module at its new place; its users say its new name, unless that is taken."""
        package, _, name = self.places[old].rpartition(".")
        before = old.rpartition(".")[2]
        if local is None and name != before:
            if name in self.taken:
                local = before
            else:
                self.renamed[before] = name
        return f"from {package} import {name}" + (f" as {local}" if local and local != name else "")

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        if updated_node.body:
            return updated_node
        return updated_node.with_changes(body=[cst.parse_statement("pass")])


class NameRewriter(cst.CSTTransformer):
    """Renames bare names, and replaces ``part.name`` by ``name`` for the names in ``modules``."""

    def __init__(self, renamed: dict[str, str], modules: Set[str] = frozenset()) -> None:
        self.renamed = renamed
        self.modules = modules

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        if isinstance(original_node.value, cst.Name) and original_node.value.value in self.modules:
            return cst.Name(original_node.attr.value, lpar=updated_node.lpar, rpar=updated_node.rpar)
        return updated_node.with_changes(attr=original_node.attr)

    def visit_Arg_keyword(self, node: cst.Arg) -> None:
        return None

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        new = self.renamed.get(original_node.value)
        return updated_node.with_changes(value=new) if new else updated_node


def words(code: str) -> set[str]:
    """All names that a module uses or binds, those after a dot excepted."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found


def with_places(code: str, places: dict[str, str], inside: Set[str] = frozenset()) -> str:
    """``code`` with ``from package import module`` and the uses of that name as ``places`` has them."""
    tree = ast.parse(code)
    bound = {
        (alias.asname or alias.name, f"{node.module}.{alias.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    own = {name for name, origin in bound if origin.rpartition(".")[0] in inside or origin in places.values()}
    rewriter = ImportRewriter(places, words(code) - own, inside)
    module = cst.parse_module(code).visit(rewriter)
    if clash := set(rewriter.renamed.values()) & (words(code) - own) if inside else set():
        raise Refused(f"{sorted(clash)} are imported under other names beside them")
    if rewriter.renamed or rewriter.modules:
        bare = words(module.code) & rewriter.modules
        module = module.visit(NameRewriter(rewriter.renamed, rewriter.modules))
        if left := words(module.code) & bare:
            raise Refused(f"{sorted(left)}: a module is used as a value, or its name has a second meaning")
        names = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in rewriter.modules
        }
        if hidden := names & {
            node.arg if isinstance(node, ast.arg) else node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        }:
            raise Refused(f"{sorted(hidden)}: a variable of that name hides it")
    return module.code


# ---------------------------------------------------------------- the steps


def merge(project: Project, names: list[str], target: str, title: str) -> dict[str, str]:
    """Write the module ``target`` from the modules ``names``; returns the new place of each."""
    inside = {*names, target}
    parts = []
    for name in names:
        try:
            code = with_places(project.path(name).read_text(encoding="utf-8"), {}, inside)
        except Refused as refusal:
            raise Refused(f"{name}: {refusal}") from None
        part = taken_apart(name, code)
        # A runtime import of another part comes from the code before it was rewritten.
        before = taken_apart(name, project.path(name).read_text(encoding="utf-8"))
        for imported in bound_by_imports(before.imports).values():
            part.needs |= {imported, imported.rpartition(".")[0]} & inside - {name}
        parts.append(part)
        if name != target:
            into_a_class(part)
    parts = in_order(parts)
    same = check_names(parts)
    blank = cst.Module([])
    texts = [part.docstring for part in parts if part.docstring]
    main = next((part.docstring for part in parts if part.name == target), "")
    if main:
        texts = [main, *(text for text in texts if text != main)]
    docstring = "\n\n".join([title, *texts] if title else texts)
    imports = dict.fromkeys(blank.code_for_node(line) for part in parts for line in part.imports)
    runtime = {name for part in parts for name in bound_by_imports(part.imports)}
    typing = dict.fromkeys(
        blank.code_for_node(line).strip()
        for part in parts
        for line in part.typing
        if not set(bound_by_imports([line])) <= runtime
    )
    raw = "r" if "\\" in docstring else ""
    lines = [f'{raw}"""{docstring}\n"""\n\nfrom __future__ import annotations\n\n', *imports]
    if typing:
        lines += [
            "\nif TYPE_CHECKING:\n",
            *(f"    {line}\n".replace("\n", "\n    ").rstrip() + "\n" for line in typing),
        ]
    written: set[str] = set()
    for part in parts:
        for line in part.body:
            code = blank.code_for_node(line)
            if (names_of := defined(line)) and names_of <= same and names_of <= written:
                continue
            written |= names_of
            lines.append(code if line is not part.body[0] else f"\n{code}")
        lines.append(part.footer)
    lines += [blank.code_for_node(line) for part in parts for line in part.main]
    for name in names:
        project.path(name).unlink()
    folder = project.root / project.roots[target.split(".")[0]] / target.replace(".", "/")
    if folder.is_dir():
        if left := [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]:
            if left != [folder / "__init__.py"] or taken_apart("", left[0].read_text(encoding="utf-8")).body:
                raise Refused(f"{target} is a package that still has {left[0].name}")
            left[0].unlink()
        subprocess.run(["rm", "-r", str(folder)], check=True)
    file = folder.with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    for package in (file.parent, *file.parent.parents):
        if package.parent == project.root:
            break
        if not (package / "__init__.py").exists():
            (package / "__init__.py").write_text('"""."""\n', encoding="utf-8")
            print(f"give {package / '__init__.py'} a docstring")
    file.write_text("".join(lines), encoding="utf-8")
    return {name: target for name in names if name != target}


def into_a_class(part: Part) -> None:
    """Give the text of a part to its class whose docstring says no more than where that text is."""
    for place, line in enumerate(part.body):
        found = (
            re.search(r'"""See the module\.\s*', cst.Module([]).code_for_node(line))
            if isinstance(line, cst.ClassDef)
            else None
        )
        if found and part.docstring and "\\" not in part.docstring:
            code = cst.Module([]).code_for_node(line)
            rest, _, after = code[found.end() :].partition('"""')
            text = re.sub(r"\n(?=.)", "\n    ", f"{part.docstring}\n\n{rest}".rstrip())
            made = cst.parse_statement(f'{code[: found.start()]}"""{text}\n    """{after}')
            assert isinstance(made, cst.ClassDef)
            part.body[place], part.docstring = made, ""
            return


def in_order(parts: list[Part]) -> list[Part]:
    """The parts, each after those whose names it uses while it is imported."""
    done: list[Part] = []
    waiting = list(parts)
    while waiting:
        names = {part.name for part in waiting}
        ready = [part for part in waiting if not part.needs & names]
        if not ready:
            raise Refused(f"{sorted(names)} import each other")
        done.append(ready[0])
        waiting.remove(ready[0])
    return done


def check_names(parts: list[Part]) -> set[str]:
    """Refuse parts that mean different things by one name; returns the names that several define by equal statements."""
    meanings: dict[str, dict[str, list[str]]] = {}
    for part in parts:
        for line in part.body:
            text = cst.Module([]).code_for_node(line).strip()
            for name in defined(line):
                meanings.setdefault(name, {}).setdefault(text, []).append(part.name)
        for name, origin in {**bound_by_imports(part.typing), **bound_by_imports(part.imports)}.items():
            meanings.setdefault(name, {}).setdefault(f"import {origin}", []).append(part.name)
    problems = [
        f"{name}: {'; '.join(sorted({w for one in texts.values() for w in one}))}"
        for name, texts in meanings.items()
        if len({w for one in texts.values() for w in one}) > 1 and len(texts) > 1
    ]
    for part in parts:
        own = {name for line in part.body for name in defined(line)} | set(bound_by_imports(part.imports))
        used = {
            n.id
            for line in part.body
            for n in ast.walk(ast.parse(cst.Module([]).code_for_node(line)))
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        hidden = {name for name in used if name in vars(builtins) and name in meanings and name not in own}
        problems += [f"{name} hides a builtin that {part.name} uses" for name in sorted(hidden)]
    if sum(bool(part.main) for part in parts) > 1:
        problems.append("two parts are programs")
    if problems:
        raise Refused("; ".join(problems))
    return {name for name, texts in meanings.items() if len(texts) == 1 and len(next(iter(texts.values()))) > 1}


def move(project: Project, old: str, new: str) -> dict[str, str]:
    """Give a module, or a package with its modules, another name; returns the new place of each."""
    source, package = project.path(old), project.path(old).name == "__init__.py"
    places = {old: new}
    if package:
        places |= {one: new + one.removeprefix(old) for one in project.below(old)}
    target = project.root / project.roots[new.split(".")[0]] / new.replace(".", "/")
    target = target if package else target.with_suffix(".py")
    if target.exists():
        raise Refused(f"{new} exists")
    target.parent.mkdir(parents=True, exist_ok=True)
    (source.parent if package else source).rename(target)
    return places


def rewrite(project: Project, places: dict[str, str]) -> None:
    """Bring all mentions of modules to their new places."""
    if not places:
        return
    for old in places:
        while (further := places.get(places[old], places[old])) != places[old]:
            places[old] = further
    mentions = forms(project, places)
    wanted = re.compile(rf"(?<![\w.])(?:{'|'.join(sorted(map(re.escape, mentions), key=len, reverse=True))})(?!\w)")
    packages = {one.rpartition(".")[0] for one in places}
    names = "|".join(sorted({one.rpartition(".")[2] for one in places}))
    from_package = re.compile(
        rf"from (?:{'|'.join(sorted(map(re.escape, packages)))}) import (?:\([^)]*\b(?:{names})\b|[^(\n]*\b(?:{names})\b)"
    )
    for path in project.texts():
        text = before = path.read_text(encoding="utf-8", errors="surrogateescape")
        if path.suffix == ".py" and from_package.search(text):
            text = with_places(text, places)
        if any(one in text for one in mentions):
            text = wanted.sub(lambda found: mentions[found[0]], text)
        if text != before:
            path.write_text(text, encoding="utf-8", errors="surrogateescape")


def forms(project: Project, places: dict[str, str]) -> dict[str, str]:
    """Every form in which the places are mentioned: dotted, quoted without the first package, and as paths."""
    found = {}
    for old, new in places.items():
        found[old] = new
        top, _, inner = old.partition(".")
        new_inner = new.partition(".")[2]
        if "." in inner:
            found |= {f"{quote}{inner}{quote}": f"{quote}{new_inner}{quote}" for quote in "\"'`"}
        suffix = ".py"
        path, new_path = inner.replace(".", "/") + suffix, new_inner.replace(".", "/") + suffix
        for prefix in (
            {f"{project.roots[top]}/{top}/", f"{top}/", ""}
            if "/" in path
            else {f"{project.roots[top]}/{top}/", f"{top}/"}
        ):
            found[prefix + path] = prefix + new_path
    return found


def rename(project: Project, module: str, old: str, new: str) -> None:
    """Rename what ``module`` defines, wherever it is imported by name or used through the module."""
    file = project.path(module)
    package, _, last = module.rpartition(".")
    for path in project.texts():
        text = before = path.read_text(encoding="utf-8", errors="surrogateescape")
        if path.suffix == ".py" and re.search(rf"\b{old}\b", text):
            imported = re.search(rf"from {re.escape(module)} import [^)]*?\b{old}\b", text)
            if path == file or imported:
                if new in words(text):
                    raise Refused(f"{path} has a {new} already")
                text = cst.parse_module(text).visit(NameRewriter({old: new})).code
            if re.search(rf"from {re.escape(package)} import [^)]*?\b{last}\b", text):
                text = re.sub(rf"\b{last}\.{old}\b", f"{last}.{new}", text)
        text = re.sub(rf"(?<![\w.]){re.escape(module)}([.:]){old}\b", rf"{module}\g<1>{new}", text)
        if text != before:
            path.write_text(text, encoding="utf-8", errors="surrogateescape")


def steps(plan: str) -> Iterator[tuple[str, list[str], str, str]]:
    """The steps of a plan: verb, sources, target, title."""
    prefix = ""
    for line in plan.splitlines():
        line = line.partition("#")[0].strip()
        verb, _, rest = line.partition(" ")
        if verb == "in":
            prefix = rest.strip() + "."
        elif line:
            rest, _, title = rest.partition("|")
            sources, _, target = rest.partition("->")
            goal = target.strip() if verb == "name" else prefix + target.strip()
            yield verb, [prefix + one for one in sources.split()], goal, title.strip()


def run(project: Project, plan: str) -> list[str]:
    """Do the steps of ``plan``; returns what was refused."""
    refused: list[str] = []
    places: dict[str, str] = {}
    for verb, sources, target, title in steps(plan):
        names = [
            one for source in sources for one in (project.below(source[:-2]) if source.endswith(".*") else [source])
        ]
        try:
            if gone := [name for name in names if verb != "name" and not project.path(name).exists()]:
                raise Refused(f"{gone} do not exist")
            if verb == "merge":
                places |= merge(project, list(dict.fromkeys(names)), target, title)
            elif verb == "move":
                places |= move(project, names[0], target)
            elif verb == "name":
                rewrite(project, places)
                places.clear()
                module, _, old = names[0].rpartition(".")
                rename(project, module, old, target)
            else:
                raise Refused("no such verb")
        except Refused as refusal:
            refused.append(f"{verb} {' '.join(sources)} -> {target}: {refusal}")
    rewrite(project, places)
    return refused


def main(arguments: list[str]) -> int:
    """Run the plan in the file that the argument names."""
    project = Project(Path(__file__).resolve().parent.parent)
    refused = run(project, Path(arguments[0]).read_text(encoding="utf-8"))
    for line in refused:
        print(f"refused: {line}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
