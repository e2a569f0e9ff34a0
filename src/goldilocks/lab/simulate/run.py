"""``goldilocks simulate``: what would each policy cost on my data?

The real collector runs against the simulated engine until a budget of rollouts is spent; tables say what it yields.

Policies are compared at equal cost. Every rollout asked of the engine counts, cancelled and failed ones too, and those
in flight when the budget ends are waited for. So every policy spends exactly the same number of rollouts.

A group counts if it was trained, or if it is kept for the next batch when the budget ends. Groups that were dropped,
expired or unfinished count only as cost.

The policies are those of a recipe, as ``goldilocks train`` would build them, with two differences. A simulation ends
when its budget is spent, so ``max_num_gen_batches``, which stops a training run on data that yield nothing, is lifted.
And the batch filter, which needs a trainer's log-probs, is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from goldilocks.config.recipes import ADVISED, FILE, about, name_of, names, read_recipe
from goldilocks.config.settings import Settings
from goldilocks.core import Collector, Exhausted
from goldilocks.dotted_keys import dotted_keys, merged, with_value
from goldilocks.drive.driver import Driver, Stalled
from goldilocks.drive.rehearsal import rehearse
from goldilocks.drive.rows import NoRows
from goldilocks.errors import nearest, require
from goldilocks.lab.simulate.engine import EngineConfig, SimulatedEngine
from goldilocks.lab.simulate.pass_rates import DIFFICULTIES, PassRates, mixture, read_pass_rates
from goldilocks.launch.live import counted
from goldilocks.sheet import Sheet
from goldilocks.types import Group, is_informative, signal

Config = Mapping[str, Any]
WIDEST = 160  # columns, also on a narrower terminal: a wrapped row is readable, a truncated one is not
HARD = 0.2  # the highest pass rate of a hard prompt; prompts with pass rate 0 are impossible, not hard
LEGEND = """\
groups: groups whose rewards differ, trained or kept for the next batch; signal: Σ(r − r̄)² over
their trained rollouts; steps: engine steps until a batch is full, each writes a token in every
busy slot; hard reached: share of the prompts with a pass rate in (0, 0.2] that had such a group.
Below: where the tokens went."""


@dataclass(frozen=True)
class Setup:
    """The settings that all policies of one comparison share."""

    rollouts: int = 50_000
    seed: int = 1
    target_groups: int = 64
    gen_batch_size: int | None = None
    repeat: bool = True
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for key, least in {"rollouts": 1, "target_groups": 1, "seed": 0}.items():
            require(getattr(self, key) >= least, key, getattr(self, key), f"{least} or more")


def recipe_config(recipe: str) -> Config:
    """Return the keys of a recipe, with ``max_num_gen_batches`` lifted and ``rollout.n`` as verl has it where unset."""
    config = merged({"actor_rollout_ref": {"rollout": {"n": 1}}}, read_recipe(recipe))
    return with_value(config, "algorithm.filter_groups.max_num_gen_batches", 0)


def settings_of(config: Config, setup: Setup) -> Settings:
    """Return the settings of a config with the sizes of this setup. Raise ``ValueError`` as a trainer would."""
    sizes = {
        "train_batch_size": setup.target_groups,
        "gen_batch_size": setup.gen_batch_size,
        "max_response_length": setup.engine.max_tokens,
        "seed": setup.seed,
    }
    settings = Settings.from_config(merged(config, {"data": sizes}))
    simulated = settings.batch_filter_config is None
    require(simulated, "batch_filter.enable", True, "false: the batch filter is not simulated")
    return settings


def recipe_settings(recipe: str, setup: Setup) -> Settings:
    return settings_of(recipe_config(recipe), setup)


def simulate(name: str, settings: Settings, prompts: PassRates, setup: Setup) -> Outcome:
    """Spend the budget by these settings and return the yield."""
    source = prompts.source()
    rehearse(settings, source)
    filled_at: list[int] = []  # the engine step at which each batch was full
    groups: list[Group] = []
    try:
        collector = settings.collector(source, repeat=setup.repeat, name=name)
        engine = SimulatedEngine(prompts, setup.engine, seed=setup.seed)
        for batch in batches(collector, engine, setup.rollouts):
            filled_at.append(engine.clock)
            groups += filter(is_informative, batch)
    except ValueError as error:
        if setup.repeat or not isinstance(error, Exhausted):
            raise ValueError(f"{name}: {error}") from None
        # Without repeats, a run whose budget outlasts the data ends here.
    groups += filter(is_informative, waiting(collector))
    accounts = collector.accounts
    accounts.check()
    rollouts, tokens = accounts.generated_rollouts, accounts.generated_tokens
    informative, learnt = len(groups), sum(map(signal, groups))
    hard = np.flatnonzero((prompts.pass_rate > 0) & (prompts.pass_rate <= HARD)).tolist()
    reached = {group.prompt.index for group in groups}.intersection(hard)
    return Outcome(
        policy=name,
        rollouts=rollouts,
        tokens=tokens,
        batches=len(filled_at),
        informative_groups_per_1k_rollouts=1e3 * informative / max(rollouts, 1),
        signal_per_1k_rollouts=1e3 * learnt / max(rollouts, 1),
        informative_groups_per_1m_tokens=1e6 * informative / max(tokens, 1),
        signal_per_1m_tokens=1e6 * learnt / max(tokens, 1),
        engine_steps_per_batch=filled_at[-1] / len(filled_at) if filled_at else None,
        hard_prompts_reached=len(reached) / len(hard) if hard else None,
        mean_pass_rate=engine.learner.mean_pass_rate,
        token_share={account: count / max(tokens, 1) for account, count in accounts.by_class(accounts.tokens).items()},
    )


def batches(collector: Collector, engine: SimulatedEngine, rollouts: int) -> Iterator[tuple[Group, ...]]:
    """Yield every batch that ``rollouts`` rollouts fill; the engine trains on each before the next is collected."""
    engine.budget = rollouts
    driver = Driver(collector, engine, NoRows(), max_failures=math.inf)  # the user chose the failure rate
    with contextlib.suppress(Stalled):  # the budget is spent
        while True:
            batch = driver.batch()
            engine.train(batch)
            yield batch


def waiting(collector: Collector) -> Iterator[Group]:
    """Yield the groups that are kept for a next batch, as it would train them."""
    trained = collector.allocator.trained
    return (replace(group, trained=tuple(trained(group, collector.beliefs))) for group in collector.kept)


@dataclass(frozen=True)
class Outcome:
    """One policy's row. A figure is None if it is undefined: no batch was filled, or no prompt is hard."""

    policy: str
    rollouts: int
    tokens: int
    batches: int
    informative_groups_per_1k_rollouts: float
    signal_per_1k_rollouts: float
    informative_groups_per_1m_tokens: float
    signal_per_1m_tokens: float
    engine_steps_per_batch: float | None
    hard_prompts_reached: float | None
    mean_pass_rate: float
    token_share: dict[str, float]

    def _repr_html_(self) -> str:
        return Comparison((self,))._repr_html_()


@dataclass(frozen=True)
class Comparison:
    """Outcomes of policies that had the same prompts and the same budget."""

    outcomes: tuple[Outcome, ...]

    def _repr_html_(self) -> str:
        return yield_table(self.outcomes).in_html() + token_table(self.outcomes).in_html()


def figure(value: float | None, digits: int = 1) -> str:
    """Format a number; None is a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Format a share as a percentage; None is a dash."""
    return "-" if share is None else f"{100 * share:.1f}%"


def yield_table(outcomes: Sequence[Outcome]) -> Sheet:
    """Return the table of what each policy yields per rollout, per token and per batch."""
    cells: dict[str, Callable[[Outcome], str]] = {
        "policy": lambda one: one.policy,
        "groups per\n1k rollouts": lambda one: figure(one.informative_groups_per_1k_rollouts),
        "signal per\n1k rollouts": lambda one: figure(one.signal_per_1k_rollouts),
        "groups per\n1M tokens": lambda one: figure(one.informative_groups_per_1m_tokens),
        "signal per\n1M tokens": lambda one: figure(one.signal_per_1m_tokens),
        "batches": lambda one: figure(one.batches, 0),
        "steps per\nbatch": lambda one: figure(one.engine_steps_per_batch, 0),
        "hard\nreached": lambda one: percent(one.hard_prompts_reached),
    }
    return Sheet(list(cells), [[cell(one) for cell in cells.values()] for one in outcomes])


def token_table(outcomes: Sequence[Outcome]) -> Sheet:
    """Return the table of the share of tokens in each account; accounts that no policy used are left out."""
    used = [account for account in outcomes[0].token_share if any(one.token_share[account] for one in outcomes)]
    rows = []
    for one in outcomes:
        shares = [percent(one.token_share[account]) for account in used]
        spent = (f"{one.rollouts:,}", f"{one.tokens / 1e6:,.1f}M")
        rows.append([one.policy, *spent, *shares, figure(one.mean_pass_rate, 3)])
    return Sheet(["policy", "rollouts", "tokens", *used, "pass rate\nat end"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    setup, engine = Setup(), EngineConfig()
    lines = [f"  {name:<18} {about(name)}" for name in names()]
    lines.insert(len(ADVISED), "for studies:")
    policies = "\n".join(lines)
    bands = ", ".join(f"{prompts} {name}" for name, prompts, *_ in DIFFICULTIES)
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
    add("--gen-batch-size", metavar="N", type=int, help="prompts chosen, and open, at a time (default: target groups, "
        "and twice as many where groups of the next batch are begun ahead, as by frontier)")  # fmt: skip
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
    lift_by, _, gain = args.lift.rpartition("=")
    try:
        lift = float(gain)
    except ValueError:
        raise ValueError(f"--lift={args.lift!r} is not accepted: COLUMN=X, such as level=0.05") from None
    setup = Setup(
        rollouts=args.rollouts,
        seed=args.seed,
        target_groups=args.target_groups,
        gen_batch_size=args.gen_batch_size,
        repeat=not args.no_repeat,
        engine=EngineConfig(
            slots=args.slots, improvement=args.improvement, lift=lift, lift_by=lift_by, failure_rate=args.failure_rate
        ),
    )
    configs: dict[str, Config] = {}
    for recipe in dict.fromkeys(args.policy or names()):
        name = name_of(recipe)  # its path where another recipe has that name
        configs[recipe if recipe.endswith(FILE) and name in configs else name] = recipe_config(recipe)
    policies = apply_overrides(configs, args.set, setup)
    prompts = read_pass_rates(args.pass_rates) if args.pass_rates else mixture()
    outcomes = []
    with counted(len(policies), "policy") as begin:
        for name, settings in policies.items():
            begin(name)
            outcomes.append(simulate(name, settings, prompts, setup))
    if args.json:
        mean, found = float(prompts.pass_rate.mean()), list(map(asdict, outcomes))
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
        console.print(yield_table(outcomes).on_terminal(1))
        console.print(f"\n{LEGEND}\n", highlight=False, markup=False)
        console.print(token_table(outcomes).on_terminal(1))
    return 0


def apply_overrides(configs: Mapping[str, Config], words: Sequence[str], setup: Setup) -> dict[str, Settings]:
    """Return the settings of every config with every ``KEY=VALUE`` set: JSON, ``[a,b]``, ``none``, or else a word."""
    changed = dict(configs)
    known = {one for config in configs.values() for one in dotted_keys(config)}
    for word in words:
        key, _, text = word.partition("=")
        fits = bool(text) and (key in known or key.rpartition(".")[0].endswith("_kwargs"))
        require(fits, "--set", word, f"KEY=VALUE with a key of the recipes{nearest(key, known)}")
        value: Any = None if text == "none" else text
        if text.startswith("["):  # [level,type], as Hydra takes it
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                raise ValueError(f"--set={word!r} is not accepted: a list is written [a,b]") from None
        with contextlib.suppress(ValueError):
            value = json.loads(text)
        changed = {policy: with_value(config, key, value) for policy, config in changed.items()}
    return {policy: settings_of(config, setup) for policy, config in changed.items()}
