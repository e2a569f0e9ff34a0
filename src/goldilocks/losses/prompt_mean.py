"""Loss aggregation ``prompt-mean``: every prompt weighs the same, however many rollouts it has.

verl's ``agg_loss`` sees rows and tokens, not prompts, and so do the losses that call it. But a clipped policy loss is
positively homogeneous in the advantage, max(−wA·s, −wA·clip(s)) = w·max(−A·s, −A·clip(s)), so the advantage can carry
a row's weight through verl's own aggregation, over any split into mini-batches, micro-batches and ranks. That holds for
the policy-gradient term alone: KL and entropy terms are aggregated over rows or tokens as ``loss_agg_mode`` says.

The weighted mass of all rows is the total that the aggregation divides by, and each prompt has an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from goldilocks.errors import require

# The losses that scale with the advantage and leave the aggregation to `loss_agg_mode`.
LOSS_MODES = ("vanilla", "gspo", "gpg", "cispo", "dppo_tv", "dppo_kl", "bypass_mode")
ROW_MODES = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
AGG_MODES = (*ROW_MODES, "token-mean")


def require_agg_mode(mode: str) -> None:
    """Raise a ``ValueError`` for an aggregation that cannot be made a mean over prompts."""
    accepted = f"with goldilocks.loss_agg=prompt-mean one of {', '.join(AGG_MODES)}"
    require(mode in AGG_MODES, "actor_rollout_ref.actor.loss_agg_mode", mode, accepted)


def prompt_mean_weights(uids: Sequence[object] | np.ndarray, mass: Tensor, total: float | None = None) -> Tensor:
    """Return the weight of each row: ``total / (prompts · mass of the row's prompt)``.

    ``mass`` is how much the aggregation counts a row: 1 where it averages sequences, the number of tokens where it
    averages tokens, 0 for padding. Rows of a prompt without mass weigh 0. ``total`` is what the aggregation divides by;
    by default the sum of the masses.
    """
    require(len(uids) == len(mass), "uids", f"{len(uids)} uids", f"one for each of the {len(mass)} rows")
    _, inverse = np.unique(np.asarray(uids, dtype=str), return_inverse=True)
    group = torch.from_numpy(inverse).to(mass.device)
    mass = mass.double()
    of_group = mass.new_zeros(len(uids)).index_add_(0, group, mass)
    share = (mass.sum() if total is None else total) / of_group.count_nonzero().clamp(min=1)
    return torch.where(mass > 0, share / of_group[group], 0).float()


def weigh_prompts_equally(
    advantages: Tensor,
    response_mask: Tensor,
    uids: Sequence[object] | np.ndarray,
    loss_agg_mode: str,
    rows_counted: int | None = None,
) -> Tensor:
    """Return advantages under which ``loss_agg_mode`` is a mean over prompts; within a prompt it does not change.

    Takes the whole batch of a step, padding included. ``rows_counted`` is how many rows the sequence modes divide by
    over all mini-batches; by default every row of the batch, as verl's workers do.
    """
    require_agg_mode(loss_agg_mode)
    tokens = response_mask.sum(-1)
    if loss_agg_mode in ROW_MODES:
        rows = len(tokens) if rows_counted is None else rows_counted
        weights = prompt_mean_weights(uids, (tokens > 0).long(), rows)
    else:
        weights = prompt_mean_weights(uids, tokens)
    return advantages * weights.to(advantages.dtype).unsqueeze(-1)
