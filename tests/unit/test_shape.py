"""``scripts/shape.py`` measures a tree, and the package keeps the limits that CONTRIBUTING names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import shape

SHORT = "from pack import longer\n\ndef one():\n    return 1\n"
LONG = "import numpy\n\ndef four():\n    if numpy:\n        return 2\n    return 3\n" + "\n" * shape.SMALL


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "src" / "pack"
    folder.mkdir(parents=True)
    for name, text in {"__init__": "", "short": SHORT, "longer": LONG}.items():
        (folder / f"{name}.py").write_text(text)
    return tmp_path


def test_a_folder_has_its_files_lines_and_function_lengths(tree: Path) -> None:
    found = shape.by_folder(shape.working_tree(tree))
    assert found["pack"] == found["all"] == shape.Shape(files=3, lines=50, mean=3, longest=4, small=2)


def test_a_module_with_one_importer_is_named(tree: Path) -> None:
    assert shape.with_one_importer(shape.working_tree(tree)) == ["pack.longer"]


def test_a_circle_is_found_unless_a_function_closes_it(tree: Path) -> None:
    assert shape.circle(shape.working_tree(tree)) == []
    longer = tree / "src" / "pack" / "longer.py"
    longer.write_text("def late():\n    import pack.short\n")
    assert shape.circle(shape.working_tree(tree)) == []
    longer.write_text("import pack.short\n")
    assert set(shape.circle(shape.working_tree(tree))) == {"pack.short", "pack.longer"}


def test_another_revision_stands_beside_the_working_tree(tree: Path) -> None:
    commit = ("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first")
    for words in (("init", "-q"), ("add", "."), commit):
        subprocess.run(["git", *words], cwd=tree, check=True)
    (tree / "src" / "pack" / "longer.py").unlink()
    now, before = shape.working_tree(tree), shape.revision("HEAD", tree)
    assert (len(now), len(before)) == (2, 3)
    assert "|" in next(line for line in shape.report(now, before) if line.startswith("pack "))


def test_the_package_keeps_its_limits() -> None:
    found = shape.by_folder(shape.working_tree())
    assert {folder: one.files for folder, one in found.items() if one.files > 20 and folder != "all"} == {}
