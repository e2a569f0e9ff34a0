"""``goldilocks simulate``: what would each policy cost on my data?

==========================================  ==================================================================
``--set allocator.max_n=64``                to every chosen policy whose allocator has ``max_n``; at least one must
``--set allocator=package.module:Class``    replaces the allocator of every policy, by class or by a name of ours
``--set adaptive_rollout.max_n=64``         sets the key for every policy, as ``goldilocks train`` does
==========================================  ==================================================================

Parts are replaced first, then keys of the config are set, then parameters of parts: one command can name a new part and
give it parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from goldilocks.config.recipes import ADVISED, FILE, about, name_of, names
from goldilocks.config.settings import Settings
from goldilocks.core.policy import Policy
from goldilocks.dotted_keys import dotted_keys, value_at, with_value
from goldilocks.errors import nearest, require, require_type
from goldilocks.lab.simulate.engine import EngineConfig
from goldilocks.lab.simulate.pass_rates import DIFFICULTIES, mixture, read_pass_rates
from goldilocks.lab.simulate.run import Config, Setup, Tell, recipe_config, settings_of, simulate, tables

KINDS = ("selector", "allocator", "filter")
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
    """Return the settings of every config with every ``KEY=VALUE`` applied to those that it fits."""
    pairs = [_parse(word, configs) for word in words]
    changed = dict(configs)
    for key, value in pairs:
        if key in KINDS:
            changed = {policy: _with_part(config, key, value) for policy, config in changed.items()}
    for key, value in pairs:
        if key.partition(".")[0] not in KINDS:
            changed = {policy: with_value(config, key, value) for policy, config in changed.items()}
    settings = {policy: settings_of(config, setup) for policy, config in changed.items()}
    for key, value in pairs:
        kind, _, parameter = key.partition(".")
        if kind in KINDS and parameter:
            for policy in _takers(settings, key, value):
                changed[policy] = with_value(changed[policy], _config_key(changed[policy], key), value)
    return {policy: settings_of(config, setup) for policy, config in changed.items()}


def _parse(word: str, configs: Mapping[str, Config]) -> tuple[str, Any]:
    """Return the key and the value: the name of a part, JSON, null for ``none``, or else a word."""
    key, equals, text = word.partition("=")
    if key in KINDS and text:
        return key, text
    known = {one for config in configs.values() for one in dotted_keys(config)}
    section, _, last = key.rpartition(".")
    fits = bool(equals and text and last) and (section in KINDS or key in known or section.endswith("_kwargs"))
    forms = f"KIND.PARAMETER=VALUE or KIND=NAME, where KIND is one of {', '.join(KINDS)}, or a key of the recipes"
    require(fits, "--set", word, forms + nearest(key, known))
    with contextlib.suppress(ValueError):
        return key, json.loads(text)
    return key, None if text == "none" else text


def _with_part(config: Config, kind: str, name: str) -> Config:
    """Return the config with another part of this kind, without the parameters of the part before."""
    config = with_value(with_value(config, f"goldilocks.{kind}", name), f"goldilocks.{kind}_kwargs", {})
    replaced = {"allocator": "adaptive_rollout.enable", "filter": "algorithm.filter_groups.enable"}
    return with_value(config, replaced[kind], False) if kind in replaced else config


def _config_key(config: Config, key: str) -> str:
    """Return the key of the config that sets a part's parameter, which depends on where the config names the part."""
    kind, _, parameter = key.partition(".")
    if kind == "allocator" and value_at(config, "adaptive_rollout.enable"):
        return f"adaptive_rollout.{parameter}"
    if kind == "filter" and value_at(config, "goldilocks.filter") is None:
        section = "adaptive_rollout" if parameter == "positive_threshold" else "algorithm.filter_groups"
        return f"{section}.{parameter}"
    return f"goldilocks.{kind}_kwargs.{parameter}"


def _takers(settings: Mapping[str, Settings], key: str, value: Any) -> list[str]:
    """Return the names of the policies whose part of this kind has this parameter: at least one."""
    kind, _, parameter = key.partition(".")
    parts: dict[str, Policy] = {name: getattr(one, kind)() for name, one in settings.items()}
    known = {name: inspect.signature(type(part)).parameters for name, part in parts.items()}
    takers = [name for name in parts if parameter in known[name]]
    if not takers:
        there = sorted({one for parameters in known.values() for one in parameters})
        raise ValueError(
            f"--set {key} fits none of the policies {', '.join(parts)}{nearest(parameter, there)}; "
            f"their {kind}s have: {', '.join(there) or 'no parameters'}"
        )
    for name in takers:  # a policy checks the range of its numbers; that they are numbers is checked here
        require_type(key, value, typing.get_type_hints(type(parts[name]).__init__).get(parameter))
    return takers
