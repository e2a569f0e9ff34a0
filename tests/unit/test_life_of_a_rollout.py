"""docs/life-of-a-rollout.md names files that are there. A traced launch says whether they are all, in a slow test."""

from __future__ import annotations

import re

import shape

PAGE = (shape.ROOT / "docs/life-of-a-rollout.md").read_text()
FILES = dict(re.findall(r"^\| (\w+) \| (`.*`) \|$", PAGE, re.MULTILINE))


def test_every_file_that_the_page_names_is_there() -> None:
    named = {file for row in (*FILES.values(), PAGE) for file in re.findall(r"(?:`|<br>)([\w/]+\.py)", row)}
    there = {str(module.path).removeprefix("goldilocks/") for module in shape.working_tree()}
    assert len(named) > 30
    assert named - {"tests/integration/test_life_of_a_rollout.py"} <= there


def test_every_station_but_the_gate_which_a_run_may_have_has_files() -> None:
    stations = [name.lower() for name in re.findall(r"^\*\*\d\. (\w+)\.\*\*", PAGE, re.MULTILINE)]
    assert [*FILES] == [*(name for name in stations if name != "gate"), "weights"]


def test_a_rollout_passes_thirty_files_at_most() -> None:
    files = [file for row in FILES.values() for file in re.findall(r"`(\S+\.py)`", row)]
    assert 20 < len(files) == len(set(files)) <= 30
