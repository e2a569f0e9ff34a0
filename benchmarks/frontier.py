"""What strata are worth: ``dapo``'s informative groups per 1,000 rollouts, and ``frontier``'s as multiples of them.

    python benchmarks/frontier.py [--worlds 8] [--seed 0]
    python benchmarks/frontier.py --pass-rates FILE --columns level,type [--runs 10] [--rest 0.25]

With a file of pass rates: ``frontier``'s informative groups per token and per rollout, and the engine's steps for one,
as multiples of ``dapo``'s at equal rollouts, after one pass and after three. A run draws the pass rates that may be
behind the answers, as ``goldilocks advise`` does.

Else each world is a file for ``goldilocks simulate --pass-rates``: skills of several levels, most of them out of reach.
How many there are, how steeply levels get harder, how much prompts of one level differ, and how prompts are worded is
drawn.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from goldilocks.core.selectors import Frontier
from goldilocks.dotted_keys import merged
from goldilocks.drive.driver import Driver
from goldilocks.lab import Interval
from goldilocks.lab.simulate import PassRates, Setup, simulate
from goldilocks.lab.simulate.advise import Candidate, course
from goldilocks.lab.simulate.pass_rates import read_pass_rates
from goldilocks.lab.simulate.run import recipe_config, settings_of

BUDGETS = (4_096, 16_384)
N, PASSES = 8, (1, 3)  # rollouts of a prompt; passes over the prompts of a file
COLUMNS = ("dapo", "column", "text", "column*", "text*")  # *: shuffled, so that strata say nothing
WORDINGS = ("numbers", "verbose", "operands", "letters")
NAMES = ("add", "sub", "mul", "sort", "count", "max", "reverse", "divide")
PEOPLE = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")


@dataclass(frozen=True)
class World:
    """``steep``: log-odds from level to level; ``spread``: concentration of prompts around their level's rate."""

    skills: int = 5
    levels: int = 8
    mean: float = 0.04
    steep: float = 4.0
    spread: float = 16.0
    wording: str = "numbers"
    prompts: int = 2_048
    seed: int = 0

    @classmethod
    def drawn(cls, seed: int) -> World:
        rng = np.random.default_rng(seed)
        return cls(
            skills=int(rng.integers(2, 8)),
            levels=int(rng.integers(5, 13)),
            mean=float(rng.choice([0.02, 0.04, 0.04, 0.08, 0.2])),
            steep=float(rng.uniform(2.0, 6.0)),
            spread=float(rng.choice([2.0, 6.0, 16.0, 64.0])),
            wording=WORDINGS[seed % len(WORDINGS)],
            seed=seed,
        )

    def pass_rates(self, *, shuffled: bool = False) -> PassRates:
        """The prompts; ``shuffled``: neither columns nor texts say anything of the pass rates."""
        rng = np.random.default_rng(self.seed)
        skill, level = rng.integers(0, self.skills, self.prompts), rng.integers(1, self.levels + 1, self.prompts)
        ability = rng.normal(0, 1.5, self.skills)
        logits = ability[skill] - self.steep * level
        rates = _sigmoid(logits + _shift(logits, self.mean))
        noisy = rng.beta(np.maximum(self.spread * rates, 1e-3), np.maximum(self.spread * (1 - rates), 1e-3))
        texts = tuple(_text(self.wording, NAMES[s], int(n), rng) for s, n in zip(skill, level, strict=True))
        if shuffled:
            noisy = rng.permutation(noisy)
        names = [NAMES[s] for s in skill]
        return PassRates(texts, noisy, np.full(self.prompts, 64.0), columns={"level": level.tolist(), "skill": names})


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _shift(logits: np.ndarray, mean: float) -> float:
    """What to add to the logits so that the mean rate is this."""
    low, high = -200.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(logits + middle).mean() < mean else (low, middle)
    return low


def _number(digits: int, rng: np.random.Generator) -> int:
    return int(rng.integers(10 ** (digits - 1), 10**digits))


def _text(wording: str, name: str, level: int, rng: np.random.Generator) -> str:
    if wording == "numbers":
        return f"{name}: {_number(level, rng)} + {_number(int(rng.integers(1, level + 1)), rng)} ="
    if wording == "operands":
        return f"{name}: " + " + ".join(str(_number(int(rng.integers(1, 3)), rng)) for _ in range(level + 1)) + " ="
    if wording == "letters":
        return f"{name} the letters " + " ".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), level + 2))
    who, thing = rng.choice(PEOPLE), rng.choice(["apples", "pens", "coins"])
    return f"{who} must {name} {_number(level, rng)} and {_number(level, rng)} {thing}. What does {who} get?"


def yields(policy: str, keys: dict[str, object], world: PassRates, rollouts: int, seeds: range) -> float:
    """Informative groups per 1,000 rollouts, the mean over the seeds."""
    found = []
    for seed in seeds:
        setup = Setup(rollouts=rollouts, seed=seed)
        config = merged(recipe_config(policy), {"goldilocks": keys})
        found.append(simulate(policy, settings_of(config, setup), world, setup).informative_groups_per_1k_rollouts)
    return float(np.mean(found))


def row(world: World, seeds: range) -> list[float]:
    """DAPO's yield at each budget; then that of strata by column, by text and shuffled, as multiples of DAPO's."""
    told, untold = world.pass_rates(), world.pass_rates(shuffled=True)
    by_level = {"strata": {"columns": ["level"]}}
    figures: list[float] = []
    for rollouts in BUDGETS:
        dapo = yields("dapo", {}, told, rollouts, seeds)
        figures += [dapo, *(yields("frontier", keys, told, rollouts, seeds) / dapo for keys in (by_level, {}))]
        none = yields("dapo", {}, untold, rollouts, seeds)
        figures += [yields("frontier", keys, untold, rollouts, seeds) / none for keys in (by_level, {})]
    return figures


def line(name: str, figures: list[float]) -> str:
    return f"{name:<56}" + "".join(f"{one:>8.2f}" for one in figures)


def multiples(file: Path, arms: Sequence[Candidate], runs: int) -> dict[Candidate, list[Interval]]:
    """Of each arm, after each number of passes: groups per token and per rollout, and steps per group, over dapo's."""
    logging.getLogger(Driver.__module__).setLevel(logging.ERROR)  # a simulation ends with its budget
    prompts = read_pass_rates(file)
    found: dict[Candidate, list[list[float]]] = {arm: [] for arm in arms}
    for seed in range(1, runs + 1):
        setup = Setup(max(PASSES) * N * len(prompts), seed, target_groups=32)
        drawn = prompts.drawn(np.random.default_rng(seed))
        dapo = course(Candidate("dapo"), drawn, setup, N)
        for arm in arms:
            own, figures = course(arm, drawn, setup, N), []
            for passes in PASSES:
                at = passes * N * len(prompts)
                (groups, tokens, steps), (its_groups, its_tokens, its_steps) = (
                    [float(np.interp(at, one[1], one[row])) for row in (0, 2, 3)] for one in (own, dapo)
                )
                more = groups / its_groups
                figures += [more * its_tokens / tokens, more, steps / its_steps / more]
            found[arm].append(figures)
    return {arm: [Interval.of(column) for column in zip(*rows, strict=True)] for arm, rows in found.items()}


def of_file(args: argparse.Namespace) -> None:
    """Print the table of a file of pass rates."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "frontier.yaml"
        recipe.write_text(f"defaults: [frontier, _self_]\ngoldilocks: {{selector_kwargs: {{rest: {args.rest}}}}}\n")
        columns = tuple(filter(None, args.columns.split(",")))
        arms = [Candidate(str(recipe), columns, " and ".join(columns))] if columns else []
        headings = "".join(
            f"{f'{passes} pass, {what}':>24}" for passes in PASSES for what in ("tokens", "rollouts", "steps")
        )
        print(f"{f'rest {args.rest}, {args.runs} runs':<24}{headings}")
        for arm, figures in multiples(args.pass_rates, [*arms, Candidate(str(recipe), (), "text")], args.runs).items():
            cells = (f"{one.mean:.2f} ± {one.half:.2f}" for one in figures)
            print(f"{'by ' + arm.strata:<24}" + "".join(f"{cell:>24}" for cell in cells))


def of_worlds(args: argparse.Namespace) -> None:
    """Print the table of worlds that are drawn."""
    print(f"{'':<56}" + "".join(f"{f'after {rollouts:,} rollouts':>40}" for rollouts in BUDGETS))
    print(f"{'skills x levels':<56}" + len(BUDGETS) * "".join(f"{one:>8}" for one in COLUMNS))
    for seed in range(args.seed, args.seed + args.worlds):
        world = World.drawn(seed)
        name = f"{world.skills}x{world.levels} mean {world.mean} steep {world.steep:.1f} spread {world.spread:.0f}"
        print(line(f"{name} {world.wording}", row(world, range(1, args.runs + 1))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the first world")
    parser.add_argument("--runs", type=int, default=2, help="simulations of each world and policy")
    parser.add_argument("--pass-rates", metavar="FILE", type=Path, help="of your own prompts, in place of worlds")
    parser.add_argument(
        "--columns", metavar="NAME,NAME", default="", help="of FILE, for strata; by the text in any case"
    )
    parser.add_argument(
        "--rest", type=float, default=Frontier.rest, help="goldilocks.selector_kwargs.rest (%(default)s)"
    )
    args = parser.parse_args()
    if args.pass_rates:
        of_file(args)
    else:
        of_worlds(args)


if __name__ == "__main__":
    main()
