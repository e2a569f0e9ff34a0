"""Estimators ``<name>_pool``: a group's baseline comes from every rollout seen, not only from the rows trained.

Adaptive rollouts stop early and may train only some of a group, and the batch filter cuts groups down, so the mean of a
prompt's trained rows is biased. verl's estimators get the trained rows only. ``pooled`` passes the other rollouts to
the same estimator beside them, and returns the advantages of the trained rows. The trainer names the other rollouts:

    with untrained_rollouts({group.uid: [Untrained(rollout.reward, rollout.tokens), ...] for group in groups}):
        ...verl computes the advantages, in this thread...

A trained row has the advantage that verl's estimator gives it among all rollouts of its group.

A rollout may have several rows (``rows_of_rollouts``). It counts once, as the reward of its last row behind the tokens
of all its rows, and each of its rows has its advantage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from goldilocks.errors import require

Estimator = Callable[..., tuple[Tensor, Tensor]]
T = TypeVar("T")

SUFFIX = "_pool"
# verl's estimators whose baseline is over a group and needs no more than rewards and lengths of its rollouts.
POOLED = (
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline", "gpg",
)  # fmt: skip
# Their baselines are over a group too, but need log-probs or the single rewards of each rollout.
NOT_POOLED = ("gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")


class Untrained(NamedTuple):
    """A rollout that was seen and is not trained."""

    reward: float
    tokens: int


_untrained: ContextVar[Mapping[str, Sequence[Untrained]] | None] = ContextVar("untrained rollouts", default=None)
_rows: ContextVar[Sequence[tuple[Hashable, int]] | None] = ContextVar("rows of rollouts", default=None)


def untrained_rollouts(by_uid: Mapping[str, Sequence[Untrained]]) -> AbstractContextManager[None]:
    """Let the pool estimators count these rollouts in the baselines of their groups, within the block."""
    return _within(_untrained, by_uid)


def rows_of_rollouts(rows: Sequence[tuple[Hashable, int]]) -> AbstractContextManager[None]:
    """Let the pool estimators count rollouts, within the block: ``rows`` has each row's rollout and its part in it."""
    return _within(_rows, rows)


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def pool_estimator(name: str, use_kl_in_reward: bool) -> str:
    """Return the estimator to use where part of a group is trained; one without a group baseline stays as it is."""
    plain = name.removesuffix(SUFFIX)
    accepted = (
        f"{', '.join(POOLED)}, or one without a group baseline, where only part of a group is trained "
        "(adaptive_rollout.max_train_n, batch_filter) or rollouts have several rows: this one would take its baseline "
        "from the trained rows alone"
    )
    require(plain not in NOT_POOLED, "algorithm.adv_estimator", name, accepted)
    if plain not in POOLED:
        return name
    check_pool(plain + SUFFIX, use_kl_in_reward)
    return plain + SUFFIX


def check_pool(name: str, use_kl_in_reward: bool) -> None:
    """Raise a ``ValueError`` for a pool with a KL penalty in the reward, which untrained rollouts do not have."""
    accepted = (
        f"False with algorithm.adv_estimator={name}, the estimator where only part of a group is trained: the penalty "
        "of the other rollouts is unknown, so their mean is. Use actor_rollout_ref.actor.use_kl_loss=True"
    )
    known = not use_kl_in_reward or name not in {plain + SUFFIX for plain in POOLED}
    require(known, "algorithm.use_kl_in_reward", use_kl_in_reward, accepted)


def pooled(estimator: Estimator, of_rollouts: Estimator | None = None) -> Estimator:
    """Return verl's estimator over all rollouts seen, for the rows that are trained.

    A rollout is one number there, its reward, with a mask that holds its length: memory grows with the rows of the
    batch, not with the tokens of rollouts that are not in it. ``of_rollouts`` is the estimator to call on these
    numbers, where verl's reads tokens one by one.
    """

    @functools.wraps(estimator)
    @torch.no_grad()
    def over_the_pool(
        token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **others: Any
    ) -> tuple[Tensor, Tensor]:
        seen = _untrained.get() or {}
        untrained = [(uid, one) for uid in dict.fromkeys(index) for one in seen.get(uid, ())]
        rows = _rows.get()
        if not untrained and rows is None:  # each row is a rollout, and there are no others
            return estimator(
                token_level_rewards=token_level_rewards, response_mask=response_mask, index=index, **others
            )
        rewards, tokens, uids, rollout = _rollouts(token_level_rewards, response_mask, index, rows)
        rewards = torch.cat([rewards, rewards.new_tensor([one.reward for _, one in untrained])])
        tokens = torch.cat([tokens, tokens.new_tensor([one.tokens for _, one in untrained])])
        uids = np.concatenate([uids, np.array([uid for uid, _ in untrained], dtype=object)])
        values = (of_rollouts or estimator)(
            token_level_rewards=rewards.unsqueeze(1), response_mask=tokens.unsqueeze(1), index=uids, **others
        )
        each = [value.squeeze(1) / tokens.clamp(min=1) for value in values]  # the estimator multiplied by the mask
        advantages, returns = (value[rollout].unsqueeze(1) * response_mask for value in each)
        return advantages, returns

    return over_the_pool


def _rollouts(
    rewards: Tensor, mask: Tensor, index: np.ndarray, rows: Sequence[tuple[Hashable, int]] | None
) -> tuple[Tensor, Tensor, np.ndarray, Tensor]:
    """Return reward, length and uid of each rollout of the batch, and the number of each row's rollout."""
    scores, counts = rewards.sum(-1), mask.sum(-1)
    if rows is None:
        return scores, counts, index, torch.arange(len(mask), device=mask.device)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in rows))}
    last = {name: row for row, (name, _) in sorted(enumerate(rows), key=lambda entry: entry[1][1])}
    final = [last[name] for name in numbers]
    rollout = torch.tensor([numbers[name] for name, _ in rows], device=mask.device)
    tokens = counts.new_zeros(len(numbers)).index_add_(0, rollout, counts)
    return scores[final], tokens, index[final], rollout


def whitened(estimator: Estimator) -> Estimator:
    """Return an estimator of rollouts whose advantages have mean 0 and variance 1 over all tokens, as verl whitens."""

    @functools.wraps(estimator)
    def over_tokens(token_level_rewards: Tensor, response_mask: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        ones = torch.ones_like(response_mask)
        centred, _ = estimator(token_level_rewards=token_level_rewards, response_mask=ones, **others)
        share = response_mask / response_mask.sum()
        apart = centred - (share * centred).sum()
        tokens = response_mask.sum()
        variance = (share * apart.square()).sum() * tokens / (tokens - 1)
        values = apart * torch.rsqrt(variance + 1e-8) * response_mask
        return values, values

    return over_tokens


def normalised_by_config(estimator: Estimator) -> Estimator:
    """Return ``grpo`` as verl's trainers call it: ``norm_adv_by_std_in_grpo`` is read from the config."""

    @functools.wraps(estimator)
    def with_config(*rows: Any, config: Any = None, **others: Any) -> tuple[Tensor, Tensor]:
        normalise = True if config is None else bool(config.get("norm_adv_by_std_in_grpo", True))
        return estimator(*rows, config=config, norm_adv_by_std_in_grpo=normalise, **others)

    return with_config
