"""Config keys that have a new name. The old one is read for two minor versions, with a warning (docs/versions.md)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renamed:
    """A key of ``algorithm.filter_groups``, ``adaptive_rollout`` or ``goldilocks`` with another name in its section.

    ``since`` is the first version that has the new name.
    """

    old: str
    new: str
    since: str

    def warn(self) -> None:
        logger.warning("%s is now %s; the old name is accepted for two minor versions", self.old, self.new)


RENAMED: tuple[Renamed, ...] = ()


def read_renamed(section: str, given: Mapping[str, Any], renamed: Sequence[Renamed] = RENAMED) -> dict[str, Any]:
    """Return the keys of a section under their new names. An old name wins: the new one may be a default."""
    keys = dict(given)
    for one in renamed:
        above, _, old = one.old.rpartition(".")
        if above == section and old in keys:
            one.warn()
            keys[one.new.rpartition(".")[2]] = keys.pop(old)
    return keys


def rename_override(word: str, renamed: Sequence[Renamed] = RENAMED) -> str:
    """Return an override of the command line (``key=value``, ``+key=value``, ``~key``) with the new name of its key."""
    for one in renamed:
        match = re.fullmatch(rf"([+~]*){re.escape(one.old)}((?:[.=@].*)?)", word, re.DOTALL)
        if match:
            one.warn()
            return f"{match[1]}{one.new}{match[2]}"
    return word
