"""A validation's accuracy by column: each answer counts once, whatever the batch it was in."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import trl_world as world
from run_files import logged


def validating(out: Path, prompts: int, answers: int, by: tuple[str, ...] = (), **chosen: Any) -> Any:
    """Return a trainer that validates on so many prompts, so many answers at a time."""
    sections = {"goldilocks": {"validate_by": list(by)}, "run_dir": out}
    validation = {"eval_dataset": world.dataset(prompts), "per_device_eval_batch_size": answers}
    return world.trainer(out, sections=sections, **validation, **chosen)


def evaluated(trainer: Any) -> dict[str, Any]:
    """Return what an evaluation logs; the oldest TRL does not return it."""
    trainer.evaluate()
    return dict(trainer.state.log_history[-1])


def test_accuracy_by_column_is_the_mean_over_the_answers_of_each_value(tmp_path: Path) -> None:
    seen: dict[int, list[float]] = defaultdict(list)

    def acc(completions: list[Any], right: list[int], **columns: Any) -> list[float]:
        values = world.reward(completions, right, **columns)
        for kinds, value in zip(right, values, strict=True):
            seen[kinds].append(value)
        return values

    validating(tmp_path, 10, 32, by=("right",), reward_funcs=acc).evaluate()  # batches of eight prompts and of two
    expected = {f"val/right/{kinds}/acc": pytest.approx(sum(ones) / len(ones)) for kinds, ones in seen.items()}
    lines = logged(tmp_path)
    assert len(expected) == 6
    assert {name: value for name, value in lines[-1].items() if name.startswith("val/")} == expected
    answers = [one for ones in seen.values() for one in ones]
    assert lines[-1]["val-core/eval/acc/mean@4"] == pytest.approx(sum(answers) / len(answers))


def test_accuracy_is_how_often_answers_are_right_where_the_reward_trained_on_is_another(tmp_path: Path) -> None:
    """Of ten prompts in batches of eight and two, every answer counts the same."""
    seen: list[float] = []

    def acc(completions: list[Any], right: list[int], **columns: Any) -> list[float]:
        seen.extend(world.reward(completions, right, **columns))
        return seen[-len(completions) :]

    def marks(completions: list[Any], right: list[int], **columns: Any) -> list[float]:
        return [0.25 + value / 2 for value in world.reward(completions, right, **columns)]

    validating(tmp_path, 10, 32, reward_funcs=[marks, acc], reward_weights=[1.0, 0.0]).evaluate()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(seen) == 40
    assert json.loads(line)["data"] == {"val-core/eval/acc/mean@4": pytest.approx(sum(seen) / len(seen))}


def test_of_several_data_sets_each_has_an_accuracy_of_its_own(tmp_path: Path) -> None:
    graded = itertools.count()

    def acc(completions: list[Any], **_: Any) -> list[float]:
        return [float(next(graded)) for _ in completions]

    both = {"easy": world.dataset(2), "hard": world.dataset(3)}
    sections = {"goldilocks": {}}
    world.trainer(tmp_path, sections=sections, eval_dataset=both, reward_funcs=acc, num_generations_eval=1).evaluate()
    found = [next(iter(line.items())) for line in logged(tmp_path)]
    assert found == [("val-core/easy/acc/mean@1", 0.5), ("val-core/hard/acc/mean@1", 3.0)]
    with pytest.raises(ValueError, match=r"goldilocks\.validate_by=\['right'\] is not accepted: none with .*several"):
        world.trainer(tmp_path / "by", sections={"goldilocks": {"validate_by": ["right"]}}, eval_dataset=both)


def test_where_the_last_batch_is_dropped_every_answer_of_the_others_counts(tmp_path: Path) -> None:
    """Of five prompts, two whole batches of two are answered."""
    graded = itertools.count()

    def acc(completions: list[Any], **_: Any) -> list[float]:
        return [float(next(graded)) for _ in completions]

    validating(tmp_path, 5, 8, reward_funcs=acc, dataloader_drop_last=True).evaluate()
    assert next(graded) == 16
    assert logged(tmp_path)[-1]["val-core/eval/acc/mean@4"] == sum(range(16)) / 16


def test_an_oracle_is_told_what_the_validation_shows(tmp_path: Path) -> None:
    oracle = {"prior": "oracle", "study": True, "strata": {"columns": ["right"]}}
    sections = {"goldilocks": {"validate_by": ["right"], **oracle}}
    trainer = world.trainer(tmp_path, sections=sections, eval_dataset=world.dataset(10), per_device_eval_batch_size=32)
    found = evaluated(trainer)
    assert trainer.collection is not None
    assert trainer.collection.driver is not None
    told = trainer.collection.driver.collector.beliefs.state_dict()["told"]
    shown = {name.removeprefix("eval_"): value for name, value in found.items() if "val/right" in name}
    assert told
    # No stratum is believed to be out of reach for ever: a rate of 0 is told as one in ten thousand.
    assert {name: min(max(shown[name], 1e-4), 1 - 1e-4) for name in told} == pytest.approx(told)


def test_where_the_reward_has_no_acc_an_answer_counts_by_its_score(tmp_path: Path) -> None:
    def acc(completions: list[Any], **_: Any) -> list[None]:
        return [None for _ in completions]

    weighted = {"reward_funcs": [world.reward, acc], "reward_weights": [1.0, 0.0]}
    found = evaluated(validating(tmp_path, 4, 16, by=("right",), **weighted))
    by_column = [value for name, value in found.items() if "right" in name]
    assert len(by_column) == 4
    assert sum(by_column) / 4 == pytest.approx(found["eval_reward"])


def test_an_answer_that_the_judge_failed_on_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def acc(completions: list[Any], **_: Any) -> list[float | None]:
        return [1.0 if place % 4 else None for place in range(len(completions))]

    found = evaluated(validating(tmp_path, 4, 16, by=("right",), reward_funcs=acc))
    assert {value for name, value in found.items() if "right" in name} == {1.0}
    assert "4 of 16 answers do not count" in caplog.text


@pytest.mark.parametrize("chosen", [{}, {"steps_per_generation": 4}], ids=["one update", "several updates of a batch"])
def test_an_evaluation_without_a_loss_has_the_same_answers_in_batches_of_any_size(
    chosen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goldilocks.trl.trainer.NUMBERED", 2)

    def answers(out: Path, size: int, **sections: Any) -> tuple[list[str], dict[str, float]]:
        seen: list[str] = []

        def acc(completions: list[Any], right: list[int], **columns: Any) -> list[float]:
            seen.extend(one[0]["content"] for one in completions)
            return world.reward(completions, right, **columns)

        validation = {"eval_dataset": world.dataset(6), "per_device_eval_batch_size": size, **chosen}
        own = {"goldilocks": {}, "engine_slots": 5, **sections}
        trainer = world.trainer(out, sections=own, reward_funcs=acc, per_device_train_batch_size=4, **validation)
        return seen, evaluated(trainer)

    small, with_loss = answers(tmp_path / "small", 8)
    large, without = answers(tmp_path / "large", 24, eval_loss=False)
    assert large == small
    assert without["eval_reward"] == pytest.approx(with_loss["eval_reward"])
    assert "eval_loss" in with_loss
    assert "eval_loss" not in without
