"""Error texts that the guide quotes are error texts of the code."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import shape

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
NOT_OURS = ("Unknown trainer", "train/num_gen_batches")  # verl's words; a metric
HEADINGS = [
    text
    for line in PAGE.read_text().splitlines()
    if line.startswith("### `") and not (text := line.removeprefix("### `").partition("`")[0]).startswith(NOT_OURS)
]


@functools.cache
def texts() -> str:
    """Every string of the code, with … where a value is put in."""
    found: list[str] = []
    for node in (node for module in shape.working_tree() for node in ast.walk(module.tree)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found).replace("%s", "…").replace("%d", "…")


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_quoted_error_text_is_in_the_code(heading: str) -> None:
    fragments = [found for fragment in heading.split("…") if len(found := fragment.strip(" =,")) > 3]
    assert fragments
    assert [fragment for fragment in fragments if fragment not in texts() and not composed(fragment)] == []


def composed(fragment: str) -> bool:
    """``key=value is not accepted: what would be`` is put together by ``require``."""
    found = re.fullmatch(r"(?:(?P<key>[\w.]+)=\w+ )?is not accepted: ?(?P<accepted>.*)", fragment)
    return found is not None and (found["key"] or "") in texts() and found["accepted"] in texts()


def test_the_page_quotes_enough() -> None:
    assert len(HEADINGS) > 20
