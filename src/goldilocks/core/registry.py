"""Makes policies from the names in a config: ours by name, a user's own as ``package.module:Class``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from goldilocks.core.allocators import ALLOCATORS, Allocator
from goldilocks.core.filters import FILTERS, Chain, Filter
from goldilocks.core.policy import Policy
from goldilocks.core.selectors import SELECTORS, Selector
from goldilocks.errors import refuse_unknown, require, require_known

P = TypeVar("P", bound=Policy)


def build_selector(name: str, params: Mapping[str, Any] | None = None) -> Selector:
    return _build("selector", name, params or {}, SELECTORS, Selector)  # type: ignore[type-abstract]


def build_allocator(name: str, params: Mapping[str, Any] | None = None) -> Allocator:
    return _build("allocator", name, params or {}, ALLOCATORS, Allocator)  # type: ignore[type-abstract]


def build_filter(name: str | Sequence[str], params: Mapping[str, Any] | None = None) -> Filter:
    """Return the filter of this name; several names make a chain, in which each filter takes the parameters it has."""
    if isinstance(name, str):
        return _build("filter", name, params or {}, FILTERS, Filter)  # type: ignore[type-abstract]
    classes = [_resolve("filter", one, FILTERS, Filter) for one in name]  # type: ignore[type-abstract]
    known = [inspect.signature(cls).parameters for cls in classes]
    refuse_unknown("goldilocks.filter_kwargs", params or {}, {key: None for keys in known for key in keys})
    chosen = ({key: value for key, value in (params or {}).items() if key in keys} for keys in known)
    return Chain([cls(**own) for cls, own in zip(classes, chosen, strict=True)])


def _build(kind: str, name: str, params: Mapping[str, Any], named: Mapping[str, type[P]], base: type[P]) -> P:
    cls = _resolve(kind, name, named, base)
    refuse_unknown(f"goldilocks.{kind}_kwargs", params, inspect.signature(cls).parameters)
    try:
        return cls(**params)
    except ValueError:
        raise  # a policy's own message, with its key and what it accepts
    except Exception as error:
        raise ValueError(f"goldilocks.{kind}={name!r} cannot be made: {type(error).__name__}: {error}") from error


def _resolve(kind: str, name: str, named: Mapping[str, type[P]], base: type[P]) -> type[P]:
    if ":" in name:
        return _import(kind, name, base)
    require_known(f"goldilocks.{kind}", name, named, "or package.module:Class")
    return named[name]


def _import(kind: str, name: str, base: type[P]) -> type[P]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"goldilocks.{kind}={name!r} cannot be imported: {error}") from error
    fits = isinstance(found, type) and issubclass(found, base)
    require(fits, f"goldilocks.{kind}", name, f"a subclass of {base.__module__}.{base.__name__}")
    return found  # type: ignore[no-any-return]
