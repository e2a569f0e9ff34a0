"""Reused rollouts on TRL: the ratio is against the policy that wrote a token, and the guard acts on that ratio."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import logged
from torch import Tensor

pytest.importorskip("trl")

import trl_world as world
from documented_metrics import undocumented

from goldilocks.trl import GoldilocksGRPOTrainer
from goldilocks.trl.rows import LOG_PROBS

Tokens = tuple[int, ...]


class Watching(GoldilocksGRPOTrainer):
    """Notes, outside of TRL's and our code, what wrote each answer and what each loss compares it with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.written: dict[tuple[Tokens, Tokens], tuple[int, Tensor]] = {}  # the update and its policy's log-probs
        self.compared: list[tuple[int, int, float]] = []  # update of the loss, update that wrote, largest difference
        super().__init__(*args, **kwargs)

    def _generate_round(self, inputs: Any, *args: Any) -> Any:
        made = super()._generate_round(inputs, *args)
        for row in made.rows:
            key = tokens(row.tensors["prompt_ids"]), tokens(row.tensors["completion_ids"])
            self.written[key] = self.state.global_step, self.policy_now(row.tensors)
        return made

    @torch.no_grad()
    def policy_now(self, row: Any) -> Tensor:
        """Log-probs of the completion, by a plain forward pass."""
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        logits = self.model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        for place, advantage in enumerate(inputs["advantages"]):
            prompt = inputs["prompt_ids"][place][inputs["prompt_mask"][place].bool()]
            completion = inputs["completion_ids"][place][inputs["completion_mask"][place].bool()]
            if len(completion) and bool((advantage != 0).any()):
                wrote, expected = self.written[tokens(prompt), tokens(completion)]
                now = self.state.global_step
                if LOG_PROBS in inputs:
                    used = inputs[LOG_PROBS][place, : len(completion)]
                    self.compared.append((now, wrote, float((used - expected).abs().max())))
                else:  # TRL compares with the policy of now
                    self.compared.append((now, wrote, 0.0 if now == wrote else math.inf))
        return loss


def tokens(ids: Tensor) -> Tokens:
    return tuple(ids.tolist())


def watched(out: Path, sections: dict[str, Any], **chosen: Any) -> Watching:
    made: Any = world.trainer(out, ours=Watching, sections=sections, **chosen)
    made.train()
    return made


@pytest.mark.parametrize("only_signal", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_later_mini_batches_and_epochs_compare_with_the_policy_that_wrote_the_token(
    tmp_path: Path, accumulation: int, only_signal: bool
) -> None:
    """Two epochs over four parts of a batch; each part is an update, or every two of them."""
    sections = {"goldilocks": {"guard": {"enable": True}}, "only_signal": only_signal}
    sizes = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_iterations": 2}
    updates = {"gradient_accumulation_steps": accumulation, "max_steps": 16 // accumulation}
    one = watched(tmp_path, sections, **sizes, **updates)
    assert {now - wrote for now, wrote, _ in one.compared} == set(range(8 // accumulation))
    assert max(difference for *_, difference in one.compared) < 1e-4


def test_groups_that_are_used_again_and_again_compare_with_the_policy_that_wrote_them(tmp_path: Path) -> None:
    replay = {"groups": 4, "max_age": 3, "max_uses": 3}
    one = watched(tmp_path, {"goldilocks": {"replay": replay, "guard": {"enable": True}}}, max_steps=5)
    assert {now - wrote for now, wrote, _ in one.compared} == {0, 1, 2, 3}
    assert max(difference for *_, difference in one.compared) < 1e-4


def test_mini_batches_with_groups_that_are_used_again(tmp_path: Path) -> None:
    """Two updates a batch: a group is used again one and two batches later, in either mini-batch."""
    replay = {"groups": 2, "max_age": 2, "max_uses": 2, "prefer": "signal"}
    sizes = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 8}
    one = watched(tmp_path, {"goldilocks": {"replay": replay, "guard": {"enable": True}}}, **sizes)
    assert {now - wrote for now, wrote, _ in one.compared} == {0, 1, 2, 3, 4, 5}
    assert max(difference for *_, difference in one.compared) < 1e-4


def reused(out: Path, guard: dict[str, Any], **chosen: Any) -> Any:
    """A run of two epochs over each batch, each an update."""
    sections = {"goldilocks": {"guard": guard}}
    made: Any = world.trainer(out, sections=sections, num_iterations=2, lr_scheduler_type="constant", **chosen)
    made.train()
    return made


def test_a_skipped_update_moves_neither_the_weights_nor_the_optimizer_and_the_schedule_goes_on(tmp_path: Path) -> None:
    skipping = {"enable": True, "skip": 1e-12}
    one = reused(tmp_path / "one", skipping, max_steps=1)
    two = reused(tmp_path / "two", skipping, max_steps=2)
    assert torch.equal(world.weights(one), world.weights(two))
    steps = {int(state["step"]) for state in two.optimizer.state.values()}
    assert steps == {1}
    assert two.state.global_step == 2
    assert two.lr_scheduler.last_epoch == 2
    plain = reused(tmp_path / "plain", {"enable": True, "skip": None}, max_steps=2)
    assert not torch.equal(world.weights(one), world.weights(plain))


def test_the_guard_counts_what_it_does_and_a_loose_one_does_nothing(tmp_path: Path) -> None:
    loose, tight, skipping = (
        reused(tmp_path / str(place), {"enable": True, **guard}, max_steps=4, learning_rate=3e-2)
        for place, guard in enumerate(
            ({"bound": 1e9, "skip": None}, {"bound": 1e-3, "skip": None}, {"bound": 1e-3, "skip": 1e-6})
        )
    )
    off = reused(tmp_path / "off", {"enable": False}, max_steps=4, learning_rate=3e-2)
    assert torch.equal(world.weights(loose), world.weights(off))
    assert not torch.equal(world.weights(tight), world.weights(off))
    steps = {one: [step for step in one.state.log_history if "loss" in step] for one in (loose, tight, skipping)}
    assert [step["replay/m2"] for step in steps[loose]][::2] == [0.0, 0.0], "a batch is trained first by its own policy"
    assert all(step["replay/m2"] > 1e-3 for step in steps[loose][1::2])
    assert not any(step["replay/guarded_rows"] + step["replay/skipped_updates"] for step in steps[loose])
    assert all(0 < step["replay/guarded_rows"] <= step["replay/guarded_tokens"] for step in steps[tight][1::2])
    assert [step["replay/skipped_updates"] for step in steps[skipping]] == [0, 1, 0, 1]
    lines = logged(tmp_path / "1")
    recorded = [line for line in lines if "replay/m2" in line]
    assert [line["replay/m2"] for line in recorded] == [step["replay/m2"] for step in steps[tight]]
    assert not undocumented(name for line in recorded for name in line)
