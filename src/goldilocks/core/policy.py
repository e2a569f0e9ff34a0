"""The base of every policy (selectors, allocators, filters, priors), how one is made by name, and the base of priors.

A policy of ours has a name, a user's own is ``package.module:Class``. A prior is the Beta that a prompt has before any
rollout of its own. Beliefs add the prompt's rollouts to it.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from goldilocks.errors import refuse_unknown, require, require_known
from goldilocks.types import Prompt

P = TypeVar("P", bound="Policy")


class Policy(ABC):  # noqa: B024  # each family adds its own abstract methods
    """Parameters that are checked, state that can be saved, metrics. A policy without state inherits these methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changed since construction, as JSON values and numpy arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # a policy without state loads nothing
        """Continue from a state that ``state_dict`` returned."""

    def metrics(self) -> dict[str, float]:
        """Return what to log of this policy, under its own names."""
        return {}


def build(kind: str, name: str, params: Mapping[str, Any], named: Mapping[str, type[P]], base: type[P]) -> P:
    """Return the policy of this name with these parameters; ``named`` are ours of its kind, ``base`` their class."""
    cls = resolve(kind, name, named, base)
    refuse_unknown(f"goldilocks.{kind}_kwargs", params, inspect.signature(cls).parameters)
    try:
        return cls(**params)
    except ValueError:
        raise  # a policy's own message, with its key and what it accepts
    except Exception as error:
        raise ValueError(f"goldilocks.{kind}={name!r} cannot be made: {type(error).__name__}: {error}") from error


def resolve(kind: str, name: str, named: Mapping[str, type[P]], base: type[P]) -> type[P]:
    """Return the class of a policy, ours or the user's own."""
    if ":" not in name:
        require_known(f"goldilocks.{kind}", name, named, "or package.module:Class")
        return named[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"goldilocks.{kind}={name!r} cannot be imported: {error}") from error
    fits = isinstance(found, type) and issubclass(found, base)
    require(fits, f"goldilocks.{kind}", name, f"a subclass of {base.__module__}.{base.__name__}")
    return found  # type: ignore[no-any-return]


class Counts(Protocol):
    """What a prior may learn from: the columns of ``Beliefs``, a row per prompt, and the last recorded update."""

    keys: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray
    visits: np.ndarray
    drawn_step: np.ndarray  # of the last fair visit: first, or drawn uniformly
    now: int


class Prior(Policy):
    """A Beta for each prompt. The sum of its two parameters is how many rollouts of the prompt it counts as."""

    @abstractmethod
    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected Beta of each prompt: passes and failures."""

    @abstractmethod
    def overall(self) -> float:
        """Return the expected pass rate of any prompt."""

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the Beta of each prompt, given one draw of what prompts share."""
        return self.mean(rows)

    def observe(self, prompt: Prompt, passes: int, trials: int, version: int, *, fair: bool) -> None:
        """Note a group, also one that is given up before it is judged; ``version`` is the policy that wrote it.

        ``fair``: the prompt was chosen independently of its own rollouts: a first visit, or a uniform draw.
        """

    def tell(self, rates: Mapping[str, float]) -> None:
        """Take pass rates that a validation measured, by metric name; only ``Oracle`` uses them."""

    def catch_up(self, counts: Counts) -> None:
        """Learn from the groups observed since the last call. Called before beliefs are read."""


class Flat(Prior):
    """Beta(1, 1): every pass rate is equally likely."""

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ones = np.ones(len(rows), dtype=np.float32)
        return ones, ones

    def overall(self) -> float:
        return 0.5
