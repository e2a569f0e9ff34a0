"""How often SmolLM2 is right before any training, level by level of ``task=sums``, and how many groups would teach.

    python benchmarks/sums.py [--device cuda] [--prompts 64] [--n 8]

Sampled at temperature 1 by our rollout engine. A group is informative if its rollouts are neither all right nor all
wrong.
"""

from __future__ import annotations

import argparse
import random

import numpy as np
import torch
from step import Floor

from goldilocks.config.recipes import choose, compose_config
from goldilocks.launch import preflight
from goldilocks.tasks.arithmetic import SUM_LEVELS, Sums
from goldilocks.tasks.registry import to_row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    args = parser.parse_args()
    config = compose_config(choose(["task=sums"], args.device))
    preflight.provide(config)
    floor = Floor(config, args.device, args.n)
    print(f"{'level':>8} {'difficulty':>10} {'right':>7} {'informative':>12} {'tokens':>7}")
    for place, level in enumerate(SUM_LEVELS):
        rng = random.Random(place)
        problems = [level.draw(rng) for _ in range(args.prompts)]
        floor.tokens.clear()
        rows = [to_row(problem, Sums.data_source, "train", i) for i, problem in enumerate(problems)]
        _, rewards = floor.generate(rows, place)
        rate = rewards.mean(1)
        informative = np.mean((rate > 0) & (rate < 1))
        name = problems[0].extra["level"]
        print(
            f"{name:>8} {level.difficulty:>10g} {rate.mean():>7.1%} {informative:>12.0%} {np.mean(floor.tokens):>7.1f}"
        )


if __name__ == "__main__":
    main()
