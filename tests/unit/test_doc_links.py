"""Every link of every page leads to a file of this repository, or out of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipe/*/*.md"), *ROOT.glob("examples/*/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_a_block_of_a_list_is_indented_by_four(page: Path) -> None:
    """GitHub takes two as well; the site would show the backticks."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
    assert re.findall(r"^ {1,3}```.*", page.read_text(), re.MULTILINE) == []


def test_every_page_is_in_the_navigation_of_the_site_and_every_guide_in_the_readme() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")} - listed == set()
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in ROOT.glob("docs/*.md") if f"docs/{page.name}" not in readme] == []
