"""``--set``: parameters of the chosen policies, or another part in place of theirs.

``allocator.max_n=64`` goes to every chosen policy whose allocator has that parameter; at least one must.
``allocator=package.module:Class`` (or the name of one of ours) replaces the allocator of all of them. Parts are
replaced first, so a new part can be given its parameters in the same command.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from goldilocks.core.policy import Policy
from goldilocks.core.presets import KINDS, Preset
from goldilocks.errors import nearest, require

PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "none"}


def apply_overrides(presets: Mapping[str, Preset], settings: Sequence[str]) -> dict[str, Preset]:
    """The presets with every ``KEY=VALUE`` applied to those that it fits. Each of them is known to build."""
    pairs = [_parse(setting) for setting in settings]
    replaced = {key: value for key, value in pairs if key in KINDS}
    changed = {name: _replace_parts(preset, replaced) for name, preset in presets.items()}
    parts = {name: _build(preset) for name, preset in changed.items()}
    for key, value in pairs:
        if key not in KINDS:
            for name in _takers(parts, key, value):
                changed[name] = _with_parameter(changed[name], key, value)
    for preset in changed.values():
        _build(preset)
    return changed


def _parse(setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    kind, dot, parameter = key.partition(".")
    fits = bool(equals and text and kind in KINDS and (parameter or not dot))
    require(fits, "--set", setting, f"KIND.PARAMETER=VALUE or KIND=NAME, where KIND is one of {', '.join(KINDS)}")
    return key, _value(text) if parameter else text


def _value(text: str) -> Any:
    """A JSON value; ``none`` is null, and any other word is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "none" else text


def _replace_parts(preset: Preset, parts: Mapping[str, str]) -> Preset:
    kept = {kind: params for kind, params in preset.params.items() if kind not in parts}
    changes: dict[str, Any] = {**parts, "params": kept}
    return replace(preset, **changes)


def _build(preset: Preset) -> dict[str, Policy]:
    return dict(zip(KINDS, preset.build(), strict=True))


def _takers(parts: Mapping[str, Mapping[str, Policy]], key: str, value: Any) -> list[str]:
    """The policies whose part of this kind has this parameter: at least one."""
    kind, _, parameter = key.partition(".")
    known = {name: inspect.signature(type(part[kind])).parameters for name, part in parts.items()}
    takers = [name for name in parts if parameter in known[name]]
    if not takers:
        there = sorted({one for parameters in known.values() for one in parameters})
        raise ValueError(
            f"--set {key} fits none of the policies {', '.join(parts)}{nearest(parameter, there)}; "
            f"their {kind}s have: {', '.join(there) or 'no parameters'}"
        )
    for name in takers:
        _check_type(parts[name][kind], key, parameter, value)
    return takers


def _with_parameter(preset: Preset, key: str, value: Any) -> Preset:
    kind, _, parameter = key.partition(".")
    params = {**preset.params, kind: {**preset.params.get(kind, {}), parameter: value}}
    return replace(preset, params=params)


def _check_type(part: Policy, key: str, parameter: str, value: Any) -> None:
    """A policy checks the range of its numbers; that they are numbers is checked here, where they come from text."""
    hint = typing.get_type_hints(type(part).__init__).get(parameter)
    accepted = set(typing.get_args(hint) or (hint,))
    if accepted <= set(PLAIN):
        fits = type(value) in accepted or (float in accepted and type(value) is int)
        require(fits, key, value, " or ".join(PLAIN[one] for one in PLAIN if one in accepted))
