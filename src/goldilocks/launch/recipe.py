"""From the words of a command line (``[RECIPE] [key=value …]``, in Hydra's grammar) to verl's config.

Invariant: the config is the one that ``python -m verl.trainer.main_ppo +device=… +task=… +recipe=… key=value …``
composes. Only verl's YAML files are read and verl is not imported, so a typing error is found within a second.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from goldilocks.config.recipes import DEFAULT, ELSEWHERE, FILE, added_or_changed, find, name_of, names, read_keys
from goldilocks.dotted_keys import dotted_keys
from goldilocks.errors import closest, require, require_known
from goldilocks.filtering.config import (
    INSTEAD_OF_LIBRARY_CALLS,
    INSTEAD_OF_REJECTION_SAMPLE,
    OF_LIBRARY_CALLS,
    REJECTION_SAMPLE,
)

DEFAULT_TASK = "arithmetic"
GROUPS = ("device", "task")
_MISSING = object()
OWN = "recipe_file"  # Hydra's group of recipes that are files of the user's own
TRAINER = "backend"  # the key under ``trainer`` that says who trains; verl where there is none
TRAINERS = ("verl", "trl")
# Keys that are no keys here, by their last word, and what to use in their place.
ANSWERS = {REJECTION_SAMPLE: INSTEAD_OF_REJECTION_SAMPLE, **dict.fromkeys(OF_LIBRARY_CALLS, INSTEAD_OF_LIBRARY_CALLS)}


@dataclass(frozen=True)
class Choice:
    """The choices of a command line."""

    recipe: str
    task: str
    device: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the recipe's name; of a file, the file's."""
        return name_of(self.recipe)

    @property
    def on_trl(self) -> bool:
        return f"+trainer.{TRAINER}=trl" in self.overrides


def choose(words: Sequence[str], device: str) -> Choice:
    """Separate the recipe, ``task=``, ``device=`` and ``trainer=`` from the overrides."""
    recipes = [word for word in words if "=" not in word and not word.startswith("~")]
    require(len(recipes) <= 1, "RECIPE", " ".join(recipes), "one recipe at a time; settings are written key=value")
    chosen = {"device": device, "task": DEFAULT_TASK}
    overrides = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in GROUPS:
            chosen[key] = value
        elif key == "trainer":
            require_known(key, value, TRAINERS)
            overrides += [] if value == "verl" else [f"+trainer.{TRAINER}={value}"]
        elif word not in recipes:
            overrides.append(added_or_changed(word))
    recipe = recipes[0] if recipes else DEFAULT
    find(recipe)
    for group in GROUPS:
        require_known(group, chosen[group], names(group))
    return Choice(recipe, chosen["task"], chosen["device"], tuple(overrides))


def compose_config(choice: Choice, extra: Sequence[str] = ()) -> DictConfig:
    """Compose verl's config: its defaults, the device, the task, the recipe, ``extra``, and last the overrides."""
    recipe = f"+recipe={choice.recipe}"
    if choice.recipe.endswith(FILE):
        keys = OmegaConf.create(read_keys(choice.recipe))
        ConfigStore.instance().store(group=OWN, name="chosen", node=keys, package="_global_")
        recipe = f"+{OWN}=chosen"
    groups = [f"+device={choice.device}", f"+task={choice.task}", recipe, *extra]
    with initialize_config_dir(str(_verl_config()), version_base=None):
        try:
            return compose("ppo_trainer", overrides=[*groups, *choice.overrides])
        except (HydraException, OmegaConfBaseException) as error:
            base = compose("ppo_trainer", overrides=groups)
            raise ValueError(_explain(error, base, choice.overrides)) from None


def verl_defaults() -> DictConfig:
    """Compose verl's config alone: what every key is where nobody has set it."""
    with initialize_config_dir(str(_verl_config()), version_base=None):
        return compose("ppo_trainer")


def quoted(value: object) -> str:
    """Quote a text for Hydra's grammar, in which a bare comma would make a sweep."""
    text = str(value).replace("'", r"\'")
    return f"'{text}'"


def _explain(error: Exception, base: DictConfig, overrides: Sequence[str]) -> str:
    """Return Hydra's message in one line; for an unknown key, name the nearest ones."""
    keys = list(dotted_keys(OmegaConf.to_container(base)))  # type: ignore[arg-type]
    for override in overrides:
        key = re.split(r"[=@]", override.lstrip("~"), maxsplit=1)[0]
        if not override.startswith("+") and OmegaConf.select(base, key, default=_MISSING) is _MISSING:
            if (last := key.rpartition(".")[2]) in ANSWERS:
                return f"{override} is not accepted: {ANSWERS[last]}"
            require(key not in ELSEWHERE, key, override.partition("=")[2], ELSEWHERE.get(key, ""))
            near = _nearest_keys(key, keys)
            hint = f"; nearest: {', '.join(near)}" if near else "; no key is like it"
            return f"unknown key {key!r} in {override!r}{hint}. To add a key that verl does not have, write +{override}"
    return " ".join(str(error).split())


def _nearest_keys(key: str, keys: Sequence[str]) -> list[str]:
    """Return up to three similar keys; those with the same last word come first."""
    last = key.rsplit(".", 1)[-1]
    same_end = [known for known in keys if known.rsplit(".", 1)[-1] == last]
    return (closest(key, same_end, likeness=0) + closest(key, keys))[:3]


def _verl_config() -> Path:
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'verl'", name="verl")
    return Path(spec.origin).parent / "trainer" / "config"
