#!/usr/bin/env python3
"""Prints the shape of the tree: files, lines and function lengths of ``src`` by folder, modules with one importer,
import circles; patches, digests of other packages' sources, files that are too long, the size of the tests.

``scripts/shape.py --against REV`` prints the figures of another revision beside those of the working tree, ``--docs``
also the words of every document.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS, DOCS = "src", "tests", "docs"
SMALL = 40  # lines; a file below it needs a reason
LARGE = 500  # lines; no file has more
DIGEST = re.compile("[0-9a-f]{16}")  # of a function of another package that ours was written for
PACKAGES = {"verl": "verl", "transfer_queue": "TransferQueue", "vllm": "vLLM", "trl": "TRL"}
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
    median: float
    longest: int
    small: int

    @classmethod
    def of(cls, modules: Iterable[Module]) -> Shape:
        """Measure the modules."""
        found = list(modules)
        lengths = [length for module in found for length in module.lengths] or [0]
        small = sum(module.lines < SMALL for module in found)
        return cls(len(found), sum(module.lines for module in found), median(lengths), max(lengths), small)

    def __str__(self) -> str:
        return f"{self.files:6d} {self.lines:7,d} {self.median:7.1f} {self.longest:8d} {self.small:6d}"


def files_here(root: Path = ROOT) -> dict[PurePosixPath, bytes]:
    """Read the Python files and documents as they are now."""
    found = [*(root / SOURCE).rglob("*.py"), *(root / TESTS).rglob("*.py"), *(root / DOCS).rglob("*.md")]
    return {PurePosixPath(file.relative_to(root)): file.read_bytes() for file in sorted([*found, *root.glob("*.md")])}


def files_of(name: str, root: Path = ROOT) -> dict[PurePosixPath, bytes]:
    """Read the Python files and documents as a revision has them."""
    packed = subprocess.run(["git", "archive", name], cwd=root, capture_output=True, check=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith((".py", ".md")) and (file := archive.extractfile(member)) is not None:
                found[PurePosixPath(member.name)] = file.read()
    return found


def working_tree(root: Path = ROOT) -> list[Module]:
    """Read the modules below ``src`` as they are now."""
    return parsed(files_here(root))


def parsed(files: Mapping[PurePosixPath, bytes]) -> list[Module]:
    """Parse those below ``src``."""
    return [_module(path.relative_to(SOURCE), text) for path, text in files.items() if path.parts[0] == SOURCE]


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


def patches(modules: Iterable[Module]) -> Counter[str]:
    """Count the patches for speed and the others. One of a trainer's own is for speed if it changes no value."""
    found: Counter[str] = Counter({"patches for speed": 0, "other patches": 0})
    for node in (node for module in modules for node in ast.walk(module.tree)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Patch":
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            own = given["kind"] == "Kind.TRAINER" and "the same values" in given["changes"]
            found["patches for speed" if own or given["kind"] == "Kind.SPEED" else "other patches"] += 1
    return found


def digests(modules: Iterable[Module]) -> Counter[str]:
    """Count the digests of sources of other packages, by package."""
    found: Counter[str] = Counter({f"digests of {name}": 0 for name in PACKAGES.values()})
    for module in modules:
        top = "trl" if "trl" in module.path.parts else "verl"
        origins = {
            alias.asname or alias.name: str(node.module if isinstance(node, ast.ImportFrom) else alias.name)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for package in _digests(module.tree, top, origins):
            found[f"digests of {PACKAGES[package]}"] += 1
    return found


def _digests(node: ast.AST, package: str, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield the package of each digest: that of the patch's module or of the function beside it, else ``package``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and DIGEST.fullmatch(node.value):
        yield package
    beside = ""
    if isinstance(node, ast.Call):
        beside = next((ast.unparse(word.value).strip("'") for word in node.keywords if word.arg == "module"), "")
    elif isinstance(node, ast.Tuple) and node.elts and isinstance(node.elts[0], ast.Name | ast.Attribute):
        beside = origins.get(ast.unparse(node.elts[0]).split(".")[0], "")
    package = beside.split(".")[0] if beside.split(".")[0] in PACKAGES else package
    for child in ast.iter_child_nodes(node):
        yield from _digests(child, package, origins)


def figures(files: Mapping[PurePosixPath, bytes], *, docs: bool) -> dict[str, int]:
    """Return the counts of a tree by name; of documents also the words of each, if asked."""
    modules = parsed(files)
    tests = [len(text.splitlines()) for path, text in files.items() if path.parts[0] == TESTS and path.suffix == ".py"]
    documents = [path for path in files if path.suffix == ".md" and (len(path.parts) == 1 or path.parts[0] == DOCS)]
    words = {str(path): len(files[path].decode().split()) for path in documents}
    return {
        "files of src": len(modules),
        "lines of src": sum(module.lines for module in modules),
        f"files of src over {LARGE} lines": sum(module.lines > LARGE for module in modules),
        "files of tests": len(tests),
        "lines of tests": sum(tests),
        f"files of tests over {LARGE} lines": sum(lines > LARGE for lines in tests),
        **patches(modules),
        **digests(modules),
        "words of documents": sum(words.values()),
        **(words if docs else {}),
    }


def report(
    files: Mapping[PurePosixPath, bytes], before: Mapping[PurePosixPath, bytes] | None = None, *, docs: bool = False
) -> Iterator[str]:
    """Yield the lines to print; the figures of ``before`` stand to the right."""
    trees = {"now": parsed(files), "before": parsed(before or {})}
    now, then = by_folder(trees["now"]), by_folder(trees["before"])
    width = max(map(len, {**now, **then}))
    heads = f"{'files':>6} {'lines':>7} {'median':>7} {'longest':>8} {'<' + str(SMALL):>6}"
    yield f"{'folder':<{width}} {heads}" + (f"  | {heads}" if before else "")
    for folder in sorted({**now, **then}, key=lambda name: (name == "all", name)):
        shown = now.get(folder, Shape.of([]))
        yield f"{folder:<{width}} {shown}" + (f"  | {then.get(folder, Shape.of([]))}" if before else "")
    for name, found in trees.items():
        if found:
            alone, round_trip = with_one_importer(found), circle(found)
            yield f"{name}: {len(alone)} modules with one importer; circles: {' -> '.join(round_trip) or 'none'}"
    counts, others = figures(files, docs=docs), figures(before or {}, docs=docs)
    width = max(map(len, {**counts, **others}))
    for name in {**counts, **others}:
        yield f"{name:<{width}} {counts.get(name, 0):>8,d}" + (f"  | {others.get(name, 0):>8,d}" if before else "")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="REV", help="print the figures of this revision too")
    parser.add_argument("--docs", action="store_true", help="print the words of every document")
    parser.add_argument("--one-importer", action="store_true", help="name the modules that one other imports")
    args = parser.parse_args()
    before = files_of(args.against) if args.against else None
    print("\n".join(report(files_here(), before, docs=args.docs)))
    if args.one_importer:
        print("\n".join(with_one_importer(working_tree())))


if __name__ == "__main__":
    main()
