"""docs/life-of-a-rollout.md names files that are there, and each reaches the next as the page says."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import PurePosixPath

import pytest
import shape

PAGE = (shape.ROOT / "docs/life-of-a-rollout.md").read_text()
LINES = re.findall(r"^\| (\w+) \| `(\S+)` \| `(\S+)` \| (imports|calls) ?(?:`(\w+)`)? \|$", PAGE, re.MULTILINE)
STATIONS = re.findall(r"^\*\*\d\. (\w+)\.\*\*", PAGE, re.MULTILINE)


@functools.cache
def modules() -> dict[str, shape.Module]:
    return {str(module.path): module for module in shape.working_tree()}


@functools.cache
def imports() -> dict[str, set[str]]:
    return shape.imports(modules().values(), inside_functions=True)


def module_of(path: str) -> shape.Module:
    file = str(PurePosixPath("goldilocks") / path)
    assert file in modules(), f"{path} is not there"
    return modules()[file]


def methods(module: shape.Module) -> set[str]:
    return {node.name for node in ast.walk(module.tree) if isinstance(node, shape.Function)}


def called(module: shape.Module) -> set[str]:
    """The attributes that are called, also by name or through Ray's ``remote``."""
    attributes = {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    return attributes | texts(module)


def texts(module: shape.Module) -> set[str]:
    constants = (node.value for node in ast.walk(module.tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


@pytest.mark.parametrize(("station", "first", "second", "by", "method"), LINES)
def test_a_file_reaches_the_next_as_the_page_says(station: str, first: str, second: str, by: str, method: str) -> None:
    before, after = module_of(first), module_of(second)
    assert station.capitalize() in STATIONS
    if by == "imports":
        assert after.name in imports()[before.name]
    else:
        assert method in methods(after) & called(before)


def test_every_station_has_files_and_every_file_of_the_diagram_a_line() -> None:
    assert [name.lower() for name in STATIONS] == list(dict.fromkeys(line[0] for line in LINES))
    assert len(LINES) == len(re.findall(r"^\| \w+ \| `", PAGE, re.MULTILINE))
    drawn = set(re.findall(r"<br>(\S+\.py)", PAGE))
    assert drawn <= {file for line in LINES for file in line[1:3]}
