"""Are the answers that are trained as long as the answers that were started?

    python benchmarks/length_bias.py

Latency is length in the simulated engine, so short answers arrive first. Two ways to count are run on the same engine:
by the order in which rollouts were asked for, which is what the collector does, and by the order in which they arrive.
The columns are what ``max_carry_steps`` and ``on_full`` add. Every prompt has pass rate 0.3 and a mean length of 200
tokens, so that nothing but the rule favours a length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from goldilocks.core import Collector, ListSource, Surplus
from goldilocks.core.allocators import Adaptive, Allocator, Fixed
from goldilocks.core.filters import Everything
from goldilocks.core.selectors import Uniform
from goldilocks.lab.simulate import EngineConfig, PassRates, SimulatedEngine, batches
from goldilocks.types import Failure, OnFull, Request, Rollout, StopRule

PROMPTS, MEAN, ROLLOUTS = 4_000, 200, 30_000
ALLOCATORS: dict[str, Allocator] = {
    "fixed, n=8": Fixed(8),
    "positive": Adaptive(max_n=32),
    "contrast": Adaptive(max_n=32, stop=StopRule.CONTRAST),
}
SURPLUS = {
    "finish, carry 1": Surplus(),
    "finish, carry 0": Surplus(max_carry_steps=0),
    "requeue": Surplus(on_full=OnFull.REQUEUE),
}


class ArrivalOrder(SimulatedEngine):
    """The same engine, which gives each rollout the lowest index of its group that has not arrived yet."""

    def __init__(self, prompts: PassRates, config: EngineConfig, *, seed: int) -> None:
        super().__init__(prompts, config, seed=seed)
        self._unused: dict[str, list[int]] = defaultdict(list)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._unused[request.uid] += range(request.first, request.first + request.n)
        super().submit(requests)

    def events(self, within: float | None = None) -> list[Rollout | Failure]:
        return [replace(event, index=self._unused[event.uid].pop(0)) for event in super().events(within)]


def trained_over_started(engine: type[SimulatedEngine], allocator: Allocator, surplus: Surplus) -> float:
    """The mean length of what is trained over the mean length of the data."""
    data = PassRates(tuple(range(PROMPTS)), np.full(PROMPTS, 0.3), np.full(PROMPTS, float(MEAN)))
    collector = Collector(
        ListSource(data.contents),
        Uniform(),
        allocator,
        Everything(),
        target_groups=64,
        gen_batch_size=96,
        surplus=surplus,
    )
    machine = engine(data, EngineConfig(slots=1024, spread=0.7, wait=0.0), seed=3)
    batched = batches(collector, machine, rollouts=ROLLOUTS)
    return float(np.mean([rollout.tokens for batch in batched for group in batch for rollout in group.trained])) / MEAN


def main() -> None:
    """Print the table."""
    print(f"mean length trained / started{'':14}" + "".join(f"{name:>17}" for name in SURPLUS))
    for name, allocator in ALLOCATORS.items():
        for order, engine in (("as asked for", SimulatedEngine), ("as they arrive", ArrivalOrder)):
            figures = [trained_over_started(engine, allocator, surplus) for surplus in SURPLUS.values()]
            print(f"{name:<14}{order:<29}" + "".join(f"{figure:>17.3f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
