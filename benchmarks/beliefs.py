"""Do beliefs keep up? Informative groups by strata, against the same policy told the true rate of every stratum.

    python benchmarks/beliefs.py [--seeds 3] [--rollouts 12288]

91 strata: seven skills of thirteen levels, most of them out of reach; skill and level are columns of the data. Training
lifts them: with ``improvement`` each prompt by itself and all a little, with ``lift`` one stratum after the other. The
oracle is told, before every update, the mean of the true rates of each stratum's prompts as they are then. Both sides
of a row have the same seeds and the same budget of rollouts.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from dataclasses import replace

import numpy as np
from frontier import World

from goldilocks.dotted_keys import merged
from goldilocks.lab.simulate import EngineConfig, PassRates, Setup, SimulatedEngine, batches
from goldilocks.lab.simulate.run import recipe_config, settings_of, waiting
from goldilocks.runs.history import metric_name
from goldilocks.types import is_informative

WORLD = World(skills=7, levels=13, mean=0.03, steep=1.5, spread=16.0)
MOVES = {
    "still": EngineConfig(),
    "improvement": EngineConfig(improvement=0.3),
    "lift": EngineConfig(lift=0.05, lift_by="stratum"),
}
GROUPS = (1, 2, 16)
GOAL = 0.85


def world(seed: int) -> PassRates:
    """Return the prompts; ``stratum`` is their skill and level."""
    drawn = replace(WORLD, seed=seed).pass_rates()
    both = [
        f"{skill} {level}" for skill, level in zip(*(drawn.columns[name] for name in ("skill", "level")), strict=True)
    ]
    return replace(drawn, columns={**drawn.columns, "stratum": both})


def groups(policy: str, prior: str, prompts: PassRates, setup: Setup) -> tuple[int, float]:
    """Return the informative groups of a run and the pass rate at its end."""
    columns = ["stratum"] if prior == "oracle" else ["skill", "level"]
    keys = {"prior": prior, "strata": {"columns": columns}, "study": True, "validate_by": ["stratum"]}
    settings = settings_of(merged(recipe_config(policy), {"goldilocks": keys}), setup)
    collector = settings.collector(prompts.source(), repeat=True, name=policy)
    engine, informative = SimulatedEngine(prompts, setup.engine, seed=setup.seed), 0
    names = np.array([metric_name("stratum", value) for value in prompts.columns["stratum"]])
    strata = [(name, np.flatnonzero(names == name).tolist()) for name in np.unique(names).tolist()]

    def tell() -> None:
        rate = engine.learner.pass_rate
        collector.beliefs.tell({name: sum(map(rate, rows)) / len(rows) for name, rows in strata})

    if prior == "oracle":
        tell()
    for batch in batches(collector, engine, setup.rollouts):
        informative += sum(map(is_informative, batch))
        if prior == "oracle":
            tell()
    informative += sum(map(is_informative, waiting(collector)))
    return informative, engine.learner.mean_pass_rate


def row(policy: str, moves: str, size: int, rollouts: int, seeds: range) -> str:
    """Compare the policy by strata with the same told by the oracle, and with DAPO, at ``size`` groups an update."""
    found = []
    for seed in seeds:
        setup = Setup(rollouts=rollouts, seed=seed, target_groups=size, engine=MOVES[moves])
        arms = (("dapo", "flat"), (policy, "strata"), (policy, "oracle"))
        found.append([groups(*arm, world(seed), setup) for arm in arms])
    (dapo, strata, oracle), at_end = np.array(found).mean(axis=0)[:, 0], np.array(found)[:, 1, 1].mean()
    share = strata / oracle
    missed = "" if share >= GOAL else "  missed"
    figures = f"{dapo:>8.0f}{strata:>8.0f}{oracle:>8.0f}{share:>15.2f}{at_end:>13.2f}{missed}"
    return f"{policy:<14}{moves:<14}{size:>17}{figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=12_288)
    parser.add_argument("--policies", nargs="+", default=["frontier", "dapo_strata"])
    parser.add_argument("--moves", nargs="+", default=list(MOVES), choices=list(MOVES))
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # that a batch of one group waits for it
    print(f"informative groups of {args.rollouts:,} rollouts, {args.seeds} seeds; goal {GOAL}")
    heads = f"{'dapo':>8}{'strata':>8}{'oracle':>8}{'strata/oracle':>15}{'rate at end':>13}"
    print(f"{'policy':<14}{'rates':<14}{'groups an update':>17}{heads}")
    for policy, moves, size in itertools.product(args.policies, args.moves, GROUPS):
        print(row(policy, moves, size, args.rollouts, range(1, args.seeds + 1)), flush=True)


if __name__ == "__main__":
    main()
