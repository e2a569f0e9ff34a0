"""``GOLDILOCKS_PATCHES`` chooses the patches of a process: ``none``, ``all``, or kinds and names with commas between.

Unset, verl stays as it is, except on the platform ``cpu``, where the patches of kind ``cpu`` are applied. Our launchers
(``goldilocks train``, ``python -m goldilocks.main_ppo``) set it to ``all`` for the processes of their runs unless the
user has set it.
"""

from __future__ import annotations

import os
import sys

from goldilocks.engine.cpu import PATCHES_VARIABLE
from goldilocks.errors import require
from goldilocks.verl.patch import Kind, Patch
from goldilocks.verl.patches import PATCHES


def selected(patch: Patch) -> bool:
    """Whether the environment of this process asks for ``patch``."""
    return not _words().isdisjoint({"all", patch.kind.value, patch.name})


def asks_for(kind: Kind) -> bool:
    """Whether the environment of this process asks for all that is of this kind."""
    return not _words().isdisjoint({"all", kind.value})


def apply_selected(patch: Patch) -> None:
    """Apply ``patch`` if the environment asks for it and the platform has the fault."""
    if selected(patch) and patch.possible:
        patch.apply()


def named(name: str) -> Patch:
    """Return the patch of this name. Our trainers and workers ask by name, and import no patch."""
    return next(patch for patch in PATCHES if patch.name == name)


def in_force(name: str) -> bool:
    """Whether a patch is asked for and stands, here and in every process with this environment."""
    return selected(named(name)) and named(name).apply()


def ask_for(kind: Kind) -> None:
    """Apply the patches of ``kind`` in this process for an object of ours, unless the environment chooses others.

    A module that needs another package, such as vLLM's server, is not imported for the sake of its patches.
    """
    for patch in PATCHES:
        chosen = selected(patch) or PATCHES_VARIABLE not in os.environ
        if patch.kind is kind and chosen and (not patch.needs or patch.module in sys.modules):
            patch.apply()


def _words() -> set[str]:
    value = os.environ.get(PATCHES_VARIABLE)
    if value is None:
        return {Kind.CPU.value} if os.environ.get("VERL_PLATFORM") == "cpu" else set()
    words = {word.strip() for word in value.split(",")}
    accepted = ["none", "all", *(kind.value for kind in Kind), *(patch.name for patch in PATCHES)]
    require(words <= set(accepted), PATCHES_VARIABLE, value, f"one or several of {', '.join(accepted)}")
    return words
