"""A function of another package that is replaced, and the digest of the source it was replaced for.

Where the source is another, the patch stays off and says so: a function that was rewritten upstream is never silently
overwritten.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

Function = Callable[..., Any]


def digest(function: Function) -> str:
    """A short fingerprint of a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Patch:
    """``replace(original)`` takes the place of ``module.name`` while that function's source has ``source_digest``.

    ``name`` may be that of a method, ``Class.method``.
    """

    what: str
    module: str
    name: str
    source_digest: str
    replace: Callable[[Function], Function]

    @functools.cache  # noqa: B019  # a process has few patches, each for ever
    def apply(self) -> None:
        """Put the replacement into its module, once in a process, if it is the function this was written for."""
        *owner, name = self.name.split(".")
        holder = functools.reduce(getattr, owner, importlib.import_module(self.module))
        original = getattr(holder, name)
        if digest(original) != self.source_digest:
            where = f"{self.module}.{self.name}"
            logger.warning("%s is not the one this was written for; left as it is: %s", where, self.what)
            return
        setattr(holder, name, self.replace(original))
