"""The documentation's site builds without a warning, and has the pages that ``scripts/site_pages.py`` makes.

What its theme makes of a page in a browser is the theme's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {  # the heading of the first page of each
    "Home": "Goldilocks",
    "Tutorials": "Quick start",
    "Guides": "Coming from verl's DAPO, TRL, slime or prime-rl",
    "Reference": "Reference",
    "Explanation": "How it works",
    "Lab notes": "Lab notes",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as ``make docs-site`` does, elsewhere."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    return out


def page(site: Path, address: str) -> str:
    return (site / address / "index.html").read_text()


def test_every_part_of_the_navigation_leads_to_its_first_page(site: Path) -> None:
    tabs = re.findall(r'<a href="([^"]*)" class="md-tabs__link">\s*([^<]*?)\s*<', page(site, "."))
    headings = {part: re.search(r"<h1[^>]*>([^<]*)", page(site, address)) for address, part in tabs}
    assert {part: found and found[1].strip() for part, found in headings.items()} == PARTS


def test_the_search_knows_in_which_guide_a_key_is_explained(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    pages = [one["location"] for one in found if "max_inflight_gen_batches" in one["text"]]
    assert any(location.startswith("coming-from/") for location in pages)


def test_the_api_is_made_of_the_docstrings(site: Path) -> None:
    api = page(site, "api/collector")
    assert 'id="goldilocks.core.collector.Collector.take"' in api
    assert "open → (more rollouts)* → kept | dropped(reason)" in api


def test_a_link_out_of_the_docs_leads_to_the_file(site: Path) -> None:
    (address,) = set(re.findall(r'href="([^"]*/examples/toy_trainer.py/)"', page(site, "adding-a-trainer")))
    assert "ToyTrainer" in page(site, f"adding-a-trainer/{address}")


def test_the_report_is_shown_in_both_colours(site: Path) -> None:
    pictures = re.findall(r'src="([^"#]*)#gh-(light|dark)-mode-only"', page(site, "report"))
    assert [theme for _, theme in pictures] == ["light", "dark"]
    assert all((site / "report" / picture).is_file() for picture, _ in pictures)
