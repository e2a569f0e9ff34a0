"""The policies of a recipe, as ``goldilocks train`` would build them, with the sizes of a simulation and ``--set``.

A simulation differs in two places. It ends when its budget is spent, so ``max_num_gen_batches``, which stops a training
run on data that yield nothing, is lifted. And the batch filter, which needs a trainer's log-probs, is refused.

==========================================  ==================================================================
``--set allocator.max_n=64``                to every chosen policy whose allocator has ``max_n``; at least one must
``--set allocator=package.module:Class``    replaces the allocator of every policy, by class or by a name of ours
``--set adaptive_rollout.max_n=64``         sets the key for every policy, as ``goldilocks train`` does
==========================================  ==================================================================

Parts are replaced first and keys set next, so a new part can be given its parameters in the same command.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from goldilocks.config.recipes import read_recipe
from goldilocks.config.settings import Settings
from goldilocks.core.policy import Policy
from goldilocks.dotted_keys import dotted_keys, merged, value_at, with_value
from goldilocks.errors import nearest, require, require_type
from goldilocks.simulate.run import Setup

Config = Mapping[str, Any]
KINDS = ("selector", "allocator", "filter")


def recipe_config(recipe: str) -> Config:
    """Return the keys of a recipe, with ``max_num_gen_batches`` lifted."""
    return with_value(read_recipe(recipe), "algorithm.filter_groups.max_num_gen_batches", 0)


def settings_of(config: Config, setup: Setup) -> Settings:
    """Return the trainer's settings for this config and the sizes of this setup. Raises ``ValueError`` as it would."""
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


def apply_overrides(configs: Mapping[str, Config], words: Sequence[str], setup: Setup) -> dict[str, Settings]:
    """Return the settings of every config with every ``KEY=VALUE`` applied to those that it fits."""
    pairs = [_parse(word, configs) for word in words]
    changed = dict(configs)
    for kind, name in (pair for pair in pairs if pair[0] in KINDS):
        changed = {policy: _with_part(config, kind, name) for policy, config in changed.items()}
    for key, value in (pair for pair in pairs if not _is_of_a_part(pair[0])):
        changed = {policy: with_value(config, key, value) for policy, config in changed.items()}
    settings = {policy: settings_of(config, setup) for policy, config in changed.items()}
    for key, value in (pair for pair in pairs if _is_of_a_part(pair[0]) and pair[0] not in KINDS):
        for policy in _takers(settings, key, value):
            changed[policy] = with_value(changed[policy], _config_key(changed[policy], key), value)
    return {policy: settings_of(config, setup) for policy, config in changed.items()}


def _parse(word: str, configs: Mapping[str, Config]) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if key in KINDS and text:
        return key, text
    known = {one for config in configs.values() for one in dotted_keys(config)}
    section, _, last = key.rpartition(".")
    fits = bool(equals and text and last) and (section in KINDS or key in known or section.endswith("_kwargs"))
    forms = f"KIND.PARAMETER=VALUE or KIND=NAME, where KIND is one of {', '.join(KINDS)}, or a key of the recipes"
    require(fits, "--set", word, forms + nearest(key, known))
    return key, _value(text)


def _is_of_a_part(key: str) -> bool:
    return key.partition(".")[0] in KINDS


def _value(text: str) -> Any:
    """Return a JSON value; ``none`` is null, and any other word is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "none" else text


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
