"""The drop-in class: verl's real ``fit`` over fake workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader.sampler import RandomSampler
from unit.verl.v0.v0_world import PROMPT, RESPONSE, Prompts, World
from verl import DataProto

from goldilocks import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgoConfig,
    DataConfig,
    FilterGroupsConfig,
    PPOTrainerConfig,
    RolloutConfig,
    TrainerConfig,
)
from goldilocks.losses.log_probs import StaleWeights


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def config(tmp_path: Path, *, n: int = 4, batch: int = 4, mini: int = 2, steps: int | None = 4, **extra: Any):
    return TrainerConfig(
        algorithm=extra.pop("algorithm", AlgoConfig(adv_estimator="grpo")),
        data=DataConfig(
            train_batch_size=batch, max_prompt_length=PROMPT, max_response_length=RESPONSE, **extra.pop("data", {})
        ),
        actor_rollout_ref=ActorRolloutRefConfig(
            rollout=RolloutConfig(n=n), actor=ActorConfig(ppo_mini_batch_size=mini), model={"path": str(tmp_path)}
        ),
        trainer=PPOTrainerConfig(
            **{
                "total_training_steps": steps,
                "default_local_dir": str(tmp_path / "checkpoints"),
                "logger": ["console"],
                **extra.pop("trainer", {}),
            }
        ),
        **extra,
    )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


DYNAMIC = {"enable": True, "metric": "acc"}


def filtered(**keys: Any) -> AlgoConfig:
    return AlgoConfig(adv_estimator="grpo", filter_groups=FilterGroupsConfig(**{**DYNAMIC, **keys}))


def groups_of(batch: Any) -> dict[str, list[float]]:
    """The rewards of a trained batch by group, without padding."""
    groups: dict[str, list[float]] = {}
    for uid, scores, mask in zip(batch["uid"], batch["rm_scores"], batch["response_mask"], strict=True):
        if mask.any():
            groups.setdefault(uid, []).append(float(scores.sum()))
    return groups


def test_whatever_token_the_generation_config_names_ends_an_answer(tmp_path: Path, world: World) -> None:
    trainer: Any = world.trainer(config(tmp_path), [50] * 4)
    trainer.init_workers()
    assert trainer.async_rollout_manager._backend._ends == {0, 9}


def test_tokens_that_a_tool_wrote_are_counted_apart(tmp_path, monkeypatch):
    world, said = World(monkeypatch, agents=1), 0
    plain = world.engine.generate_sequences

    def with_a_tool(prompts: Any) -> Any:
        nonlocal said
        answers = plain(prompts)
        longer = answers.batch["response_mask"].sum(-1) > 1
        answers.batch["response_mask"][longer, 0] = 0
        said += int(longer.sum())
        return answers

    monkeypatch.setattr(world.engine, "generate_sequences", with_a_tool)
    world.trainer(config(tmp_path, algorithm=filtered()), [50, 40] * 20).fit()
    assert world.steps[-1]["accounts/tool_tokens"] == said > 0


def test_only_groups_with_signal_are_trained_and_every_batch_is_full(tmp_path, monkeypatch):
    world = World(monkeypatch, agents=3)
    world.trainer(config(tmp_path, algorithm=filtered(), data={"gen_batch_size": 8}), [0, 100, 50, 40] * 10).fit()
    assert len(world.actor.trained) == 4
    for batch in world.actor.trained:
        groups = groups_of(batch)
        assert [len(rewards) for rewards in groups.values()] == [4] * 4
        assert all(0 < sum(rewards) < 4 for rewards in groups.values())
    last = world.steps[-1]
    assert last["accounts/generated_rollouts"] == sum(world.engine.asked.values())
    assert last["accounts/trained_rollouts"] == 64
    assert last["accounts/cancelled_rollouts"] == 0
    assert last["actor/mini_batches"] == 2
    assert last["data/epoch"] == last["data/prompts_issued"] / 40
    assert [step["training/global_step"] for step in world.steps] == [1, 2, 3, 4]


def test_surplus_is_carried_and_trained_in_the_next_step(tmp_path, world):
    trainer = world.trainer(config(tmp_path, algorithm=filtered(), data={"gen_batch_size": 16}), [50] * 40)
    before = trainer.config.copy()
    trainer.fit()
    assert trainer.config == before
    carried = [step["train/groups_carried"] for step in world.steps]
    issued = [step["train/prompts_issued"] for step in world.steps]
    assert carried[0] > 0
    assert issued[1] < issued[0]
    assert len(trainer.rows) == len(trainer.collector.waiting_rollouts) + 16  # what waits, and the batch in hand
    trained = [uid for batch in world.actor.trained for uid in groups_of(batch)]
    assert len(trained) == len(set(trained)) == 16


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_adaptive_groups_of_any_size_share_a_batch_that_is_padded_with_nothing(tmp_path, monkeypatch, micro_batch):
    world = World(monkeypatch, ranks=2, agents=4)
    given = config(tmp_path, n=2, adaptive_rollout={"enable": True, "max_n": 10, "rollouts_per_batch": 3}, steps=3)
    given.actor_rollout_ref.actor = {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": micro_batch}
    given.actor_rollout_ref.rollout = {"n": 2, "log_prob_micro_batch_size_per_gpu": micro_batch}
    world.actor.micro_batch = micro_batch
    trainer = world.trainer(given, [100, 100, 0, 15, 40] * 4)
    trainer.fit()
    rates = trainer.train_dataset.pass_rates
    assert {world.engine.asked[index] for index in world.engine.asked if rates[index] == 100} == {2}
    assert {world.engine.asked[index] for index in world.engine.asked if rates[index] == 0} == {10}
    for batch, step in zip(world.actor.trained, world.steps, strict=True):
        groups = groups_of(batch)
        real = sum(map(len, groups.values()))
        assert len(groups) == 4
        whole = 4 * micro_batch  # two mini-batches over two ranks, and not a row more
        assert batch.shape[0] == -(-real // whole) * whole
        assert batch["response_mask"].any(-1).sum() == real
        assert step["actor/mini_batches"] == 2
        assert step["adaptive_rollout/min_rollouts_per_sample"] == 2
    assert {len(rewards) for batch in world.actor.trained for rewards in groups_of(batch).values()} > {2}
    assert world.steps[-1]["accounts/cancelled_rollouts"] == 0  # a round that is paid for is used


def test_the_baseline_comes_from_all_rollouts_also_of_those_that_are_not_trained(tmp_path, world):
    adaptive = {"enable": True, "max_n": 9, "rollouts_per_batch": 7, "max_train_n": 3, "stop": "contrast"}
    trainer = world.trainer(config(tmp_path, n=2, batch=2, mini=2, steps=2, adaptive_rollout=adaptive), [20] * 10)
    trainer.config.algorithm.norm_adv_by_std_in_grpo = False
    taken: dict[str, list[float]] = {}
    take = trainer.collector.take

    def take_and_note() -> Any:
        groups = take()
        taken.update({group.uid: group.rewards for group in groups})
        return groups

    trainer.collector.take = take_and_note
    trainer.fit()
    assert world.steps[-1]["accounts/trimmed_rollouts"] > 0
    for batch in world.actor.trained:
        assert max(map(len, groups_of(batch).values())) <= 3
        for uid, scores, advantages in zip(batch["uid"], batch["rm_scores"], batch["advantages"], strict=True):
            mean = sum(taken[uid]) / len(taken[uid])
            assert float(advantages[0]) == pytest.approx(float(scores.sum()) - mean, abs=1e-6)


@pytest.mark.parametrize("correction", [None, "token"])
def test_carried_groups_are_trained_against_the_policy_that_wrote_them(tmp_path, world, correction):
    trainer = world.trainer(config(tmp_path, data={"gen_batch_size": 8}, steps=3), [50] * 40)
    trainer.config.algorithm.rollout_correction.rollout_is = correction
    trainer.fit()
    first, second, third = ({row[0].item() for row in batch["old_log_probs"]} for batch in world.actor.trained)
    assert first == {-1.0}
    assert second == ({-1.0} if correction is None else {-1.125})  # verl's weights are against the recomputed ones
    assert third == {-1.25}
    assert [step["train/stale_rows"] for step in world.steps] == [0, 16, 0]
    assert world.steps[1]["train/stale_log_prob_diff_mean"] == pytest.approx(0.125)
    assert [step.get("rollout/weights_gap") for step in world.steps] == [0.0, None, 0.0]  # all of the second is carried


def test_an_engine_that_never_gets_new_weights_ends_a_run_that_asked_for_it(tmp_path, world):
    generate = world.engine.generate_sequences

    def as_at_first(prompts: DataProto) -> DataProto:
        answers = generate(prompts)
        answers.batch["rollout_log_probs"] = -1.0 * answers.batch["response_mask"]
        return answers

    world.engine.generate_sequences = as_at_first
    given = config(tmp_path, steps=4, more={"goldilocks.on_stale_weights": "error"})
    with pytest.raises(StaleWeights, match=r"rollout/weights_gap is .* It was 0 before"):
        world.trainer(given, [50] * 80).fit()
    assert [step["rollout/weights_gap"] for step in world.steps] == [0.0, 0.125]


def test_ppo_with_a_critic_and_the_final_reward_judged_before_training(tmp_path, monkeypatch):
    world = World(monkeypatch, ranks=2)
    groups = FilterGroupsConfig(enable=True, metric="seq_final_reward")
    ppo = AlgoConfig(adv_estimator="gae", use_kl_in_reward=True, filter_groups=groups)
    given = config(tmp_path, algorithm=ppo, critic={"ppo_mini_batch_size": 1}, trainer={"critic_warmup": 2})
    world.trainer(given, [0, 100, 50, 40] * 10).fit()
    assert len(world.critic.trained) == 4
    assert len(world.actor.trained) == 3  # in updates 3 and 4 the penalties of any two answers differ
    for batch in world.critic.trained:
        assert [0 < sum(rewards) < 4 for rewards in groups_of(batch).values()] == [True] * 4
    assert world.steps[-1]["critic/mini_batches"] == 4
    assert world.steps[-1]["accounts/rejected/no_variance_after_kl_rollouts"] > 0


def test_a_budget_ends_the_run_with_the_update_that_reaches_it_and_the_next_has_nothing_to_do(tmp_path, monkeypatch):
    keys = {"steps": 10, "trainer": {"save_freq": 100}, "more": {"goldilocks.budget.rollouts": 40}}
    world = World(monkeypatch)
    trainer = world.trainer(config(tmp_path, **keys), [50] * 40)
    before = trainer.config.copy()
    trainer.fit()
    assert [step["budget/spent"] for step in world.steps] == [0.4, 0.8, 1.2]
    assert (tmp_path / "checkpoints" / "global_step_3" / "actor").is_dir()  # the last update is saved
    assert trainer.config == before
    again = World(monkeypatch)
    again.trainer(config(tmp_path, **keys), [50] * 40).fit()
    assert again.steps == []


def test_a_budget_that_ends_in_the_critics_warmup_saves_the_last_update_too(tmp_path, monkeypatch):
    ppo = {"algorithm": AlgoConfig(adv_estimator="gae"), "critic": {"ppo_mini_batch_size": 2}}
    keys = {"steps": 10, "trainer": {"save_freq": 100, "critic_warmup": 9}, "more": {"goldilocks.budget.rollouts": 32}}
    world = World(monkeypatch)
    world.trainer(config(tmp_path, **ppo, **keys), [50] * 40).fit()
    assert (len(world.critic.trained), len(world.actor.trained)) == (2, 0)
    assert (tmp_path / "checkpoints" / "global_step_2" / "actor").is_dir()
    again = World(monkeypatch)
    again.trainer(config(tmp_path, **ppo, **keys), [50] * 40).fit()
    assert again.steps == []


def test_validations_are_spread_over_the_budget(tmp_path, world, monkeypatch):
    given = config(tmp_path, steps=10, more={"goldilocks.budget.rollouts": 96, "goldilocks.budget.validations": 2})
    trainer = world.trainer(given, [50] * 40, val_dataset=Prompts([50]))
    monkeypatch.setattr(type(trainer), "_validate", lambda self: {"val": 1.0})
    trainer.config.trainer.val_before_train = False
    trainer.fit()
    assert [step["step"] for step in world.steps if "val" in step] == [3, 6]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of a budget of seconds, which goes on when ``now`` is changed."""
    clock = SimpleNamespace(now=0.0)
    now = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    monkeypatch.setattr("goldilocks.drive.driver.time", now)
    return clock


def test_a_budget_of_seconds_is_of_the_updates_and_goes_on_after_a_restart(tmp_path, monkeypatch, clock):
    def spent(steps: int) -> list[float]:
        world, keys = World(monkeypatch), {"goldilocks.budget.seconds": 240}
        update = world.actor.update_actor

        def takes_a_minute(data: Any) -> Any:
            clock.now += 60
            return update(data)

        world.actor.update_actor = takes_a_minute
        world.trainer(config(tmp_path, steps=steps, trainer={"save_freq": 100}, more=keys), [50] * 80).fit()
        return [step["budget/spent"] for step in world.steps]

    assert spent(steps=2) == [0.25, 0.5]
    clock.now += 1e6  # between the two starts
    assert spent(steps=10) == [0.75, 1.0]


def test_a_budget_of_seconds_that_runs_out_after_an_update_ends_the_run_with_one_that_is_saved(tmp_path, world, clock):
    """A checkpoint and the log take time too, when it is too late to ask verl for the last checkpoint."""

    def log(data: dict[str, float], step: int) -> None:
        world.steps.append(data)
        clock.now += 60

    world._log = log
    keys = {"steps": 10, "trainer": {"save_freq": 100}, "more": {"goldilocks.budget.seconds": 120}}
    world.trainer(config(tmp_path, **keys), [50] * 40).fit()
    assert len(world.steps) == 3
    assert (tmp_path / "checkpoints" / "global_step_3" / "actor").is_dir()


def test_a_checkpoint_that_workers_write_on_their_own_is_waited_for_at_the_end_of_a_budget(tmp_path, monkeypatch):
    world, waited = World(monkeypatch), []
    world.actor.async_calls_finalize_fn_exec = lambda blocking: waited.append(blocking)  # Megatron's workers have it
    keys = {"steps": 10, "trainer": {"save_freq": 100}, "more": {"goldilocks.budget.rollouts": 32}}
    world.trainer(config(tmp_path, **keys), [50] * 40).fit()
    assert waited == [False, False, True]


def test_the_batch_filter_rejects_inside_the_refill_loop(tmp_path, monkeypatch):
    world = World(monkeypatch, ranks=2)
    world.trainer(config(tmp_path, n=8, steps=3, more={"batch_filter.enable": True}), [0, 50, 100, 40] * 10).fit()
    for batch in world.actor.trained:
        assert [0 < sum(rewards) < 8 for rewards in groups_of(batch).values()] == [True] * 4
    rejected = [step["train/groups_rejected"] for step in world.steps]
    assert sum(rejected) > 0
    assert [step["batch/total_groups_generated"] for step in world.steps] == [4 + count for count in rejected]


def test_the_two_gates_hold_rows_against_the_policy_that_is_trained(tmp_path, world):
    """Every second answer claims to be far likelier than the policy says: none of those is trained."""
    generate = world.engine.generate_sequences

    def drifted(prompts: DataProto) -> DataProto:
        answers = generate(prompts)
        answers.batch["rollout_log_probs"][::2] += 0.5
        return answers

    world.engine.generate_sequences = drifted
    gates = {"enable": True, "enable_two_gate_filter": True, "sample_oversampling_factor": 2.0}
    given = config(tmp_path, n=8, steps=2, more={f"batch_filter.{key}": value for key, value in gates.items()})
    world.trainer(given, [50] * 40).fit()
    for batch, step in zip(world.actor.trained, world.steps, strict=True):
        assert {len(rewards) for rewards in groups_of(batch).values()} == {8}
        assert step["filter/gate1_rejection_rate"] == 0.5


@pytest.mark.parametrize(("on_exhausted", "groups"), [("shrink", 2), ("backfill", 4)])
def test_a_batch_that_the_final_reward_leaves_too_small_is_trained_as_it_is_or_filled_up(
    tmp_path, world, on_exhausted, groups
):
    limits = {"max_num_gen_batches": 1, "on_exhausted": on_exhausted}
    final = FilterGroupsConfig(enable=True, metric="seq_final_reward", **limits)
    algorithm = AlgoConfig(adv_estimator="grpo", use_kl_in_reward=True, filter_groups=final)
    keys = {"algorithm": algorithm, "data": {"shuffle": False}}
    world.trainer(config(tmp_path, n=16, steps=1, **keys), [50, 0, 50, 0] * 5).fit()
    assert len(world.actor.trained[0]) == 16 * groups
    with_a_loss = groups_of(world.actor.trained[0])  # what only fills the batch up has none
    assert [0 < sum(rewards) < 16 for rewards in with_a_loss.values()] == [True] * 2
    step = world.steps[0]
    assert step["train/groups_backfilled"] == groups - 2
    assert step["accounts/backfilled_rollouts"] == 16 * (groups - 2)
    assert step["accounts/rejected_rollouts"] == 16 * (4 - groups)


def test_nothing_to_train_at_all_is_an_error_that_says_so(tmp_path, world):
    given = config(tmp_path, algorithm=filtered(max_num_gen_batches=1, on_exhausted="shrink"))
    with pytest.raises(ValueError, match=r"num_gen_batches=1 >= .* is saved in .*global_step_0\."):
        world.trainer(given, [0] * 10).fit()


@pytest.mark.parametrize("save_freq", [-1, 1, 2, 1_000_000])
def test_an_unfinished_step_is_gone_on_with_whatever_save_freq_is(tmp_path, monkeypatch, capsys, save_freq):
    rates = [50] * 8 + [0] * 60  # in this order: two batches, and then nothing to learn
    keys = {"data": {"gen_batch_size": 4, "shuffle": False}, "trainer": {"save_freq": save_freq}}

    def fit(limit: int) -> Any:
        world = World(monkeypatch)
        given = config(tmp_path, n=8, algorithm=filtered(max_num_gen_batches=limit), **keys)
        trainer = world.trainer(given, rates)
        with pytest.raises(ValueError, match=rf"num_gen_batches={limit} >= .* is saved in .*global_step_2\."):
            trainer.fit()
        return world, trainer.collector

    first, collector = fit(3)
    assert [step["step"] for step in first.steps] == [1, 2]
    assert (tmp_path / "checkpoints" / "global_step_2" / "actor").is_dir()  # the weights it is about
    capsys.readouterr()
    second, went_on = fit(5)
    assert second.steps == []  # it is the third step still, under a limit of five generation batches
    assert went_on.prompts_issued == collector.prompts_issued + 8
    assert went_on.accounts.rollouts["trained"] == 64
    assert f"goes on from {tmp_path}/checkpoints/global_step_2: {collector.prompts_issued}" in capsys.readouterr().out
    assert len([*(tmp_path / "checkpoints" / "global_step_2").glob("goldilocks_rows*")]) == 1


def test_a_run_that_began_elsewhere_saves_its_unfinished_step_with_weights(tmp_path, monkeypatch):
    keys = {"data": {"gen_batch_size": 4, "shuffle": False}}
    rates = [50] * 4 + [0] * 60
    saved = {"save_freq": 1, "default_local_dir": str(tmp_path / "elsewhere")}
    World(monkeypatch).trainer(config(tmp_path, n=8, steps=1, trainer=saved, **keys), rates).fit()
    begun = {"resume_mode": "resume_path", "more": {"resume_from_path": str(tmp_path / "elsewhere" / "global_step_1")}}
    given = config(tmp_path, n=8, algorithm=filtered(max_num_gen_batches=2), trainer=begun, **keys)
    with pytest.raises(ValueError, match=r"is saved in .*checkpoints/global_step_1\."):
        World(monkeypatch).trainer(given, rates).fit()
    assert (tmp_path / "checkpoints" / "global_step_1" / "actor").is_dir()


def test_a_checkpoint_of_verls_own_trainer_is_taken_up_with_the_data_from_the_beginning(tmp_path, monkeypatch, capsys):
    keys = {"algorithm": filtered(), "trainer": {"save_freq": 1}}
    World(monkeypatch).trainer(config(tmp_path, steps=1, **keys), [50] * 40).fit()
    (tmp_path / "checkpoints" / "global_step_1" / "goldilocks.npz").unlink()
    world = World(monkeypatch)
    world.trainer(config(tmp_path, steps=2, **keys), [50] * 40).fit()
    assert [step["step"] for step in world.steps] == [2]
    assert world.steps[0]["data/prompts_issued"] == world.steps[0]["train/prompts_issued"]
    assert "the data begin anew with the first prompt of the first epoch" in capsys.readouterr().out


def test_a_run_goes_on_from_its_checkpoint_with_what_it_carried(tmp_path, monkeypatch):
    saving = {"save_freq": 2, "resume_mode": "auto"}
    keys = {"algorithm": filtered(max_carry_steps=3), "data": {"gen_batch_size": 16}, "trainer": saving}
    first = World(monkeypatch)
    trainer = first.trainer(config(tmp_path, steps=2, **keys), [50] * 40)
    trainer.fit()
    waiting = {rollout.uid for rollout in trainer.collector.waiting_rollouts}
    assert waiting
    second = World(monkeypatch)
    second.trainer(config(tmp_path, steps=3, **keys), [50] * 40).fit()
    assert [step["step"] for step in second.steps] == [3]
    assert waiting & set(groups_of(second.actor.trained[0]))
    new = second.steps[0]["train/prompts_issued"]
    assert second.steps[0]["data/prompts_issued"] == first.steps[-1]["data/prompts_issued"] + new
    assert second.steps[0]["accounts/trained_rollouts"] == 48


def test_epochs_end_with_the_prompts_issued_and_updates_are_another_clock(tmp_path, world):
    saved = {"total_epochs": 4, "save_freq": 100}
    given = config(tmp_path, batch=2, steps=None, algorithm=filtered(max_carry_steps=0), trainer=saved)
    world.trainer(given, [50, 0] * 5).fit()
    issued = [step["data/prompts_issued"] for step in world.steps]
    assert len(world.steps) < 20  # which is what all prompts of four epochs would make
    assert issued[-2] <= 38  # two prompts make a batch
    assert issued[-1] > 38
    assert [step["training/epoch"] for step in world.steps] == [before // 10 for before in [0, *issued[:-1]]]
    assert (tmp_path / "checkpoints" / f"global_step_{len(world.steps)}").is_dir()  # the last step knew that it was


def test_prompts_come_in_the_order_of_the_sampler_that_was_given(tmp_path, world):
    sampler = RandomSampler(range(40), generator=torch.Generator().manual_seed(5))
    expected = list(RandomSampler(range(40), generator=torch.Generator().manual_seed(5)))[:4]
    world.trainer(config(tmp_path, n=1, steps=1, data={"shuffle": False}), [50] * 40, train_sampler=sampler).fit()
    assert list(world.engine.asked) == expected


def test_a_metric_that_the_reward_does_not_return_names_those_there_are(tmp_path, world):
    trainer = world.trainer(config(tmp_path, algorithm=filtered(metric="bleu")), [50] * 10)
    with pytest.raises(ValueError, match=r"metric='bleu' is not accepted: .* acc, reward"):
        trainer.fit()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm": AlgoConfig(adv_estimator="remax")}, "algorithm.adv_estimator='remax' is not accepted"),
        ({"algorithm": filtered(max_inflight_gen_batches=2)}, "max_inflight_gen_batches=2 is not accepted: 1"),
        ({"n": 1, "algorithm": filtered()}, "actor_rollout_ref.rollout.n=1 is not accepted"),
        ({"reward": {"reward_model": {"enable": True}}}, "reward.reward_model.enable_resource_pool=False is not"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_started(tmp_path, world, changes, text):
    with pytest.raises(ValueError, match=text):
        world.trainer(config(tmp_path, **changes), [50] * 10)
