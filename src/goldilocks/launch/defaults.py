"""Models and data that a config names: made or fetched the first time, then kept in the user's cache.

A YAML file of a task finds them by a variable such as ``GOLDILOCKS_SUMS``, with which a user may choose another folder.
Invariant: a folder in the cache is whole. It is made beside its place and moved there when it is done.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goldilocks.config.recipes import CONFIG
from goldilocks.runs.files import cache_folder, make_folder
from goldilocks.tasks.calculator import check_tool

if TYPE_CHECKING:
    from omegaconf import DictConfig

VERSION = "2"  # of the models and data made here; raised when they change, so that older ones are not used
VARIABLE = "GOLDILOCKS_ARITHMETIC"
# problems to train and validate on
SIZES = {"arithmetic": (2048, 256), "sums": (4096, 256), "ladder": (20480, 400), "calculator": (2048, 256)}
GYM = "reasoning_gym"
GENERATORS: dict[str, dict[str, Any]] = {"leg_counting": {}}
SMOLLM2 = "smollm2"  # what actor_rollout_ref.model.path takes for SmolLM2-135M-Instruct


def folder(task: str = "arithmetic") -> Path:
    """Return the folder of a task's data and model."""
    chosen = os.environ.get(f"GOLDILOCKS_{task.upper()}")
    return Path(chosen).expanduser() if chosen else cache_folder() / f"{task}-{VERSION}"


def locate(config: DictConfig) -> None:
    """Set the variables that say where data will be, before ``config`` is resolved; nothing is made."""
    from omegaconf import OmegaConf

    for task in SIZES:
        os.environ[f"GOLDILOCKS_{task.upper()}"] = str(folder(task))
    _locate_tools(config)
    if GYM in config:
        settings = json.dumps(OmegaConf.to_container(config[GYM]), sort_keys=True)
        name = f"{GYM}-{VERSION}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
        os.environ["GOLDILOCKS_REASONING_GYM"] = str(cache_folder() / name)


def _locate_tools(config: DictConfig) -> None:
    """Say where the YAML files of tools are, and the calculator's settings: agent-loop workers inherit both."""
    os.environ["GOLDILOCKS_TOOLS"] = str(CONFIG / "tools")
    if tool := config.get("calculator"):
        check_tool(tool.seconds, tool.fail_every)
        os.environ["CALCULATOR_SECONDS"], os.environ["CALCULATOR_FAIL_EVERY"] = str(tool.seconds), str(tool.fail_every)


def provide(config: DictConfig) -> None:
    """Make or fetch what the config names and is not there yet; a model's name becomes its folder."""
    from omegaconf import open_dict

    locate(config)
    for task, (train, val) in SIZES.items():
        if _names(config, folder(task) / "data"):
            make_folder(folder(task) / "data", partial(_make_data, name=task, train=train, val=val))
    if GYM in config and _names(config, folder(GYM) / "data"):
        make_folder(folder(GYM) / "data", lambda out: _make_gym(out, config[GYM]))
    for (task, name), make in _MODELS.items():
        path = folder(task) / name
        if config.actor_rollout_ref.model.path == str(path):
            make_folder(path, make)
    if config.actor_rollout_ref.model.path == SMOLLM2 and not Path(SMOLLM2).is_dir():
        from goldilocks.tasks.smollm2 import fetch_once

        with open_dict(config):
            config.actor_rollout_ref.model.path = str(fetch_once())


def _names(config: DictConfig, place: Path) -> bool:
    return any(str(place) in str(config.data[key]) for key in ("train_files", "val_files"))


def _make_data(out: Path, name: str, train: int, val: int, seed: int = 0, **options: Any) -> None:
    from goldilocks.tasks.registry import create, write_split

    task = create(name, **options)
    write_split(out, task.data_source, "train", task.problems("train", train, seed))
    write_split(out, task.data_source, "val", task.problems("val", val, seed))


def _make_gym(out: Path, settings: DictConfig) -> None:
    from omegaconf import OmegaConf

    chosen: Any = OmegaConf.to_container(settings)
    generators = {name: knobs or {} for name, knobs in (chosen["generators"] or GENERATORS).items()}
    _make_data(out, GYM, chosen["train"], chosen["val"], chosen["seed"], generators=generators)


def _make_tiny(out: Path, task: str) -> None:
    from goldilocks.tasks.tiny_model import make

    make(out, task=task)


def _teach_smollm2(out: Path) -> None:
    from goldilocks.tasks.ladder import lessons
    from goldilocks.tasks.smollm2 import fetch_once
    from goldilocks.tasks.tiny_model import teach

    teach(fetch_once(), out, lessons)


# (task, folder in the task's): how the model in it is made
_MODELS: dict[tuple[str, str], Callable[[Path], None]] = {
    ("arithmetic", "model"): partial(_make_tiny, task="arithmetic"),
    ("calculator", "model"): partial(_make_tiny, task="calculator"),
    ("ladder", "tiny"): partial(_make_tiny, task="ladder"),
    ("ladder", "smollm2"): _teach_smollm2,
}
