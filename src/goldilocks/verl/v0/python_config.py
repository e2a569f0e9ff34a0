"""Configurations as Python objects, which become verl's config.

Each class is a section, with the most used keys as fields; every other key of verl goes into ``more``, by its dotted
name. A field that is None keeps verl's value. Values are checked when they are given, and keys in ``to_verl``: a key
that verl does not have is an error that suggests the nearest.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from goldilocks.config.recipes import ANSWERS, verl_defaults
from goldilocks.config.sections import FilterGroups
from goldilocks.core.filters import Variance
from goldilocks.core.limits import Limits, Surplus
from goldilocks.errors import nearest, require
from goldilocks.filtering.config import PPOFilterConfig
from goldilocks.types import MIN_STD, OnExhausted, OnFull

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Sections whose keys verl does not have: ours are checked by Settings, Ray's by Ray.
FREE = ("algorithm.filter_groups.", "adaptive_rollout.", "batch_filter.", "goldilocks.", "ray_kwargs.ray_init.")


@dataclass(kw_only=True)
class ConfigSection:
    """A section of verl's config. ``COUNTS`` are 1 or more, ``NOT_NEGATIVE`` 0 or more."""

    NAME: ClassVar[str] = ""
    COUNTS: ClassVar[tuple[str, ...]] = ()
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = ()

    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for least, keys in ((1, self.COUNTS), (0, self.NOT_NEGATIVE)):
            for key in keys:
                value = getattr(self, key)
                require(value is None or value >= least, f"{self.NAME}.{key}", value, f"{least} or more")


@dataclass(frozen=True)
class FilterGroupsConfig(FilterGroups):
    """``algorithm.filter_groups``: dynamic sampling."""

    def __post_init__(self) -> None:
        require(self.metric != "", "filter_groups.metric", self.metric, "acc, score, seq_reward or another metric")
        on_exhausted = OnExhausted.parse("filter_groups.on_exhausted", self.on_exhausted)
        Limits(max_num_gen_batches=self.max_num_gen_batches, on_exhausted=on_exhausted)
        Surplus(self.max_carry_steps, OnFull.parse("filter_groups.on_full", self.on_full))
        Variance(self.metric or "reward", MIN_STD if self.min_std is None else self.min_std)


@dataclass
class AlgoConfig(ConfigSection):
    """``algorithm``: the advantage estimator and which groups are trained."""

    adv_estimator: str | None = None
    use_kl_in_reward: bool | None = None
    norm_adv_by_std_in_grpo: bool | None = None
    gamma: float | None = None
    lam: float | None = None
    filter_groups: Any = None  # FilterGroupsConfig, or verl's class of that name

    def __post_init__(self) -> None:
        require(self.adv_estimator != "", "algorithm.adv_estimator", self.adv_estimator, "the name of an estimator")
        for key in ("gamma", "lam"):
            value = getattr(self, key)
            require(value is None or 0 <= value <= 1, f"algorithm.{key}", value, "a number from 0 to 1")


@dataclass
class DataConfig(ConfigSection):
    """``data``: how many prompts are generated for and trained at a time, and where they are."""

    NAME = "data"
    COUNTS = ("train_batch_size", "gen_batch_size", "max_prompt_length", "max_response_length")

    train_batch_size: int | None = None
    gen_batch_size: int | None = None
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    train_files: Any = None
    val_files: Any = None
    seed: int | None = None
    shuffle: bool | None = None


@dataclass
class RolloutConfig(ConfigSection):
    """``actor_rollout_ref.rollout``: generation."""

    NAME = "actor_rollout_ref.rollout"
    COUNTS = ("n",)

    n: int | None = None
    name: str | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        hot = self.temperature is None or self.temperature > 0
        require(hot, "actor_rollout_ref.rollout.temperature", self.temperature, "a number above 0")


@dataclass
class ActorConfig(ConfigSection):
    """``actor_rollout_ref.actor``: the policy's update."""

    NAME = "actor_rollout_ref.actor"
    COUNTS = ("ppo_mini_batch_size",)
    NOT_NEGATIVE = ("kl_loss_coef", "clip_ratio_low", "clip_ratio_high")

    use_kl_loss: bool | None = None
    kl_loss_coef: float | None = None
    ppo_mini_batch_size: int | None = None
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    loss_agg_mode: str | None = None


@dataclass
class ActorRolloutRefConfig(ConfigSection):
    """``actor_rollout_ref``: the model, its update and its rollouts."""

    rollout: RolloutConfig | Mapping[str, Any] = field(default_factory=RolloutConfig)
    actor: ActorConfig | Mapping[str, Any] = field(default_factory=ActorConfig)
    model: Mapping[str, Any] = field(default_factory=dict)
    ref: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class PPOTrainerConfig(ConfigSection):
    """``trainer``: the length of the run, its machines, and what it writes."""

    NAME = "trainer"
    COUNTS = ("total_training_steps", "total_epochs", "n_gpus_per_node", "nnodes")
    NOT_NEGATIVE = ("critic_warmup",)

    critic_warmup: int | None = None
    total_training_steps: int | None = None
    total_epochs: int | None = None
    save_freq: int | None = None
    test_freq: int | None = None
    val_before_train: bool | None = None
    default_local_dir: str | None = None
    resume_mode: str | None = None
    logger: Any = None
    project_name: str | None = None
    experiment_name: str | None = None
    n_gpus_per_node: int | None = None
    nnodes: int | None = None


@dataclass
class TrainerConfig(ConfigSection):
    """The whole config. ``to_verl`` returns what verl's trainers take."""

    algorithm: Any = field(default_factory=AlgoConfig)  # or verl's class of that name
    data: DataConfig | Mapping[str, Any] = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig | Mapping[str, Any] = field(default_factory=ActorRolloutRefConfig)
    trainer: PPOTrainerConfig | Mapping[str, Any] = field(default_factory=PPOTrainerConfig)
    critic: Mapping[str, Any] = field(default_factory=dict)
    reward: Mapping[str, Any] = field(default_factory=dict)
    adaptive_rollout: Mapping[str, Any] = field(default_factory=dict)
    batch_filter: PPOFilterConfig | Mapping[str, Any] = field(default_factory=dict)
    goldilocks: Mapping[str, Any] = field(default_factory=dict)

    def to_verl(self) -> DictConfig:
        """Return verl's defaults for this machine's device, with every value that is set here."""
        from omegaconf import OmegaConf
        from verl.utils.device import get_device_name

        stock = _verl_defaults()
        config = copy.deepcopy(_verl_defaults("+device=cpu") if get_device_name() == "cpu" else stock)
        given = dict(_flat(self))
        if "data.val_files" not in given:
            config.data.val_files = None  # verl's default names files that do not exist
        for key, value in given.items():
            if not key.startswith(FREE):
                _check_key(key, value, stock)
            OmegaConf.update(config, key, value, force_add=True)
        return config


_verl_defaults = functools.cache(verl_defaults)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values that are set, by their dotted names; ``more`` wins. Of verl's classes, what is not default."""
    items: Iterable[tuple[str, Any]]
    if isinstance(value, ConfigSection):
        plain = [(one.name, getattr(value, one.name)) for one in fields(value) if one.name != "more"]
        items = [*plain, *value.more.items()]
    elif isinstance(value, FilterGroups):
        items = {"_target_": _path(FilterGroupsConfig), **dataclasses.asdict(value)}.items()
    elif isinstance(value, PPOFilterConfig):
        items = [("enable", True), *_changed(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = _changed(value)
    elif isinstance(value, Mapping):
        items = value.items()
    else:
        yield prefix, value
        return
    for name, inner in items:
        if inner is not None:
            yield from _flat(inner, f"{prefix}.{name}".lstrip("."))


def _changed(value: Any) -> list[tuple[str, Any]]:
    default = type(value)()
    names = [one.name for one in fields(value) if getattr(value, one.name) != getattr(default, one.name)]
    return [(name, getattr(value, name)) for name in names]


def name_targets(config: DictConfig) -> None:
    """Name the classes of verl's sections that were assigned as objects, by which verl makes objects of them again."""
    from omegaconf import DictConfig, OmegaConf

    for key in config:
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            if node.get("_target_") == "":
                node._target_ = _path(OmegaConf.get_type(node))  # type: ignore[arg-type]
            name_targets(node)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_key(key: str, value: Any, stock: DictConfig) -> None:
    """Check that verl has the key. A section that verl ships empty (``engine_kwargs.vllm``) takes any key."""
    from omegaconf import DictConfig, OmegaConf

    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(stock, parent) if parent else stock
    known = [str(sibling) for sibling in section] if isinstance(section, DictConfig) else []
    is_open = isinstance(section, DictConfig) and not section
    if name not in known and not is_open:
        require(name not in ANSWERS, key, value, ANSWERS.get(name, ""))
        suggestion = nearest(key, [f"{parent}.{sibling}" for sibling in known])
        raise ValueError(f"{key} is not a key of verl's config{suggestion}")
