"""What the V1 trainer cannot do is said before anything is started."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.utils import config as verl_config

from goldilocks import TrainerConfig
from goldilocks.config.recipes import choose, compose_config
from goldilocks.config.settings import Settings
from goldilocks.verl.checks import check_entry, check_run, check_v0, check_v1, check_with_verl, names_ours
from goldilocks.verl.update.async_trainer import prepare


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def config(**keys: Any) -> Any:
    made = TrainerConfig().to_verl()
    for key, value in keys.items():
        OmegaConf.update(made, key, value, force_add=True)
    return made


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.sampler.custom_sampler.path", "pkg://mine"),
        ("reward.reward_model.enable", True),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class", "mine.Manager"),
        ("skip.rollout_tq.enable", True),
    ],
)
def test_what_would_be_ignored_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{key}.* is not accepted: .* with trainer\.v1\.trainer_mode=goldilocks"):
        check_v1(config(**{key: value}))
    check_v1(config())


def test_rollouts_from_a_file_are_refused_on_v0_which_asks_for_several_rounds_in_a_step() -> None:
    """verl gives the second round of a step the rollouts of the first."""
    skipping = config(**{"skip.rollout.enable": True, "skip.rollout.steps": [1]})
    with pytest.raises(ValueError, match=r"skip\.rollout\.enable=True is not accepted: False on verl's V0 trainer"):
        check_v0(skipping, Settings.from_config(skipping))


def test_what_our_server_cannot_do_is_refused_by_the_trainer_too() -> None:
    rollout = "actor_rollout_ref.rollout"
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=2 .* rollout\.name=transformers"):
        check_v1(config(**{f"{rollout}.name": "transformers", f"{rollout}.tensor_model_parallel_size": 2}))


@pytest.mark.parametrize(("name", "value"), [("threshold", 2), ("threshold", None), ("strategy", "wait")])
@pytest.mark.parametrize("mode", ["goldilocks", "goldilocks_async"])
def test_verls_bounds_on_age_are_refused_and_ours_is_named(mode: str, name: str, value: Any) -> None:
    key = f"trainer.v1.sampler.max_off_policy_{name}"
    with pytest.raises(ValueError, match=rf"{key}={value!r} is not accepted: .*filter_groups\.max_carry_steps"):
        check_v1(config(**{"trainer.v1.trainer_mode": mode, key: value}))


@pytest.mark.parametrize(
    ("name", "value", "accepted"), [("hybrid_rollout.enable_switch", True, "False"), ("num_warmup_batches", 2, "1")]
)
def test_the_async_trainer_lends_no_devices_and_begins_one_batch_ahead(name: str, value: Any, accepted: str) -> None:
    """verl's loop would do either otherwise, where ours issues prompts in its own way."""
    rollout, key = "actor_rollout_ref.rollout", f"trainer.v1.separate_async.{name}"
    keys = {f"{rollout}.nnodes": 1, f"{rollout}.checkpoint_engine.backend": "ray"}
    prepare(config(**keys))
    with pytest.raises(ValueError, match=rf"{key}={value} is not accepted: {accepted}.*goldilocks_async"):
        prepare(config(**keys, **{key: value}))


@pytest.mark.parametrize("mode", ["goldilocks", "goldilocks_async"])
@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("separate_async.parameter_sync_step", 2, 3),  # by 2, verl's trainer sends weights after each batch, as ours do
        ("colocate_async.num_warmup_batches", 1, 3),
        ("sampler.sync_refill_failed_groups", False, True),
    ],
)
def test_keys_of_verls_own_trainers_that_ours_do_not_read_are_said(mode, name, usual, other, caplog) -> None:
    sizes = {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 4, "trainer.use_v1": True}
    for value, told in ((usual, False), (other, True)):
        check_run(config(**sizes, **{"trainer.v1.trainer_mode": mode, f"trainer.v1.{name}": value}))
        assert (f"{name}={value} has no effect with trainer.v1.trainer_mode={mode}: " in caplog.text) is told


def test_gspo_is_refused_where_groups_are_carried_and_not_where_none_are() -> None:
    actor, groups = "actor_rollout_ref.actor", "algorithm.filter_groups"
    gspo = {f"{actor}.policy_loss.loss_mode": "gspo", f"{actor}.clip_ratio_low": 3e-4, f"{actor}.clip_ratio_high": 4e-4}
    check_v1(config(**gspo))  # nothing is left over from a batch
    filtered = {**gspo, f"{groups}.enable": True, f"{groups}.metric": "acc", "actor_rollout_ref.rollout.n": 4}
    for check in (check_v1, lambda run: check_v0(run, Settings.from_config(run))):
        with pytest.raises(ValueError, match=r"filter_groups\.max_carry_steps=1 is not accepted: 0, "):
            check(config(**filtered))
        check(config(**filtered, **{f"{groups}.max_carry_steps": 0}))


def test_partial_rollouts_are_refused_where_an_engine_cannot_stop_a_request() -> None:
    partial = {"algorithm.filter_groups.on_full": "partial"}
    with pytest.raises(ValueError, match=r"filter_groups\.on_full='partial' is not accepted: .*rollout.name=sglang"):
        check_v1(config(**partial, **{"actor_rollout_ref.rollout.name": "sglang"}))
    ours = {"actor_rollout_ref.rollout.name": "transformers", "actor_rollout_ref.rollout.tensor_model_parallel_size": 1}
    check_v1(config(**partial, **ours))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"goldilocks.selecter": "thompson"}, r"goldilocks\.selecter is not a key \(did you mean 'selector'\?\)"),
        ({"goldiloks.selector": "thompson"}, r"'goldiloks' is a section that nobody reads \(did you mean 'goldilocks'"),
        ({"n_resp_per_prompt": 16}, r"n_resp_per_prompt=16 is not accepted: actor_rollout_ref\.rollout\.n"),
        ({"actor_rollout_ref.rollout.mode": "sync"}, r"rollout\.mode='sync' is not accepted: async"),
    ],
)
def test_verls_own_command_refuses_what_our_trainer_would_before_ray_starts(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_entry(config(**keys, **{"trainer.use_v1": True, "trainer.v1.trainer_mode": "goldilocks"}))


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("+goldilocks.selector=thompson", True),
        ("+goldiloks.selector=thompson", True),
        ("trainer.v1.trainer_mode=goldilocks", True),
        ("+n_resp_per_prompt=16", True),
        ("++algorithm.filter_groups.enable=true", True),
        ("data.train_batch_size=8", False),
        ("+my_section.key=1", False),
    ],
)
def test_verls_command_is_looked_at_where_its_words_name_a_key_of_ours(word: str, ours: bool) -> None:
    assert names_ours(["data.seed=1", word]) is ours


FILE_OF_KEYS, RECIPE = ["--config-dir=d", "--config-name=mine"], ["+recipe=dapo_strata", "trainer.use_v1=False"]
THOMPSON = "goldilocks.selector=thompson: no effect with trainer."
OURS = {"trainer.use_v1": True, "trainer.v1.trainer_mode": "goldilocks"}
GSPO = {
    "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
}


@pytest.mark.parametrize(
    ("words", "keys", "said"),
    [
        (FILE_OF_KEYS, {"goldilocks.selector": "thompson"}, THOMPSON),
        (["-cn", "mine"], {"goldilocks.selector": "thompson"}, THOMPSON),
        (FILE_OF_KEYS, {"goldiloks.selector": "thompson"}, "'goldiloks' is a section that nobody reads"),
        (FILE_OF_KEYS, {"goldilocks.selector": "uniform"}, None),
        (["trainer.v1.trainer_mode=goldilocks"], {**OURS, **GSPO}, "loss_mode=gspo with clip_ratio_low=0.2"),
        (["trainer.v1.trainer_mode=goldilocks"], {**OURS, "reward.num_workers": 64}, "reward.num_workers=64 has no"),
        (["trainer.v1.trainer_mode=goldilocks"], {**OURS, "actor_rollout_ref.rollout.agent.num_workers": 2}, None),
        (FILE_OF_KEYS, {"n_resp_per_prompt": 16}, None),  # a variable of the file's own
        (RECIPE, lambda: compose_config(choose(["dapo_strata", RECIPE[1]], "cpu")), THOMPSON),
    ],
)
def test_verls_command_says_what_has_no_effect_and_what_is_likely_a_mistake(
    words: list[str], keys: Any, said: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["main_ppo.py", *words])
    seen: list[Any] = []
    monkeypatch.setattr("verl.utils.config.validate_config", lambda config, **_: seen.append(config))
    check_with_verl()
    given = keys() if callable(keys) else config(**keys)
    verl_config.validate_config(given, use_reference_policy=False, use_critic=False)
    ours = [record.getMessage() for record in caplog.records if record.name == "goldilocks.verl.checks"]
    assert seen == [given]
    assert len(ours) == (said is not None)
    assert all(str(said) in one for one in ours)


def test_verls_command_with_a_file_of_keys_refuses_what_our_trainer_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["main_ppo.py", *FILE_OF_KEYS])
    monkeypatch.setattr("verl.utils.config.validate_config", lambda **_: None)
    check_with_verl()
    keys = {**OURS, "actor_rollout_ref.rollout.mode": "sync"}
    with pytest.raises(ValueError, match=r"rollout\.mode='sync' is not accepted: async"):
        verl_config.validate_config(config=config(**keys), use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("words", [[], ["data.seed=1", "+my_section.key=1"]])
def test_without_words_that_could_bring_a_key_of_ours_verls_function_stays_verls(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = verl_config.validate_config
    monkeypatch.setattr("sys.argv", ["main_ppo.py", *words])
    check_with_verl()
    assert verl_config.validate_config is before


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("goldilocks.selector", "thompson", "goldilocks.selector=thompson: no effect with trainer.v1.trainer_mode"),
        ("algorithm.filter_groups.on_full", "requeue", "algorithm.filter_groups.on_full=requeue: no effect with"),
        ("goldiloks.selector", "thompson", "'goldiloks' is a section that nobody reads (did you mean 'goldilocks'?)"),
        ("algorithm.filter_groups.enable", True, None),  # verl's own trainer has it
        ("goldilocks.selector", "uniform", None),
        ("my_section.key", 1, None),
    ],
)
def test_keys_that_verls_own_trainer_does_not_read_are_named_in_the_log(
    key: str, value: Any, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"trainer.use_v1": True, "trainer.v1.trainer_mode": "sync", "actor_rollout_ref.actor.use_dynamic_bsz": True}
    check_entry(config(**keys, **{key: value}))
    ours = [record.getMessage() for record in caplog.records if record.name == "goldilocks.verl.checks"]
    assert len(ours) == (said is not None)
    assert all(one.startswith(str(said)) for one in ours)


def test_our_trainer_on_v0_reads_the_keys(caplog: pytest.LogCaptureFixture) -> None:
    given = config(**{"trainer.use_v1": False, "goldilocks.selector": "thompson"})
    check_entry(given, ours=True)
    assert not caplog.records
    check_entry(given)
    assert "no effect with trainer.use_v1=False" in caplog.text
