"""The documentation's site in a real browser: it builds without a warning, its links lead on, its search finds."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import AVAILABLE, WHY_NOT, script, wait
from selenium import webdriver
from selenium.webdriver.common.by import By

ROOT = Path(__file__).parents[2]
PARTS = {  # the heading of the first page of each
    "Tutorials": "Quick start",
    "Guides": "Coming from verl's DAPO, TRL, slime or prime-rl",
    "Reference": "Reference",
    "Explanation": "How it works",
    "Lab notes": "Lab notes",
}
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=WHY_NOT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as ``make docs-site`` does, elsewhere."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    return out


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""


def click(browser: webdriver.Chrome, selector: str, text: str) -> None:
    """Click the link with this text."""
    links = browser.find_elements(By.CSS_SELECTOR, selector)
    next(link for link in links if link.text.strip() == text).click()


def heading(browser: webdriver.Chrome) -> str:
    return str(script(browser, "return document.querySelector('article h1').firstChild.textContent.trim()"))


def leads_to(browser: webdriver.Chrome, page: str) -> None:
    """Wait for the page with this heading: a click may return before the browser has left the page it was on."""
    wait(lambda: heading(browser) == page)


def test_the_navigation_leads_through_every_part(browser: webdriver.Chrome, address: str) -> None:
    browser.get(address)
    tabs = [tab.text for tab in browser.find_elements(By.CSS_SELECTOR, ".md-tabs__link")]
    assert tabs == ["Home", *PARTS]
    for part, page in PARTS.items():
        click(browser, ".md-tabs__link", part)
        leads_to(browser, page)
        assert script(browser, "return document.querySelector('.md-tabs__item--active').textContent.trim()") == part
    assert browser.get_log("browser") == []


def test_a_page_of_the_navigation_is_a_click_away(browser: webdriver.Chrome, address: str) -> None:
    browser.get(address + "quick-start/")
    click(browser, ".md-nav--primary .md-nav__link", "A policy of your own")
    leads_to(browser, "A policy of your own")


def test_the_search_finds_a_key_and_leads_to_its_page(browser: webdriver.Chrome, address: str) -> None:
    browser.get(address)
    box = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    script(browser, "document.querySelector('label.md-search__icon').click()")
    box.send_keys("max_inflight_gen_batches")
    # The results of what was typed first are replaced while it is typed on: look and click in one.
    first = "const found = document.querySelector('.md-search-result__item a'); "
    click_it = "if (found && found.textContent.includes('Coming from')) { found.click(); return true }"
    wait(lambda: script(browser, first + click_it))
    leads_to(browser, PARTS["Guides"])
    assert "/coming-from/" in browser.current_url


def test_the_api_is_made_of_the_docstrings(browser: webdriver.Chrome, address: str) -> None:
    browser.get(address + "api/collector/#goldilocks.core.collector.Collector.take")
    section = browser.find_element(By.ID, "goldilocks.core.collector.Collector.take")
    assert section.text.startswith("take")
    assert "open → (more rollouts)* → kept | dropped(reason)" in browser.find_element(By.TAG_NAME, "article").text


def test_a_link_out_of_the_docs_leads_to_the_file(browser: webdriver.Chrome, address: str) -> None:
    browser.get(address + "adding-a-trainer/")
    click(browser, "article a", "examples/toy_trainer.py")
    leads_to(browser, "examples/toy_trainer.py")
    assert "import" in browser.find_element(By.CSS_SELECTOR, "article pre").text


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_report_is_shown_in_the_colours_of_the_page(browser: webdriver.Chrome, address: str, theme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(address + "report/")
    shown = "[...document.querySelectorAll('article img')].filter(e => e.offsetParent && e.naturalWidth)"
    names = f"return {shown}.map(e => e.src.split('/').pop().split('#')[0])"
    wait(lambda: script(browser, names) == [f"report-{theme}.png"])
