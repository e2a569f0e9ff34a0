"""The real collector against the simulated engine, until a budget of rollouts is spent, and tables of what it yields.

Policies are compared at equal cost. Every rollout asked of the engine counts, cancelled and failed ones too, and those
in flight when the budget ends are waited for. So every policy spends exactly the same number of rollouts.

A group counts if it was trained, or if it is kept for the next batch when the budget ends. Groups that were dropped,
expired or unfinished count only as cost.

The policies are those of a recipe, as ``goldilocks train`` would build them, with two differences. A simulation ends
when its budget is spent, so ``max_num_gen_batches``, which stops a training run on data that yield nothing, is lifted.
And the batch filter, which needs a trainer's log-probs, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Group as Stack
from rich.text import Text

from goldilocks.config.recipes import read_recipe
from goldilocks.config.settings import Settings
from goldilocks.core import Collector, Exhausted
from goldilocks.dotted_keys import merged, with_value
from goldilocks.drive.driver import Driver, Stalled
from goldilocks.drive.rehearsal import rehearse
from goldilocks.drive.rows import NoRows
from goldilocks.errors import require
from goldilocks.lab.simulate.engine import EngineConfig, SimulatedEngine
from goldilocks.lab.simulate.pass_rates import PassRates
from goldilocks.sheet import Sheet
from goldilocks.types import Group, is_informative, signal

Config = Mapping[str, Any]
Tell = Callable[[int], None]
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
        require(self.rollouts >= 1, "rollouts", self.rollouts, "1 or more")
        require(self.seed >= 0, "seed", self.seed, "0 or more")


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
    """Return the settings of a recipe by its name or file."""
    return settings_of(recipe_config(recipe), setup)


def simulate(
    name: str, settings: Settings, prompts: PassRates, setup: Setup, tell: Tell = lambda rollouts: None
) -> Outcome:
    """Spend the budget by these settings and return the yield. ``tell`` is called with the rollouts so far."""
    source = prompts.source()
    rehearse(settings, source)
    collector = settings.collector(source, repeat=setup.repeat, name=name)
    engine = SimulatedEngine(prompts, setup.engine, seed=setup.seed)
    harvest = Harvest()
    try:
        for batch in batches(collector, engine, setup.rollouts, tell):
            harvest.add(batch, engine.clock)
    except Exhausted as error:
        if setup.repeat:
            raise ValueError(f"{name}: {error}") from None
        # Without repeats, a run whose budget outlasts the data ends here.
    harvest.add_waiting(collector)
    collector.accounts.check()
    return Outcome.of(name, prompts, collector, engine, harvest)


def batches(
    collector: Collector, engine: SimulatedEngine, rollouts: int, tell: Tell = lambda rollouts: None
) -> Iterator[tuple[Group, ...]]:
    """Yield every batch that ``rollouts`` rollouts fill; the engine trains on each before the next is collected."""
    engine.budget = rollouts
    driver = Driver(collector, engine, NoRows(), max_failures=math.inf)  # the user chose the failure rate
    try:
        while True:
            batch = driver.batch()
            tell(engine.submitted)
            engine.train(batch)
            yield batch
    except Stalled:  # the budget is spent
        tell(engine.submitted)


class Harvest:
    """Sums over the groups of a run."""

    def __init__(self) -> None:
        self.batches = 0
        self.informative = 0
        self.signal = 0.0
        self.reached: set[int] = set()  # prompts with at least one informative group
        self.filled_at = 0

    def add(self, batch: Iterable[Group], clock: int) -> None:
        """Count a batch that was trained; ``clock`` is the engine step at which it was full."""
        self.batches += 1
        self.filled_at = clock
        self._count(batch)

    def add_waiting(self, collector: Collector) -> None:
        """Count the groups that are kept for the next batch."""
        trained = collector.allocator.trained
        self._count(replace(group, trained=tuple(trained(group, collector.beliefs))) for group in collector.kept)

    def _count(self, groups: Iterable[Group]) -> None:
        for group in filter(is_informative, groups):
            self.informative += 1
            self.signal += signal(group)
            self.reached.add(group.prompt.index)


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

    @classmethod
    def of(
        cls, name: str, prompts: PassRates, collector: Collector, engine: SimulatedEngine, harvest: Harvest
    ) -> Outcome:
        """Compute the figures of a finished run."""
        accounts = collector.accounts
        rollouts, tokens = accounts.generated_rollouts, accounts.generated_tokens
        hard = np.flatnonzero((prompts.pass_rate > 0) & (prompts.pass_rate <= HARD)).tolist()
        by_class = accounts.by_class(accounts.tokens)
        return cls(
            policy=name,
            rollouts=rollouts,
            tokens=tokens,
            batches=harvest.batches,
            informative_groups_per_1k_rollouts=1e3 * harvest.informative / max(rollouts, 1),
            signal_per_1k_rollouts=1e3 * harvest.signal / max(rollouts, 1),
            informative_groups_per_1m_tokens=1e6 * harvest.informative / max(tokens, 1),
            signal_per_1m_tokens=1e6 * harvest.signal / max(tokens, 1),
            engine_steps_per_batch=harvest.filled_at / harvest.batches if harvest.batches else None,
            hard_prompts_reached=len(harvest.reached.intersection(hard)) / len(hard) if hard else None,
            mean_pass_rate=engine.learner.mean_pass_rate,
            token_share={account: count / max(tokens, 1) for account, count in by_class.items()},
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

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


def tables(outcomes: Sequence[Outcome]) -> Stack:
    return Stack(yield_table(outcomes).on_terminal(1), Text(f"\n{LEGEND}\n"), token_table(outcomes).on_terminal(1))


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
    headings = ["policy", "rollouts", "tokens", *used, "pass rate\nat end"]
    rows = []
    for one in outcomes:
        shares = [percent(one.token_share[account]) for account in used]
        spent = (f"{one.rollouts:,}", f"{one.tokens / 1e6:,.1f}M")
        rows.append([one.policy, *spent, *shares, figure(one.mean_pass_rate, 3)])
    return Sheet(headings, rows)
