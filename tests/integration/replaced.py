"""What ``register()`` replaces in verl and under it: for a process of its own that has not imported verl.

verl is imported without its plug-ins first. Whatever its modules, their classes and their tables hold is written down,
then the plug-in is registered, and what is another object afterwards was replaced. A second look finds functions of
ours in modules that only the plug-in imported. First nothing of ours is asked for, then everything.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from ray.actor import ActorClass

PACKAGES = ("verl", "transfer_queue", "tensordict", "ray", "vllm", "sglang")
MODULES = (
    "verl.trainer.main_ppo",
    "verl.trainer.main_ppo_v0",
    "verl.trainer.ppo.v1.trainer_colocate_async",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.llm_server",
)


def held() -> Iterator[tuple[str, Any]]:
    """Everything that the loaded modules of other packages hold, by dotted name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES and module is not None:
            for attribute, value in list(vars(module).items()):
                yield f"{name}.{attribute}", value
                yield from ((f"{name}.{attribute}{key}", item) for key, item in inside(name, attribute, value))


def inside(module: str, attribute: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a table or a class of the module's own holds. ``type`` asks nothing of objects that answer for others."""
    if type(value) is dict and not attribute.startswith("__"):
        yield from ((f"[{key}]", item) for key, item in list(value.items()))
    inner = value.__ray_metadata__.modified_class if issubclass(type(value), ActorClass) else value
    if issubclass(type(inner), type) and inner.__module__ == module:
        yield from ((f".{key}", item) for key, item in list(vars(inner).items()))


def is_ours(value: Any, folder: str) -> bool:
    """Whether ``value`` is a function written in this package."""
    return type(value) is FunctionType and value.__code__.co_filename.startswith(folder)


def replaced(before: dict[str, Any]) -> list[str]:
    """The names that stand for another object than before, or for a function of ours."""
    from goldilocks.verl import plugin

    plugin.register.cache_clear()
    plugin.register()
    after, folder = dict(held()), str(Path(plugin.__file__).parent)
    missing = object()
    changed = {name for name, value in before.items() if after.get(name, missing) is not value}
    changed |= {name for name, value in after.items() if is_ours(value, folder)}
    return sorted(name for name in changed if not is_bookkeeping(name))


def is_bookkeeping(name: str) -> bool:
    """Not a function of anyone's: what Python notes on importing, and the lookup of names that verl lacks."""
    return name.endswith((".__getattr__", ".__warningregistry__"))


def compared() -> dict[str, list[str]]:
    """Compare twice."""
    os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    from goldilocks.engine.cpu import PATCHES_VARIABLE
    from goldilocks.verl.patches import PATCHES

    for module in [*MODULES, *(patch.module for patch in PATCHES if patch.possible)]:
        importlib.import_module(module)
    before = dict(held())
    os.environ.pop(PATCHES_VARIABLE, None)
    stock = replaced(before)
    os.environ[PATCHES_VARIABLE] = "all"
    return {"nothing": stock, "all": replaced(before)}
