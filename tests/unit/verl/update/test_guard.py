"""The guard in verl's loss: computed by hand for a mini-batch of three rows in two micro-batches."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from documented_metrics import undocumented
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl_world import nested

from goldilocks.core.replay import Guard
from goldilocks.verl.fields import WHOLE_ROWS, WHOLE_TOKENS
from goldilocks.verl.update.guards import GuardedLoss, guard_metrics

NOW = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5], [-0.7, -1.1, 0.0]])  # the log-probs of responses
MOVED = torch.tensor([[0.1, 0.15, 0.2], [-0.1, -0.15, 0.9], [0.0, -0.7, 0.0]])  # less those of who wrote them
ADVANTAGES = torch.tensor([[1.0], [-2.0], [0.5]]).expand(3, 3)
MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
LENGTHS = (3, 3, 2)
# Pushed further: 0.1² 0.15² 0.2² of the first row, 0.1² 0.15² of the second. Each row is a micro-batch: with a bound of
# 0.017 the largest of the first is masked (the mean of the others is 0.01625), of the second none.
KEPT = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])
M2 = float((MOVED.square() * MASK).sum() / MASK.sum())
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


def actor(**changes: Any) -> Any:
    sizes = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "loss_scale_factor": None}
    target = {"_target_": "verl.workers.config.FSDPActorConfig"}
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    return OmegaConf.create({**target, **sizes, **clip, "use_dynamic_bsz": True, **changes})


def cut(rows: Tensor, places: list[int]) -> Tensor:
    return nested([rows[place, : LENGTHS[place]] for place in places])


def micro_batch(*places: int, fresh: tuple[int, ...] = (), rows: int = 3) -> TensorDict:
    """Rows by their places; those that are fresh have no log-probs but the policy's own."""
    old = torch.where(torch.tensor([place in fresh for place in range(3)])[:, None], torch.nan, NOW - MOVED)
    chosen = list(places)
    fields = {
        "prompts": cut(torch.ones(3, 3), chosen),
        "responses": cut(torch.ones(3, 3), chosen),
        "response_mask": cut(MASK, chosen),
        "advantages": cut(ADVANTAGES, chosen),
        "old_log_probs": cut(old, chosen),
    }
    data = TensorDict(fields, batch_size=len(chosen))
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(MASK.sum()), global_batch_size=rows)
    return data


def output(log_probs: Tensor, places: list[int]) -> dict[str, Tensor]:
    """What a model returns: each token's log-prob stands at the token before it; prompts are as long as responses."""
    rows = []
    for place in places:
        length = LENGTHS[place]
        rows.append(torch.cat([torch.zeros(length - 1), log_probs[place, :length], torch.zeros(1)]))
    return {"log_probs": nested(rows)}


@pytest.fixture
def made() -> Iterator[Any]:
    """Guarded losses; the hooks they put into torch are taken out again."""
    losses: list[GuardedLoss] = []

    def make(guard: Guard, **changes: Any) -> GuardedLoss:
        losses.append(pickle.loads(pickle.dumps(GuardedLoss(actor(**changes), guard))))  # as it travels to a worker
        return losses[-1]

    yield make
    for loss in losses:
        loss._hook.remove()


def by_hand(kept: Tensor, mode: str) -> float:
    ratio, advantages = MOVED.exp(), ADVANTAGES * kept
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    tokens, rows = int(MASK.sum()), 3
    totals = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": rows, "loss_scale_factor": None}
    return float(agg_loss(terms, MASK.bool(), mode, **totals))


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_have_no_part_in_the_loss_and_stay_in_its_denominator(made: Any, mode: str) -> None:
    for bound, kept in ((1.0, torch.ones(3, 3)), (0.017, KEPT)):
        loss = made(Guard(True, bound, None), loss_agg_mode=mode)
        found = [loss(output(NOW, [place]), micro_batch(place))[0] for place in range(3)]
        assert float(sum(found)) == pytest.approx(by_hand(kept, mode), abs=1e-6)
    assert by_hand(KEPT, mode) != pytest.approx(by_hand(torch.ones(3, 3), mode), abs=1e-3)


def test_the_metrics_of_a_mini_batch_come_with_its_last_micro_batch(made: Any) -> None:
    loss = made(Guard(True, 0.017, M2 / 2))
    parts = [loss(output(NOW, [place]), micro_batch(place))[1] for place in range(3)]
    names = [name for name in parts[0] if name.startswith("replay/")]
    assert not undocumented(names)
    seen = {name: [part[name].aggregate() for part in parts] for name in names}
    assert seen["replay/m2"] == [0, 0, pytest.approx(M2)]
    assert seen["replay/guarded_rows"] == seen["replay/guarded_tokens"] == seen["replay/skipped_updates"] == [0, 0, 1]
    whole = {f"actor/{name}": Metric.aggregate_dp([_extended(parts, name)]) for name in names}
    assert guard_metrics({**whole, "actor/loss": 1.0}, updates=4) == {
        "replay/m2": pytest.approx(M2),
        "replay/guarded_rows": 4,
        "replay/guarded_tokens": 4,
        "replay/skipped_updates": 4,
    }


def _extended(parts: list[dict[str, Any]], name: str) -> Metric:
    """As verl puts the micro-batches of a rank together."""
    whole = parts[0][name].init_list()
    for part in parts:
        whole.append(part[name])
    return whole


def test_a_skipped_update_moves_neither_the_weights_nor_the_optimizer(made: Any) -> None:
    shift = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.AdamW([shift], lr=0.1)

    def update(skip: float | None, *, moved: bool) -> None:
        loss = made(Guard(True, 10.0, skip))
        for place in range(3):
            data = micro_batch(place, fresh=() if moved else (0, 1, 2))
            tu.assign_non_tensor(data, **{WHOLE_ROWS: 3, WHOLE_TOKENS: int(MASK.sum())})
            loss(output(NOW + shift, [place]), data)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    update(1e-6, moved=True)
    assert float(shift.detach()) == 0
    assert not optimizer.state[shift]
    update(1e-6, moved=False)  # the policy wrote these tokens itself
    one = float(shift.detach())
    assert one != 0
    update(None, moved=True)
    assert float(shift.detach()) != one
    assert int(optimizer.state[shift]["step"]) == 2


def test_an_optimizer_of_another_model_steps_as_ever(made: Any) -> None:
    """A verdict is on the next step alone: that of the actor, whose losses were the last."""
    loss = made(Guard(True, 10.0, 1e-6))
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for place in range(3):
        loss(output(NOW, [place]), micro_batch(place))
    for expected in (1.0, 0.0):
        weight.grad = torch.ones(())
        optimizer.step()
        assert float(weight.detach()) == expected


def test_a_skipped_update_with_gradients_that_are_not_finite_leaves_the_critic_alone(made: Any) -> None:
    """verl does not call the actor's optimizer then: the next to step is the critic's."""
    loss = made(Guard(True, 10.0, 1e-6))
    weight = torch.ones((), requires_grad=True)
    critic = torch.optim.SGD([weight], lr=1.0)
    for expected in (0.0, -1.0):
        weight.grad = torch.ones(())
        critic.step()
        assert float(weight.detach()) == expected
        for place in range(3):
            loss(output(NOW, [place]), micro_batch(place))


def test_gspo_is_guarded_too(made: Any) -> None:
    changes = {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": {"loss_mode": "gspo"}}
    plain, guarded = (made(Guard(True, bound, None), **changes) for bound in (1.0, 0.017))
    log_probs = NOW.clone().requires_grad_()
    slope = [
        torch.autograd.grad(loss(output(log_probs, [0]), micro_batch(0))[0], log_probs)[0] for loss in (plain, guarded)
    ]
    assert bool((slope[0][0] != 0).all())
    assert slope[1][0].tolist() == [pytest.approx(float(slope[0][0, 0])), pytest.approx(float(slope[0][0, 1])), 0.0]
