"""``goldilocks simulate``: what would each policy cost on my data?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from goldilocks.config.recipes import FILE, about, name_of, names
from goldilocks.simulate.engine import EngineConfig
from goldilocks.simulate.pass_rates import DIFFICULTIES, PassRates, mixture, read_pass_rates
from goldilocks.simulate.policies import Config, apply_overrides, recipe_config
from goldilocks.simulate.run import Outcome, Setup, Tell, simulate, tables

WIDEST = 160  # columns, also on a narrower terminal: a wrapped row is readable, a truncated one is not


def add_arguments(parser: argparse.ArgumentParser) -> None:
    setup, engine = Setup(), EngineConfig()
    policies = "\n".join(f"  {name:<18} {about(name)}" for name in names())
    bands = ", ".join(f"{one.prompts} {one.name}" for one in DIFFICULTIES)
    parser.epilog = f"""\
policies, which are the recipes of goldilocks train:
{policies}

without --pass-rates, the built-in mixture: {bands} prompts
"""
    add = parser.add_argument
    add("--pass-rates", metavar="FILE", type=Path, help=".jsonl, .csv or .parquet with pass_rate or rewards per "
        "prompt, or score per rollout; or a directory of verl's rollout_data_dir dumps")  # fmt: skip
    add("--policy", metavar="NAME", action="append", help="a recipe of goldilocks train, by name or file; again for "
        "another (default: all)")  # fmt: skip
    add("--rollouts", metavar="N", type=int, default=setup.rollouts, help="what each may spend (default %(default)s)")
    add("--seed", metavar="S", type=int, default=setup.seed, help="same seed, same table (default %(default)s)")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="a parameter of the policies that have it, "
        "such as allocator.max_n=64; another part, such as allocator=package.module:Class; "
        "or a key of the recipes, for all policies")  # fmt: skip
    add("--target-groups", metavar="N", type=int, default=setup.target_groups, help="groups per batch "
        "(default %(default)s)")  # fmt: skip
    add("--gen-batch-size", metavar="N", type=int, help="prompts chosen, and open, at a time (default: target groups)")
    add("--no-repeat", action="store_true", help="visit no prompt twice; a run ends where the data do")
    add("--slots", metavar="N", type=int, default=engine.slots, help="rollouts the engine writes at once "
        "(default %(default)s)")  # fmt: skip
    add("--improvement", metavar="X", type=float, default=engine.improvement, help="log-odds of its pass rate that a "
        "prompt gains from an informative group trained (default %(default)s: nothing is learnt)")  # fmt: skip
    add("--failure-rate", metavar="X", type=float, default=engine.failure_rate, help="share of rollouts that fail "
        "(default %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead of the tables")


def run(args: argparse.Namespace) -> int:
    """Simulate every policy and print the outcomes."""
    setup = Setup(
        rollouts=args.rollouts,
        seed=args.seed,
        target_groups=args.target_groups,
        gen_batch_size=args.gen_batch_size,
        repeat=not args.no_repeat,
        engine=EngineConfig(slots=args.slots, improvement=args.improvement, failure_rate=args.failure_rate),
    )
    policies = apply_overrides(_configs(args.policy or names()), args.set, setup)
    prompts = read_pass_rates(args.pass_rates) if args.pass_rates else mixture()
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        outcomes = [simulate(name, one, prompts, setup, _teller(bar, name, setup)) for name, one in policies.items()]
    if args.json:
        print(json.dumps(_as_json(prompts, setup, outcomes), indent=2))
    else:
        console = Console(width=WIDEST)
        console.print(_caption(args.pass_rates, prompts, setup), highlight=False, markup=False)
        console.print(tables(outcomes))
    return 0


def _configs(recipes: Sequence[str]) -> dict[str, Config]:
    """Return each recipe's config by its name, or by its path if another recipe has that name."""
    configs: dict[str, Config] = {}
    for recipe in dict.fromkeys(recipes):
        name = name_of(recipe)
        configs[recipe if recipe.endswith(FILE) and name in configs else name] = recipe_config(recipe)
    return configs


def _teller(bar: Progress, name: str, setup: Setup) -> Tell:
    """Return a function that moves a bar of its own, a hundred times at most: more is not worth drawing."""
    task = bar.add_task(name, total=setup.rollouts)
    moved = 0

    def tell(rollouts: int) -> None:
        nonlocal moved
        if rollouts - moved >= setup.rollouts / 100:
            moved = rollouts
            bar.update(task, completed=rollouts)

    return tell


def _caption(path: Path | None, prompts: PassRates, setup: Setup) -> str:
    return (
        f"{path or 'built-in mixture'}: {len(prompts):,} prompts, mean pass rate {prompts.pass_rate.mean():.3f}; "
        f"{setup.rollouts:,} rollouts each, {setup.target_groups} groups per batch, seed {setup.seed}\n"
    )


def _as_json(prompts: PassRates, setup: Setup, outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "prompts": len(prompts),
        "mean_pass_rate": float(prompts.pass_rate.mean()),
        "setup": asdict(setup),
        "policies": [outcome.as_dict() for outcome in outcomes],
    }
