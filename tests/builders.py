"""What tests of many rooms are made of: prompts, a plain collector, answers to its requests, and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from goldilocks.config.settings import Settings
from goldilocks.core import Collector, ListSource
from goldilocks.core.allocators import Allocator, Fixed
from goldilocks.core.filters import Everything
from goldilocks.core.selectors import Uniform
from goldilocks.runs.checkpoints import load_state, save_state
from goldilocks.types import Failure, Request, Rollout

Outcome = Callable[[Request, int], Rollout | Failure]  # of a request's rollout with this index


def source(count: int) -> ListSource:
    """Return so many prompts, all different."""
    return ListSource([f"prompt {index}" for index in range(count)])


def plain_collector(
    prompts: int = 100, *, allocator: Allocator | None = None, filter: Any = None, **bounds: Any
) -> Collector:
    """Return a collector of batches of two groups of two, which keeps every group, as far as nothing else is said."""
    bounds = {"target_groups": 2, **bounds}
    return Collector(source(prompts), Uniform(), allocator or Fixed(2), filter or Everything(), **bounds)


def answer(
    collector: Collector, requests: Iterable[Request], rewards: Sequence[float] = (1.0, 0.0), tokens: int = 10
) -> None:
    """Answer every request in full; ``rewards`` go round."""
    observe(collector, requests, lambda request, index: rollout(request, index, rewards, tokens))


def rollout(request: Request, index: int, rewards: Sequence[float] = (1.0, 0.0), tokens: int = 10) -> Rollout:
    """Return the answer with this index; ``rewards`` go round."""
    return Rollout(request.uid, index, rewards[index % len(rewards)], tokens)


def observe(collector: Collector, requests: Iterable[Request], outcome: Outcome) -> None:
    """Tell the collector of the outcome of every rollout that is asked for."""
    for request in requests:
        for index in range(request.first, request.first + request.n):
            collector.observe(outcome(request, index))


def fill(collector: Collector, outcome: Outcome = rollout) -> None:
    """Answer requests until the batch is full."""
    while not collector.ready:
        observe(collector, collector.requests(), outcome)


def reloaded(before: Collector, after: Collector, path: Path) -> Collector:
    """Return ``after`` in the state of ``before``, by way of a file."""
    save_state(before.state_dict(), path)
    after.load_state_dict(load_state(path))
    return after


def settings(*overrides: str, batch: int = 8) -> Settings:
    """Return the settings of GRPO with batches of so many groups of four, and these keys."""
    config = {
        "data": {"train_batch_size": batch, "max_response_length": 16, "seed": None},
        "actor_rollout_ref": {"rollout": {"n": 4}},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "filter_groups": {"enable": False}},
    }
    return Settings.from_config(OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides))))
