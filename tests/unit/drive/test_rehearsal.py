"""A policy of the user's own is tried before any worker is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

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


class OutOfRange(Uniform):
    def choose(self, pool, beliefs, k, rng):
        return [0, 40]


class Nothing(Uniform):
    def choose(self, pool, beliefs, k, rng):
        return None


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


def test_a_policy_of_a_notebook_that_raises_is_named_too(policies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that has no file."""
    notebook = ModuleType("notebook")
    exec(POLICIES, vars(notebook))
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    with pytest.raises(ValueError, match=r"goldilocks\.selector='notebook:Raises': in a rehearsal it raised KeyError"):
        rehearse(settings("goldilocks.selector=notebook:Raises"), SOURCE)


@pytest.mark.parametrize(("name", "returned"), [("OutOfRange", "40"), ("Nothing", "None")])
def test_a_selector_that_returns_no_place_of_a_prompt_is_named_with_its_line(
    name: str, returned: str, policies: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{name}\.choose .* returned {returned}; accepted: .* from 0 to 39") as told:
        rehearse(settings(f"goldilocks.selector=my_policies:{name}"), SOURCE)
    line = POLICIES.splitlines().index(f"class {name}(Uniform):") + 2
    assert f"({policies}:{line})" in str(told.value)


def test_the_simulator_says_what_a_policy_of_the_user_s_own_raised(
    policies: Path, refused: Callable[[list[str]], str]
) -> None:
    words = ["simulate", "--policy", "grpo", "--rollouts", "100", "--set", "goldilocks.selector=my_policies:Raises"]
    said = refused(words)
    assert "it raised KeyError: 'difficulty'" in said
    assert f"({policies}:" in said


def test_a_policy_that_works_and_a_filter_that_keeps_nothing_are_not_refused_and_ours_need_no_rehearsal() -> None:
    rehearse(settings("goldilocks.selector=my_policies:Fine"), SOURCE)
    rehearse(settings("goldilocks.filter=my_policies:ByMetric"), SOURCE)
    rehearse(settings("goldilocks.selector=thompson"), ListSource([]))


def test_a_policy_that_cannot_be_made_is_named_with_what_it_said() -> None:
    with pytest.raises(
        ValueError, match=r"goldilocks.selector='my_policies:NeedsAnArgument' cannot be made: TypeError: .*'temper"
    ):
        settings("goldilocks.selector=my_policies:NeedsAnArgument").selector()
