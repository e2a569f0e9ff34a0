"""The rows of a micro-batch that the loss needs.

A row whose advantage is zero adds nothing to the gradient where the loss has no KL term: it is counted in the loss's
denominator and not computed. What is left is cut to its longest prompt and its longest completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from goldilocks.trl.rows import PROMPT

BY_ROW = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")  # each row's term is proportional to its advantage


def allowed(args: Any) -> bool:
    """Whether a row without advantage has no part in the loss of this configuration, nor in its denominator."""
    off = {"beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "entropy_coef": 0.0}
    adaptive = getattr(args, "use_adaptive_entropy", False)
    return (
        args.loss_type in BY_ROW
        and not adaptive
        and all(getattr(args, key, value) == value for key, value in off.items())
    )


def with_signal(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the rows to compute and the share of all rows that they are; 0 where there is nothing to compute."""
    advantages: Tensor = inputs["advantages"]
    has = advantages != 0
    rows = len(advantages)
    if not has.any():
        return {}, 0.0
    kept = {name: value[has] if _per_row(value, rows) else value for name, value in inputs.items()}
    return _cut(kept), float(has.sum()) / rows


def no_loss(model: nn.Module) -> Tensor:
    """Return a loss of zero whose gradient is zero for every parameter, as that of rows without signal is.

    No gradient at all would be another thing: the optimizer would not move, where its momentum moves it on.
    """
    firsts = [one.view(-1)[:1] for one in model.parameters() if one.requires_grad and one.numel()]
    return 0.0 * torch.cat([one.float() for one in firsts]).sum()


def _per_row(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows


def _cut(inputs: dict[str, Any]) -> dict[str, Any]:
    """Prompts are padded on the left, completions on the right."""
    prompt, completion = (max(1, int(inputs[f"{part}_mask"].sum(1).max())) for part in ("prompt", "completion"))
    longest = inputs["completion_mask"].shape[1]

    def cut(name: str, value: Any) -> Any:
        if name in PROMPT:
            return value[:, -prompt:]
        by_token = isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == longest
        return value[:, :completion] if by_token else value

    return {name: cut(name, value) for name, value in inputs.items()}
