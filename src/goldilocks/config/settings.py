"""The settings of a user's config, checked, and the core's objects made from them.

The keys are the ones people know, ``algorithm.filter_groups.*``, ``adaptive_rollout.*`` and ``batch_filter.*``, and one
group of our own, ``goldilocks.*``, for everything the policies can do beyond them. Nothing here imports verl.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from goldilocks.config.sections import AdaptiveRollout, FilterGroups, Policies, RewardCalls, read_section, reward_calls
from goldilocks.core import Beliefs, Collector, Limits, Source, Surplus
from goldilocks.core.allocators import Adaptive, Allocator, Fixed, Sequential, build_allocator
from goldilocks.core.effects import Division
from goldilocks.core.filters import Everything, Filter, Variance, build_filter
from goldilocks.core.limits import Budget
from goldilocks.core.selectors import Selector, build_selector
from goldilocks.core.strata import StrataSettings
from goldilocks.dotted_keys import value_at
from goldilocks.errors import require, require_known, require_type
from goldilocks.filtering import config as filtering
from goldilocks.runs.history import belief_name, metric_name
from goldilocks.types import MIN_STD, REWARD, Cost, OnExhausted, OnFull

logger = logging.getLogger(__name__)

FINAL_METRIC = "seq_final_reward"  # after the KL penalty, which is known once log-probs are
ON_STALE_WEIGHTS = ("warn", "error")
UNNAMED = (None, REWARD)  # verl's own default is the reward: it cannot be told from a metric that nobody named
REWARD_METRICS = ("seq_reward", FINAL_METRIC)  # the summed token-level score
SHOWN = 256  # prompts, spread evenly, whose mean belief is logged for a value of a column of validate_by
READING = "Goldilocks reads the texts of the prompts for their strata: {:,} of {:,}"
PRIORS = ("flat", "strata", "oracle")
NUMBERS = {  # of verl's: their type, and the least
    "data.train_batch_size": (int, 1), "actor_rollout_ref.rollout.n": (int, 1), "data.gen_batch_size": (int | None, 1),
    "data.max_response_length": (int | None, 1), "data.seed": (int | None, 0),
}  # fmt: skip
# Keys that are read only where another of their section has this value.
READ_WITH: dict[str, tuple[str, object]] = {
    "adaptive_rollout.balance": ("stop", "balanced"),
    "batch_filter.min_rollout_n": ("remove_clip", True),
    "batch_filter.selection_temperature": ("sample_selection_strategy", "efficiency_stochastic"),
    **{
        f"batch_filter.{key}": ("enable_two_gate_filter", True)
        for key in ("gate1_bias_epsilon", "gate1_mode", "gate2_instability_threshold")
    },
}


@dataclass(frozen=True)
class Settings:
    """What a config says of prompts, rollouts and trained rows, and the objects that are made from it."""

    train_batch_size: int
    gen_batch_size: int | None
    n: int
    max_response_length: int
    seed: int
    adv_estimator: str
    use_kl_in_reward: bool
    filter_groups: FilterGroups
    adaptive: AdaptiveRollout
    policies: Policies
    batch_filter: Mapping[str, Any] | None = None  # a section without the key ``enable`` is enabled

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Read and check; every error names the key, the value, and what would be accepted."""
        key = f"trainer.{filtering.REJECTION_SAMPLE}"
        require(value_at(config, key) is None, key, value_at(config, key), filtering.INSTEAD_OF_REJECTION_SAMPLE)
        seed = value_at(config, "data.seed")
        for key, (hint, least) in NUMBERS.items():
            require_type(key, value := value_at(config, key), hint)
            require(value is None or value >= least, key, value, f"{least} or more")
        settings = cls(
            train_batch_size=value_at(config, "data.train_batch_size"),
            gen_batch_size=value_at(config, "data.gen_batch_size"),
            n=value_at(config, "actor_rollout_ref.rollout.n"),
            max_response_length=value_at(config, "data.max_response_length"),
            seed=1 if seed is None else seed,
            adv_estimator=value_at(config, "algorithm.adv_estimator") or "",
            use_kl_in_reward=bool(value_at(config, "algorithm.use_kl_in_reward")),
            filter_groups=read_section(FilterGroups, "algorithm.filter_groups", config),
            adaptive=read_section(AdaptiveRollout, "adaptive_rollout", config),
            policies=read_section(Policies, "goldilocks", config),
            batch_filter=value_at(config, "batch_filter"),
        )
        settings._check()
        return settings

    def _check(self) -> None:
        groups, adaptive = self.filter_groups, self.adaptive
        if groups.enable:
            require(groups.metric != "", "algorithm.filter_groups.metric", groups.metric, "the name of a reward metric")
            key, batches = "algorithm.filter_groups.max_inflight_gen_batches", groups.max_inflight_gen_batches
            require(batches == 1, key, batches, "1; data.gen_batch_size says how many prompts are rolled out at a time")
        if adaptive.enable:
            require(adaptive.max_n >= self.n, "adaptive_rollout.max_n", adaptive.max_n, f"rollout.n={self.n} or more")
            free = self.policies.allocator is None
            require(free, "goldilocks.allocator", self.policies.allocator, "none with adaptive_rollout.enable=True")
        conflict = self.judges_final_reward and self.batch_filter_config is not None
        require(not conflict, "algorithm.filter_groups.metric", groups.metric, "another metric with batch_filter")
        if self.batch_filter_config is not None:
            self._check_oversampling(self.batch_filter_config)
        parts: list[Callable[[], object]] = [self.limits, self.surplus, self.selector, self.allocator, self.filter]
        for part in (*parts, self.budget, self.strata, self.rewards):
            part()  # each checks its own keys
        named = self.policies.filter
        compares = self.filter_groups.enable or "variance" in ([named] if isinstance(named, str) else named or ())
        n, own = self.allocator().size()[1], "n" in self.policies.allocator_kwargs
        key = "goldilocks.allocator_kwargs.n" if own else "actor_rollout_ref.rollout.n"
        require(n > 1 or not compares, key, n, "2 or more: a group is kept if its rewards differ")
        Cost.parse("goldilocks.cost", self.policies.cost)
        require_known("goldilocks.on_stale_weights", self.policies.on_stale_weights, ON_STALE_WEIGHTS)
        self._check_prior()
        self._check_ignored()

    def _check_prior(self) -> None:
        policies, prior = self.policies, self.policies.prior
        require_known("goldilocks.prior", prior, PRIORS)
        if prior == "oracle":
            accepted = "flat or strata; oracle is for the arms of goldilocks compare"
            require(policies.study, "goldilocks.prior", prior, accepted)
            columns = list(self.strata().columns)
            told = len(columns) == 1 and columns[0] in policies.validate_by
            accepted = "with goldilocks.prior=oracle one column, which is in goldilocks.validate_by too"
            require(told, "goldilocks.strata.columns", columns, accepted)

    def _check_ignored(self) -> None:
        policies = self.policies
        if self.adaptive.enable:
            self._require_parameters("allocator", (), "none with adaptive_rollout.enable=True, which has its own")
        elif policies.allocator in (None, "fixed"):
            named = policies.allocator or "null"
            self._require_parameters("allocator", ("n",), f"n alone with goldilocks.allocator={named}")
        if policies.filter is None:
            self._require_parameters("filter", (), "none without goldilocks.filter")
        judges = f"False with goldilocks.filter={policies.filter!r}, which judges groups instead"
        unused = self.filter_groups.enable and policies.filter is not None
        require(not unused, "algorithm.filter_groups.enable", True, judges)

    def _require_parameters(self, kind: str, known: tuple[str, ...], accepted: str) -> None:
        given = dict(getattr(self.policies, f"{kind}_kwargs"))
        require(set(given) <= set(known), f"goldilocks.{kind}_kwargs", given, accepted)

    def _check_oversampling(self, config: filtering.PPOFilterConfig) -> None:
        """Refuse a second size of the batch, or a second key for how many prompts are generated at first."""
        groups, factor = config.target_num_groups, config.prompt_oversampling_factor
        fits = groups in (None, self.train_batch_size)
        accepted = f"data.train_batch_size={self.train_batch_size}, or null; kept groups beyond it are carried"
        require(fits, "batch_filter.target_num_groups", groups, accepted)
        once = factor == 1 or not self.gen_batch_size
        accepted = f"1 with data.gen_batch_size={self.gen_batch_size}, which says the same"
        require(once, "batch_filter.prompt_oversampling_factor", factor, accepted)

    @property
    def batch_filter_config(self) -> filtering.PPOFilterConfig | None:
        """``batch_filter.*``, if it is set and enabled; the group size is ``rollout.n`` unless stated."""
        given = dict(self.batch_filter or {})
        for key in filtering.OF_LIBRARY_CALLS:
            require(key not in given, f"batch_filter.{key}", given.get(key), filtering.INSTEAD_OF_LIBRARY_CALLS)
        enabled = given.pop("enable", bool(given))
        require_type("batch_filter.enable", enabled, bool)
        filtering.PPOFilterConfig.refuse_unknown_keys(given)
        return filtering.PPOFilterConfig.from_mapping({"target_group_size": self.n, **given}) if enabled else None

    @property
    def drops_groups(self) -> bool:
        """Whether a prompt that is rolled out may train nothing."""
        return self.filter_groups.enable or self.policies.filter is not None or self.batch_filter_config is not None

    @property
    def gate_config(self) -> filtering.PPOFilterConfig | None:
        """The batch filter as it judges every group that is shown to it; the collector chooses the groups of a batch.

        A group has at most as many rows as the allocator has trained of it, and is asked for no more.
        """
        config, allocator = self.batch_filter_config, self.allocator()
        if config is None:
            return None
        most = config.target_group_size
        if isinstance(allocator, Fixed):
            most = min(most, allocator.n)
        elif isinstance(allocator, Adaptive):
            most = min(most, allocator.max_train_n or allocator.max_n)
        return replace(
            config,
            target_group_size=most,
            min_group_size=min(config.min_group_size, most),
            varying_group_sizes=not isinstance(allocator, Fixed),
            gate_always=True,
            target_num_groups=self.train_batch_size,
            prompt_oversampling_factor=1.0,
        )

    @property
    def trains_part_of_groups(self) -> bool:
        """Whether a trained group may have sound rollouts that are not trained."""
        allocator, config = self.allocator(), self.batch_filter_config
        if config is not None and (config.reward_threshold is not None or not isinstance(allocator, Fixed)):
            return True
        if isinstance(allocator, Fixed):
            return config is not None and allocator.n > config.target_group_size
        if isinstance(allocator, Adaptive):
            return allocator.max_train_n is not None
        return type(allocator).trained is not Allocator.trained

    @property
    def trains_older_groups(self) -> bool:
        """Whether a group may be trained that an older policy wrote."""
        return self.surplus().max_carry_steps > 0

    @property
    def carries_groups(self) -> bool:
        """Whether groups of an older policy are to be expected: a batch leaves kept groups over, or open ones."""
        over = self.drops_groups or (self._gen_batch_size() or 0) > self.train_batch_size or self.surplus().pauses
        return self.trains_older_groups and over

    @property
    def judges_final_reward(self) -> bool:
        """Whether groups are judged on a reward that is known only after log-probs are computed."""
        return self.filter_groups.enable and self.filter_groups.metric == FINAL_METRIC and self.use_kl_in_reward

    def summary(self) -> str:
        """Return in one line what decides in a run; every trainer prints it at its start."""
        policies, allocator, groups = self.policies, self.allocator(), self.filter_groups
        columns = ", ".join(self.strata().columns) or "data_source and text"
        prior = policies.prior if policies.prior == "flat" else f"{policies.prior} by {columns}"
        named = "adaptive" if self.adaptive.enable else policies.allocator or "fixed"
        most = allocator.max_n if isinstance(allocator, Adaptive) else getattr(allocator, "n", None)
        asked = named if most is None else f"{named} ({most} rollouts{' at most' if named != 'fixed' else ''})"
        filters = [policies.filter if isinstance(policies.filter, str) else "+".join(policies.filter or [])]
        metric = "acc, else reward" if groups.metric in UNNAMED else groups.metric
        filters += [f"variance of {metric}"] if groups.enable else []
        filters += ["batch_filter"] if self.batch_filter_config is not None else []
        kept = " and ".join(filter(None, filters)) or "none"
        decided = f"selector {policies.selector}, prior {prior}, allocator {asked}, filter {kept}"
        return f"Goldilocks: {decided}, cost in {policies.cost}"

    def limits(self) -> Limits:
        tokens = self.policies.max_tokens_per_step
        return Limits(
            max_num_gen_batches=self.filter_groups.max_num_gen_batches,
            max_rollouts_per_step=self.policies.max_rollouts_per_step,
            max_tokens_per_step=tokens,
            max_tokens_per_rollout=self.max_response_length if tokens is not None else None,
            max_retries=self.policies.max_retries,
            on_exhausted=OnExhausted.parse("algorithm.filter_groups.on_exhausted", self.filter_groups.on_exhausted),
        )

    def surplus(self) -> Surplus:
        on_full = OnFull.parse("algorithm.filter_groups.on_full", self.filter_groups.on_full)
        return Surplus(self.filter_groups.max_carry_steps, on_full)

    def budget(self) -> Budget:
        return read_section(Budget, "goldilocks.budget", {"goldilocks": vars(self.policies)})

    def rewards(self) -> RewardCalls:
        return reward_calls({"goldilocks": vars(self.policies)})

    def strata(self) -> StrataSettings:
        return read_section(StrataSettings, "goldilocks.strata", {"goldilocks": vars(self.policies)})

    def selector(self) -> Selector:
        return build_selector(self.policies.selector, self.policies.selector_kwargs)

    @property
    def outcome(self) -> str | None:
        """The metric that groups are judged by and passes are counted in; None: ``acc`` where it is returned."""
        if self.policies.filter is not None:
            metric: str | None = self.policies.filter_kwargs.get("metric")
            return metric
        if not self.filter_groups.enable:
            return REWARD
        if self.filter_groups.metric in UNNAMED:
            return None
        return REWARD if self.filter_groups.metric in REWARD_METRICS else self.filter_groups.metric

    def beliefs(self, source: Any) -> Beliefs:
        """Return beliefs about the prompts of a source; ``goldilocks.prior`` says where they begin."""
        divisions: list[Division] = []
        names: list[str] = []
        shown: dict[str, np.ndarray] = {}
        if self.policies.prior == "strata":
            divisions = self.strata().of(source, lambda done, size: print(READING.format(done, size), flush=True))
            for column in [one for one in self.strata().columns if one in self.policies.validate_by]:
                values = source.column(column, "goldilocks.strata.columns")
                labels = np.array([belief_name(column, value) for value in values])
                rows = {str(name): np.flatnonzero(labels == name) for name in np.unique(labels)}
                shown |= {name: own[:: math.ceil(len(own) / SHOWN)] for name, own in rows.items()}
        elif self.policies.prior == "oracle":
            (column,) = self.strata().columns
            told = [metric_name(column, value) for value in source.column(column, "goldilocks.strata.columns")]
            names = sorted(set(told))
            strata = np.searchsorted(np.array(names), np.array(told))
            divisions = [Division(strata, np.arange(1, len(names) + 1, dtype=np.uint64))]
        return Beliefs(
            source.keys(),
            divisions=divisions,
            metric=self.outcome,
            positive_threshold=self.adaptive.positive_threshold,
            cost=Cost.parse("goldilocks.cost", self.policies.cost),
            names=names,
            shown=shown,
        )

    def allocator(self) -> Allocator:
        """Return adaptive rollouts if enabled, else the allocator named, else ``rollout.n`` for every prompt."""
        if self.adaptive.enable:
            known = {one.name for one in fields(Adaptive)}
            chosen = {one.name: getattr(self.adaptive, one.name) for one in fields(self.adaptive) if one.name in known}
            return Adaptive(**chosen)
        if self.policies.allocator is None or self.policies.allocator == "fixed":
            oversampled = self.batch_filter_config.rollouts_to_generate if self.batch_filter_config else self.n
            return build_allocator("fixed", {"n": self.policies.allocator_kwargs.get("n", oversampled)})
        n = {"n": self.n} if self.policies.allocator == "sequential" else {}
        return build_allocator(self.policies.allocator, {**n, **self.policies.allocator_kwargs})

    def filter(self) -> Filter:
        """Return the filter named, else the variance of a metric for dynamic sampling, else none."""
        groups = self.filter_groups
        if self.policies.filter is not None:
            named, threshold = self.policies.filter, {"positive_threshold": self.adaptive.positive_threshold}
            words = isinstance(named, Sequence) and all(isinstance(one, str) for one in named)
            require(words, "goldilocks.filter", named, "a word, or a list of words")
            return build_filter(named, self.policies.filter_kwargs, threshold)
        if not groups.enable or self.judges_final_reward:
            return Everything()
        least = MIN_STD if groups.min_std is None else groups.min_std
        require(least >= 0, "algorithm.filter_groups.min_std", least, "0 or more")
        return Variance(self.outcome, least, self.adaptive.positive_threshold)

    def _gen_batch_size(self) -> int | None:
        """Return how many prompts are chosen at a time: more than a batch if they are oversampled, or begun ahead."""
        if self.gen_batch_size is not None:
            return self.gen_batch_size
        if self.batch_filter_config:
            return self.batch_filter_config.prompts_to_generate(self.train_batch_size)
        return 2 * self.train_batch_size if self._begins_ahead else None

    @property
    def _begins_ahead(self) -> bool:
        """Whether groups of the next batch are begun while this one is filled.

        Chunks of a group wait for one another: with one batch of them open, most slots of an engine stay empty.
        """
        return isinstance(self.allocator(), Sequential) and self.surplus().max_carry_steps > 1

    def without_effect(self, *, repeat: bool = True) -> list[str]:
        """Return a sentence on every key that is set and not read; ``repeat``: prompts never run out."""
        policies, groups, columns = self.policies, self.filter_groups, list(self.strata().columns)
        found: list[tuple[str, object, str]] = []
        if columns and policies.prior == "flat":
            found.append(("goldilocks.strata.columns", columns, "goldilocks.prior=strata"))
        asks = self.adaptive.enable is False and policies.allocator in ("knapsack", "sequential")
        weighs = asks or policies.selector == "frontier" or ":" in f"{policies.selector}{policies.allocator}"
        if policies.prior != "flat" and not (weighs or policies.selector == "thompson"):
            needed = "a selector or an allocator that reads beliefs: goldilocks.selector=frontier or thompson"
            found.append(("goldilocks.prior", policies.prior, needed))
        if policies.cost != str(Cost.TOKENS) and not weighs:
            found.append(("goldilocks.cost", policies.cost, "selector=frontier, or allocator=sequential or knapsack"))
        if not groups.enable:
            needed = "algorithm.filter_groups.enable=True; a filter of goldilocks.filter has its own, in filter_kwargs"
            named = {key: vars(groups)[key] for key in ("metric", "min_std") if vars(groups)[key] not in UNNAMED}
            found += [(f"algorithm.filter_groups.{key}", value, needed) for key, value in named.items()]
        bounds = (max(groups.max_num_gen_batches, 0), policies.max_rollouts_per_step, policies.max_tokens_per_step)
        endless = repeat and not any(bounds) and ":" not in policies.selector  # which may say that there are no more
        if endless and groups.on_exhausted != OnExhausted.ERROR:
            needed = "a limit: max_num_gen_batches above 0, goldilocks.max_rollouts_per_step or max_tokens_per_step"
            found.append(("algorithm.filter_groups.on_exhausted", groups.on_exhausted, needed))
        if not self.adaptive.enable:
            usual = AdaptiveRollout(positive_threshold=self.adaptive.positive_threshold)
            changed = {key: value for key, value in vars(self.adaptive).items() if value != vars(usual)[key]}
            needed = "adaptive_rollout.enable=True"
            found += [(f"adaptive_rollout.{key}", value, needed) for key, value in changed.items()]
        if self.batch_filter_config is None:
            given = {key: value for key, value in (self.batch_filter or {}).items() if key != "enable"}
            changed = {key: one for key, one in given.items() if one != getattr(filtering.PPOFilterConfig, key, None)}
            needed = "batch_filter.enable=True"
            found += [(f"batch_filter.{key}", value, needed) for key, value in changed.items() if value is not None]
        sections: dict[str, Any] = {"batch_filter": self.batch_filter_config}
        sections["adaptive_rollout"] = self.adaptive if self.adaptive.enable else None
        for name, (other, value) in READ_WITH.items():
            section, _, key = name.partition(".")
            read = sections[section]
            if read and getattr(read, key) != getattr(type(read), key) and getattr(read, other) != value:
                found.append((name, getattr(read, key), f"{section}.{other}={value}"))
        return [f"{key}={value!r} has no effect: it is read with {needed}" for key, value, needed in found]

    def collector(
        self,
        source: Source,
        order: Callable[[int], np.ndarray] | None = None,
        *,
        repeat: bool = True,
        components: Sequence[str] = (),
        name: str = "",
    ) -> Collector:
        """Return the collector of these settings; ``order`` is the data loader's order of each epoch.

        ``components`` are the parts of the reward where a trainer has its own; else ``goldilocks.rewards.functions``.
        ``name`` stands before what is said of these settings, where there are several.
        """
        for said in self.without_effect(repeat=repeat):
            logger.warning("%s%s", f"{name}: " if name else "", said)
        return Collector(
            source,
            self.selector(),
            self.allocator(),
            self.filter(),
            target_groups=self.train_batch_size,
            gen_batch_size=self._gen_batch_size(),
            limits=self.limits(),
            surplus=self.surplus(),
            beliefs=self.beliefs(source),
            ahead=self.train_batch_size // 2 if self._begins_ahead else 0,
            order=order,
            repeat=repeat,
            seed=self.seed,
            components=components or tuple(self.rewards().functions or ()),
        )
