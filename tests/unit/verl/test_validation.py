"""verl's validation with accuracy by column: rows are found again by the uid that each trainer gives them."""

from __future__ import annotations

import itertools
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from goldilocks.core import Beliefs
from goldilocks.core.effects import Division
from goldilocks.verl.driven import Driven
from goldilocks.verl.update.async_trainer import GoldilocksAsyncTrainer
from goldilocks.verl.update.trainer import GoldilocksTrainer
from goldilocks.verl.v0.trainer import RayPPOTrainerWithSampling

LEVELS = [1, 2, 1, 2]
RIGHT = [1.0, 0.0, 1.0, 1.0]


def batches():
    """Two batches of two rows, as verl's collate function makes them."""
    for start in (0, 2):
        infos = [{"level": level, "split": "val"} for level in LEVELS[start : start + 2]]
        yield {
            "dummy_tensor": torch.zeros(2, 1),
            "data_source": np.array(["a", "a"], dtype=object),
            "extra_info": np.array(infos, dtype=object),
            "index": np.array([start, start + 1], dtype=object),
        }


class Validation:
    """The part of a validation that gives rows their uid; the metrics are verl's own."""

    def __init__(self, columns):
        self.settings = SimpleNamespace(policies=SimpleNamespace(validate_by=columns))
        keys, names = np.arange(2, dtype=np.uint64), ["val/level/1/acc", "val/level/2/acc"]
        self.collector = SimpleNamespace(beliefs=Beliefs(keys, divisions=[Division(np.arange(2), keys)], names=names))
        self.val_dataloader = list(batches())

    def _validate(self):
        uids, rows = [], list(RIGHT)
        for batch in self.val_dataloader:
            uids += list(self._uids(batch))
        infos = {"reward": rows, "acc": rows}
        order = [2, 0, 3, 1]  # answers come back in any order
        shuffled = {name: [values[place] for place in order] for name, values in infos.items()}
        return self._val_metrics_update(["a"] * 4, [uids[place] for place in order], shuffled, [])


class OfV0(Validation):
    def _uids(self, batch):
        return DataProto.from_single_dict(batch).non_tensor_batch["uid"]

    _val_metrics_update = RayPPOTrainer._val_metrics_update


class OfV1(Validation):
    def _uids(self, batch):
        batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(2)], dtype=object)
        return batch["uid"]

    _val_metrics_update = PPOTrainer._val_metrics_update


@pytest.mark.parametrize("kind", [OfV0, OfV1])
def test_accuracy_by_column_stands_beside_verls_metrics(kind):
    trainer = type("Trainer", (Driven, kind), {})(["level", "data_source"])
    loader = trainer.val_dataloader
    metrics = trainer._validate()
    assert {name: value for name, value in metrics.items() if name.startswith("val/")} == {
        "val/level/1/acc": 1.0,
        "val/level/2/acc": 0.5,
        "val/data_source/a/acc": 0.75,
    }
    assert metrics["val-core/a/acc/mean@1"] == 0.75
    assert trainer.val_dataloader is loader
    assert trainer.collector.beliefs.pass_rate(np.arange(2)) == pytest.approx([1.0, 0.5], abs=0.01), "an oracle is told"


@pytest.mark.parametrize("kind", [OfV0, OfV1])
@pytest.mark.parametrize("votes", [{}, {"pred": ["7", "8", "7", "7"]}])
def test_without_columns_the_metrics_are_verls_own(kind, votes):
    trainer = type("Trainer", (Driven, kind), {})([])
    given = (["a"] * 4, ["x", "x", "y", "y"], {"reward": RIGHT, **votes}, [np.array([1, 2])])
    assert trainer._val_metrics_update(*given) == kind._val_metrics_update(trainer, *given)


class WithAFailure(OfV1):
    """Of the four prompts, the last has no answer: its rollout failed, or the function that grades it."""

    def _val_metrics_update(self, sources, uids, infos, turns):
        expected = dict.fromkeys((("a", uid) for uid in uids), 1)
        graded = {name: values[:3] for name, values in infos.items()}
        return super()._val_metrics_update(sources[:3], uids[:3], graded, turns, expected_acc_counts=expected)


def test_answers_that_failed_are_counted_and_said_and_left_out_by_column(caplog):
    metrics = type("Trainer", (WithAFailure, Driven, OfV1), {})(["level"])._validate()
    assert metrics["val/failed_answers"] == 1
    assert {metrics["val/level/1/acc"], metrics["val/level/2/acc"]} == {1.0}
    assert metrics["val-core/a/acc/mean@1"] == 0.75, "verl counts it as wrong"
    assert "1 of 4 answers of the validation failed" in caplog.text


@pytest.mark.parametrize("kind", [RayPPOTrainerWithSampling, GoldilocksTrainer, GoldilocksAsyncTrainer])
@pytest.mark.parametrize("name", ["_validate", "_val_metrics_update"])
def test_every_trainer_of_ours_validates_by_column(kind, name):
    owners = [owner for owner in kind.__mro__ if name in vars(owner)]
    ours = list(itertools.takewhile(lambda owner: owner.__module__.startswith("goldilocks."), owners))
    assert ours[-1] is Driven, "it stands before verl's own"
