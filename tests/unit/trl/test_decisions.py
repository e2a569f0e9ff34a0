"""The decisions of the first process, without a model."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import trl_world as world
import yaml
from builders import plain_collector
from run_files import groups_in, logged

from goldilocks.core import Exhausted
from goldilocks.rewards import spent
from goldilocks.tasks.tiny_model import build, character_tokenizer
from goldilocks.trl.collection import Round


def test_no_two_rollouts_of_a_round_that_spans_two_epochs_draw_the_same_noise() -> None:
    decided = Round(tuple(plain_collector(3, target_groups=8).requests(16)), seed=1)
    assert len(decided.seeds) == len(set(decided.seeds)) == 16


def test_a_policy_of_ones_own_is_rehearsed_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = "from goldilocks.core.selectors import Uniform\nclass Broken(Uniform):\n    choose = None\n"
    (tmp_path / "trl_policy.py").write_text(policy)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"selector='trl_policy:Broken': in a rehearsal it raised TypeError"):
        world.trainer(tmp_path, sections={"goldilocks": {"selector": "trl_policy:Broken"}})


def gspo(out: Path, *, engine: bool, carried: int = 1, **chosen: Any) -> None:
    """Make a trainer with GSPO's loss and range."""
    sections: dict[str, Any] = {"filter_groups": {"enable": True, "max_carry_steps": carried}}
    chosen = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, **chosen}
    world.trainer(out, sections={**sections, **({"engine_slots": 4} if engine else {})}, **chosen)


def test_gspo_with_carried_rows_that_have_the_engines_log_probs_is_refused(tmp_path: Path) -> None:
    message = r"filter_groups\.max_carry_steps=1 is not accepted: 0 with importance_sampling_level='sequence', .*slots"
    with pytest.raises(ValueError, match=message):
        gspo(tmp_path, engine=True)
    with pytest.raises(ValueError, match=message):
        gspo(tmp_path, engine=True, epsilon_high=4e-4)


@pytest.mark.parametrize(
    "chosen",
    [
        {"carried": 0},
        {"epsilon": 0.2},
        {"importance_sampling_level": "token"},
        {"engine": False},  # the trainer computes the log-probs of rows that wait
        {"num_iterations": 2},  # TRL computes those of all rows
    ],
)
def test_gspo_that_has_none_of_these_is_accepted(tmp_path: Path, chosen: dict[str, Any]) -> None:
    gspo(tmp_path, **{"engine": True, **chosen})


def test_what_a_round_generated_is_let_go_before_the_batch_is_trained(tmp_path: Path) -> None:
    trainer = world.trainer(tmp_path, sections={"filter_groups": {"enable": True}})
    generate, rounds = trainer._generate_round, []

    def generated(*args: Any) -> Any:
        made = generate(*args)
        rounds.append(weakref.ref(made[0]["completion_ids"]))
        return made

    trainer._generate_round = generated
    world.collect(trainer)
    gc.collect()
    assert rounds
    assert [one() for one in rounds] == [None] * len(rounds)


def test_a_run_that_was_interrupted_in_a_round_is_trained_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def reward(completions: list[Any], right: list[int], **_: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return world.reward(completions, right)

    trainer = world.trainer(tmp_path, sections={"filter_groups": {"enable": True}}, reward_funcs=reward, max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert trainer.state.global_step == 2
    (last,) = (one for one in trainer.state.log_history if one["step"] == 2 and "loss" in one)
    assert last["accounts/generated_rollouts"] == sum(calls) - calls[1]
    world.assert_accounts_sum(last)


def test_what_was_generated_for_an_update_that_is_not_made_is_trained_by_the_next_start(tmp_path: Path) -> None:
    calls: list[int] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        calls.append(len(completions))
        return [float(place % 2 and (len(calls) != 2 or place < 8)) for place in range(len(completions))]

    halves: dict[str, Any] = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "reward_funcs": reward}
    fresh = {"enable": True, "max_carry_steps": 0}
    with pytest.raises(Exhausted, match=r"What was generated is saved in .*checkpoint-0"):
        world.run(tmp_path, {"filter_groups": {**fresh, "max_num_gen_batches": 1}}, **halves)
    trained = world.run(tmp_path, {"filter_groups": fresh}, resume=True, max_steps=1, **halves)
    assert len(calls) == 3  # the first is trained with half of the second, and what the third has in place of the rest
    found = trained.collection.driver.collector.accounts.rollouts
    assert (found["trained"], found["filtered/too_hard"], found.get("expired")) == (32, 8, None)
    (line,) = (one for one in logged(tmp_path) if "critic/score/mean" in one)
    assert (line["train/informative_groups"], line["train/groups_judged"]) == (8, sum(calls) / 4)
    rows = [row for group in groups_in(tmp_path / "rollouts" / "1.jsonl").values() for row in group]
    assert line["critic/score/mean"] == sum(row["score"] for row in rows) / len(rows)
    assert len(rows) == 32
    (of_trl,) = (one for one in trained.state.log_history if "train/groups_judged" in one)
    assert of_trl["train/groups_judged"] == line["train/groups_judged"]


def test_the_rest_of_a_batch_that_an_update_began_with_is_trained_where_that_update_was_not_made(
    tmp_path: Path,
) -> None:
    """Updates of three micro-batches, batches of two: the second update begins with the rest of a batch."""
    thirds = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "steps_per_generation": 2}

    def reward(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        return [float(place % 2 and trainer_state.global_step == 0) for place in range(len(completions))]

    limited = {"filter_groups": {"enable": True, "max_num_gen_batches": 1}}
    with pytest.raises(Exhausted, match=r"saved in .*checkpoint-1"):
        world.run(tmp_path, limited, reward_funcs=reward, **thirds)
    again = world.run(tmp_path, {"filter_groups": {}}, resume=True, max_steps=2, **thirds)
    assert again.collection.driver.collector.accounts.rollouts["trained"] == 2 * 3 * 8


def test_a_run_in_the_folder_of_an_earlier_one_has_its_own_configuration_and_rollouts(tmp_path: Path) -> None:
    world.run(tmp_path, {"goldilocks": {}}, max_steps=2)
    world.run(tmp_path, {"filter_groups": {"enable": True}}, max_steps=1, num_generations=8)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["actor_rollout_ref"]["rollout"]["n"] == config["trl"]["num_generations"] == 8
    assert config["algorithm"]["filter_groups"] == {"enable": True}
    assert [file.name for file in (tmp_path / "rollouts").iterdir()] == ["1.jsonl"]
    assert len(list((tmp_path / "rollouts.1").iterdir())) == 2


def test_what_rewards_cost_in_an_earlier_run_is_not_in_this_ones_account(tmp_path: Path) -> None:
    spent.add(calls=3)
    trained = world.run(tmp_path, {"goldilocks": {}}, max_steps=1)
    assert not [name for name in trained.state.log_history[0] if name.startswith("accounts/reward_")]


def test_a_completion_is_truncated_unless_its_last_allowed_token_ends_it(tmp_path: Path) -> None:
    model = build(character_tokenizer(), seed=0)
    for parameter in model.parameters():
        parameter.data.zero_()  # all tokens are equally likely
    trainer = world.trainer(
        tmp_path,
        model=model,
        sections={"filter_groups": {"enable": True}},
        reward_funcs=world.every_third,
        max_completion_length=1,
        per_device_train_batch_size=64,
    )
    rows = world.rows_of(trainer)
    world.collect(trainer)
    ended = [int(row.tensors["completion_ids"][0]) == trainer.processing_class.eos_token_id for row in rows]
    assert set(ended) == {True, False}
    assert [row.truncated for row in rows] == [not one for one in ended]


def test_a_reward_function_that_applies_to_no_row_has_no_mean(tmp_path: Path) -> None:
    def never(completions: list[Any], **_: Any) -> list[None]:
        return [None] * len(completions)

    trained = world.run(tmp_path, {"filter_groups": {"enable": True}}, reward_funcs=[world.reward, never], max_steps=1)
    (of_trl,) = (one for one in trained.state.log_history if "loss" in one)
    assert of_trl["rewards/never/mean"] is None
    (ours,) = (one for one in logged(tmp_path) if "train/groups_judged" in one)
    assert 0 < ours["reward/reward"] < 1
    assert "reward/never" not in ours
