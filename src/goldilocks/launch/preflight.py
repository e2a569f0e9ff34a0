"""Before a worker of Ray's is started: the config is checked, and what it names is made or fetched.

Every error is one line. Models and data are made or fetched the first time, then kept in the user's cache. A YAML file
of a task finds them by a variable such as ``GOLDILOCKS_SUMS``, with which a user may choose another folder. Invariant:
a folder in the cache is whole. It is made beside its place and moved there when it is done.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from goldilocks.config.recipes import CONFIG
from goldilocks.config.sections import reward_calls
from goldilocks.dotted_keys import values
from goldilocks.errors import require
from goldilocks.launch.recipe import TRAINER, Choice
from goldilocks.runs.costs import Budget
from goldilocks.runs.files import RunDir, cache_folder, make_folder
from goldilocks.tasks import ladder
from goldilocks.tasks.arithmetic import check_tool
from goldilocks.tasks.download import MODELS, download
from goldilocks.tasks.registry import create, write_split
from goldilocks.tasks.tiny_model import copy_tiny_model
from goldilocks.verl.checks import OUR_MODES

FILES = ("train_files", "val_files")
CHANGES, LONGEST = 6, 40  # keys that are shown, and characters of a value
_HUB_NAME = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")


def check_paths(config: DictConfig) -> None:
    """Check that the model, the data and the reward function exist."""
    model = str(config.actor_rollout_ref.model.path)
    known = Path(model).expanduser().is_dir() or _HUB_NAME.fullmatch(model) is not None
    require(known, "actor_rollout_ref.model.path", model, "a folder that exists, or a name on the hub (org/name)")
    for key in FILES:
        for file in files_of(config.data[key]):
            there = "://" in file or Path(file).expanduser().is_file()
            made = "a file that exists; goldilocks data make TASK --out DIR makes such files"
            require(there, f"data.{key}", file, made)
    rewards = {"reward.custom_reward_function.path": config.reward.custom_reward_function.path}
    for name, one in (reward_calls(config).functions or {}).items():
        rewards[f"goldilocks.rewards.functions.{name}.path"] = one.path
    for key, path in rewards.items():
        there = not path or "://" in path or Path(path).is_file()
        require(there, key, path, "a file that exists")


def budget_of(config: DictConfig) -> Budget:
    """Return the budget of the config; verl's own config has none."""
    return Budget(**((config.get("goldilocks") or {}).get("budget") or {}))


def check_budget(config: DictConfig) -> None:
    """Check the budget, and that the chosen trainer supports one."""
    budget = budget_of(config)
    mode = config.trainer.v1.trainer_mode if config.trainer.use_v1 else "V0"
    if budget.costs and mode not in OUR_MODES:
        costs = ", ".join(f"goldilocks.budget.{cost}={amount}" for cost, amount in budget.costs.items())
        raise ValueError(f"{costs} needs trainer.use_v1=True and trainer.v1.trainer_mode=goldilocks, not {mode}")


def changes(run: RunDir, config: DictConfig) -> str:
    """Return the keys whose values are not those of the run's last start, with both; empty at its first."""
    if not run.config.exists():
        return ""
    plain: list[Any] = [OmegaConf.to_container(one, resolve=True) for one in (OmegaConf.load(run.config), config)]
    before, now = map(values, plain)
    keys = [key for key in {**before, **now} if not key.startswith("ray_kwargs.") and before.get(key) != now.get(key)]
    shown = [f"{key} {_short(before.get(key))} → {_short(now.get(key))}" for key in keys[:CHANGES]]
    return ", ".join(shown) + (f" and {len(keys) - CHANGES} more" if len(keys) > CHANGES else "")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def refuse_other_recipe(run: RunDir, choice: Choice, changed: str) -> None:
    """Raise ``ValueError`` where the run was started with another recipe, task or trainer; else note this start's."""
    trainer = " trainer=trl" if f"+trainer.{TRAINER}=trl" in choice.overrides else ""
    now = f"{choice.name} task={choice.task}{trainer}"
    before = run.started_as.read_text() if run.started_as.exists() else now
    accepted = f"another name: {run.path} is a run of {before}, and this is {now} ({changed})"
    require(now == before, "--name", run.path.name, accepted)
    run.started_as.write_text(now)


def check_prompts(config: DictConfig) -> None:
    """Check that no prompt exceeds ``data.max_prompt_length``, unless verl was told to drop or truncate those."""
    data = config.data
    if data.get("filter_overlong_prompts") or data.get("truncation", "error") != "error":
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(config.actor_rollout_ref.model.path).expanduser().as_posix())
    for file in (file for key in FILES for file in files_of(data[key])):
        lengths = [prompt_length(tokenizer, prompt) for prompt in _prompts(file, data.get("prompt_key", "prompt"))]
        longer = sum(length > data.max_prompt_length for length in lengths)
        longest = f"{max(lengths, default=0)}, the tokens of the longest prompt; {longer} of {len(lengths)} prompts of"
        accepted = f"{longest} {file!r} are longer (data.filter_overlong_prompts=True drops them)"
        require(not longer, "data.max_prompt_length", data.max_prompt_length, accepted)


def files_of(value: Any) -> list[str]:
    """Return the files of a key that takes one or several."""
    return [str(file) for file in value] if isinstance(value, ListConfig | list | tuple) else [str(value)]


def _prompts(file: str, key: str) -> Iterable[Any]:
    import pyarrow.parquet as pq

    if not file.endswith(".parquet") or "://" in file:
        return []
    path = Path(file).expanduser()
    columns = pq.read_schema(path).names
    require(key in columns, "data.prompt_key", key, f"a column of {file!r}: {', '.join(columns)}")
    return pq.read_table(path, columns=[key])[key].to_pylist()


def prompt_length(tokenizer: Any, prompt: Any) -> int:
    """Return the tokens of a prompt, a text or a conversation, as the policy reads it."""
    if isinstance(prompt, str):
        return len(tokenizer.encode(prompt))
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))


# -- models and data that a config names -------------------------------------------------------------------------------

VERSION = "3"  # of the models and data made here; raised when they change, so that older ones are not used
VARIABLE = "GOLDILOCKS_ARITHMETIC"
# problems to train and validate on
SIZES = {"arithmetic": (2048, 256), "sums": (4096, 256), "ladder": (20480, 400), "calculator": (2048, 256)}
GYM = "reasoning_gym"
TINY_FOLDERS = {"arithmetic": "model", "calculator": "model", "ladder": "tiny"}  # of a task's tiny model
GENERATORS: dict[str, dict[str, Any]] = {"leg_counting": {}}


def folder(task: str = "arithmetic") -> Path:
    """Return the folder of a task's data and model."""
    chosen = os.environ.get(f"GOLDILOCKS_{task.upper()}")
    return Path(chosen).expanduser() if chosen else cache_folder() / f"{task}-{VERSION}"


def locate(config: DictConfig) -> None:
    """Set the variables that say where data will be, before ``config`` is resolved; nothing is made."""
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
    locate(config)
    for task, (train, val) in SIZES.items():
        if _names(config, folder(task) / "data"):
            make_folder(folder(task) / "data", partial(_make_data, name=task, train=train, val=val))
    if GYM in config and _names(config, folder(GYM) / "data"):
        make_folder(folder(GYM) / "data", partial(_make_gym, settings=config[GYM]))
    ours = Path(os.environ.get("GSM8K") or Path.home() / "data" / "gsm8k") / "val.parquet"
    verls = ours.with_name("test.parquet")  # as verl's own preparation of GSM8K calls it
    with open_dict(config):
        if config.data.val_files == str(ours) and verls.is_file() and not ours.exists():
            config.data.val_files = str(verls)
        config.actor_rollout_ref.model.path = _provided_model(config.actor_rollout_ref.model.path)


def _provided_model(path: str) -> str:
    """Make or fetch the model that is named so, if it is one of ours; return its folder."""
    for task, name in TINY_FOLDERS.items():
        if path == str(folder(task) / name):
            make_folder(folder(task) / name, partial(copy_tiny_model, task))
    taught = folder("ladder") / "smollm2"
    if path == str(taught) and not taught.exists():
        from goldilocks.tasks.warm_start import teach  # imports torch

        untaught = download("smollm2")
        taught = taught.with_name(untaught.name)  # says where its weights come from
        make_folder(taught, partial(teach, untaught, taught=ladder.lessons))
        return str(taught)
    return str(download(path)) if path in MODELS and not Path(path).is_dir() else path


def _names(config: DictConfig, place: Path) -> bool:
    return any(str(place) in str(config.data[key]) for key in FILES)


def _make_data(out: Path, name: str, train: int, val: int, seed: int = 0, **options: Any) -> None:
    task = create(name, **options)
    write_split(out, task.data_source, "train", task.problems("train", train, seed))
    write_split(out, task.data_source, "val", task.problems("val", val, seed))


def _make_gym(out: Path, settings: DictConfig) -> None:
    chosen: Any = OmegaConf.to_container(settings)
    generators = {name: knobs or {} for name, knobs in (chosen["generators"] or GENERATORS).items()}
    _make_data(out, GYM, chosen["train"], chosen["val"], chosen["seed"], generators=generators)
