"""The trainer of docs/adding-a-trainer.md: it learns, keeps the contracts, and goes on where it was cut."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from goldilocks.core import ListSource
from goldilocks.drive.backend import Rounds
from goldilocks.testing import check_backend, check_rows
from goldilocks.types import Failure, Request, Rollout

EXAMPLE = Path(__file__).parents[3] / "examples" / "toy_trainer.py"


@pytest.fixture(scope="module")
def toy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("toy_trainer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("streaming", [False, True])
def test_it_learns_until_its_budget_is_spent(toy: ModuleType, streaming: bool) -> None:
    limited = {**toy.CONFIG, "goldilocks": {**toy.CONFIG["goldilocks"], "budget": {"rollouts": 2_000}}}
    trainer = toy.ToyTrainer(streaming=streaming, config=limited)
    metrics = list(trainer.train())
    assert metrics[-2]["budget/spent"] < 1 <= metrics[-1]["budget/spent"]
    assert metrics[-1]["accuracy"] > 2 * metrics[0]["accuracy"]
    trainer.driver.collector.accounts.check()


def test_cut_saved_and_loaded_it_ends_with_the_same_policy(toy: ModuleType, tmp_path: Path) -> None:
    whole, cut, again = (toy.ToyTrainer() for _ in range(3))
    list(whole.train(updates=12))
    list(cut.train(updates=7))
    cut.save(tmp_path)
    again.load(tmp_path)
    list(again.train(updates=12))
    assert (again.policy.logits == whole.policy.logits).all()
    assert again.driver.metrics() == whole.driver.metrics()


def test_its_parts_keep_the_contracts(toy: ModuleType) -> None:
    questions = ListSource([f"question {index}" for index in range(toy.QUESTIONS)])
    check_backend(lambda: toy.Threads(toy.ToyTrainer()._rollout), questions)
    check_backend(lambda: Rounds(toy.ToyTrainer()._round), questions)
    check_rows(toy.AnswerRows, [(1, 0.5), (7, 0.25)], lambda one, other: one == other)


def answers(requests: Sequence[Request], twice: bool, lost: bool) -> list[Rollout | Failure]:
    told = [
        Rollout(request.uid, request.first + index, 1.0, 1)
        for request in requests
        for index in range(request.n - (lost and request.uid == "g3"))
    ]
    return told + told[:1] * twice


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"twice": True, "lost": False}, "is told of twice"),
        ({"twice": False, "lost": True}, "nothing is being generated"),
    ],
)
def test_a_backend_that_tells_twice_or_loses_a_rollout_is_found_out(fault: dict[str, bool], message: str) -> None:
    with pytest.raises(Exception, match=message):
        check_backend(lambda: Rounds(partial(answers, **fault)))


def test_rows_that_are_not_freed_or_not_saved_are_found_out(toy: ModuleType) -> None:
    class Keeps(toy.AnswerRows):  # type: ignore[name-defined, misc]
        def retain(self, alive: Any) -> None:
            """Free nothing."""

    class Forgets(toy.AnswerRows):  # type: ignore[name-defined, misc]
        def load(self, folder: Path) -> tuple[()]:
            self.put(("g0", 0), (0, 0.0))
            self.put(("g0", 1), (0, 0.0))
            return ()

    for store, message in ((Keeps, "is still there after retain"), (Forgets, "other rows are loaded than were saved")):
        with pytest.raises(AssertionError, match=message):
            check_rows(store, [(1, 0.5), (7, 0.25)], lambda one, other: one == other)
