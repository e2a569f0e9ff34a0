"""The guard for old weights on TRL: the sampling engine's log-probs beside the trainer's, in every update.

TRL's own ``generate`` samples with the weights that are trained, and returns no log-probs. Goldilocks' engine and vLLM
have weights of their own, and return theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from goldilocks.algorithms.weights_gap import WeightsGuard, gap_sums, has_experts, mean_gap
from goldilocks.trl.rows import LOG_PROBS, SAMPLED


class WeightsGuardCallback(TrainerCallback):
    """Sees every micro-batch of a training run, and judges each update, the same on all processes."""

    def __init__(self, guard: WeightsGuard, accelerator: Any, logged: dict[str, list[float]]) -> None:
        """``logged`` are the values that TRL logs the means of."""
        self._guard = guard
        self._accelerator = accelerator
        self._logged = logged
        self._sums = torch.zeros(2, dtype=torch.float64)
        self.metrics: dict[str, float] = {}  # of the last update

    def see(self, inputs: Mapping[str, Any], log_probs: Tensor) -> None:
        """Add a micro-batch up; call this before ``old_per_token_logps`` is filled with ``log_probs``."""
        sampled = inputs.get(SAMPLED)
        if sampled is not None:
            own, fresh = trainers_log_probs(inputs, log_probs, sampled)
            self._sums += gap_sums(own, sampled, fresh).cpu()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Judge the update whose micro-batches are all there."""
        device = self._accelerator.device
        sums = self._accelerator.reduce(self._sums.to(device, torch.float32), reduction="sum")
        self._sums.zero_()
        self.metrics = self._guard.observe(mean_gap(sums.tolist()))
        for name, value in self.metrics.items():
            self._logged.setdefault(name, []).append(value)


def trainers_log_probs(inputs: Mapping[str, Any], now: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the trainer's log-probs from when the rows were written, and which tokens they can be compared for.

    TRL computes them as ``old_per_token_logps`` where a batch serves several updates; else they are those of ``now``.
    A carried or replayed row has the engine's own in their place, which say nothing.
    """
    mask = inputs["completion_mask"].bool()
    mask = mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask
    old = inputs.get(LOG_PROBS)
    if old is None:
        return now, mask
    own = torch.where(old.isnan(), now, old)
    copied = ((old == sampled) | ~mask).all(1, keepdim=True)
    return own, mask & ~copied


def is_exact(args: Any, model: nn.Module) -> bool:
    """Whether trainer and engine both compute in fp32."""
    half = args.bf16 or args.fp16 or getattr(args, "use_vllm", False)
    return not half and all(one.dtype == torch.float32 for one in model.parameters())


def is_comparable(args: Any, model: nn.Module) -> bool:
    """Whether nothing but rounding tells the engine's log-probs from the trainer's."""
    dropped = any(isinstance(one, nn.Dropout) and one.p > 0 for one in model.modules())
    config: Any = getattr(model, "config", None)
    routed = config is not None and has_experts(config.to_dict())
    return not (dropped or routed or _is_cut(args) or _is_altered(args) or _may_be_raw(args))


def _is_cut(args: Any) -> bool:
    """Whether tokens are left out of the distribution that the engine reports."""
    bound = getattr(args, "vllm_structured_outputs_regex", None)
    return bool((args.top_p or 1.0) < 1 or (args.top_k or 0) > 0 or getattr(args, "min_p", None) or bound)


def _is_altered(args: Any) -> bool:
    """Whether the engine reports logits that more than the temperature has changed."""
    return bool((getattr(args, "repetition_penalty", None) or 1.0) != 1 or getattr(args, "generation_kwargs", None))


def _may_be_raw(args: Any) -> bool:
    """Whether a vLLM server, whose options are its own, may report log-probs without the temperature."""
    served = getattr(args, "use_vllm", False) and args.vllm_mode == "server"
    return bool(served and args.temperature != 1)
