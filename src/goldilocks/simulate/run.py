"""The real collector against the simulated engine, until a budget of rollouts is spent.

Policies are compared at equal cost. Every rollout asked of the engine counts, cancelled and failed ones too, and those
in flight when the budget ends are waited for. So every policy spends exactly the same number of rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from goldilocks.config.settings import Settings
from goldilocks.core import Collector, Exhausted
from goldilocks.core.source import ListSource
from goldilocks.drive.driver import Driver, Stalled
from goldilocks.drive.rows import NoRows
from goldilocks.errors import require
from goldilocks.simulate.engine import EngineConfig, SimulatedEngine
from goldilocks.simulate.pass_rates import PassRates
from goldilocks.simulate.table import Harvest, Outcome
from goldilocks.types import Group

Tell = Callable[[int], None]


@dataclass(frozen=True)
class Setup:
    """The settings that all policies of one comparison share."""

    rollouts: int = 50_000
    seed: int = 1
    target_groups: int = 64
    gen_batch_size: int | None = None
    repeat: bool = True
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        require(self.rollouts >= 1, "rollouts", self.rollouts, "1 or more")
        require(self.seed >= 0, "seed", self.seed, "0 or more")


def _untold(rollouts: int) -> None:
    """Do nothing."""


def simulate(name: str, settings: Settings, prompts: PassRates, setup: Setup, tell: Tell = _untold) -> Outcome:
    """Spend the budget under these settings (``recipe_settings``). ``tell`` is called with the rollouts asked for."""
    source = ListSource(prompts.contents, readable=prompts.readable, columns=prompts.columns)
    collector = settings.collector(source, repeat=setup.repeat)
    engine = SimulatedEngine(prompts, setup.engine, seed=setup.seed)
    harvest = Harvest()
    try:
        for batch in batches(collector, engine, setup.rollouts, tell):
            harvest.add(batch, engine.clock)
    except Exhausted as error:
        if setup.repeat:
            raise ValueError(f"{name}: {error}") from None
        # Without repeats, a run whose budget outlasts the data ends here.
    harvest.add_waiting(collector)
    collector.accounts.check()
    return Outcome.of(name, prompts, collector, engine, harvest)


def batches(
    collector: Collector, engine: SimulatedEngine, rollouts: int, tell: Tell = _untold
) -> Iterator[tuple[Group, ...]]:
    """Yield every batch that ``rollouts`` rollouts fill; the engine trains on each before the next is collected."""
    engine.budget = rollouts
    driver = Driver(collector, engine, NoRows(), max_failures=math.inf)  # the failure rate is the user's own
    try:
        while True:
            batch = driver.batch()
            tell(engine.submitted)
            engine.train(batch)
            yield batch
    except Stalled:  # the budget is spent
        tell(engine.submitted)
