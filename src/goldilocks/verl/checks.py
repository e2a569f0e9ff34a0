"""Refuses what a run could not do, by its key, before anything starts: settings, and media in the data.

Importing this module imports nothing of verl.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goldilocks.config.recipes import ELSEWHERE, OURS, SECTIONS, VERLS, our_defaults
from goldilocks.config.sections import REWARDS
from goldilocks.config.settings import Settings
from goldilocks.dotted_keys import value_at, values
from goldilocks.engine.cpu import PATCHES_VARIABLE
from goldilocks.errors import closest, refuse, require
from goldilocks.hashing import MEDIA
from goldilocks.rewards.calls import PATH
from goldilocks.types import OnFull

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

OUR_MODES = ("goldilocks", "goldilocks_async")  # trainer.v1.trainer_mode
CAN_PAUSE = ("transformers", "vllm")
SAMPLER = "trainer.v1.sampler"
AGENT = "actor_rollout_ref.rollout.agent"
VERLS_BOUNDS = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop"}  # verl's defaults
# Keys of verl's own trainers with verl's defaults, which cannot be told from values that a user chose.
VERLS_OWN = {f"{mode}.num_warmup_batches": 1 for mode in ("colocate_async", "separate_async")}
VERLS_OWN |= {"separate_async.hybrid_rollout.enable_switch": False, "separate_async.parameter_sync_step": 4}
VERLS_OWN |= {"sampler.sync_refill_failed_groups": False}
SKIPS = ("skip.rollout.enable", "skip.rollout_tq.enable")
SPLITS = ("train", "val")
COUNTS = {"trainer.total_training_steps": True}  # sizes that every run reads, and whether it may be without
COUNTS |= dict.fromkeys(["data.max_prompt_length", "data.max_response_length"], False)
COUNTS |= {"actor_rollout_ref.actor.ppo_mini_batch_size": False}
FROM_FILES = ("-c", "--config", "hydra.searchpath", "recipe", "task")  # how words begin that have Hydra read files
MANAGER = "goldilocks.verl.dispatch.worker.StreamingManager"


def uses_collector(config: DictConfig) -> bool:
    """Return whether a trainer of ours runs on verl's V1."""
    return bool(config.trainer.use_v1 and config.trainer.v1.trainer_mode in OUR_MODES)


def estimator_for(settings: Settings) -> str:
    """Return the name of the advantage estimator; raise ``ValueError`` if its baseline cannot be over all rollouts."""
    from goldilocks.losses.advantages import pool_estimator  # imports torch

    if not settings.trains_part_of_groups:
        return settings.adv_estimator
    return pool_estimator(settings.adv_estimator, settings.use_kl_in_reward)


def check_settings(config: DictConfig) -> None:
    """Check the settings as the trainer would."""
    if uses_collector(config):
        estimator_for(Settings.from_config(config))
        check_v1(config)


def check_names(config: DictConfig) -> None:
    """Refuse what guides to older releases of verl name, with what it is now."""
    for name, accepted in ELSEWHERE.items():
        require(name not in config, name, config.get(name), accepted)
    key = "actor_rollout_ref.rollout.mode"
    require(value_at(config, key) in (None, "async"), key, value_at(config, key), "async, verl's only mode and default")


def check_inputs(config: DictConfig, splits: Sequence[str] = SPLITS) -> None:
    """Refuse sizes that are no numbers, and data files that are empty or have no prompts."""
    from pyarrow import ArrowException, parquet

    for key, without in COUNTS.items():
        count, accepted = value_at(config, key), "a whole number above 0" + (", or null" if without else "")
        require((without and count is None) or (type(count) is int and count > 0), key, count, accepted)
    data = config.data
    for split in splits:
        key = f"data.{split}_files"
        for file in filter(Path.is_file, _parquet(data.get(f"{split}_files"))):
            try:
                rows, columns = parquet.read_metadata(file).num_rows, parquet.read_schema(file).names
            except ArrowException as error:
                raise ValueError(f"{key}={str(file)!r} is not accepted: a parquet file ({error})") from None
            require(rows > 0, key, str(file), "a file with rows")
            known = data.prompt_key in columns or value_at(config, "data.custom_cls.path")
            require(known, "data.prompt_key", data.prompt_key, f"a column of {str(file)!r}: {', '.join(columns)}")


def check_entry(config: DictConfig, *, ours: bool = False) -> None:
    """Look at the config of a run on verl before Ray is started; ``ours`` where its trainer is ours on V0.

    What a trainer of ours cannot do is refused; keys that verl's own trainer does not read are named in the log.
    """
    ours = ours or uses_collector(config)
    check_names(config)
    for section in set(config) - {*VERLS, *OURS}:
        if close := closest(str(section), SECTIONS, most=1):
            said = f"{section!r} is a section that nobody reads (did you mean {close[0]!r}?)"
            if ours:
                raise ValueError(said)
            logger.warning(said)
    if ours:
        check_inputs(config)
    check_settings(config)
    if not ours and (said := unread(config)):
        logger.warning(said)


def unread(config: DictConfig) -> str:
    """Return a sentence on the keys of ours that a trainer of verl's own leaves unread; empty if none is set."""
    from omegaconf import OmegaConf

    there = [name for name in ("algorithm", *SECTIONS) if config.get(name)]
    given = values({name: OmegaConf.to_container(config[name], resolve=True) for name in there})
    defaults = OmegaConf.create({**our_defaults(), "task": config.get("task") or {}})  # some are the task's
    usual = values(OmegaConf.to_container(defaults, resolve=True))  # type: ignore[arg-type]
    set_by_user = {key for key in given if key in usual or not key.startswith("algorithm.")}
    set_by_user.discard("algorithm.filter_groups._target_")  # the name of its class, which verl has too
    if config.reward.custom_reward_function.path == PATH:  # calls are guarded on every trainer
        set_by_user = {key for key in set_by_user if not key.startswith(REWARDS)}
    found = [f"{key}={given[key]}" for key in sorted(set_by_user) if given[key] != usual.get(key)]
    if not found:
        return ""
    mode = f"v1.trainer_mode={config.trainer.v1.trainer_mode}" if config.trainer.use_v1 else "use_v1=False"
    reader = "trainer.use_v1=True trainer.v1.trainer_mode=goldilocks reads them, or python -m goldilocks.main_ppo"
    return f"{', '.join(found)}: no effect with trainer.{mode}, a trainer of verl's own; {reader}"


@contextmanager
def in_one_line() -> Iterator[None]:
    """Have a ``ValueError`` end a program of Hydra's with its message alone."""
    from hydra.core.hydra_config import HydraConfig

    try:
        yield
    except ValueError as error:
        if HydraConfig.initialized():
            sys.exit(f"goldilocks: {error}")
        raise


def check_with_verl() -> None:
    """Have verl's ``validate_config``, which its command calls before it starts Ray, look at our keys too.

    In a process whose command line can name nothing of ours, every function stays verl's own.
    """
    from verl.utils import config as module

    named = names_ours(sys.argv[1:])
    from_files = any(word.lstrip("+").startswith(FROM_FILES) for word in sys.argv[1:])
    if os.environ.get(PATCHES_VARIABLE) == "none" or not (named or from_files):
        return
    original = module.validate_config

    @functools.wraps(original)
    def validate_config(config: DictConfig, *args: Any, **kwargs: Any) -> None:
        sections = set(map(str, config)) - set(VERLS)
        spelt_like_ours = any(closest(section, SECTIONS, most=1) for section in sections)
        if named or spelt_like_ours or uses_collector(config):
            with in_one_line():
                check_entry(config)
                if uses_collector(config):
                    check_run(config)
        original(config, *args, **kwargs)

    module.validate_config = validate_config


def names_ours(words: Sequence[str]) -> bool:
    """Return whether one of these words of a command sets a key of ours, or one that is spelt like it."""
    keys = [word.lstrip("+~").partition("=") for word in words]
    sections = {key.split(".")[0] for key, equals, _ in keys if equals} - set(VERLS)
    known = any(key in ELSEWHERE or closest(key, SECTIONS, most=1) for key in sections)
    named = {"trainer.v1.trainer_mode", "actor_rollout_ref.rollout.mode"}
    return known or any(key in named or key.startswith("algorithm.filter_groups.") for key, _, _ in keys)


def check_run(config: DictConfig) -> None:
    """Raise ``ValueError`` for what an algorithm or our rollout server cannot do; log what is likely a mistake."""
    for warning in _mistakes(config):
        logger.warning(warning)


def _mistakes(config: DictConfig) -> list[str]:
    from goldilocks.engine import verl_server
    from goldilocks.losses.policy_loss import check_algorithm  # imports torch

    mistakes = check_algorithm(config)
    graders, loops = (value_at(config, key) for key in ("reward.num_workers", f"{AGENT}.num_workers"))
    apart = value_at(config, "reward.reward_model.enable") or value_at(config, "reward.sandbox_fusion.url")
    naive = value_at(config, "reward.reward_manager.name") == "naive" and not apart
    if naive and graders > max(loops, 8) and uses_collector(config):  # 8 is verl's default
        said = f"reward.num_workers={graders} has no effect: with reward.reward_manager.name=naive agent-loop workers"
        mistakes.append(f"{said} compute the rewards, {AGENT}.num_workers={loops} of them")
    given = {name: value_at(config, f"trainer.v1.{name}") for name in VERLS_OWN}
    for name, value in given.items() if any(given.values()) and uses_collector(config) else ():
        mode, syncs = config.trainer.v1.trainer_mode, value is not None and name.endswith(".parameter_sync_step")
        as_ours = syncs and config.data.train_batch_size == value * config.actor_rollout_ref.actor.ppo_mini_batch_size
        refused = mode == "goldilocks_async" and name.startswith("separate_async.") and not syncs
        if value not in (None, VERLS_OWN[name]) and not (as_ours or refused):
            why = "weights are sent after each batch" if syncs else "verl's own trainers read it"
            mistakes.append(f"trainer.v1.{name}={value} has no effect with trainer.v1.trainer_mode={mode}: {why}")
    if config.actor_rollout_ref.rollout.get("name", None) == verl_server.NAME:
        verl_server.check(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model)
        check_text(config.data, f"rollout.name={verl_server.NAME} takes text; or use rollout.name=vllm")
    else:
        check_readable(config)
    return mistakes


def check_v1(config: DictConfig) -> None:
    """Raise ``ValueError`` for a config that the V1 trainer does not support, or would ignore."""
    with_us = "with trainer.v1.trainer_mode=goldilocks"
    _check_both(config, Settings.from_config(config), with_us)
    key = f"{AGENT}.agent_loop_manager_class"
    require(value_at(config, key) in (None, MANAGER), key, value_at(config, key), f"none {with_us}, or {MANAGER}")
    key = f"{SAMPLER}.custom_sampler.path"
    require(not value_at(config, key), key, value_at(config, key), f"none {with_us}: goldilocks.selector samples")
    for name, default in VERLS_BOUNDS.items():  # which cannot be told from values that a user chose
        value = config.trainer.v1.sampler.get(name, default)
        accepted = f"{default} (verl's default, not used) {with_us}; algorithm.filter_groups.max_carry_steps bounds age"
        require(value == default, f"{SAMPLER}.{name}", value, accepted)
    # Rollouts pause where a server ends a request on demand and returns what it has written.
    key = "algorithm.filter_groups.on_full"
    on_full, engine = value_at(config, key), config.actor_rollout_ref.rollout.get("name", None)
    accepted = f"finish or requeue with rollout.name={engine}; partial needs {' or '.join(CAN_PAUSE)}"
    require(on_full != OnFull.PARTIAL or engine in CAN_PAUSE, key, on_full, accepted)


def _check_both(config: DictConfig, settings: Settings, trainer: str) -> None:
    from goldilocks.losses.policy_loss import check_older_rows  # imports torch

    _mistakes(config)
    if settings.carries_groups:
        check_older_rows(config, settings.surplus().max_carry_steps)
    model, key = config.reward.reward_model, "reward.reward_model.enable_resource_pool"
    accepted = f"True {trainer}, since a group is judged when its rollouts arrive and needs their rewards"
    require(not model.enable or model.enable_resource_pool, key, False, accepted)
    for key in SKIPS:
        accepted = f"False {trainer}, whose step is no one batch of prompts: its rollouts cannot be taken from a file"
        require(not value_at(config, key), key, True, accepted)


def check_v0(config: DictConfig, settings: Settings) -> None:
    """Raise ``ValueError`` for a config that the V0 trainer does not support."""
    _check_both(config, settings, "on verl's V0 trainer")
    key, estimator = "algorithm.adv_estimator", config.algorithm.adv_estimator
    require(estimator != "remax", key, estimator, "an estimator without a greedy baseline")
    accepted = "finish or requeue on verl's V0 trainer; trainer.use_v1=True has partial"
    require(not settings.surplus().pauses, "algorithm.filter_groups.on_full", OnFull.PARTIAL, accepted)


def check_text(data: Any, reader: str, splits: Sequence[str] = SPLITS) -> None:
    """Raise ``ValueError`` for data with more than text, as far as the files are on this machine.

    ``reader`` is what takes text, with what to use in its place.
    """
    for key, column, file in _found(data, splits):
        refuse(f"data.{key}", column, f"a name that is no column of {file}: {reader}")


def check_readable(config: Any) -> None:
    """Raise ``ValueError`` for data with more than text that verl would fail to read, after minutes or in silence.

    verl drops every prompt whose image it cannot read, and says so once a prompt. It goes on without a processor that
    it cannot make, and fails at the first prompt.
    """
    found = next(_found(config.data), None)
    if found is None or value_at(config, "data.custom_cls.path"):  # a data set of the user's own reads as it likes
        return
    key, column, file = found
    problem = ""
    try:
        importlib.import_module("qwen_vl_utils")
    except Exception as error:  # torchvision raises a RuntimeError where it does not fit torch
        problem = f"reads images with qwen_vl_utils and torchvision, which fail here: {error}"
    model = config.actor_rollout_ref.model
    folder = Path(str(model.get("path"))).expanduser()
    if not problem and folder.is_dir() and not model.get("trust_remote_code"):
        from verl.utils.tokenizer import hf_processor

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = hf_processor(str(folder), trust_remote_code=False)
        reasons = [str(one.message) for one in said if "processor" in str(one.message)] or ["it has none"]
        problem = "" if made is not None else f"makes no processor of {folder} ({reasons[-1]})"
    require(not problem, f"data.{key}", column, f"a name that is no column of {file}, since verl {problem}")


def _found(data: Any, splits: Sequence[str] = SPLITS) -> Iterator[tuple[str, str, Path]]:
    """Yield the keys that name a column of the data, with the column and a file that has it."""
    files = [file for split in splits for file in _parquet(data.get(f"{split}_files"))]
    for key in MEDIA:
        for file in files:
            if data.get(key) in _columns(file):
                yield key, data.get(key), file


def _parquet(files: Any) -> list[Path]:
    names = [files] if isinstance(files, str) else list(files or ())
    return [path for path in (Path(str(name)).expanduser() for name in names) if path.suffix == ".parquet"]


def _columns(file: Path) -> set[str]:
    """Return the columns that have a value somewhere, by what the file says of its chunks."""
    from pyarrow import parquet

    if not file.is_file():
        return set()
    opened = parquet.ParquetFile(file)
    groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
    leaves = [opened.schema.column(place) for place in range(opened.metadata.num_columns)]
    typed = [place for place, leaf in enumerate(leaves) if str(leaf.logical_type) != "Null"]
    found = set()
    for chunk in (group.column(place) for group in groups for place in typed):
        known = chunk.statistics
        if known is None or not known.has_null_count or known.null_count < chunk.num_values:
            found.add(chunk.path_in_schema.split(".")[0])
    return found
