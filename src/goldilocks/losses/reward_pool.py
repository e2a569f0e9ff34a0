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


def pooled(estimator: Estimator) -> Estimator:
    """Return verl's estimator over all rollouts seen, for the rows that are trained."""

    @functools.wraps(estimator)
    @torch.no_grad()
    def over_the_pool(
        token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **others: Any
    ) -> tuple[Tensor, Tensor]:
        whole = _Whole.of(token_level_rewards, response_mask, index)
        rewards, mask, uids = _with_untrained(whole.rewards, whole.mask, whole.uids)
        advantages, returns = estimator(
            token_level_rewards=rewards, response_mask=mask, index=uids, config=config, **others
        )
        return whole.spread(advantages, response_mask), whole.spread(returns, response_mask)

    return over_the_pool


class _Whole(NamedTuple):
    """One row for each rollout; ``rollout`` is the number of each given row's, or None where each row is a rollout."""

    rewards: Tensor
    mask: Tensor
    uids: np.ndarray
    rollout: Tensor | None

    @classmethod
    def of(cls, rewards: Tensor, mask: Tensor, index: np.ndarray) -> _Whole:
        rows = _rows.get()
        if rows is None:
            return cls(rewards, mask, index, None)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in rows))}
        last = {name: row for row, (name, _) in sorted(enumerate(rows), key=lambda entry: entry[1][1])}
        final = [last[name] for name in numbers]
        rollout = torch.tensor([numbers[name] for name, _ in rows], device=mask.device)
        counts = mask.sum(-1)
        tokens = counts.new_zeros(len(numbers)).index_add_(0, rollout, counts)
        made = _rows_of(rewards[final].sum(-1), tokens, int(tokens.max()), rewards, mask)
        return cls(*made, index[final], rollout)

    def spread(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the values of the rows that were given; these estimators give all tokens of a rollout the same."""
        if self.rollout is None:
            return values[: len(mask), : mask.shape[1]]
        return values[:, 0][self.rollout].unsqueeze(-1) * mask


def _rows_of(scores: Tensor, tokens: Tensor, width: int, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return rewards and mask of a row for each score, which is at the last of its tokens."""
    places, last = torch.arange(width, device=mask.device), (tokens - 1).unsqueeze(1)
    return (places == last) * scores.to(rewards).unsqueeze(1), (places <= last).to(mask.dtype)


def _with_untrained(rewards: Tensor, mask: Tensor, index: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return the rows, and behind them one for each untrained rollout of their groups, its reward at its last token."""
    known = _untrained.get() or {}
    others = [(uid, one) for uid in dict.fromkeys(index) for one in known.get(uid, ())]
    if not others:
        return rewards, mask, index
    tokens = torch.tensor([one.tokens for _, one in others], device=mask.device)
    width = max(mask.shape[1], int(tokens.max()))
    more = _rows_of(rewards.new_tensor([one.reward for _, one in others]), tokens, width, rewards, mask)
    uids = np.concatenate([index, np.array([uid for uid, _ in others], dtype=object)])
    wider = (0, width - mask.shape[1])
    rewards, mask = (torch.nn.functional.pad(own, wider) for own in (rewards, mask))
    return torch.cat([rewards, more[0]]), torch.cat([mask, more[1]]), uids


def normalised_by_config(estimator: Estimator) -> Estimator:
    """Return ``grpo`` as verl's trainers call it: ``norm_adv_by_std_in_grpo`` is read from the config."""

    @functools.wraps(estimator)
    def with_config(*rows: Any, config: Any = None, **others: Any) -> tuple[Tensor, Tensor]:
        normalise = True if config is None else bool(config.get("norm_adv_by_std_in_grpo", True))
        return estimator(*rows, config=config, norm_adv_by_std_in_grpo=normalise, **others)

    return with_config
