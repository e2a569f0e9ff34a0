"""The recipes: one YAML file for each policy, the same for ``goldilocks train``, ``compare`` and ``simulate``.

``read_recipe`` needs neither Hydra nor verl: it reads the keys that a recipe sets, and those of the recipes it builds
on (``defaults:``). A recipe is one of ours by name, or a YAML file of the user's own by path. A file that builds on
none of ours builds on the default recipe.

``choose`` and ``compose_config`` go from the words of a command line (``[RECIPE] [key=value …]``, in Hydra's grammar)
to verl's config. Invariant: the config is the one that ``python -m verl.trainer.main_ppo +device=… +task=… +recipe=…
key=value …`` composes. Only verl's YAML files are read and verl is not imported, so a typing error is found within a
second.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from goldilocks.dotted_keys import dotted_keys, merged
from goldilocks.errors import closest, nearest, require, require_known, require_type
from goldilocks.filtering import config as filtering

if TYPE_CHECKING:
    from omegaconf import DictConfig

ADVISED = ("grpo", "dapo", "gspo", "adaptive", "frontier")  # the others are for studies
DEFAULT = ADVISED[0]
SECTIONS = ("adaptive_rollout", "batch_filter", "goldilocks")  # what a trainer of ours reads beyond verl's own
OURS = (*SECTIONS, "calculator", "task")
VERLS = (
    "actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "distillation", "global_profiler",
    "model_engine", "ray_kwargs", "reward", "reward_model", "sandbox_fusion", "skip", "trainer", "transfer_queue",
)  # fmt: skip
PLAIN = ("model_engine",)  # a word, where the other sections have keys
ELSEWHERE = {  # names that guides have for keys of verl's or of ours
    "n_resp_per_prompt": "actor_rollout_ref.rollout.n, the rollouts of every prompt",
    "rollout_mode": "actor_rollout_ref.rollout.mode, for which verl has async alone; nothing needs to be set",
    filtering.REJECTION_SAMPLE: filtering.INSTEAD_OF_REJECTION_SAMPLE,
}
FILE = ".yaml"  # a recipe with this ending is a file
_OF_A_TASK = re.compile(r"\$\{oc\.select:task\.[\w.]+,(?P<default>.*)\}")
CONFIG = Path(__file__).parent
DEFAULT_TASK = "arithmetic"
GROUPS = ("device", "task")
OWN = "recipe_file"  # Hydra's group of recipes that are files of the user's own
TRAINER = "backend"  # the key under ``trainer`` that says who trains; verl where there is none
TRAINERS = ("verl", "trl")
# Keys that are no keys here, by their last word, and what to use in their place.
ANSWERS = {
    filtering.REJECTION_SAMPLE: filtering.INSTEAD_OF_REJECTION_SAMPLE,
    **dict.fromkeys(filtering.OF_LIBRARY_CALLS, filtering.INSTEAD_OF_LIBRARY_CALLS),
}
_MISSING = object()


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml's, where PyYAML has it
    """YAML as Hydra reads it: ``1e-3`` is a number, which YAML 1.1 takes for a word."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def names(group: str = "recipe") -> list[str]:
    """Return the choices of a config group, in order; of the recipes those that we advise come first."""
    found = sorted(path.stem for path in (CONFIG / group).glob(f"*{FILE}"))
    return found if group != "recipe" else [*ADVISED, *(name for name in found if name not in ADVISED)]


def listed() -> str:
    """Return the names of the recipes in one line of a help text."""
    return f"{', '.join(ADVISED)}; for studies: {', '.join(names()[len(ADVISED) :])}"


def name_of(recipe: str) -> str:
    """Return the name of a recipe; of a file, its stem."""
    return Path(recipe).stem if recipe.endswith(FILE) else recipe


def find(recipe: str) -> Path:
    """Return the file of a recipe. Raise ``ValueError`` with the nearest name if there is none."""
    listed = ", ".join(names())
    if recipe.endswith(FILE):
        require(Path(recipe).is_file(), "recipe", recipe, f"a file that is there, or one of {listed}")
        return Path(recipe)
    require(recipe in names(), "recipe", recipe, f"one of {listed}, or a {FILE} file{nearest(recipe, names())}")
    return CONFIG / "recipe" / f"{recipe}{FILE}"


def our_defaults() -> dict[str, Any]:
    """Return every key that Goldilocks adds to verl's config, with its default as it is written."""
    return _read(CONFIG / "goldilocks" / f"defaults{FILE}", [])


def about(recipe: str) -> str:
    """Return the first comment of a recipe's file: one sentence on what the recipe does."""
    lines = find(recipe).read_text(encoding="utf-8").splitlines()
    comment = [line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line]
    return comment[0] if comment else ""


def read_recipe(recipe: str) -> dict[str, Any]:
    """Return every key that a recipe sets, by itself or through its ``defaults:``."""
    return {key: _without_task(value) for key, value in read_keys(recipe).items()}


def read_keys(recipe: str) -> dict[str, Any]:
    """Return the same with the values as they are written: one may refer to a key that a task sets."""
    read: list[Path] = []
    keys = _read(find(recipe), read)
    if not any(CONFIG in file.parents for file in read):
        keys = merged(_read(find(DEFAULT), []), keys)
    refuse_sections(keys, f"recipe={recipe!r}: ")
    return keys


def added_or_changed(word: str) -> str:
    """Return ``++section.key=…`` for ``+section.key=…`` of ours: a recipe may have set the key already."""
    return re.sub(rf"^\+(?=({'|'.join(SECTIONS)}|algorithm\.filter_groups)\b)", "++", word)


def key_of(word: str) -> str:
    """Return the key that a word of a command line sets."""
    return word.lstrip("+~").partition("=")[0]


def refuse_sections(given: Mapping[str, Any], where: str = "") -> None:
    """Raise ``ValueError`` for a section without keys, or that neither verl nor Goldilocks has, with the nearest."""
    known = sorted(OURS + VERLS)
    for section in given:
        require(section not in ELSEWHERE, f"{where}{section}", given[section], ELSEWHERE.get(section, ""))
        if section not in known:
            there = f"not a section{nearest(section, known)}; there are: {', '.join(known)}"
            raise ValueError(f"{where}{section!r} is {there}")
        if section not in PLAIN:
            require_type(f"{where}{section}", given[section], Mapping[str, Any])


def _without_task(value: Any) -> Any:
    """Return a value with the default of every key that a task may set, since a recipe read here has no task."""
    if isinstance(value, Mapping):
        return {key: _without_task(one) for key, one in value.items()}
    found = _OF_A_TASK.fullmatch(value) if isinstance(value, str) else None
    return yaml.load(found["default"], _Loader) if found else value


def _read(file: Path, read: list[Path], above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the keys of a file and add the file to ``read``; the ``defaults:`` of the files ``above`` led to it."""
    if file.resolve() in [one.resolve() for one in above]:
        circle = ", ".join(one.stem for one in (*above, file))
        raise ValueError(f"recipe={str(above[0])!r}: defaults go in a circle: {circle}")
    read.append(file)
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe={str(file)!r} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"recipe={str(file)!r} has no keys; it is written like those in {CONFIG / 'recipe'}")
    own = {str(key): value for key, value in content.items() if key != "defaults"}
    entries = list(content.get("defaults") or ["_self_"])
    config: dict[str, Any] = {}
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        config = merged(config, own if entry == "_self_" else _read(_default(entry, file), read, (*above, file)))
    return config


def _default(entry: Any, file: Path) -> Path:
    """Return the file that an entry of ``defaults:`` names: ``NAME``, ``/GROUP/NAME`` or ``{/GROUP: NAME}``.

    A bare name means a file beside the one that names it, or else a recipe.
    """
    if isinstance(entry, Mapping) and len(entry) == 1:
        group, name = next(iter(entry.items()))
        entry = f"{group}/{name}"
    path = str(entry)
    found, beside = CONFIG / f"{path[1:]}{FILE}", file.parent / f"{path}{FILE}"
    if path.startswith("/"):
        if not found.is_file():
            raise ValueError(f"recipe={str(file)!r}: defaults has {entry!r}, which is not a file; write /recipe/NAME")
        return found
    if beside.is_file() and beside.resolve() != file.resolve():
        return beside
    if path not in names():
        known = f"known{nearest(path, names())}; a recipe's name, or a file beside it"
        raise ValueError(f"recipe={str(file)!r}: defaults has {path!r}, which is not {known}")
    return CONFIG / "recipe" / f"{path}{FILE}"


# -- the words of a command line ---------------------------------------------------------------------------------------


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
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

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
            raise ValueError(_explain(error, compose("ppo_trainer", overrides=groups), choice.overrides)) from None


def verl_defaults(*overrides: str) -> DictConfig:
    """Compose verl's config alone: what every key is where nobody has set it. Hydra may have started this script."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(_verl_config()), version_base=None):
            return compose("ppo_trainer", overrides=list(overrides))
    finally:
        GlobalHydra.instance().hydra = running


def quoted(value: object) -> str:
    """Quote a text for Hydra's grammar, in which a bare comma would make a sweep."""
    return "'" + str(value).replace("'", r"\'") + "'"


def _explain(error: Exception, base: DictConfig, overrides: Sequence[str]) -> str:
    """Return Hydra's message in one line; for an unknown key, name the nearest ones."""
    from omegaconf import OmegaConf

    keys = list(dotted_keys(OmegaConf.to_container(base)))  # type: ignore[arg-type]
    for override in overrides:
        key = re.split(r"[=@]", override.lstrip("~"), maxsplit=1)[0]
        if not override.startswith("+") and OmegaConf.select(base, key, default=_MISSING) is _MISSING:
            if (last := key.rpartition(".")[2]) in ANSWERS:
                return f"{override} is not accepted: {ANSWERS[last]}"
            require(key not in ELSEWHERE, key, override.partition("=")[2], ELSEWHERE.get(key, ""))
            same_end = [known for known in keys if known.rpartition(".")[2] == last]
            near = list(dict.fromkeys(closest(key, same_end, likeness=0) + closest(key, keys)))[:3]
            hint = f"; nearest: {', '.join(near)}" if near else "; no key is like it"
            return f"unknown key {key!r} in {override!r}{hint}. To add a key that verl does not have, write +{override}"
    return " ".join(str(error).split())


def _verl_config() -> Path:
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'verl'", name="verl")
    return Path(spec.origin).parent / "trainer" / "config"
