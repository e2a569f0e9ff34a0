"""``goldilocks advise FILE``: which recipe to train these prompts with, and what it would save against DAPO.

A few recipes are simulated on the pass rates of the file, over seeds. A seed draws the pass rates that may be behind
the answers, the order of the prompts and every rollout; the recipes of one seed have the same. Each is held against
``dapo`` by what it spends until it has the informative groups that both have in a first pass, and in three.
"""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from goldilocks.config.recipes import our_defaults, read_keys
from goldilocks.dotted_keys import values, with_value
from goldilocks.drive.driver import Driver
from goldilocks.errors import require
from goldilocks.lab import Interval
from goldilocks.lab.simulate.engine import EngineConfig, SimulatedEngine
from goldilocks.lab.simulate.pass_rates import LENGTH_COLUMNS, PROMPT_COLUMNS, SCORE_COLUMNS, PassRates, read_pass_rates
from goldilocks.lab.simulate.run import WIDEST, Setup, batches, recipe_config, settings_of
from goldilocks.launch.live import counted
from goldilocks.runs.records import TEXT_COLUMNS
from goldilocks.sheet import Sheet
from goldilocks.types import is_informative

COSTS = ("rollouts", "tokens", "engine steps")
PASSES = {"first pass": 1, "three passes": 3}
WORTHWHILE = 0.95  # of dapo's tokens; a smaller gain is not worth a change
# What a run has written of its answers: no strata.
OF_A_RUN = {*PROMPT_COLUMNS, *SCORE_COLUMNS, *LENGTH_COLUMNS, *TEXT_COLUMNS, "gts", "pass_rate", "step"}
FEW = 32  # values of a column; more divide the prompts too finely
COLUMNS = 3  # at most: those that tell most
# Of the variance of pass rates: a column that explains less tells nothing, one that explains more is made of answers.
LITTLE, ALL = 0.02, 0.999

Shares = Mapping[tuple[str, str], Interval]  # of what dapo spends, by pass and cost


@dataclass(frozen=True)
class Candidate:
    """A recipe, the columns of its strata, and what these are called."""

    recipe: str
    columns: tuple[str, ...] = ()
    strata: str = ""

    @property
    def name(self) -> str:
        return f"{self.recipe} with strata by {self.strata}" if self.strata else self.recipe

    def commands(self) -> str:
        """Return how to train it with our command, and with verl's."""
        keys = {"goldilocks.strata.columns": f"[{','.join(self.columns)}]"} if self.columns else {}
        ours, sections = values(our_defaults()), ("algorithm", "adaptive_rollout", "goldilocks")
        recipe = {key: one for key, one in values(read_keys(self.recipe)).items() if key.split(".")[0] in sections}
        changed = {key: one for key, one in recipe.items() if ours.get(key) != one}
        words = [f"{'+' if key in ours else ''}{key}={one}" for key, one in {**changed, **keys}.items()]
        train = shlex.join(["goldilocks", "train", self.recipe, *(f"{key}={one}" for key, one in keys.items())])
        return f"{train}\npython -m verl.trainer.main_ppo … trainer.v1.trainer_mode=goldilocks {shlex.join(words)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
example:
  goldilocks pass-rates task=gsm8k actor_rollout_ref.model.path=smollm2 --prompts 1024 --out gsm8k.jsonl
  goldilocks advise gsm8k.jsonl
"""
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="pass rates, as goldilocks simulate --pass-rates reads them")
    add("--columns", metavar="NAME,NAME", default="", help="columns of FILE for strata, known before any rollout "
        "(default: those with few values that tell pass rates apart)")  # fmt: skip
    add("--prompts", metavar="N", type=int, default=1_024, help="drawn from FILE (default %(default)s)")
    add("--n", metavar="N", type=int, default=8, help="rollouts a prompt, as rollout.n (default %(default)s)")
    add("--seeds", metavar="K", type=int, default=5, help="2 or more (default %(default)s)")
    add("--target-groups", metavar="N", type=int, default=32, help="groups per batch (default %(default)s)")
    add("--slots", metavar="N", type=int, default=EngineConfig.slots, help="rollouts the engine writes at once "
        "(default %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    require(args.seeds >= 2, "--seeds", args.seeds, "2 or more: one seed has no interval")
    require(args.prompts >= 1, "--prompts", args.prompts, "1 or more")
    require(args.n >= 2, "--n", args.n, "2 or more: a single reward does not differ from another")
    whole = read_pass_rates(args.file)
    prompts = whole.some(args.prompts)
    arms = recipes([name for name in args.columns.split(",") if name] or telling_columns(prompts), prompts.readable)
    log = logging.getLogger(Driver.__module__)
    level = log.level
    log.setLevel(logging.ERROR)  # a simulation ends with its budget, however many groups are dropped
    try:
        held = against_dapo(arms, prompts, args)
    finally:
        log.setLevel(level)
    console = Console(width=WIDEST)
    drawn = f"{len(prompts):,} of {len(whole):,}" if len(prompts) < len(whole) else f"{len(prompts):,}"
    console.print(
        f"{args.file}: {drawn} prompts, mean pass rate {prompts.pass_rate.mean():.3f}\n"
        f"share of what dapo spends for the same informative groups, mean of {args.seeds} seeds (95 % interval)\n",
        highlight=False, markup=False,
    )  # fmt: skip
    rows = [[arm.name, *map(_shown, shares.values())] for arm, shares in held.items()]
    headings = [f"{during}:\n{cost}" for during in PASSES for cost in COSTS]
    console.print(Sheet(["recipe", *headings], rows).on_terminal())
    best, sentence = advice(held)
    print(f"\n{sentence}\n\n{best.commands()}")
    return 0


def recipes(columns: Sequence[str], readable: bool) -> list[Candidate]:
    """Return the recipes to simulate, ``dapo`` first; strata are by the columns, and by texts that can be read."""
    strata = [(tuple(columns), " and ".join(columns))] if columns else []
    strata += [((), "text")] if readable else []
    return [
        *map(Candidate, ("dapo", "grpo", "adaptive")),
        Candidate("dapo_strata", *strata[0]) if strata else Candidate("dapo_strata"),
        *(Candidate("frontier", *one) for one in strata or [((), "")]),
    ]


def telling_columns(prompts: PassRates) -> list[str]:
    """Return the columns of few values that tell pass rates apart, the best first, none that repeats another."""
    rate, told = prompts.pass_rate, {}
    for name, column in prompts.columns.items():
        if name in OF_A_RUN or not all(isinstance(value, (str, int, float)) for value in column):
            continue
        values, places = np.unique(list(map(str, column)), return_inverse=True)
        if 1 < len(values) <= min(FEW, len(rate) // 4) and rate.std() > 0:
            means = np.bincount(places, rate) / np.bincount(places)
            left = ((rate - means[places]) ** 2).sum() / (len(rate) - len(values))
            told[name] = 1 - left / rate.var(ddof=1)
    found: list[str] = []
    kept = {()}
    for name in sorted(told, key=lambda name: -told[name]):
        divided = set(zip(*(prompts.columns[one] for one in (*found, name)), strict=True))
        if LITTLE < told[name] < ALL and len(divided) > len(kept):
            found, kept = [*found, name], divided
    return found[:COLUMNS]


def against_dapo(arms: Sequence[Candidate], prompts: PassRates, args: argparse.Namespace) -> dict[Candidate, Shares]:
    """Return what each recipe but the first spends for the same informative groups, as shares of the first's."""
    shares: dict[Candidate, list[np.ndarray]] = {arm: [] for arm in arms[1:]}
    a_pass = len(prompts) * args.n
    with counted(args.seeds * len(arms), "simulation") as begin:
        for seed in range(1, args.seeds + 1):
            setup = Setup(max(PASSES.values()) * a_pass, seed, args.target_groups, engine=EngineConfig(args.slots))
            drawn = prompts.drawn(np.random.default_rng(seed))
            begin(f"seed {seed}: dapo")
            dapo = course(arms[0], drawn, setup, args.n)
            for arm in arms[1:]:
                begin(f"seed {seed}: {arm.name}")
                own = course(arm, drawn, setup, args.n, enough=dapo[0, -1])
                shares[arm].append(np.array([share(own, dapo, passes * a_pass) for passes in PASSES.values()]))
    cells = [(during, cost) for during in PASSES for cost in COSTS]
    return {
        arm: dict(zip(cells, map(Interval.of, np.array(own).reshape(len(own), -1).T.tolist()), strict=True))
        for arm, own in shares.items()
    }


def course(arm: Candidate, prompts: PassRates, setup: Setup, n: int, enough: float = np.inf) -> np.ndarray:
    """Return, at the start and at every full batch, the informative groups and each cost so far, in rows."""
    config = with_value(recipe_config(arm.recipe), "actor_rollout_ref.rollout.n", n)
    if arm.columns:
        config = with_value(config, "goldilocks.strata.columns", list(arm.columns))
    collector = settings_of(config, setup).collector(prompts.source(), repeat=True, name=arm.name)
    engine = SimulatedEngine(prompts, setup.engine, seed=setup.seed)
    points, informative = [(0, 0, 0, 0)], 0
    for batch in batches(collector, engine, setup.rollouts):
        informative += sum(map(is_informative, batch))
        points.append((informative, engine.submitted, collector.accounts.generated_tokens, engine.clock))
        if informative >= enough:
            break
    found = np.array(points, dtype=float).T
    in_a_pass = np.interp(setup.rollouts / max(PASSES.values()), found[1], found[0])
    few = f"fewer, or more prompts: {arm.name} fills no batch with an informative group"
    require(in_a_pass > 0, "--target-groups", setup.target_groups, few)
    return found


def share(own: np.ndarray, dapo: np.ndarray, rollouts: int) -> list[float]:
    """Return each cost of the informative groups that both courses have within the rollouts, over that of ``dapo``."""
    groups = min(np.interp(rollouts, one[1], one[0]) for one in (own, dapo))
    mine, its = ([float(np.interp(groups, one[0], cost)) for cost in one[1:]] for one in (own, dapo))
    return [cost / of_dapo for cost, of_dapo in zip(mine, its, strict=True)]


def advice(held: Mapping[Candidate, Shares]) -> tuple[Candidate, str]:
    """Return the recipe to take, and why in a sentence."""
    alike = [arm for arm in held if arm.recipe != "adaptive"]  # its groups of two are cheap, and have less signal
    tokens = {arm: [held[arm][during, "tokens"] for during in PASSES] for arm in alike}
    best = min(tokens, key=lambda arm: sum(one.mean for one in tokens[arm]))
    first, three = map(_shown, tokens[best])
    figures = f"{first} of dapo's tokens for the same informative groups in a first pass, {three} over three"
    if any(one.mean <= WORTHWHILE and one.mean + (one.half or 0) < 1 for one in tokens[best]):
        return best, f"use {best.name}: {figures}"
    return Candidate("dapo"), f"prompts are alike: stay with dapo ({best.name}, the best of the others, has {figures})"


def _shown(one: Interval) -> str:
    half = one.half or 0
    return f"{one.mean:.2f} ({one.mean - half:.2f}–{one.mean + half:.2f})"
