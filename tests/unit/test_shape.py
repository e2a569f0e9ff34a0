"""``scripts/shape.py`` measures a tree, and the package keeps the limits that CONTRIBUTING names."""

from __future__ import annotations

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


def test_a_folder_has_its_files_lines_and_function_lengths_and_a_module_with_one_importer_is_named(tree: Path) -> None:
    assert shape.with_one_importer(shape.working_tree(tree)) == ["pack.longer"]
    found = shape.by_folder(shape.working_tree(tree))
    assert found["pack"] == found["all"] == shape.Shape(files=3, lines=50, median=3, longest=4, small=2)


def test_a_circle_is_found_unless_a_function_closes_it(tree: Path) -> None:
    assert shape.circle(shape.working_tree(tree)) == []
    longer = tree / "src" / "pack" / "longer.py"
    longer.write_text("def late():\n    import pack.short\n")
    assert shape.circle(shape.working_tree(tree)) == []
    longer.write_text("import pack.short\n")
    assert set(shape.circle(shape.working_tree(tree))) == {"pack.short", "pack.longer"}


PATCHES = """
from transfer_queue import client
from verl.utils import rows
SLOW = Patch(kind=Kind.SPEED, module="vllm.core", written_for={"a": ("0123456789abcdef", "1123456789abcdef")})
OWN = Patch(kind=Kind.TRAINER, changes="nothing: the same values", module="verl.x", written_for={"b": TWO})
TWO = "2123456789abcdef"
CLASS = Patch(kind=Kind.TRAINER, changes="the class", module="verl.x", written_for={"b": "3123456789abcdef"})
READERS = ((client.put, "4123456789abcdef"), (rows.pick, "5123456789abcdef"))
"""


def test_patches_and_digests_are_counted_by_what_they_are_for_and_of(tree: Path) -> None:
    (tree / "src" / "pack" / "longer.py").write_text(PATCHES)
    (tree / "src" / "pack" / "trl").mkdir()
    (tree / "src" / "pack" / "trl" / "supported.py").write_text('KNOWN = ("6123456789abcdef", "no digest")\n')
    found = shape.working_tree(tree)
    assert shape.patches(found) == {"patches for speed": 2, "other patches": 1}
    counts = {name.removeprefix("digests of "): count for name, count in shape.digests(found).items()}
    assert counts == {"verl": 3, "TransferQueue": 1, "vLLM": 2, "TRL": 1}


def test_tests_long_files_and_words_are_counted(tree: Path) -> None:
    (tree / "tests").mkdir()
    (tree / "tests" / "test_it.py").write_text("\n" * (shape.LARGE + 1))
    (tree / "docs").mkdir()
    (tree / "docs" / "page.md").write_text("three short words\n")
    (tree / "README.md").write_text("two words\n")
    found = shape.figures(shape.files_here(tree), docs=True)
    assert (found["files of tests"], found["lines of tests"]) == (1, shape.LARGE + 1)
    assert (found["files of tests over 500 lines"], found["files of src over 500 lines"]) == (1, 0)
    assert (found["words of documents"], found["docs/page.md"], found["README.md"]) == (5, 3, 2)


def test_the_package_keeps_its_limits() -> None:
    found = shape.by_folder(shape.working_tree())
    assert {folder: one.files for folder, one in found.items() if one.files > 20 and folder != "all"} == {}
