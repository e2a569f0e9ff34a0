"""``goldilocks.guard`` on verl: the actor's loss, which verl lets a trainer set on its workers (``set_loss_fn``).

The loss sees a mini-batch in micro-batches and gives the verdict with the last one, the same on all ranks.
Torch calls a hook right before an optimizer steps; the hook removes the gradients of a skipped update. So no parameter,
no moment and no step count of the optimizer changes; verl's counters and learning rate go on.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers import engine_workers
from verl.workers.utils import losses, padding

from goldilocks.algorithms.behaviour import GuardVerdict, UpdateGuard
from goldilocks.core.replay import Guard

COUNTS = ("replay/guarded_rows", "replay/guarded_tokens", "replay/skipped_updates")
NAMES = ("replay/m2", *COUNTS)


class GuardedLoss:
    """verl's loss of the actor with guarded advantages; each worker has one for its life."""

    _others: WeakSet[torch.optim.Optimizer]  # the optimizers of other models in this process, such as the critic

    def __init__(self, actor: DictConfig, guard: Guard) -> None:
        self._config = omega_conf_to_dataclass(actor)
        self._guard = UpdateGuard(guard.bound, guard.skip)
        self._rows = 0  # of the current mini-batch, so far
        self._verdict: GuardVerdict | None = None  # until the actor's optimizer steps

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a worker: watch its optimizers from before the first verdict on."""
        vars(self).update(state)
        self._others = WeakSet()
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        data = data.copy()
        data["advantages"] = self._guarded(model_output["log_probs"].detach(), data)
        loss, metrics = engine_workers.ppo_loss(self._config, model_output, data, dp_group)
        found = self._judged(data, dp_group)
        return loss, {**metrics, **{name: Metric(AggregationType.SUM, found.get(name, 0.0)) for name in NAMES}}

    def _guarded(self, log_probs: Any, data: Any) -> Any:
        """Return the advantages, zero for masked tokens, in verl's nested form."""
        now = losses.no_padding_2_padding(log_probs, data)
        stored = [name for name in ("advantages", "response_mask", "old_log_probs") if name in data]
        rows = data.select(*stored).to_padded_tensor()
        behaviour = rows.get("old_log_probs", torch.full_like(now, torch.nan))  # NaN: this policy wrote the row
        guarded = self._guard.guarded(now, behaviour, rows["advantages"], rows["response_mask"])
        return padding.response_to_nested(guarded, data["response_mask"])

    def _judged(self, data: Any, dp_group: Any) -> dict[str, float]:
        """Return the guard's metrics of the mini-batch with its last micro-batch, and nothing before."""
        self._rows += len(data)
        ranks = tu.get_non_tensor_data(data, "dp_size", 1)
        if self._rows * ranks < tu.get_non_tensor_data(data, "global_batch_size", 0):
            return {}
        self._rows = 0
        self._verdict = self._guard.verdict(lambda sums: _summed(sums, dp_group))
        return self._verdict.metrics

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Remove the gradients of a skipped update.

        verl does not step the actor's optimizer where gradients are not finite, and the verdict stays. So an optimizer
        that steps without a verdict is remembered as another model's, and no verdict holds for it.
        """
        if self._verdict is None:
            self._others.add(optimizer)
        elif optimizer not in self._others:
            if self._verdict.skip:
                optimizer.zero_grad(set_to_none=True)
            self._verdict = None


def _summed(sums: Tensor, group: Any) -> Tensor:
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums, group=group)
    return sums


def guard_metrics(found: dict[str, Any], updates: int) -> dict[str, float]:
    """Take the guard's metrics out of verl's, which are means over the updates of a batch; sum up the counts."""
    mean = {name: found.pop(f"actor/{name}") for name in NAMES}
    return {name: value * updates if name in COUNTS else value for name, value in mean.items()}
