"""Advantages that are computed group by group are verl's, number by number."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base
from verl_world import Queue

from goldilocks.losses.advantages import Untrained, untrained_rollouts
from goldilocks.verl import estimators  # noqa: F401  # registers the pool estimators
from goldilocks.verl.patches.trainers import GROUP_NUMBERS, groups_at_once

GROUPS = {"g0": 4, "g_1_0": 3, "g2": 1}  # a uid may look like the key of a row
KEYS = [f"{uid}_{i}_0" for uid, n in GROUPS.items() for i in range(n)]
VERLS = {name: inspect.unwrap(getattr(trainer_base, name)) for name in GROUP_NUMBERS.replaced}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue(monkeypatch)
    for place, key in enumerate(KEYS):
        uid, index, _ = key.rsplit("_", 2)
        queue.add(f"x_{index}_0", version=0, length=2 + place % 3, rollout_log_probs=-0.5)
        queue.rows[key] = {**queue.rows.pop(f"x_{index}_0"), "uid": uid}
        queue.tags[key] = queue.tags.pop(f"x_{index}_0")
    return queue


def compute(batch: KVBatchMeta, estimator: str) -> None:
    algorithm = {
        "adv_estimator": estimator,
        "use_kl_in_reward": False,
        "rollout_correction": None,
        "gamma": 1.0,
        "lam": 1.0,
    }
    config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 4}}})
    trainer_base.PPOTrainer._compute_advantage(SimpleNamespace(config=config), batch, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["grpo", "grpo_pool", "rloo", "gpg", "opo"])
def test_verls_trainer_stores_the_same_advantages(
    estimator: str, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"g0": [Untrained(1.0, 3)], "g2": [Untrained(0.0, 2), Untrained(1.0, 9)]}
    found = []
    for ours in (False, True):
        for name, verls in VERLS.items():
            monkeypatch.setattr(trainer_base, name, GROUP_NUMBERS.replaced[name](verls) if ours else verls)
        with untrained_rollouts(others):
            compute(queue.batch(), estimator)
        rows = queue.rows.values()
        found.append([{name: row.pop(name).tolist() for name in ("advantages", "returns")} for row in rows])
    assert found[1] == found[0]
    assert any(value for row in found[0] for value in row["advantages"])


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_grpo_group_by_group_is_verls_number_by_number(seed: int, by_std: bool) -> None:
    """Groups of any size in any order, rewards on any token, rows whose first tokens or whose all are masked."""
    original = VERLS["compute_advantage_for_multi_trajectories"]
    generator = torch.Generator().manual_seed(seed)
    uids = torch.randint(12, (60,), generator=generator).tolist()
    keys = [f"g{uid}_{place}_0" for place, uid in enumerate(uids)]
    fields = {
        "token_level_rewards": torch.randn(60, 7, generator=generator) * torch.randint(2, (60, 7), generator=generator),
        "response_mask": torch.randint(2, (60, 7), generator=generator),
    }
    found = []
    for compute_all in (original, groups_at_once(original)):
        data = DataProto(batch=TensorDict({name: value.clone() for name, value in fields.items()}, batch_size=60))
        data.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        data = compute_all(data, batch_keys=keys, adv_estimator="grpo", norm_adv_by_std_in_grpo=by_std)
        found.append([data.batch[name] for name in ("advantages", "returns")])
    assert all(torch.equal(ours, verls) for ours, verls in zip(found[1], found[0], strict=True))


def test_rollouts_of_several_rows_and_other_estimators_are_verls_own() -> None:
    asked: list[str] = []

    def verls(data: Any, batch_keys: list[str], adv_estimator: str) -> None:
        asked.append(adv_estimator)

    ours = groups_at_once(verls)
    ours(None, batch_keys=["g0_0_0"], adv_estimator="rloo")
    ours(None, batch_keys=["g0_0_0", "g0_0_1"], adv_estimator="grpo")
    assert asked == ["rloo", "grpo"]
