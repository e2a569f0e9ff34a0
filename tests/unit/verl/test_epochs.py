"""The last update of a run that ends with its data is known, and what is not known is said."""

from __future__ import annotations

from typing import Any

import pytest
from builders import fill, plain_collector, rollout
from omegaconf import DictConfig, OmegaConf

from goldilocks import Collector, Surplus
from goldilocks.config.settings import Settings
from goldilocks.core.filters import Variance
from goldilocks.verl.driven import Driven, UpdatesPerEpoch, schedule_note
from goldilocks.verl.v0.python_config import TrainerConfig


def trainer(epochs: int, steps: int | None = None) -> DictConfig:
    return OmegaConf.create({"total_epochs": epochs, "total_training_steps": steps})


def train(epochs: UpdatesPerEpoch, collector: Collector, informative: Any) -> int:
    """Make updates until the epochs are over, or verl's own count is reached; return how many."""
    most = 200
    for update in range(1, most + 1):
        fill(collector, lambda request, index: rollout(request, index, (0.0, float(informative(request.prompt.index)))))
        collector.take()
        if epochs.over:
            return update
    return most


def test_the_last_update_is_the_one_after_which_no_batch_can_be_filled() -> None:
    collector = plain_collector(48, filter=Variance(), target_groups=3, gen_batch_size=3)
    updates = train(UpdatesPerEpoch(trainer(epochs=3), collector), collector, informative=lambda index: index % 3 == 0)
    assert 14 <= updates <= 18  # a third of 144 prompts, three an update, and some that were carried
    assert 144 - collector.prompts_issued < 3


@pytest.mark.parametrize("carried", [0, 1, 2])
def test_groups_that_wait_are_trained_before_the_run_ends_unless_they_expire(carried: int) -> None:
    collector = plain_collector(12, target_groups=4, gen_batch_size=12, surplus=Surplus(max_carry_steps=carried))
    epochs = UpdatesPerEpoch(trainer(epochs=1), collector)
    assert train(epochs, collector, informative=lambda index: True) == 1 + carried
    assert collector.prompts_issued == 12


def test_a_number_of_updates_has_the_last_word() -> None:
    collector = plain_collector(2)
    epochs = UpdatesPerEpoch(trainer(epochs=1, steps=100), collector)
    assert train(epochs, collector, informative=lambda index: True) == 200
    assert collector.prompts_issued >= 200 * 2
    assert 7 // epochs == 0  # verl asks, and ends the run at total_epochs


def test_epochs_that_would_end_the_run_on_verls_own_trainer_and_do_not_here_are_said(capsys: Any) -> None:
    for steps, said in ((24, ""), (25, "total_training_steps=25 ends this run; verl's ends with total_epochs=3")):
        UpdatesPerEpoch(trainer(epochs=3, steps=steps), plain_collector(48, target_groups=6))
        out = capsys.readouterr().out
        assert said in out
        assert bool(out) == bool(said)


def test_a_batch_of_more_prompts_than_there_are_is_refused_where_epochs_end_the_run() -> None:
    """verl counts no batch in an epoch then, and so no update in the run."""
    collector = plain_collector(5, target_groups=6)
    UpdatesPerEpoch(trainer(epochs=3, steps=2), collector)
    with pytest.raises(ValueError, match=r"data\.train_batch_size=6 is not accepted: at most 5, the prompts there are"):
        UpdatesPerEpoch(trainer(epochs=3), collector)
    UpdatesPerEpoch(OmegaConf.create({**trainer(epochs=3), "val_only": True}), collector)  # makes no update


@pytest.mark.parametrize(("batch", "mini", "updates"), [(8, 4, 2), (8, 8, 1), (10, 8, 2), (20, 8, 3)])
def test_a_batch_is_as_many_mini_batches_as_on_verls_own_trainer(batch: int, mini: int, updates: int) -> None:
    """verl pads the last one to the size of the others."""
    driven = Driven()
    driven.config = OmegaConf.create({"data": {"train_batch_size": batch}})
    assert driven._mini_batches(OmegaConf.create({"ppo_mini_batch_size": mini})) == updates


def test_verl_is_told_the_last_epoch_until_the_run_is_over() -> None:
    collector = plain_collector(2, gen_batch_size=6)
    epochs = UpdatesPerEpoch(trainer(epochs=1), collector)
    collector.requests()
    assert collector.prompts_issued >= 2
    assert 1 // epochs == 0


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, False),
        ({"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"}, True),
        ({"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1}, True),
        ({"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine", "trainer.total_training_steps": 9}, False),
        ({"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine", "algorithm.filter_groups.enable": False}, False),
    ],
)
def test_a_schedule_over_updates_that_will_not_be_made_is_said(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], told: bool
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    given = {"actor_rollout_ref.rollout.n": 4, "algorithm.filter_groups.enable": True, "trainer.total_epochs": 3}
    config = TrainerConfig(more={**given, **keys}).to_verl()
    note = schedule_note(config, Settings.from_config(config), 48)
    assert (note is not None) == told
    assert note is None or "trainer.total_epochs=3 makes 48 updates at most" in note
