"""Before training starts: the config is checked, and what it names is made or fetched.

Every error is one line. Models and data are made or fetched the first time, then kept in the user's cache, where the
YAML file of a task finds them by ``task.folder``. Invariants: a folder in the cache is whole, since it is made beside
its place and moved there when it is done; what was made with other settings, from other data or from another model is
in another folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from goldilocks.config.recipes import CONFIG, Choice
from goldilocks.config.sections import read_section, reward_calls
from goldilocks.core.limits import Budget
from goldilocks.dotted_keys import value_at, values
from goldilocks.errors import require, require_type
from goldilocks.runs.files import RunDir, cache_folder, make_folder, write_text
from goldilocks.tasks.arithmetic import check_tool
from goldilocks.tasks.download import MODELS, download
from goldilocks.tasks.registry import SPLITS, Task, WarmStart, create, write_split
from goldilocks.tasks.tiny_model import TINY_MODELS
from goldilocks.verl.checks import OUR_MODES, check_inputs

FILES = ("train_files", "val_files")
CHANGES, LONGEST = 6, 40  # keys that are shown, and characters of a value
_HUB_NAME = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")


def check_paths(config: DictConfig, splits: Sequence[str] = SPLITS) -> None:
    """Check that the model, the data and the reward function exist, and that the data have prompts."""
    model = str(config.actor_rollout_ref.model.path)
    known = Path(model).expanduser().is_dir() or _HUB_NAME.fullmatch(model) is not None
    require(known, "actor_rollout_ref.model.path", model, "a folder that exists, or a name on the hub (org/name)")
    for split in splits:
        key = f"{split}_files"
        for file in files_of(config.data[key]) or [""]:
            there = "://" in file or Path(file).expanduser().is_file()
            made = "a file that exists; goldilocks data make TASK --out DIR makes such files"
            require(there, f"data.{key}", file, made)
    check_inputs(config, splits)
    rewards = {"reward.custom_reward_function.path": config.reward.custom_reward_function.path}
    for name, one in (reward_calls(config).functions or {}).items():
        rewards[f"goldilocks.rewards.functions.{name}.path"] = one.path
    for key, path in rewards.items():
        require(not path or "://" in path or Path(path).is_file(), key, path, "a file that exists")


def budget_of(config: DictConfig) -> Budget:
    """Return the budget of the config; verl's own config has none."""
    return read_section(Budget, "goldilocks.budget", config)


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
    now = f"{choice.name} task={choice.task}{' trainer=trl' if choice.on_trl else ''}"
    before = run.started_as.read_text() if run.started_as.exists() else now
    accepted = f"another name: {run.path} is a run of {before}, and this is {now} ({changed})"
    require(now == before, "--name", run.path.name, accepted)
    write_text(run.started_as, now)


def check_prompts(config: DictConfig) -> None:
    """Check that no prompt exceeds ``data.max_prompt_length``, unless verl was told to drop or truncate those."""
    data = config.data
    if data.get("filter_overlong_prompts") or data.get("truncation", "error") != "error":
        return
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    model = config.actor_rollout_ref.model  # whose tokenizer verl makes so
    path, own_code = Path(model.tokenizer_path or model.path).expanduser().as_posix(), bool(model.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=own_code)
    tokenizer.chat_template = model.custom_chat_template or tokenizer.chat_template
    files, key = [file for name in FILES for file in files_of(data[name])], data.get("prompt_key", "prompt")
    for file in (file for file in files if file.endswith(".parquet") and "://" not in file):
        prompts = pq.read_table(Path(file).expanduser(), columns=[key])[key].to_pylist()
        lengths = [len(prompt_tokens(tokenizer, prompt, data)) for prompt in prompts]
        longer = sum(length > data.max_prompt_length for length in lengths)
        longest = f"{max(lengths, default=0)}, the tokens of the longest prompt; {longer} of {len(lengths)} prompts of"
        accepted = f"{longest} {file!r} are longer (data.filter_overlong_prompts=True drops them)"
        require(not longer, "data.max_prompt_length", data.max_prompt_length, accepted)


def check_columns(config: DictConfig) -> None:
    """Check that the training data have the columns of ``goldilocks.strata.columns``: the collector reads them last."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = value_at(config, "goldilocks.strata.columns")
    if not columns or value_at(config, "data.custom_cls.path"):  # a data set of the user's own reads as it likes
        return
    known: set[str] = set()  # of all files: where one lacks a column, its rows have none there
    for file in files_of(config.data.train_files):
        if "://" in file or not file.endswith(".parquet"):
            return
        schema = pq.read_schema(Path(file).expanduser())
        info = schema.field("extra_info").type if "extra_info" in schema.names else pa.struct([])
        if not pa.types.is_struct(info):
            return
        known |= {*schema.names, *(info.field(place).name for place in range(info.num_fields))}
    accepted = f"a column of the data: {', '.join(sorted(known))}"
    for column in columns:
        require(column in known, "goldilocks.strata.columns", column, accepted)


def files_of(value: Any) -> list[str]:
    """Return the files of a key that takes one or several."""
    return [str(file) for file in value] if isinstance(value, ListConfig | list | tuple) else [str(value)]


def rows_in(value: Any) -> int | None:
    """Return the rows in the files of a key; None where one of them is no parquet file on this machine."""
    import pyarrow.parquet as pq

    files = [Path(file).expanduser() for file in files_of(value)]
    here = all(file.suffix == ".parquet" and file.is_file() for file in files)
    return sum(pq.read_metadata(file).num_rows for file in files) if here else None


def prompt_tokens(tokenizer: Any, prompt: Any, data: DictConfig) -> list[int]:
    """Return the tokens of a prompt, a text or a conversation, as the policy reads it by these keys of the data."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    given = data.get("apply_chat_template_kwargs") or {}
    keywords = {str(key): given[key] for key in given if key not in ("tokenize", "return_dict", "return_tensors")}
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **keywords))


# -- models and data that a config names -------------------------------------------------------------------------------

VERSION = "4"  # of what is made here; raised when it changes, so that what was made before is not used
GENERATORS: dict[str, dict[str, Any]] = {"leg_counting": {}}  # of reasoning-gym, where none is named
MADE_OF = ("name", "train", "val", "seed", "generators")  # keys of the task that decide its data


def locate(config: DictConfig) -> None:
    """Say where the task's data and an agent's tools are, before ``config`` is resolved; nothing is made."""
    os.environ["GOLDILOCKS_TOOLS"] = str(CONFIG / "tools")
    if tool := config.get("calculator"):  # agent-loop workers inherit its settings
        check_tool(tool.seconds, tool.fail_every)
        os.environ["CALCULATOR_SECONDS"], os.environ["CALCULATOR_FAIL_EVERY"] = str(tool.seconds), str(tool.fail_every)
    if section := config.get("task"):
        for split in SPLITS:
            size, has_files = section[split], "data" in section
            fits = (has_files and size is None) or (isinstance(size, int) and size >= 1)
            require(fits, f"task.{split}", size, "1 or more problems" + (", or null: all" if has_files else ""))
        if section.get("warm_start"):
            read_section(WarmStart, "task.warm_start", config)
        section.folder = str(Path(section.folder).expanduser() if section.folder else _kept(section))


def _kept(section: DictConfig) -> Path:
    """Return the folder in the cache for the task with these settings and, where it has any, these files."""
    plain: Any = OmegaConf.to_container(section)
    made_of: list[Any] = [{key: value for key, value in plain.items() if key in MADE_OF}]
    if "data" in section:
        files = [file for split in SPLITS for file in _task(section).files(split)]
        made_of += [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        made_of += [bool(section.get("warm_start"))]  # its lessons are left out of the data
    return cache_folder() / f"{section.name}-{VERSION}-{_digest(made_of)}"


def provide(config: DictConfig) -> None:
    """Make or fetch what the config names and is not there yet; a model's name becomes its folder."""
    locate(config)
    section, model = config.get("task"), config.actor_rollout_ref.model
    require_type("actor_rollout_ref.model.path", model.path, str)
    if section and any(section.folder in str(config.data[key]) for key in FILES):
        make_folder(Path(section.folder) / "data", partial(_make_data, section=section))
    ours = Path(os.environ.get("GSM8K") or Path.home() / "data" / "gsm8k").expanduser() / "val.parquet"
    verls = ours.with_name("test.parquet")  # as verl's own preparation of GSM8K calls it
    if Path(str(config.data.val_files)).expanduser() == ours and verls.is_file() and not ours.exists():
        config.data.val_files = str(verls)
    if (local := Path(model.path).expanduser()).is_dir():
        model.path = str(local)
    else:
        model.path = TINY_MODELS.get(model.path) or (str(download(model.path)) if model.path in MODELS else model.path)
    if section and section.get("warm_start") and not Path(model.path).is_relative_to(section.folder):
        model.path = _taught(model.path, section, read_section(WarmStart, "task.warm_start", config))


def _task(section: DictConfig) -> Any:
    options: dict[str, Any] = {}
    if "generators" in section:
        given: Any = OmegaConf.to_container(section.generators) if section.generators else GENERATORS
        options["generators"] = {name: knobs or {} for name, knobs in given.items()}
    if "data" in section:
        require(section.data is not None, "task.data", None, "the folder with the published data")
        options |= {"source": section.data, "key": "task.data"}
        options |= {"lessons": True} if section.get("warm_start") else {}
    return create(section.name, **options)


def _make_data(out: Path, section: DictConfig) -> None:
    task: Task = _task(section)
    for split in SPLITS:
        write_split(out, task.data_source, split, task.problems(split, section[split], section.seed))


def _taught(model: str, section: DictConfig, plan: WarmStart) -> str:
    """Return the folder of a copy of the model that has had the task's lessons, which are given once."""
    files = sorted(file for file in Path(model).glob("*") if file.is_file())
    found = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    taught = Path(section.folder) / f"{Path(model).name}-{_digest([model, asdict(plan), found])}"
    if not taught.exists():
        from goldilocks.tasks.warm_start import teach  # imports torch

        make_folder(taught, partial(teach, model, taught=_task(section).lessons, plan=plan))
    return str(taught)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
