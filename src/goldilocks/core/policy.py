"""The base of every policy (selectors, allocators and filters), and how one is made by name.

A policy of ours has a name, a user's own is ``package.module:Class``.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from goldilocks.errors import refuse_unknown, require, require_known, require_type

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


def place_of(method: Callable[..., Any]) -> str:
    """Return a method's name with its file and line."""
    code = inspect.unwrap(method).__code__
    return f"{method.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def build(kind: str, name: str, params: Mapping[str, Any], named: Mapping[str, type[P]], base: type[P]) -> P:
    """Return the policy of this name with these parameters; ``named`` are ours of its kind, ``base`` their class."""
    cls = resolve(kind, name, named, base)
    refuse_unknown(f"goldilocks.{kind}_kwargs", params, inspect.signature(cls).parameters)
    if name in named:  # a policy of ours checks the range of its numbers; that they are numbers is checked here
        hints = get_type_hints(cls.__init__)
        for key, value in params.items():
            require_type(f"goldilocks.{kind}_kwargs.{key}", value, hints.get(key))
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
