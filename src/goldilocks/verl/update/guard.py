"""``goldilocks.guard`` on verl: the actor's loss, which verl lets a trainer set on its workers (``set_loss_fn``).

The loss sees a mini-batch in micro-batches. With the last one the verdict is given, the same on all data-parallel
ranks. An update that is skipped finds no gradients: torch calls a hook right before an optimizer steps, and the hook
takes them away. So no parameter, no moment and no step count of the optimizer changes; verl's clocks go on, the
learning rate's with each batch as always.
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers import engine_workers
from verl.workers.utils import losses, padding

from goldilocks.algorithms.guard import UpdateGuard
from goldilocks.core.replay import Guard

COUNTS = ("replay/guarded_rows", "replay/guarded_tokens", "replay/skipped_updates")
NAMES = ("replay/m2", *COUNTS)


class GuardedLoss:
    """verl's loss of the actor with the advantages that the guard leaves; each worker has one for its life."""

    def __init__(self, actor: DictConfig, guard: Guard) -> None:
        self._config = omega_conf_to_dataclass(actor)
        self._guard = UpdateGuard(guard.bound, guard.skip)
        self._rows = 0  # of the mini-batch in hand, so far
        self._hook: Any = None
        self._skip = False

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        data = data.copy()
        data["advantages"] = self._guarded(model_output["log_probs"].detach(), data)
        loss, metrics = engine_workers.ppo_loss(self._config, model_output, data, dp_group)
        found = self._verdict(data, dp_group)
        return loss, {**metrics, **{name: Metric(AggregationType.SUM, found.get(name, 0.0)) for name in NAMES}}

    def _guarded(self, log_probs: Any, data: Any) -> Any:
        """Return the advantages, zero for masked tokens, in verl's nested form."""
        now = losses.no_padding_2_padding(log_probs, data)
        stored = [name for name in ("advantages", "response_mask", "old_log_probs") if name in data]
        rows = data.select(*stored).to_padded_tensor()
        behaviour = rows.get("old_log_probs", torch.full_like(now, torch.nan))  # NaN: this policy wrote the row
        guarded = self._guard.guarded(now, behaviour, rows["advantages"], rows["response_mask"])
        return padding.response_to_nested(guarded, data["response_mask"])

    def _verdict(self, data: Any, dp_group: Any) -> dict[str, float]:
        """Return the guard's metrics of a mini-batch with its last micro-batch, and nothing before."""
        self._rows += len(data)
        ranks = tu.get_non_tensor_data(data, "dp_size", 1)
        if self._rows * ranks < tu.get_non_tensor_data(data, "global_batch_size", 0):
            return {}
        self._rows = 0
        verdict = self._guard.verdict(lambda sums: _summed(sums, dp_group))
        self._skip = verdict.skip
        self._hook = self._hook or register_optimizer_step_pre_hook(self._before_step)
        return verdict.metrics

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The critic's optimizer may live in this process too: its steps have no verdict."""
        if self._skip:
            optimizer.zero_grad(set_to_none=True)
        self._skip = False


def _summed(sums: Tensor, group: Any) -> Tensor:
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums, group=group)
    return sums


def guard_metrics(found: dict[str, Any], updates: int) -> dict[str, float]:
    """Take the guard's metrics out of what verl found in a batch, by their own names.

    verl takes the mean over the updates of a batch. That is right for M2; what is counted is added up.
    """
    mean = {name: found.pop(f"actor/{name}") for name in NAMES}
    return {name: value * updates if name in COUNTS else value for name, value in mean.items()}
