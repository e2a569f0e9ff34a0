"""The names that guides to verl use and verl does not have: importing this module adds them to verl's namespace.

    from verl.trainer.ppo import RayPPOTrainerWithSampling
    from verl.trainer.config import TrainerConfig, DataConfig, ...
    python3 -m verl.trainer.main_ppo_adaptive ...

The plug-in does so. Nothing of verl's is replaced, no file is edited, and nothing of ours is imported before it is
asked for. With ``GOLDILOCKS_VERL_NAMES=0`` in the environment verl's namespace stays as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "GOLDILOCKS_VERL_NAMES"

# Of AlgoConfig and FilterGroupsConfig verl has its own; TrainerConfig takes those too.
NAMES: dict[str, dict[str, str]] = {
    "verl.trainer.ppo": {"RayPPOTrainerWithSampling": "goldilocks.verl.v0.trainer"},
    "verl.trainer.config": dict.fromkeys(
        ("TrainerConfig", "DataConfig", "ActorRolloutRefConfig", "RolloutConfig", "ActorConfig", "PPOTrainerConfig"),
        "goldilocks.verl.documents",
    ),
}
MODULES = {"verl.trainer.main_ppo_adaptive": "goldilocks.main_ppo_adaptive"}


def add() -> None:
    """To the packages of verl, what they lack; below them, behind every module that verl has there."""
    for package, names in NAMES.items():
        module = importlib.import_module(package)
        module.__dict__["__getattr__"] = _finder(module, names, module.__dict__.get("__getattr__"))
    sys.meta_path.append(_ByAnotherName())


def _finder(module: ModuleType, names: dict[str, str], before: Any) -> Any:
    """A module's ``__getattr__`` is asked for what is not there: what is verl's stays verl's."""

    def find(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(names[name]), name)
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    return find


class _ByAnotherName(MetaPathFinder):
    """Finds the file of a module of ours under a name of verl's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        found = importlib.util.find_spec(MODULES[fullname])
        return None if found is None else importlib.util.spec_from_file_location(fullname, found.origin)


if os.environ.get(SWITCH, "1") != "0":
    add()
