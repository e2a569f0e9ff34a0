"""From the words of a command line to verl's config: ``[RECIPE] [key=value …]``, in Hydra's own grammar.

Invariant: it is what ``python -m verl.trainer.main_ppo +device=… +task=… +recipe=… key=value …`` composes. verl itself
is not imported: only its YAML files are read, so a typing error costs a second and not a start of Ray.

A recipe is one of ours by name, or a YAML file of one's own by path.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from goldilocks.errors import closest, nearest
from goldilocks.recipes import CONFIG, DEFAULT, FILE, find, name_of, names

DEFAULT_TASK = "arithmetic"
GROUPS = ("device", "task")


@dataclass(frozen=True)
class Choice:
    """What the command line chose."""

    recipe: str
    task: str
    device: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The recipe's name; of a file, the file's."""
        return name_of(self.recipe)


def choose(words: Sequence[str], device: str) -> Choice:
    """Tell recipe, ``task=`` and ``device=`` from the overrides; unknown names are answered with the nearest."""
    recipes = [word for word in words if "=" not in word and not word.startswith("~")]
    if len(recipes) > 1:
        raise ValueError(f"one recipe at a time, not {' and '.join(recipes)}; settings are written key=value")
    chosen = {"device": device, "task": DEFAULT_TASK}
    overrides = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in GROUPS:
            chosen[key] = value
        elif word not in recipes:
            overrides.append(word)
    recipe = recipes[0] if recipes else DEFAULT
    find(recipe)
    for group in GROUPS:
        _require_known(group, chosen[group])
    known = recipe if recipe.endswith(FILE) else name_of(recipe)
    return Choice(known, chosen["task"], chosen["device"], tuple(overrides))


def compose_config(choice: Choice, extra: Sequence[str] = ()) -> DictConfig:
    """verl's config: its defaults, the device, the task, the recipe, ``extra``, and last what the user set."""
    recipe = _stored(choice.recipe) if choice.recipe.endswith(FILE) else f"+recipe={choice.recipe}"
    groups = [f"+device={choice.device}", f"+task={choice.task}", recipe, *extra]
    with initialize_config_dir(str(_verl_config()), version_base=None):
        try:
            return compose("ppo_trainer", overrides=[*groups, *choice.overrides])
        except (HydraException, OmegaConfBaseException) as error:
            base = compose("ppo_trainer", overrides=groups)
            raise ValueError(_explain(error, base, choice.overrides)) from None


def _stored(file: str) -> str:
    """The override that chooses a recipe's file, wherever the file is."""
    try:
        node = OmegaConf.load(find(file))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"recipe={file!r} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(node, DictConfig):
        raise ValueError(f"recipe={file!r} has no keys; it is written like those in {CONFIG / 'recipe'}")
    ConfigStore.instance().store(group="recipe_file", name="chosen", node=node, package="_global_")
    return "+recipe_file=chosen"


def quoted(value: object) -> str:
    """A value in Hydra's grammar that is this text, whatever is in it: a comma is not a sweep."""
    text = str(value).replace("'", r"\'")
    return f"'{text}'"


def _require_known(group: str, name: str) -> None:
    known = names(group)
    if name not in known:
        raise ValueError(f"{group}={name!r} is not one of {', '.join(known)}{nearest(name, known)}")


def _explain(error: Exception, base: DictConfig, overrides: Sequence[str]) -> str:
    """Hydra's message in one line; where a key does not exist, with the nearest that do."""
    keys = list(_keys(base))
    for override in overrides:
        key = re.split(r"[=@]", override.lstrip("~"), maxsplit=1)[0]
        if not override.startswith("+") and OmegaConf.select(base, key, default=_MISSING) is _MISSING:
            near = _nearest_keys(key, keys)
            hint = f"; nearest: {', '.join(near)}" if near else "; no key is like it"
            return f"unknown key {key!r} in {override!r}{hint}. To add a key that verl does not have, write +{override}"
    return " ".join(str(error).split())


_MISSING = object()


def _nearest_keys(key: str, keys: Sequence[str]) -> list[str]:
    """Keys that end the same way come first: people remember the last word of a path."""
    last = key.rsplit(".", 1)[-1]
    same_end = [known for known in keys if known.rsplit(".", 1)[-1] == last]
    return (closest(key, same_end, likeness=0) + closest(key, keys))[:3]


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, config):
        node = config._get_node(key)
        yield f"{prefix}{key}"
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from _keys(node, f"{prefix}{key}.")


def _verl_config() -> Path:
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'verl'", name="verl")
    return Path(spec.origin).parent / "trainer" / "config"
