"""What a notebook shows of our objects: tables whose texts are escaped."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import pytest
from builders import answer, plain_collector
from rich.console import Console

from goldilocks.lab.simulate import Comparison, Outcome, PassRates, Setup, mixture, recipe_settings, simulate
from goldilocks.sheet import Sheet
from goldilocks.types import Account

BAD = "<script>alert('&')</script>"


class Cells(HTMLParser):
    """The texts of a table's cells, row by row, and every tag there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def test_every_text_is_escaped() -> None:
    found = Cells(Sheet([BAD, "two\nlines"], [[BAD, "1"]], BAD).in_html())
    assert found.rows == [[BAD, "twolines"], [BAD, "1"]]
    assert "script" not in found.tags
    assert "br" in found.tags


def test_on_a_terminal_and_in_markdown_every_text_stands_as_it_is() -> None:
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system=None)
    sheet = Sheet(["recipe", "[b]"], [["a[a]", "[/INST]"], ["x|y", "1"]])
    console.print(sheet.on_terminal())
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert shown == [["recipe", "[b]"], ["a[a]", "[/INST]"], ["x|y", "1"]]
    assert sheet.in_markdown().splitlines()[-1] == r"| x\|y | 1 |"


def test_a_collector_shows_where_it_is_and_its_accounts_show_every_rollout() -> None:
    subject = plain_collector()
    answer(subject, subject.requests())
    subject.take()
    subject.accounts.move(subject.in_hand[0].rollouts, Account.TRAINED, Account.REJECTED.because(BAD))
    found = Cells(subject._repr_html_())
    assert dict(zip(*found.rows[:2], strict=True))["prompts issued"] == "2"
    assert found.rows[3:] == [
        [f"rejected/{BAD}", "2", "20", "50.0%"],
        ["trained", "2", "20", "50.0%"],
        ["generated", "4", "40", ""],
    ]
    assert "script" not in found.tags
    assert repr(subject) == "Collector(step 0, 0 groups kept, 0 open, 0 rollouts in flight)"
    assert repr(subject.accounts) == "Accounts(4 rollouts generated, 2 trained)"


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    setup = Setup(rollouts=400, target_groups=8)
    prompts: PassRates = mixture()
    return simulate(BAD, recipe_settings("dapo", setup), prompts, setup)


def test_outcomes_stand_below_one_another(outcome: Outcome) -> None:
    found = Cells(Comparison((outcome, replace(outcome, policy="other")))._repr_html_())
    assert [row[0] for row in found.rows] == ["policy", BAD, "other", "policy", BAD, "other"]
    assert found.rows[1][1:] == found.rows[2][1:]
    assert "script" not in found.tags
    assert [row[0] for row in Cells(outcome._repr_html_()).rows] == ["policy", BAD, "policy", BAD]
