"""A policy of the user's own is tried before any worker is started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import settings

from goldilocks.core import ListSource
from goldilocks.drive.rehearsal import rehearse

POLICIES = """
from goldilocks.core.filters import Filter
from goldilocks.core.selectors import Uniform
from goldilocks.types import Verdict


class Fine(Uniform):
    pass


class Raises(Uniform):
    def choose(self, *args, **kwargs):
        return {}["difficulty"]


class NeedsAnArgument(Uniform):
    def __init__(self, temperature):
        self.temperature = temperature


class ByMetric(Filter):
    def judge(self, group):
        group.values("length_bonus")
        return Verdict(False, "never")
"""


@pytest.fixture(autouse=True)
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "my_policies.py"
    path.write_text(POLICIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop("my_policies", None)


SOURCE = ListSource([f"prompt {index}" for index in range(40)])


def test_a_policy_that_raises_is_named_with_its_key_its_error_and_its_line(policies: Path) -> None:
    with pytest.raises(ValueError, match="it raised KeyError: 'difficulty'") as told:
        rehearse(settings("goldilocks.selector=my_policies:Raises"), SOURCE)
    assert "goldilocks.selector='my_policies:Raises'" in str(told.value)
    line = POLICIES.splitlines().index('        return {}["difficulty"]') + 1
    assert f"{policies}:{line}" in str(told.value)


def test_a_policy_that_works_is_not_refused() -> None:
    rehearse(settings("goldilocks.selector=my_policies:Fine"), SOURCE)


def test_a_filter_that_asks_for_a_metric_and_keeps_nothing_is_not_refused() -> None:
    rehearse(settings("goldilocks.filter=my_policies:ByMetric"), SOURCE)


def test_a_policy_of_ours_needs_no_rehearsal() -> None:
    rehearse(settings("goldilocks.selector=thompson"), ListSource([]))


def test_a_policy_that_cannot_be_made_is_named_with_what_it_said() -> None:
    with pytest.raises(
        ValueError, match=r"goldilocks.selector='my_policies:NeedsAnArgument' cannot be made: TypeError: .*'temper"
    ):
        settings("goldilocks.selector=my_policies:NeedsAnArgument").selector()
