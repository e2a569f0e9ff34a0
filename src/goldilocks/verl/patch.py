"""Attributes of another package that are replaced, and the digests of the sources that they were replaced for.

A patch is skipped, with a sentence in the log, if a function it was written for has changed: a function that was
rewritten upstream is never silently overwritten.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from goldilocks.hashing import Sources, is_known

logger = logging.getLogger(__name__)

Function = Callable[..., Any]

# Names by which our trainer and the patches in its workers speak to one another.
# Beside the rows of an update: the rows and response tokens of the whole batch, by which the loss is normalised.
WHOLE_ROWS, WHOLE_TOKENS = "goldilocks_whole_rows", "goldilocks_whole_tokens"
DISTANCE = "rollout_probs_diff"  # how far the trainer's probabilities are from the rollout engine's: verl's own name
GAP_SUM, GAP_TOKENS = "weights_gap_sum", "weights_gap_tokens"  # of tokens that this very policy wrote
MOVED_SUM, MOVED_TOKENS = "moved_sum", "moved_tokens"  # of tokens that an older policy wrote


def around(replacement: Function) -> Callable[[Function], Function]:
    """Decorate ``replacement(original, …)``: return a function from the original to what takes its place."""

    return lambda original: functools.wraps(original)(lambda *args, **kwargs: replacement(original, *args, **kwargs))


class Kind(str, Enum):
    """Why a patch exists."""

    CPU = "cpu"
    """verl does not run on this machine unless it is applied: no GPU, no flash-attn, a TRL it does not know."""
    SPEED = "speed"
    """The same values in less time."""
    RESULTS = "results"
    """What verl computes is wrong without it."""
    REPORTS = "reports"
    """A run that fails says why."""
    ALGORITHM = "algorithm"
    """An algorithm gets or measures what verl does not give it."""
    TRAINER = "trainer"
    """Part of a trainer of ours, which applies it in its own processes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Patch:
    """``replaced[attribute](original)`` takes the place of each ``module.attribute``: all of them, or none.

    ``attribute`` may be that of a class, ``Class.method``. ``written_for`` has the functions of the module that the
    replacements were written for, each with the digest of its source, or one for every release that has another.
    ``without`` says what a step costs without the patch, as ``benchmarks/patches.py`` measured it, or what fails.
    ``needless_when`` is the change upstream that would end it.
    ``needs`` is a package without which the module cannot be imported, ``platform`` the only platform of verl's that
    has the fault.
    """

    name: str
    kind: Kind
    module: str
    replaced: Mapping[str, Callable[[Any], Any]]
    written_for: Mapping[str, Sources]
    reason: str
    changes: str
    without: str
    needless_when: str
    needs: str = ""
    platform: str = ""

    @property
    def targets(self) -> list[str]:
        """What is replaced, as dotted names."""
        return [f"{self.module}.{attribute}" for attribute in self.replaced]

    @property
    def possible(self) -> bool:
        """Whether it is of use in this process."""
        return self.possible_on(os.environ.get("VERL_PLATFORM"))

    def possible_on(self, platform: str | None) -> bool:
        """Whether this platform of verl's has the fault, and the package that the module needs is installed."""
        there = not self.needs or importlib.util.find_spec(self.needs) is not None
        return there and self.platform in ("", platform)

    @functools.cache  # noqa: B019  # a process has few patches, each for ever
    def apply(self) -> bool:
        """Replace the attributes, once in a process; False if what this was written for has changed or is gone."""
        if changed := [path for path in (*self.written_for, *self.replaced) if not self._is_known(path)]:
            where = f"{self.module}.{changed[0]}"
            logger.warning("%s has changed; the patch %s is skipped (%s)", where, self.name, self.reason)
            return False
        for attribute, replace in self.replaced.items():
            owner, _, name = attribute.rpartition(".")
            setattr(self._find(owner), name, replace(self._find(attribute)))
        return True

    def _is_known(self, path: str) -> bool:
        """Whether the module has this, with a source it was written for if it was written for one.

        A module that cannot be imported has nothing that is known.
        """
        try:
            found = self._find(path)
            return path not in self.written_for or is_known(found, self.written_for[path])
        except (AttributeError, ImportError, OSError):
            return False

    def _find(self, path: str) -> Any:
        module = importlib.import_module(self.module)
        return functools.reduce(getattr, path.split("."), module) if path else module
