"""The names that guides to verl use and verl does not have. Importing this module adds them to verl's namespace.

    from verl.trainer.ppo import RayPPOTrainerWithSampling
    from verl.trainer.ppo.ray_trainer_with_sampling import RayPPOTrainerWithSampling
    from verl.trainer.config import TrainerConfig, DataConfig, ...
    python3 -m verl.trainer.main_ppo_adaptive ...

Nothing of verl is replaced, and a module of ours is imported only when its name is used. ``GOLDILOCKS_VERL_NAMES=0`` in
the environment leaves verl's namespace as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "GOLDILOCKS_VERL_NAMES"

# verl has its own AlgoConfig and FilterGroupsConfig; TrainerConfig takes those too.
NAMES: dict[str, dict[str, str]] = {
    "verl.trainer.ppo": {"RayPPOTrainerWithSampling": "goldilocks.verl.v0.trainer"},
    "verl.trainer.config": dict.fromkeys(
        ("TrainerConfig", "DataConfig", "ActorRolloutRefConfig", "RolloutConfig", "ActorConfig", "PPOTrainerConfig"),
        "goldilocks.verl.v0.python_config",
    ),
}
MODULES = {
    "verl.trainer.ppo.ray_trainer_with_sampling": "goldilocks.verl.v0.trainer",
    "verl.trainer.ppo.adaptive_ray_trainer": "goldilocks.verl.v0.trainer",
    "verl.trainer.ppo.adaptive_rollout": "goldilocks.core.allocators",
}
SCRIPTS = {"verl.trainer.main_ppo_adaptive": "goldilocks.main_ppo_adaptive"}  # run with python -m


def add() -> None:
    """Register the names above under ``verl.trainer``. A name or module that verl has is found first."""
    for package, names in NAMES.items():
        module = importlib.import_module(package)
        module.__dict__["__getattr__"] = _with_names(module, names, module.__dict__.get("__getattr__"))
    sys.meta_path.append(_Finder())


def _with_names(module: ModuleType, names: dict[str, str], before: Any) -> Any:
    """Return a ``__getattr__`` for verl's module; Python calls it only for names that the module does not have."""

    def find(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(names[name]), name)
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    return find


class _Finder(MetaPathFinder):
    """Finds our modules under the names of verl's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, _SameModule(MODULES[fullname]))
        if fullname not in SCRIPTS:
            return None
        found = importlib.util.find_spec(SCRIPTS[fullname])
        return None if found is None else importlib.util.spec_from_file_location(fullname, found.origin)


class _SameModule(Loader):
    """Gives a module a second name; its classes are the same objects under both."""

    def __init__(self, module: str) -> None:
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._module)


if os.environ.get(SWITCH, "1") != "0":
    add()
