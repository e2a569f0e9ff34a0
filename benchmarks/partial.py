"""What ``on_full: partial`` saves, and what it does to the answers that are trained.

    python benchmarks/partial.py                # the simulated engine: seconds
    python benchmarks/partial.py --real         # the tiny model on this machine, through verl: minutes

Every row trains the same number of groups. Lengths vary tenfold, and the longest answer is five times the mean, so that
a step that waits for it is mostly waiting. The real runs take their learning rate down to 0 and reward by a hash of the
answer: no length is worth more than another, so lengths move only if the choice of what is trained moves them.

Columns: the time of a step over that of ``finish`` with the same batch; mean length of what is trained over the mean
length of what was started; mean and largest age, in updates, of the oldest token of a trained group; share of the
generated tokens that were thrown away.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from goldilocks.core import Collector, ListSource, Surplus
from goldilocks.core.allocators import Adaptive, Allocator, Fixed
from goldilocks.core.filters import Everything
from goldilocks.core.selectors import Uniform
from goldilocks.simulate import EngineConfig, PassRates, SimulatedEngine, batches
from goldilocks.types import OnFull, StopRule

STEPS, PROMPTS, TARGET, MEAN, LONGEST, SPREAD = 20, 20_000, 64, 200, 1_000, 0.7
ALLOCATORS: dict[str, Allocator] = {"n=8": Fixed(8), "contrast": Adaptive(max_n=32, stop=StopRule.CONTRAST)}
CHOICES = [
    Surplus(),
    Surplus(on_full=OnFull.REQUEUE),
    *(Surplus(carry, OnFull.PARTIAL) for carry in (1, 2, 4, 8)),
]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    step_time: float
    trained_over_started: float
    age_mean: float
    age_max: float
    wasted: float

    def text(self, finish: Row) -> str:
        """The line, with the step's time over that of ``finish``."""
        return (
            f"{self.name:<34}{self.step_time / finish.step_time:>10.2f}{self.trained_over_started:>18.3f}"
            f"{self.age_mean:>10.2f}{self.age_max:>9.0f}{self.wasted:>10.1%}"
        )


HEADER = f"{'':<34}{'step time':>10}{'trained/started':>18}{'mean age':>10}{'max age':>9}{'wasted':>10}"


def simulated(name: str, allocator: Allocator, surplus: Surplus) -> Row:
    """Twenty steps of a simulated engine that has a slot for every rollout."""
    data = PassRates(tuple(range(PROMPTS)), np.full(PROMPTS, 0.3), np.full(PROMPTS, float(MEAN)))
    collector = Collector(
        ListSource(data.contents), Uniform(), allocator, Everything(), target_groups=TARGET, surplus=surplus
    )
    engine = SimulatedEngine(data, EngineConfig(slots=8_192, spread=SPREAD, wait=0.0, max_tokens=LONGEST), seed=3)
    lengths: list[int] = []
    ages: list[float] = []
    for _, batch in zip(range(STEPS), batches(collector, engine, rollouts=10**9), strict=False):
        lengths += [rollout.tokens for group in batch for rollout in group.trained]
        ages += [collector.step - group.version for group in batch]
    accounts = collector.accounts
    lost = sum(accounts.by_class(accounts.tokens)[name] for name in ("cancelled", "expired"))
    return Row(
        name,
        engine.clock / STEPS,
        float(np.mean(lengths)) / mean_length(),
        float(np.mean(ages)),
        max(ages),
        lost / accounts.generated_tokens,
    )


def mean_length() -> float:
    """The mean of the engine's lengths: log-normal, cut at the longest."""
    drawn = np.random.default_rng(1).lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, 10**6)
    return float(np.minimum(drawn, LONGEST).mean())


def label(surplus: Surplus) -> str:
    """A choice as the config has it."""
    return f"{surplus.on_full}, max_carry_steps={surplus.max_carry_steps}"


def print_simulated() -> None:
    """Print the table of the simulated engine."""
    print(f"simulated: {STEPS} steps of {TARGET} groups, mean length {mean_length():.0f}, longest {LONGEST}\n{HEADER}")
    for policy, allocator in ALLOCATORS.items():
        rows = [simulated(f"{policy}, {label(surplus)}", allocator, surplus) for surplus in CHOICES]
        print(*(row.text(rows[0]) for row in rows), sep="\n", flush=True)


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--real", action="store_true", help="train the tiny model through verl instead")
    if not parser.parse_args().real:
        print_simulated()


if __name__ == "__main__":
    main()
