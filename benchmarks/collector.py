"""What a decision costs: observations a second by the number of open groups, and a choice among a million prompts.

    python benchmarks/collector.py

Both sizes are measured in one run, in turns, and the best of each is reported: only the ratio means much on a shared
machine.
"""

from __future__ import annotations

import gc
import time

import numpy as np

from goldilocks.core import Beliefs, Collector, ListSource
from goldilocks.core.allocators import Fixed
from goldilocks.core.filters import Variance
from goldilocks.core.selectors import Greso, Selector, Thompson, Uniform
from goldilocks.core.source import PromptOrder
from goldilocks.types import Rollout

N = 8
JUDGED = 1_000
PROMPTS = 1_000_000
CHOSEN = 1_024


def seconds_per_observation(open_groups: int, source: ListSource) -> float:
    """Open the groups, then time the arrival of every rollout of a thousand of them, spread over all that are open.

    The work is the same whatever the number that is open: a thousand groups are judged.
    """
    collector = Collector(
        source, Uniform(), Fixed(N), Variance(), target_groups=2 * open_groups, gen_batch_size=open_groups
    )
    rng = np.random.default_rng(0)
    requests = collector.requests()
    chosen = [requests[int(place)] for place in rng.choice(len(requests), JUDGED, replace=False)]
    flight = [(request.uid, index) for request in chosen for index in range(request.n)]
    rollouts = [Rollout(*flight[place], reward=float(place % 2), tokens=100) for place in rng.permutation(len(flight))]
    gc.collect()
    begin = time.perf_counter()
    for rollout in rollouts:
        collector.observe(rollout)
    return (time.perf_counter() - begin) / len(rollouts)


def seconds_per_choice(selector: Selector) -> float:
    """Choose a generation batch from a million prompts, every one of them visited before."""
    rng = np.random.default_rng(0)
    beliefs, pool = Beliefs(np.arange(PROMPTS, dtype=np.uint64)), PromptOrder(PROMPTS, seed=0, repeat=True)
    beliefs.positives[:] = rng.integers(0, 9, PROMPTS)
    beliefs.negatives[:] = 8 - beliefs.positives
    beliefs.visits[:] = 1
    beliefs.streak[:] = (beliefs.positives % 8 == 0) * 2
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        assert len(selector.choose(pool, beliefs, CHOSEN, rng)) == CHOSEN
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    source = ListSource([str(index) for index in range(100_000)])
    sizes = (1_000, 10_000, 100_000)
    best = {size: min(seconds_per_observation(size, source) for _ in range(5)) for size in sizes}
    print(f"{'open groups':>12} {'observations/s':>15} {'µs each':>9} {'against 1,000':>14}")
    for size in sizes:
        print(f"{size:>12,} {1 / best[size]:>15,.0f} {1e6 * best[size]:>9.2f} {best[size] / best[sizes[0]]:>13.2f}×")
    print(f"\n{CHOSEN:,} of {PROMPTS:,} prompts")
    for selector in (Uniform(), Greso(), Thompson()):
        print(f"{type(selector).__name__.lower():>12} {1e3 * seconds_per_choice(selector):>12.1f} ms")


if __name__ == "__main__":
    main()
