"""What a decision costs, by how many groups are open and how many prompts there are.

    python benchmarks/collector.py [--prompts 1000 100000 1000000]

Processor time of one process, the best of a few turns: on a shared machine only the ratio means much, so the first line
says how long the machine takes for ten million additions. The second line, which needs verl, is of memory: the peak
of ``grpo_pool`` for 32 trained rows of 1,024 tokens and 128 untrained rollouts in the group of each, beside the peak of
``grpo`` where all of them are rows.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Callable
from multiprocessing import get_context

import numpy as np

from goldilocks.core import Beliefs, Collector, ListSource
from goldilocks.core.allocators import Adaptive, Allocator, Fixed, Sequential
from goldilocks.core.effects import Division
from goldilocks.core.filters import Everything, Variance
from goldilocks.core.selectors import Frontier, Greso, Selector, Thompson, Uniform
from goldilocks.core.source import PromptOrder
from goldilocks.core.strata import division, text_labels
from goldilocks.types import Rollout

N = 8
JUDGED = 1_000
CHOSEN = 1_024
STRATA = (91, 8, 32, 13, 50, 200, 5_000)  # of each division: as many as texts have
WORDS = 90  # of a text
TURNS = 5


def best(work: Callable[[], float], turns: int = TURNS) -> float:
    return min(work() for _ in range(turns))


def timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def divided(prompts: int) -> list[Division]:
    rng = np.random.default_rng(0)
    sizes = [min(size, prompts // 4) for size in STRATA]
    return [Division(rng.integers(0, size, prompts), np.arange(1, size + 1, dtype=np.uint64)) for size in sizes]


def observe_all(collector: Collector, rates: np.ndarray, most: int) -> float:
    """Have every rollout that is asked for arrive, until ``most`` have; return the seconds of an arrival."""
    rng, seconds, arrived = np.random.default_rng(0), 0.0, 0
    while arrived < most:
        requests = collector.requests()
        flight = [(one, index) for one in requests for index in range(one.first, one.first + one.n)]
        right = rng.random(len(flight)) < rates[[one.prompt.index for one, _ in flight]]
        rollouts = [Rollout(one.uid, at, float(r), 100) for (one, at), r in zip(flight, right, strict=True)]
        gc.collect()
        seconds += timed(lambda rollouts=rollouts: [collector.observe(one) for one in rollouts])
        arrived += len(rollouts)
        if collector.ready:
            collector.take()
    return seconds / arrived


def by_open_groups(sizes: tuple[int, ...]) -> None:
    source = ListSource([str(index) for index in range(max(sizes))])

    def one(size: int) -> float:
        collector = Collector(source, Uniform(), Fixed(N), Variance(), target_groups=2 * size, gen_batch_size=size)
        rng, requests = np.random.default_rng(0), collector.requests()
        chosen = [requests[int(place)] for place in rng.choice(len(requests), JUDGED, replace=False)]
        flight = [(request.uid, index) for request in chosen for index in range(request.n)]
        rollouts = [Rollout(*flight[at], reward=float(at % 2), tokens=100) for at in rng.permutation(len(flight))]
        gc.collect()
        return timed(lambda: [collector.observe(rollout) for rollout in rollouts]) / len(rollouts)

    print(f"{'open groups':>12} {'µs an arrival':>15}   fixed groups, flat prior")
    for size in sizes:
        print(f"{size:>12,} {1e6 * best(lambda size=size: one(size)):>15.1f}", flush=True)


def by_prompts(sizes: list[int]) -> None:
    kinds: list[tuple[str, Allocator, bool]] = [
        ("fixed, flat prior", Fixed(N), False),
        ("fixed, strata", Fixed(N), True),
        ("sequential, strata", Sequential(N), True),
    ]
    print(f"\n{'µs an arrival':<26}" + "".join(f"{size:>12,}" for size in sizes) + "   prompts")
    for name, allocator, strata in kinds:
        found = []
        for size in sizes:
            source, rates = ListSource(range(size)), np.random.default_rng(1).beta(0.5, 0.5, size)
            beliefs = Beliefs(source.keys(), divisions=divided(size) if strata else ())
            groups = min(CHOSEN, size // 4)
            collector = Collector(source, Uniform(), allocator, Variance(), target_groups=groups, beliefs=beliefs)
            found.append(observe_all(collector, rates, 24_000))
        print(f"{name:<26}" + "".join(f"{1e6 * one:>12.1f}" for one in found), flush=True)


def seconds_per_choice(selector: Selector, prompts: int, strata: bool) -> float:
    """Choose from prompts every one of which was visited before."""
    rng, pool = np.random.default_rng(0), PromptOrder(prompts, seed=0, repeat=True)
    beliefs = Beliefs(np.arange(prompts, dtype=np.uint64), divisions=divided(prompts) if strata else ())
    beliefs.positives[:] = rng.integers(0, 9, prompts)
    beliefs.negatives[:] = 8 - beliefs.positives
    beliefs.visits[:] = 1
    beliefs.streak[:] = (beliefs.positives % 8 == 0) * 2
    selector.allocator = Sequential(N)
    k = min(CHOSEN, prompts // 2)
    return best(lambda: timed(lambda: selector.choose(pool, beliefs, k, rng)))


def choices(sizes: list[int]) -> None:
    kinds: list[tuple[str, Selector, bool]] = [
        ("uniform", Uniform(), False),
        ("greso", Greso(), False),
        ("thompson", Thompson(), False),
        ("thompson, strata", Thompson(), True),
        ("frontier, strata", Frontier(), True),
    ]
    print(f"\n{f'ms a choice of {CHOSEN:,}':<26}" + "".join(f"{size:>12,}" for size in sizes) + "   prompts")
    for name, selector, strata in kinds:
        found = [seconds_per_choice(selector, size, strata) for size in sizes]
        print(f"{name:<26}" + "".join(f"{1e3 * one:>12.1f}" for one in found), flush=True)


def adaptive(sizes: tuple[int, ...]) -> None:
    """Groups without a success grow to their limit by one rollout at a time: each is looked at once."""
    print(f"\n{'adaptive, max_n':<26}" + "".join(f"{size:>12,}" for size in sizes))
    found = []
    for size in sizes:
        source = ListSource(range(64))
        allocator = Adaptive(max_n=size, rollouts_per_batch=1)
        collector = Collector(source, Uniform(), allocator, Everything(), target_groups=32)
        found.append(observe_all(collector, np.zeros(64), 32 * size))
    print(f"{'µs an arrival':<26}" + "".join(f"{1e6 * one:>12.1f}" for one in found), flush=True)


def texts(sizes: list[int]) -> None:
    print(f"\n{f'strata by texts of {WORDS} words':<26}" + "".join(f"{size:>12,}" for size in sizes) + "   prompts")
    rng = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    known = ["".join(rng.choice(letters, int(rng.integers(2, 10)))) for _ in range(30_000)]
    shares = 1 / np.arange(1, len(known) + 1)
    places = rng.choice(len(known), (50_000, WORDS), p=shares / shares.sum())
    seconds, memory = [], []
    for size in sizes:
        prompts = []
        for row in range(size):
            words = [known[place] for place in places[row % len(places)]]
            words[row % WORDS] = f"{row},"  # no two texts are the same
            prompts.append(" ".join(words))
        before = _peak()
        seconds.append(timed(lambda prompts=prompts: [division(one) for one in text_labels(prompts)]))
        memory.append(_peak() - before)
    print(f"{'seconds':<26}" + "".join(f"{one:>12.1f}" for one in seconds))
    print(f"{'GiB beyond the texts':<26}" + "".join(f"{one:>12.2f}" for one in memory), flush=True)


def pool_memory(rows: int = 32, tokens: int = 1_024, untrained: int = 128) -> None:
    """Run in a process of its own, in which nothing has needed more memory before."""
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage as grpo

    from goldilocks.losses.advantages import Untrained, pooled, untrained_rollouts

    def estimated(estimator: Callable[..., object], rollouts: int) -> float:
        before, uids = _peak(), np.array([str(one % rows) for one in range(rollouts)], dtype=object)
        estimator(torch.rand(rollouts, tokens), torch.ones(rollouts, tokens, dtype=torch.int64), uids)
        return 1024 * (_peak() - before)

    seen = [Untrained(one / untrained, tokens) for one in range(untrained)]
    with untrained_rollouts({str(uid): seen for uid in range(rows)}):
        estimated(pooled(grpo), 2)  # what is needed once, whatever the batch
        pool = estimated(pooled(grpo), rows)
        dense = estimated(grpo, rows * (1 + untrained))
    print(f"peak of grpo_pool: {pool:.0f} MiB, of grpo with all as rows: {dense:.0f} MiB\n", flush=True)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    args = parser.parse_args()
    print(f"ten million additions: {timed(lambda: sum(one + 1 for one in range(10**7))):.2f} s")
    child = get_context("spawn").Process(target=pool_memory)
    child.start()
    child.join()
    by_open_groups((1_000, 10_000, 100_000))
    by_prompts(args.prompts)
    choices(args.prompts)
    adaptive((32, 128, 512, 2_048))
    texts(args.prompts)


if __name__ == "__main__":
    main()
