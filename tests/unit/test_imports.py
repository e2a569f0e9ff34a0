"""Imports point one way: a part of the package imports only the parts below it, and no module imports itself back."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import goldilocks

ROOT = Path(goldilocks.__file__).parent

# Every part (a folder, or a module at the top) and what it may import. A part stands below those that import it.
BASE = {"errors", "dotted_keys", "types", "hashing"}
CORE = BASE | {"core", "runs"}
SETTINGS = CORE | {"features", "filtering", "config"}
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "dotted_keys": set(),
    "hashing": set(),
    "types": {"errors"},
    "core": {"errors", "hashing", "types"},
    "runs": BASE | {"core"},
    "testing": CORE | {"drive"},
    "metrics": set(),
    "features": BASE,
    "filtering": {"errors", "runs"},
    "config": CORE | {"features", "filtering"},
    "algorithms": BASE,
    "engine": {"errors"},
    "platforms": {"errors"},
    "simulate": SETTINGS | {"drive", "report"},
    "drive": {"core", "errors", "filtering", "runs", "types"},
    "tasks": {"errors", "runs"},
    "report": CORE,
    "trl": SETTINGS | {"algorithms", "drive", "engine", "platforms"},
    "verl": SETTINGS | {"algorithms", "drive", "engine", "platforms"},
    "launch": SETTINGS | {"algorithms", "engine", "platforms", "tasks", "trl", "verl"},
    "compare": SETTINGS | {"launch", "report"},
    "main_ppo": SETTINGS | {"launch", "platforms", "verl"},
    "main_ppo_adaptive": {"main_ppo"},
    "cli": {"errors"},
}
ALONE = {"core": {"numpy"}, "types": set(), "errors": set()}  # all that these import from others
WHOLE = {"cli", "report"}  # import the package itself, for its version
NEVER = {"engine": {"verl", "ray"}, "filtering": {"verl", "ray"}, "simulate": {"torch", "verl"}, "report": {"verl"}}


def name_of(file: Path) -> str:
    parts = ("goldilocks", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in sorted(ROOT.rglob("*.py"))}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(nodes: list[ast.stmt], *, inside_functions: bool) -> Iterator[str]:
    """Every module that is imported; those of a type checker alone do not count."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            yield from imports(children, inside_functions=inside_functions)


@functools.cache
def statements(module: str) -> list[ast.stmt]:
    return ast.parse(FILES[module].read_text()).body


def imported(module: str, *, inside_functions: bool = True) -> set[str]:
    return set(imports(statements(module), inside_functions=inside_functions))


def test_every_module_imports_only_what_is_below_its_part() -> None:
    wrong = []
    for module in filter(part_of, FILES):
        part = part_of(module)
        assert part in BELOW, f"{part} is new: say in BELOW what it may import"
        allowed = {part, *BELOW[part]} | ({""} if part in WHOLE else set())
        ours = {name for name in imported(module) if name.split(".")[0] == "goldilocks"}
        wrong += [f"{module} imports {name}" for name in ours if part_of(name) not in allowed]
    assert wrong == []


def test_the_core_imports_numpy_only_and_the_engine_no_verl() -> None:
    wrong = []
    for module in FILES:
        others = {name.split(".")[0] for name in imported(module)} - {"goldilocks", *sys.stdlib_module_names}
        forbidden = others - ALONE.get(part_of(module), others) | others & NEVER.get(part_of(module), set())
        wrong += [f"{module} imports {name}" for name in forbidden]
    assert wrong == []


def test_the_parts_have_an_order() -> None:
    assert set(TopologicalSorter(BELOW).static_order()) >= {part_of(name) for name in FILES if part_of(name)}


def test_no_module_imports_itself_back() -> None:
    graph = {name: imported(name, inside_functions=False) & FILES.keys() - {"goldilocks"} for name in FILES}
    graph["goldilocks"] = set()  # every import runs it first, and its own names are below everything
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)
