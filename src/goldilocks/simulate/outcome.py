"""The figures by which policies are compared.

A group counts if it was trained, or if it is kept for the next batch when the budget ends. Groups that were dropped,
expired or unfinished count only as cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from goldilocks.core.collector import Collector
from goldilocks.core.informative import is_informative, signal
from goldilocks.simulate.engine import SimulatedEngine
from goldilocks.simulate.pass_rates import PassRates
from goldilocks.types import Group

HARD = 0.2  # the highest pass rate of a hard prompt; prompts with pass rate 0 are impossible, not hard


class Harvest:
    """Sums over the groups of a run."""

    def __init__(self) -> None:
        self.batches = 0
        self.informative = 0
        self.signal = 0.0
        self.reached: set[int] = set()  # prompts with at least one informative group
        self.filled_at = 0

    def add(self, batch: Iterable[Group], clock: int) -> None:
        """Count a batch that was trained; ``clock`` is the engine step at which it was full."""
        self.batches += 1
        self.filled_at = clock
        self._count(group for group in batch if not group.replays)

    def add_waiting(self, collector: Collector) -> None:
        """Count the groups that are kept for the next batch."""
        trained = collector.allocator.trained
        self._count(replace(group, trained=tuple(trained(group, collector.ledger))) for group in collector.kept)

    def _count(self, groups: Iterable[Group]) -> None:
        for group in filter(is_informative, groups):
            self.informative += 1
            self.signal += signal(group)
            self.reached.add(group.prompt.index)


@dataclass(frozen=True)
class Outcome:
    """One policy's row. A figure is None if it is undefined: no batch was filled, or no prompt is hard."""

    policy: str
    rollouts: int
    tokens: int
    batches: int
    informative_groups_per_1k_rollouts: float
    signal_per_1k_rollouts: float
    informative_groups_per_1m_tokens: float
    signal_per_1m_tokens: float
    engine_steps_per_batch: float | None
    hard_prompts_reached: float | None
    mean_pass_rate: float
    token_share: dict[str, float]
    trained_again: float  # tokens trained again / tokens generated

    @classmethod
    def of(
        cls, name: str, prompts: PassRates, collector: Collector, engine: SimulatedEngine, harvest: Harvest
    ) -> Outcome:
        """Compute the figures of a finished run."""
        accounts = collector.accounts
        rollouts, tokens = accounts.generated_rollouts, accounts.generated_tokens
        hard = np.flatnonzero((prompts.pass_rate > 0) & (prompts.pass_rate <= HARD)).tolist()
        by_class = accounts.by_class(accounts.tokens)
        return cls(
            policy=name,
            rollouts=rollouts,
            tokens=tokens,
            batches=harvest.batches,
            informative_groups_per_1k_rollouts=1e3 * harvest.informative / max(rollouts, 1),
            signal_per_1k_rollouts=1e3 * harvest.signal / max(rollouts, 1),
            informative_groups_per_1m_tokens=1e6 * harvest.informative / max(tokens, 1),
            signal_per_1m_tokens=1e6 * harvest.signal / max(tokens, 1),
            engine_steps_per_batch=harvest.filled_at / harvest.batches if harvest.batches else None,
            hard_prompts_reached=len(harvest.reached.intersection(hard)) / len(hard) if hard else None,
            mean_pass_rate=engine.learner.mean_pass_rate,
            token_share={account: count / max(tokens, 1) for account, count in by_class.items()},
            trained_again=collector.metrics().get("replay/total_tokens", 0) / max(tokens, 1),
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)
