"""Imports point one way: a part of the package imports only the parts below it, and no module imports itself back."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import shape

import goldilocks

# Four groups, each imported by those that come after it: what decides, what connects it to a trainer, what runs, what
# measures. Every part (a folder, or a module at the top) says what it may import beside the modules that all share.
SHARED = {"errors", "dotted_keys", "types", "hashing", "sheet"}
DECIDE = {
    "core": set(),
    "runs": {"core"},
    "filtering": {"runs"},
    "config": {"core", "runs", "filtering"},
    "rewards": {"config"},
    "drive": {"core", "filtering", "rewards", "runs"},
    "losses": set(),
    "tasks": {"runs"},
    "testing": {"core", "drive", "runs"},
}
CONNECT = {
    "engine": set(),
    "trl": {"engine", *DECIDE} - {"tasks", "testing"},
    "verl": {"engine", *DECIDE} - {"tasks", "testing"},
}
RUN = {
    "launch": {*DECIDE, *CONNECT} - {"testing"},
    "main_ppo": {"launch", "engine", "verl", "config"},
    "main_ppo_adaptive": {"main_ppo"},
}
MEASURE = {"lab": {*DECIDE, "engine", "launch"}}
BELOW: dict[str, set[str]] = {
    **{name: set() for name in SHARED},
    "types": {"errors"},
    **{part: SHARED | below for group in (DECIDE, CONNECT, RUN, MEASURE) for part, below in group.items()},
    "cli": {"config", "errors", "verl"},
}
ALONE = {"core": {"numpy"}, "types": set(), "errors": set()}  # all that these import from others
WHOLE = {"cli", "lab"}  # import the package itself, for its version
NEVER = {  # by the beginning of a module's name
    "goldilocks.engine": {"verl", "ray"},
    "goldilocks.filtering": {"verl", "ray"},
    "goldilocks.lab.simulate": {"torch", "verl"},
    "goldilocks.lab.report": {"verl"},
    "goldilocks.losses": {"verl", "trl", "ray"},
    "goldilocks.drive": {"verl", "trl", "ray"},
    "goldilocks.config": {"verl", "trl", "ray"},
}
OF_VERL = ("goldilocks.engine.verl_server", "goldilocks.engine.cpu")  # the parts of the engine that are for verl


@functools.cache
def statements() -> dict[str, list[ast.stmt]]:
    return {module.name: module.tree.body for module in shape.working_tree() if module.name.startswith("goldilocks")}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def imported(module: str) -> set[str]:
    return set(shape.imported(statements()[module], statements().keys(), inside_functions=True))


def test_the_parts_have_an_order_and_every_module_imports_only_what_is_below_its_part() -> None:
    assert set(TopologicalSorter(BELOW).static_order()) >= {part_of(name) for name in statements() if part_of(name)}
    wrong = []
    for module in filter(part_of, statements()):
        part = part_of(module)
        assert part in BELOW, f"{part} is new: say in BELOW what it may import"
        allowed = {part, *BELOW[part]} | ({""} if part in WHOLE else set())
        ours = {name for name in imported(module) if name.split(".")[0] == "goldilocks"}
        wrong += [f"{module} imports {name}" for name in ours if part_of(name) not in allowed]
    assert wrong == []


def test_the_core_imports_numpy_only_and_what_decides_no_trainer() -> None:
    wrong = []
    for module in statements():
        others = {name.split(".")[0] for name in imported(module)} - {"goldilocks", *sys.stdlib_module_names}
        forbidden = others - ALONE.get(part_of(module), others)
        if not module.startswith(OF_VERL):
            forbidden |= {name for part, never in NEVER.items() if module.startswith(part) for name in others & never}
        wrong += [f"{module} imports {name}" for name in forbidden]
    assert wrong == []


def loaded(module: str, found: set[str]) -> set[str]:
    """Return what importing a module loads, by the statements outside functions; a package runs before its modules."""
    names = set(shape.imported(statements()[module], statements().keys(), inside_functions=False))
    names |= {name.rpartition(".")[0] for name in names if name in statements() and "." in name}
    for name in names - found:
        found.add(name)
        if name in statements():
            loaded(name, found)
    return found


def test_what_runs_in_a_bare_install_loads_nothing_that_an_extra_brings() -> None:
    starts = [module for module in statements() if part_of(module) in {"cli", "core", "config"}]
    starts += [module for module in statements() if module.startswith("goldilocks.lab.simulate")]
    starts += ["goldilocks.launch.doctor", "goldilocks.tasks.registry", "goldilocks.tasks.download"]
    extras = {"torch", "verl", "trl", "transformers", "ray", "hydra", "omegaconf", "altair", "psutil"}
    packages = {start: {name.split(".")[0] for name in loaded(start, set())} for start in starts}
    assert {start: names & extras for start, names in packages.items() if names & extras} == {}


def test_the_command_line_does_not_load_numpy() -> None:
    """``goldilocks --help`` answers at once; NumPy alone takes a tenth of a second."""
    for module in ("goldilocks", "goldilocks.cli"):
        assert "numpy" not in loaded(module, set())


def test_the_parts_that_are_imported_on_first_use_are_attributes_at_once() -> None:
    said = "import goldilocks as g; print(g.core.Collector is g.Collector, g.types.Group is g.Group, 'Group' in dir(g))"
    assert subprocess.check_output([sys.executable, "-c", said], text=True).split() == ["True"] * 3


def test_every_folder_of_unit_tests_is_a_folder_of_the_package() -> None:
    here, package = Path(__file__).parent, Path(goldilocks.__file__).parent
    folders = {file.parent.relative_to(here) for file in here.rglob("test_*.py")}
    assert [str(folder) for folder in sorted(folders) if not (package / folder).is_dir()] == []


def test_only_what_applies_or_lists_patches_imports_their_table() -> None:
    """Patches are a leaf: a part that they share with a trainer or a worker lives with the trainer or the worker."""
    patches = "goldilocks.verl.patches"  # the package itself is the table
    found = {(module, name) for module in statements() if not module.startswith(patches) for name in imported(module)}
    importers = ("goldilocks.verl.plugin", "goldilocks.launch.doctor")
    assert {pair for pair in found if pair[1].startswith(patches)} == {(module, patches) for module in importers}


def test_no_part_of_verl_imports_itself_back_by_way_of_a_patch_even_inside_functions() -> None:
    ways = {name: imported(name) & statements().keys() - {name} for name in statements() if part_of(name) == "verl"}
    assert set(TopologicalSorter(ways).static_order()) >= ways.keys()


def test_what_a_trainer_of_ours_is_made_of_does_not_import_verls_trainers() -> None:
    """verl's import ours at the end of their own import, and those would find half of the module that began it."""
    parts = {name for name in statements() if name.startswith("goldilocks.verl.store")}
    parts |= {name for name in loaded("goldilocks.verl.dispatch.backend", set()) if name.startswith("goldilocks.verl")}
    assert "goldilocks.verl.dispatch.failures" in parts
    nodes = [(name, node) for name in parts for node in statements()[name] if isinstance(node, ast.ImportFrom)]
    assert [name for name, node in nodes if str(node.module).startswith("verl.trainer")] == []


def test_no_module_imports_itself_back_and_imports_are_absolute() -> None:
    tree = shape.working_tree()
    assert shape.circle(tree) == []
    nodes = [node for module in tree for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 0 for node in nodes)
