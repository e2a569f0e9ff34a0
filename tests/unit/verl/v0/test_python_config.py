from __future__ import annotations

import math

import pytest
from omegaconf import OmegaConf
from verl.trainer.config import AlgoConfig as VerlAlgoConfig
from verl.trainer.config import FilterGroupsConfig as VerlFilterGroupsConfig
from verl.utils.config import omega_conf_to_dataclass

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
from goldilocks.config.settings import Settings
from goldilocks.filtering import PPOFilterConfig
from goldilocks.verl.v0.python_config import name_targets


def example() -> TrainerConfig:
    """Example 1 of the guide."""
    return TrainerConfig(
        algorithm=AlgoConfig(
            adv_estimator="grpo",
            use_kl_in_reward=False,
            norm_adv_by_std_in_grpo=True,
            filter_groups=FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=10),
        ),
        data=DataConfig(gen_batch_size=1536, train_batch_size=512),
        actor_rollout_ref=ActorRolloutRefConfig(
            rollout=RolloutConfig(n=5), actor=ActorConfig(use_kl_loss=True, kl_loss_coef=0.001)
        ),
        trainer=PPOTrainerConfig(critic_warmup=0),
    )


def test_the_guides_example_becomes_verls_config() -> None:
    config = example().to_verl()
    assert config.algorithm.adv_estimator == "grpo"
    assert config.data.gen_batch_size == 1536
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.actor_rollout_ref.actor.kl_loss_coef == 0.001
    assert config.trainer.critic_warmup == 0
    assert config.trainer.v1.trainer_mode == "sync"  # what is not said is as verl has it
    settings = Settings.from_config(config)
    assert settings.filter_groups.metric == "acc"
    assert settings.limits().max_num_gen_batches == 10
    assert settings.train_batch_size == 512
    assert TrainerConfig().to_verl().data.train_batch_size == 1024, "one config does not change the next"


def test_verls_own_classes_of_the_same_names_are_taken_too() -> None:
    algorithm = VerlAlgoConfig(
        adv_estimator="rloo", filter_groups=VerlFilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=3)
    )
    config = TrainerConfig(algorithm=algorithm).to_verl()
    assert config.algorithm.adv_estimator == "rloo"
    assert config.algorithm.filter_groups.max_num_gen_batches == 3
    assert config.algorithm.pf_ppo.reweight_method == "pow"  # verl's yaml says more than its class's defaults


def test_filter_groups_can_be_set_on_verls_config() -> None:
    config = example().to_verl()
    OmegaConf.set_struct(config, True)
    config.algorithm.filter_groups = FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=10, min_std=0.1)
    assert Settings.from_config(config).filter_groups.min_std == 0.1


@pytest.mark.parametrize("groups", [VerlFilterGroupsConfig, FilterGroupsConfig])
def test_filter_groups_in_a_config_become_an_object_again(groups: type) -> None:
    given = groups(enable=True, metric="acc", max_num_gen_batches=-1)
    assigned = example().to_verl()
    assigned.algorithm.filter_groups = given
    name_targets(assigned)
    for config in (TrainerConfig(algorithm=AlgoConfig(filter_groups=given)).to_verl(), assigned):
        found = omega_conf_to_dataclass(config.algorithm).filter_groups
        assert (found.enable, found.metric, found.max_num_gen_batches) == (True, "acc", -1)


def test_no_positive_number_of_generation_batches_is_no_limit() -> None:
    for batches in (0, -1):
        groups = FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=batches)
        config = TrainerConfig(
            algorithm=AlgoConfig(filter_groups=groups), actor_rollout_ref=ActorRolloutRefConfig(rollout={"n": 4})
        ).to_verl()
        assert Settings.from_config(config).limits().prompts_left(10**9, 512) == math.inf


def test_the_batch_filter_is_a_field() -> None:
    rollout = ActorRolloutRefConfig(rollout=RolloutConfig(n=8))
    for given in (PPOFilterConfig(enable_two_gate_filter=True), {"enable_two_gate_filter": True}):
        chosen = Settings.from_config(TrainerConfig(batch_filter=given, actor_rollout_ref=rollout).to_verl())
        assert chosen.batch_filter_config == PPOFilterConfig(target_group_size=8, enable_two_gate_filter=True)
    every_default = TrainerConfig(batch_filter=PPOFilterConfig(), actor_rollout_ref=rollout)
    assert Settings.from_config(every_default.to_verl()).batch_filter_config == PPOFilterConfig(target_group_size=8)
    assert Settings.from_config(TrainerConfig().to_verl()).batch_filter_config is None


def test_any_other_key_of_verl_goes_by_its_dotted_name() -> None:
    config = TrainerConfig(
        actor_rollout_ref=ActorRolloutRefConfig(
            model={"path": "model", "override_config": {"num_hidden_layers": 2}},
            actor=ActorConfig(more={"optim.lr": 3e-4}),
        ),
        adaptive_rollout={"enable": True, "max_n": 16},
        more={"ray_kwargs.ray_init.num_cpus": 3, "ray_kwargs.ray_init.runtime_env.env_vars": {"A": "1"}},
    ).to_verl()
    assert config.actor_rollout_ref.model.override_config.num_hidden_layers == 2
    assert config.actor_rollout_ref.actor.optim.lr == 3e-4
    assert config.adaptive_rollout.max_n == 16
    assert config.ray_kwargs.ray_init.num_cpus == 3


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (DataConfig(more={"gen_batchsize": 1}), r"data.gen_batchsize is not a key .*'data.gen_batch_size'"),
        (DataConfig(more={"nested.key": 1}), "data.nested.key is not a key of verl's config"),
    ],
)
def test_a_key_that_verl_does_not_have_is_an_error_that_suggests_one(section: DataConfig, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TrainerConfig(data=section).to_verl()


def test_rejection_sample_among_the_trainers_keys_is_answered_with_the_keys_that_do_it() -> None:
    trainer = PPOTrainerConfig(more={"rejection_sample": True})
    with pytest.raises(ValueError, match=r"^trainer.rejection_sample=True is not .*batch_filter.max_response_length=N"):
        TrainerConfig(trainer=trainer).to_verl()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DataConfig(train_batch_size=0), "data.train_batch_size=0 is not accepted: 1 or more"),
        (lambda: DataConfig(gen_batch_size=-1), "data.gen_batch_size=-1"),
        (lambda: RolloutConfig(n=0), "actor_rollout_ref.rollout.n=0"),
        (lambda: RolloutConfig(temperature=0), "actor_rollout_ref.rollout.temperature=0"),
        (lambda: ActorConfig(kl_loss_coef=-1.0), "actor_rollout_ref.actor.kl_loss_coef=-1.0"),
        (lambda: AlgoConfig(gamma=2.0), "algorithm.gamma=2.0"),
        (lambda: AlgoConfig(adv_estimator=""), "algorithm.adv_estimator=''"),
        (lambda: PPOTrainerConfig(critic_warmup=-1), "trainer.critic_warmup=-1"),
        (lambda: FilterGroupsConfig(metric=""), "filter_groups.metric=''"),
        (lambda: FilterGroupsConfig(on_exhausted="stop"), "on_exhausted='stop' .* error, shrink, backfill"),
        (lambda: FilterGroupsConfig(max_carry_steps=-1), "max_carry_steps=-1"),
        (lambda: FilterGroupsConfig(min_std=-0.1), "min_std=-0.1"),
    ],
)
def test_a_value_that_cannot_work_names_the_key_and_what_would(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_a_script_that_hydra_started_can_make_one() -> None:
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from goldilocks.verl.v0.python_config import _verl_defaults

    _verl_defaults.cache_clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        assert TrainerConfig().to_verl().data.train_batch_size == 1024
        assert GlobalHydra.instance().is_initialized()
        assert compose("ppo_trainer").data.train_batch_size == 1024
