#!/usr/bin/env python3
"""Prints the shape of ``src``: files, lines and function lengths by folder, modules with one importer, import circles.

``scripts/shape.py --against REV`` prints the figures of another revision beside those of the working tree.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src"
SMALL = 40  # lines; a file below it needs a reason
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A Python file: its path below ``src``, its lines, its syntax tree."""

    path: PurePosixPath
    lines: int
    tree: ast.Module

    @property
    def name(self) -> str:
        """The name it is imported by."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The lines of each function, docstring included."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, Function))
        return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in found]


@dataclass(frozen=True)
class Shape:
    """The figures of one folder, its subfolders not included, or of the whole tree."""

    files: int
    lines: int
    mean: float
    longest: int
    small: int

    @classmethod
    def of(cls, modules: Iterable[Module]) -> Shape:
        """Measure the modules."""
        found = list(modules)
        lengths = [length for module in found for length in module.lengths] or [0]
        small = sum(module.lines < SMALL for module in found)
        return cls(len(found), sum(module.lines for module in found), fmean(lengths), max(lengths), small)

    def __str__(self) -> str:
        return f"{self.files:6d} {self.lines:7,d} {self.mean:7.1f} {self.longest:8d} {self.small:6d}"


def working_tree(root: Path = ROOT) -> list[Module]:
    """Read the modules below ``src`` as they are now."""
    folder = root / SOURCE
    texts = {PurePosixPath(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.py"))}
    return parsed(texts)


def revision(name: str, root: Path = ROOT) -> list[Module]:
    """Read the modules below ``src`` as a revision has them."""
    packed = subprocess.run(["git", "archive", name, SOURCE], cwd=root, capture_output=True, check=True).stdout
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None:
                texts[PurePosixPath(member.name).relative_to(SOURCE)] = file.read()
    return parsed(texts)


def parsed(texts: Mapping[PurePosixPath, bytes]) -> list[Module]:
    """Parse each text."""
    return [_module(path, text) for path, text in texts.items()]


@functools.cache
def _module(path: PurePosixPath, text: bytes) -> Module:
    """Tests of several files read the same tree."""
    return Module(path, len(text.splitlines()), ast.parse(text))


def by_folder(modules: Iterable[Module]) -> dict[str, Shape]:
    """Return the shape of each folder and, under ``all``, of the whole tree."""
    found = list(modules)
    folders = sorted({str(module.path.parent) for module in found})
    shapes = {folder: Shape.of(one for one in found if str(one.path.parent) == folder) for folder in folders}
    return {**shapes, "all": Shape.of(found)}


def imports(modules: Iterable[Module], *, inside_functions: bool) -> dict[str, set[str]]:
    """Return the modules that each module imports; imports for a type checker alone do not count."""
    trees = {module.name: module.tree for module in modules}
    return {
        name: set(imported(tree.body, trees.keys(), inside_functions=inside_functions)) & trees.keys() - {name}
        for name, tree in trees.items()
    }


def imported(nodes: Iterable[ast.stmt], known: Set[str], *, inside_functions: bool) -> Iterator[str]:
    """Yield the name of every module that the statements import; ``known`` tells a module from a name in one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif inside_functions or not isinstance(node, Function):
            children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            yield from imported(children, known, inside_functions=inside_functions)


def with_one_importer(modules: Iterable[Module]) -> list[str]:
    """Return the modules that exactly one other module imports; packages do not count."""
    found = list(modules)
    importers = Counter(name for names in imports(found, inside_functions=True).values() for name in names)
    return sorted(one.name for one in found if importers[one.name] == 1 and one.path.name != "__init__.py")


def circle(modules: Iterable[Module]) -> list[str]:
    """Return a circle of imports outside functions, empty if there is none. Each package runs before its modules."""
    graph = imports(modules, inside_functions=False)
    roots = {name for name in graph if "." not in name}
    try:
        TopologicalSorter({name: set() if name in roots else names - roots for name, names in graph.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def report(modules: list[Module], before: list[Module] | None = None) -> Iterator[str]:
    """Yield the lines to print; the figures of ``before`` stand to the right."""
    now, then = by_folder(modules), by_folder(before or [])
    width = max(map(len, {**now, **then}))
    heads = f"{'files':>6} {'lines':>7} {'mean fn':>7} {'longest':>8} {'<' + str(SMALL):>6}"
    yield f"{'folder':<{width}} {heads}" + (f"  | {heads}" if before else "")
    for folder in sorted({**now, **then}, key=lambda name: (name == "all", name)):
        shown = now.get(folder, Shape.of([]))
        yield f"{folder:<{width}} {shown}" + (f"  | {then.get(folder, Shape.of([]))}" if before else "")
    for name, found in (("now", modules), ("before", before)):
        if found:
            alone, round_trip = with_one_importer(found), circle(found)
            yield f"{name}: {len(alone)} modules with one importer; circles: {' -> '.join(round_trip) or 'none'}"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="REV", help="print the figures of this revision too")
    parser.add_argument("--one-importer", action="store_true", help="name the modules that one other imports")
    args = parser.parse_args()
    modules = working_tree()
    print("\n".join(report(modules, revision(args.against) if args.against else None)))
    if args.one_importer:
        print("\n".join(with_one_importer(modules)))


if __name__ == "__main__":
    main()
