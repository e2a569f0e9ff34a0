"""Policies by one name: a selector, an allocator and a filter that belong together.

``goldilocks simulate --policy NAME`` and the recipes of ``goldilocks train`` mean the same thing by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from goldilocks.core.allocators import Allocator
from goldilocks.core.filters import Filter
from goldilocks.core.registry import build_allocator, build_filter, build_selector
from goldilocks.core.selectors import Selector
from goldilocks.errors import nearest

KINDS = ("selector", "allocator", "filter")


@dataclass(frozen=True)
class Preset:
    """Names and parameters; ``build`` makes the policies themselves."""

    about: str
    selector: str = "uniform"
    allocator: str = "fixed"
    filter: str | Sequence[str] = "variance"
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def build(self, overrides: Mapping[str, Any] | None = None) -> tuple[Selector, Allocator, Filter]:
        """The three policies. ``overrides`` are ``{"allocator.max_n": 64}``; every one must fit."""
        params = {kind: dict(self.params.get(kind, {})) for kind in KINDS}
        for key, value in (overrides or {}).items():
            kind, _, name = key.partition(".")
            if kind not in KINDS or not name:
                raise ValueError(f"{key}={value!r} is not accepted: selector.NAME, allocator.NAME or filter.NAME")
            params[kind][name] = value
        return (
            build_selector(self.selector, params["selector"]),
            build_allocator(self.allocator, params["allocator"]),
            build_filter(self.filter, params["filter"]),
        )


PRESETS: dict[str, Preset] = {
    "uniform": Preset("n rollouts of every prompt, all trained", filter="everything"),
    "dapo": Preset("n rollouts of every prompt, groups without variance dropped and refilled"),
    "adaptive": Preset(
        "until one answer is right, at most max_n; all trained", allocator="adaptive", filter="everything"
    ),
    "contrast": Preset(
        "until one answer is right and one is wrong", allocator="adaptive", params={"allocator": {"stop": "contrast"}}
    ),
    "pilot": Preset("a few rollouts first, the rest where those differ", allocator="pilot"),
    "knapsack": Preset("one budget, spent where a rollout is worth most per token", allocator="knapsack"),
    "greso": Preset("dapo, skipping prompts with a streak of no variance", selector="greso"),
    "thompson": Preset("dapo on prompts believed to be half right", selector="thompson"),
    "thompson+contrast": Preset(
        "prompts believed to be half right, until there is contrast",
        selector="thompson",
        allocator="adaptive",
        params={"allocator": {"stop": "contrast"}},
    ),
}


def preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise ValueError(f"policy={name!r} is not known{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
