"""verl's trainer computes the same advantages when it is given numbers of groups in the place of their uids."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base
from verl_world import Queue, short_rows

from goldilocks.algorithms import Untrained, untrained_rollouts
from goldilocks.verl import estimators  # noqa: F401  # registers the pool estimators
from goldilocks.verl.patches.trainers import groups_at_once
from goldilocks.verl.store.rows_at_hand import RowsAtHand
from goldilocks.verl.update.driver_queue import DriverQueue, advantages, signal
from goldilocks.verl.update.held_batch import HeldBatch

GROUPS = {"g0": 4, "g_1_0": 3, "g2": 1}  # a uid may look like the key of a row
KEYS = [f"{uid}_{i}_0" for uid, n in GROUPS.items() for i in range(n)]
BROUGHT = ("uid", "response_mask", "rm_scores", "rollout_log_probs", "extra_fields")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setattr(trainer_base, "tq", transfer_queue)  # verl's own, whatever this process has installed before
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


def stored(queue: Queue) -> dict[str, dict[str, list[float]]]:
    return {key: {name: row[name].tolist() for name in ("advantages", "returns")} for key, row in queue.rows.items()}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("estimator", ["grpo", "grpo_pool", "rloo", "gpg", "opo"])
def test_advantages_are_verls(estimator: str, held: bool, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"g0": [Untrained(1.0, 3)], "g2": [Untrained(0.0, 2), Untrained(1.0, 9)]}
    batch = queue.batch()
    with untrained_rollouts(others):
        compute(batch, estimator)
    expected = stored(queue)
    for row in queue.rows.values():
        del row["advantages"], row["returns"]

    monkeypatch.setattr(trainer_base, "tq", DriverQueue())
    with (
        advantages(batch, unread=("rollout_log_probs",), held=HeldBatch.fetch(KEYS) if held else None) as label,
        untrained_rollouts({label(uid): seen for uid, seen in others.items()}),
    ):
        compute(batch, estimator)
    trainer_base.tq.kv_clear(keys=[], partition_id="val")  # a validation, before verl reads the metrics
    found = trainer_base.tq.kv_batch_get(
        keys=KEYS, partition_id="train", select_fields=["uid", "advantages", "returns", "values"]
    )
    assert found.pop("uid").tolist() == [queue.rows[key]["uid"] for key in KEYS], "as in the queue, outside"
    computed = {name: [row.tolist() for row in rows.unbind()] for name, rows in found.items()}
    assert computed == {name: [row[name] for row in expected.values()] for name in ("advantages", "returns")}
    assert all(("advantages" in row) is not held for row in queue.rows.values())
    assert any(value for row in expected.values() for value in row["advantages"])


def test_without_our_queue_groups_go_by_their_uids(queue: Queue) -> None:
    with advantages(queue.batch()) as label:
        assert label("g_1_0") == "g_1_0"


def test_the_update_is_given_what_was_stored_once_and_for_those_rows_alone(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, fetched = queue.batch(), []
    monkeypatch.setattr(trainer_base, "tq", DriverQueue())
    with advantages(batch):
        compute(batch, "grpo")
    get = transfer_queue.kv_batch_get
    monkeypatch.setattr(transfer_queue, "kv_batch_get", lambda **wanted: (fetched.append(wanted), get(**wanted))[1])
    kept = signal(batch)
    assert not fetched
    assert [row.tolist() for row in kept["advantages"].unbind()] == [
        row["advantages"] for row in stored(queue).values()
    ]
    again = signal(batch)
    assert len(fetched) == 1
    for name in ("advantages", "response_mask"):
        assert torch.equal(again[name].values(), kept[name].values())

    with advantages(batch):
        compute(batch, "grpo")
    fetched.clear()
    assert signal(batch.select_keys(KEYS[:2]))["advantages"].size(0) == 2
    assert len(fetched) == 1


def test_outside_of_advantages_it_is_the_queue_itself(queue: Queue) -> None:
    ours: Any = DriverQueue()
    found = ours.kv_batch_get(keys=KEYS, partition_id="train", select_fields=["uid"])
    assert found.pop("uid").tolist() == [queue.rows[key]["uid"] for key in KEYS]
    assert ours.kv_list is transfer_queue.kv_list
    ours.kv_clear(keys=KEYS[:3], partition_id="train")
    assert list(queue.rows) == KEYS[3:]


def test_of_rows_that_came_with_their_reports_the_queue_is_asked_nothing_and_frees_none(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, rows = queue.batch(), RowsAtHand()
    compute(batch, "grpo")
    expected = stored(queue)
    rows.add(short_rows(KEYS, [{name: row[name] for name in BROUGHT} for row in queue.rows.values()]))
    queue.kv_clear(KEYS, "train")
    monkeypatch.setattr(trainer_base, "tq", DriverQueue())
    with advantages(batch, held=HeldBatch.of(rows, KEYS)):
        compute(batch, "grpo")
    found = trainer_base.tq.kv_batch_get(keys=KEYS, partition_id="train", select_fields=["uid", "advantages"])
    assert found.pop("uid").tolist() == [key.rsplit("_", 2)[0] for key in KEYS]
    assert [row.tolist() for row in found["advantages"].unbind()] == [row["advantages"] for row in expected.values()]
    queue.add("nothing_0_0", version=0, length=1)
    trainer_base.tq.kv_clear(keys=[*KEYS, "nothing_0_0"], partition_id="train")
    assert queue.rows == {}


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_grpo_group_by_group_is_verls_number_by_number(seed: int, by_std: bool) -> None:
    """Groups of any size in any order, rewards on any token, rows whose first tokens or whose all are masked."""
    original = inspect.unwrap(trainer_base.compute_advantage_for_multi_trajectories)
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
