"""From the names in a config to policies: ours by name, a user's own as ``package.module:Class``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from goldilocks.core.allocators import ALLOCATORS, Allocator
from goldilocks.core.filters import FILTERS, Chain, Filter
from goldilocks.core.policy import Policy
from goldilocks.core.selectors import SELECTORS, Selector
from goldilocks.errors import nearest

P = TypeVar("P", bound=Policy)


def build_selector(name: str, params: Mapping[str, Any] | None = None) -> Selector:
    """The selector of this name, with these parameters."""
    return _build("selector", name, params or {}, SELECTORS, Selector)  # type: ignore[type-abstract]


def build_allocator(name: str, params: Mapping[str, Any] | None = None) -> Allocator:
    """The allocator of this name, with these parameters."""
    return _build("allocator", name, params or {}, ALLOCATORS, Allocator)  # type: ignore[type-abstract]


def build_filter(name: str | Sequence[str], params: Mapping[str, Any] | None = None) -> Filter:
    """The filter of this name, with these parameters; several names make a chain, each taking those it knows."""
    if isinstance(name, str):
        return _build("filter", name, params or {}, FILTERS, Filter)  # type: ignore[type-abstract]
    classes = [_resolve("filter", one, FILTERS, Filter) for one in name]  # type: ignore[type-abstract]
    known = {key for cls in classes for key in inspect.signature(cls).parameters}
    _refuse_unknown("filter", ", ".join(name), params or {}, known)
    chosen = (
        {key: value for key, value in (params or {}).items() if key in inspect.signature(cls).parameters}
        for cls in classes
    )
    return Chain([cls(**own) for cls, own in zip(classes, chosen, strict=True)])


def _build(kind: str, name: str, params: Mapping[str, Any], named: Mapping[str, type[P]], base: type[P]) -> P:
    cls = _resolve(kind, name, named, base)
    _refuse_unknown(kind, name, params, set(inspect.signature(cls).parameters))
    try:
        return cls(**params)
    except ValueError:
        raise  # a policy's own words, with its key and what it accepts
    except Exception as error:
        raise ValueError(f"{kind}={name!r} cannot be made: {type(error).__name__}: {error}") from error


def _resolve(kind: str, name: str, named: Mapping[str, type[P]], base: type[P]) -> type[P]:
    if ":" in name:
        return _import(kind, name, base)
    if name not in named:
        raise ValueError(
            f"{kind}={name!r} is not known{nearest(name, named)}; there are {', '.join(named)}, or package.module:Class"
        )
    return named[name]


def _import(kind: str, name: str, base: type[P]) -> type[P]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind}={name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{kind}={name!r} is not accepted: a subclass of {base.__module__}.{base.__name__}")
    return found


def _refuse_unknown(kind: str, name: str, params: Mapping[str, Any], known: set[str]) -> None:
    for key in params:
        if key not in known:
            there = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{kind}.{key} is not a parameter of {name}{nearest(key, known)}; there are: {there}")
