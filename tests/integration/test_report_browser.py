"""The report in a real browser: what people see is there, and nothing that a model wrote is more than text."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import AVAILABLE, WHY_NOT, script, wait
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from unit.lab.compare.arms import result, study
from unit.lab.report.run_directories import HOSTILE, write_run

from goldilocks.lab.compare.pictures import make_opening
from goldilocks.lab.compare.study import Results
from goldilocks.lab.compare.table import make_table
from goldilocks.lab.report import write_report
from goldilocks.lab.report.page import Opening

pytestmark = pytest.mark.skipif(not AVAILABLE, reason=WHY_NOT)

DESK, PHONE = (1280, 900), (390, 844)

# a plot is drawn when some mark of it covers some of the screen
UNDRAWN = """
return [...document.querySelectorAll(".plot")].filter((plot) => {
  const marks = plot.querySelectorAll("svg .role-mark path, svg .role-mark line, svg .role-mark text");
  return ![...marks].some((mark) => { const box = mark.getBoundingClientRect(); return box.width + box.height > 2; });
}).map((plot) => plot.dataset.plot);
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / "dapo", "dapo"), write_run(root / "pilot", "pilot", steps=16)]


@pytest.fixture(scope="module")
def pages(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run, two runs, a run that has made one step, a run that is empty."""
    root = tmp_path_factory.mktemp("pages")
    empty = root / "empty"
    (empty / "rollouts").mkdir(parents=True)
    begun = write_run(root / "begun", steps=1)
    chosen = {"one": runs[:1], "two": runs, "begun": [begun], "empty": [empty]}
    made = {name: write_report(paths, root / f"{name}.html", png=False).page for name, paths in chosen.items()}
    return made | {"study": write_report(runs, root / "study.html", png=False, opening=opening()).page}


def opening() -> Opening:
    """A study of two recipes over two seeds, with two levels."""
    whole = study(seeds=2)
    levels = ((1, 0.5, 0.9), (2, 0.1, 0.3))
    arms = [result(recipe, seed=seed, levels=levels) for seed in (1, 2) for recipe in whole.recipes]
    results = Results((), tuple(arms))
    return make_opening(results, make_table(whole, results), "The arms")


def show(browser: webdriver.Chrome, address: str, size: tuple[int, int] = DESK, theme: str = "light") -> None:
    """Open a page and wait until it says that everything is drawn."""
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get_log("browser")  # what an earlier page said is not this one's
    browser.get(address)
    wait(lambda: script(browser, "return document.documentElement.dataset.drawn"))


def rows(browser: webdriver.Chrome) -> list[str]:
    cells = "document.querySelectorAll('#beliefs tbody td:first-child')"
    return list(script(browser, f"return [...{cells}].map(e => e.textContent)"))


def search(browser: webdriver.Chrome, text: str) -> WebElement:
    box = browser.find_element(By.ID, "search")
    box.clear()
    box.send_keys(text, Keys.END)
    return box


@pytest.mark.parametrize(("size", "theme"), [(DESK, "light"), (PHONE, "dark")], ids=["desk-light", "phone-dark"])
@pytest.mark.parametrize(("name", "plots"), [("one", 15), ("two", 19), ("begun", 13), ("empty", 0), ("study", 3)])
def test_every_plot_is_drawn_within_the_page_and_the_console_is_silent(
    browser: webdriver.Chrome, pages: dict[str, Path], name: str, plots: int, size: tuple[int, int], theme: str
) -> None:
    show(browser, pages[name].as_uri(), size, theme)
    assert script(browser, "return document.documentElement.dataset.drawn") == str(plots)
    assert name == "study" or script(browser, UNDRAWN) == []
    assert browser.get_log("browser") == []
    assert script(browser, "return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert script(browser, "return innerWidth") == size[0]
    cut = "[...document.querySelectorAll('.plot')].filter(e => e.scrollWidth > e.clientWidth)"
    assert script(browser, f"return {cut}.map(e => e.dataset.plot)") == []
    assert script(browser, "return performance.getEntriesByType('resource').length") == 0  # nothing was fetched


def test_the_arms_of_a_study_are_drawn_once_they_are_unfolded(
    browser: webdriver.Chrome, pages: dict[str, Path]
) -> None:
    show(browser, pages["study"].as_uri())
    assert len(script(browser, UNDRAWN)) == 19
    browser.find_element(By.CSS_SELECTOR, "#arms > summary").click()
    wait(lambda: script(browser, "return document.documentElement.dataset.drawn") == "22")
    assert script(browser, UNDRAWN) == []
    assert browser.get_log("browser") == []


def test_the_search_finds_the_hostile_prompt_and_it_stays_text(
    browser: webdriver.Chrome, pages: dict[str, Path]
) -> None:
    show(browser, pages["two"].as_uri())
    assert len(rows(browser)) == 25
    search(browser, "minus SCRIPT")
    assert rows(browser) == [HOSTILE, HOSTILE]  # each run has visited it
    assert browser.find_element(By.ID, "found").text.startswith("2 of ")
    search(browser, "no prompt says this")
    assert rows(browser) == []
    assert script(browser, "return document.scripts.length") == 3
    assert script(browser, "return document.querySelectorAll('img').length") == 0
    answers = script(browser, "return document.getElementById('answers').textContent")
    assert "</pre></script><script>alert(3)</script>" in answers
    assert browser.get_log("browser") == []


def test_an_injected_script_would_not_run(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    """Were something ever to slip through as markup, the page's policy still stands."""
    show(browser, pages["one"].as_uri())
    make = "const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
    script(browser, make + "document.body.append(s)")
    assert script(browser, "return window.ran === undefined")
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def test_columns_sort_and_more_rows_can_be_had(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    show(browser, pages["one"].as_uri())
    read = "return [...document.querySelectorAll('#beliefs tbody tr')].map(e => parseFloat(e.cells[1].textContent))"
    header = browser.find_element(By.CSS_SELECTOR, "th[data-column='2'] button")
    header.click()
    falling = script(browser, read)
    assert falling == sorted(falling, reverse=True)
    header.click()
    rising = script(browser, read)
    assert rising == sorted(rising)
    assert rising[0] < falling[-1]
    browser.find_element(By.ID, "more").click()
    assert len(rows(browser)) == 50


def test_light_and_dark_are_two_pages_to_look_at(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    def colours() -> tuple[str, str]:
        page = script(browser, "return getComputedStyle(document.documentElement).backgroundColor")
        return page, script(browser, "return document.querySelector('.role-axis-label text').getAttribute('fill')")

    show(browser, pages["one"].as_uri(), theme="light")
    light = colours()
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})  # while the page is open
    wait(lambda: colours()[1] != light[1])
    assert colours()[0] != light[0]
    assert browser.get_log("browser") == []
