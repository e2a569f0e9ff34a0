"""``goldilocks simulate``: what would each policy cost on my data?"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from goldilocks.config.recipes import ADVISED, FILE, about, name_of, names
from goldilocks.config.settings import Settings
from goldilocks.dotted_keys import dotted_keys, with_value
from goldilocks.errors import nearest, require
from goldilocks.lab.simulate.engine import EngineConfig
from goldilocks.lab.simulate.pass_rates import DIFFICULTIES, mixture, read_pass_rates
from goldilocks.lab.simulate.run import Config, Setup, Tell, recipe_config, settings_of, simulate, tables

WIDEST = 160  # columns, also on a narrower terminal: a wrapped row is readable, a truncated one is not


def add_arguments(parser: argparse.ArgumentParser) -> None:
    setup, engine = Setup(), EngineConfig()
    lines = [f"  {name:<18} {about(name)}" for name in names()]
    lines.insert(len(ADVISED), "for studies:")
    policies = "\n".join(lines)
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
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="a key of the recipes, for all policies, as "
        "goldilocks train takes it: adaptive_rollout.max_n=64, goldilocks.allocator=package.module:Class")  # fmt: skip
    add("--target-groups", metavar="N", type=int, default=setup.target_groups, help="groups per batch "
        "(default %(default)s)")  # fmt: skip
    add("--gen-batch-size", metavar="N", type=int, help="prompts chosen, and open, at a time (default: target groups)")
    add("--no-repeat", action="store_true", help="visit no prompt twice; a run ends where the data do")
    add("--slots", metavar="N", type=int, default=engine.slots, help="rollouts the engine writes at once "
        "(default %(default)s)")  # fmt: skip
    add("--improvement", metavar="X", type=float, default=engine.improvement, help="log-odds of its pass rate that a "
        "prompt gains from an informative group trained (default %(default)s: nothing is learnt)")  # fmt: skip
    add("--lift", metavar="COLUMN=X", default="=0", help="log-odds that all prompts with its value "
        "of COLUMN gain from an informative group trained; those of the next harder value gain half")  # fmt: skip
    add("--failure-rate", metavar="X", type=float, default=engine.failure_rate, help="share of rollouts that fail "
        "(default %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead of the tables")


def run(args: argparse.Namespace) -> int:
    """Simulate every policy and print the outcomes."""
    lift_by, lift = _lift(args.lift)
    setup = Setup(
        rollouts=args.rollouts,
        seed=args.seed,
        target_groups=args.target_groups,
        gen_batch_size=args.gen_batch_size,
        repeat=not args.no_repeat,
        engine=EngineConfig(
            slots=args.slots,
            improvement=args.improvement,
            lift=lift,
            lift_by=lift_by,
            failure_rate=args.failure_rate,
        ),
    )
    policies = apply_overrides(_configs(args.policy or names()), args.set, setup)
    prompts = read_pass_rates(args.pass_rates) if args.pass_rates else mixture()
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        outcomes = [simulate(name, one, prompts, setup, _teller(bar, name, setup)) for name, one in policies.items()]
    if args.json:
        mean, found = float(prompts.pass_rate.mean()), [outcome.as_dict() for outcome in outcomes]
        shown = {"prompts": len(prompts), "mean_pass_rate": mean, "setup": asdict(setup), "policies": found}
        print(json.dumps(shown, indent=2))
    else:
        console = Console(width=WIDEST)
        caption = (
            f"{args.pass_rates or 'built-in mixture'}: {len(prompts):,} prompts, "
            f"mean pass rate {prompts.pass_rate.mean():.3f}; {setup.rollouts:,} rollouts each, "
            f"{setup.target_groups} groups per batch, seed {setup.seed}\n"
        )
        console.print(caption, highlight=False, markup=False)
        console.print(tables(outcomes))
    return 0


def _lift(word: str) -> tuple[str, float]:
    column, _, gain = word.rpartition("=")
    try:
        return column, float(gain)
    except ValueError:
        raise ValueError(f"--lift={word!r} is not accepted: COLUMN=X, such as level=0.05") from None


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


def apply_overrides(configs: Mapping[str, Config], words: Sequence[str], setup: Setup) -> dict[str, Settings]:
    """Return the settings of every config with every ``KEY=VALUE`` set: JSON, null for ``none``, or else a word."""
    changed = dict(configs)
    known = {one for config in configs.values() for one in dotted_keys(config)}
    for word in words:
        key, _, text = word.partition("=")
        fits = bool(text) and (key in known or key.rpartition(".")[0].endswith("_kwargs"))
        require(fits, "--set", word, f"KEY=VALUE with a key of the recipes{nearest(key, known)}")
        value: Any = None if text == "none" else text
        with contextlib.suppress(ValueError):
            value = json.loads(text)
        changed = {policy: with_value(config, key, value) for policy, config in changed.items()}
    return {policy: settings_of(config, setup) for policy, config in changed.items()}
