"""An attribute of another package that is replaced, and the digest of the source it was replaced for.

A patch is skipped, with a sentence in the log, if the function it was written for has changed: a function that was
rewritten upstream is never silently overwritten.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from goldilocks.hashing import digest

logger = logging.getLogger(__name__)

Function = Callable[..., Any]


class Kind(str, Enum):
    """Why a patch exists."""

    CPU = "cpu"
    """verl does not run on this machine unless it is applied: no GPU, no flash-attn, a TRL it does not know."""
    SPEED = "speed"
    """The same values in less time."""
    REPORTS = "reports"
    """A run says what went wrong, or says it once."""
    ALGORITHM = "algorithm"
    """An algorithm is measured, or its config checked."""
    TRAINER = "trainer"
    """Part of a trainer of ours, which applies it in its own processes."""


@dataclass(frozen=True)
class Patch:
    """``replace(original)`` takes the place of ``module.attribute``.

    ``attribute`` may be that of a class, ``Class.method``. ``source_digest`` is that of ``module.written_for``, a
    function, or of the attribute itself where ``written_for`` is empty. ``needs`` is a package without which the module
    cannot be imported.
    """

    name: str
    kind: Kind
    module: str
    attribute: str
    source_digest: str
    replace: Callable[[Any], Any]
    reason: str
    changes: str
    written_for: str = ""
    needs: str = ""

    @property
    def target(self) -> str:
        """What is replaced, as one dotted name."""
        return f"{self.module}.{self.attribute}"

    @property
    def possible(self) -> bool:
        """Whether the package that the module needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    @functools.cache  # noqa: B019  # a process has few patches, each for ever
    def apply(self) -> bool:
        """Replace the attribute, once in a process; False if the function this was written for has changed."""
        if digest(self._find(self.written_for or self.attribute)) != self.source_digest:
            logger.warning("%s has changed; the patch %s is skipped (%s)", self.target, self.name, self.reason)
            return False
        owner, _, name = self.attribute.rpartition(".")
        setattr(self._find(owner), name, self.replace(self._find(self.attribute)))
        return True

    def _find(self, path: str) -> Any:
        module = importlib.import_module(self.module)
        return functools.reduce(getattr, path.split("."), module) if path else module
