"""``goldilocks train [RECIPE] [key=value …]``: train with verl, show one line, and leave no process behind.

The command starts and watches its driver, ``python -m goldilocks.launch.train RUN_DIRECTORY``, which does what verl's
``main_ppo`` does, with a config that is already composed. Invariant: when it fails it writes the reason to the run
directory in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from goldilocks.config import recipes
from goldilocks.config.settings import Settings
from goldilocks.engine.cpu import platform_env
from goldilocks.errors import require
from goldilocks.launch import machine, on_trl, preflight
from goldilocks.launch.live import Board, LiveLine
from goldilocks.launch.supervisor import SignOfLife, Supervisor
from goldilocks.rewards import TIMEOUT_S
from goldilocks.rewards.calls import guard
from goldilocks.runs.costs import Progress, hint
from goldilocks.runs.files import RunDir, Tail, held, write_text
from goldilocks.verl.checks import check_names, check_run, check_settings, unread, uses_collector
from goldilocks.verl.tested import untested

POLL_S = 0.25
STALL_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"""\
recipes: {recipes.listed()} (default {recipes.DEFAULT})
tasks:   {", ".join(recipes.names("task"))} (default {recipes.DEFAULT_TASK}; choose with task=NAME)

examples:
  goldilocks train
  goldilocks train {recipes.DEFAULT} trainer.total_training_steps=200 actor_rollout_ref.rollout.n=16
  goldilocks train actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct task=gsm8k

every key is verl's own: python -m verl.trainer.main_ppo --cfg job lists them
"""
    parser.add_argument("words", nargs="*", metavar="RECIPE | key=value", help="a recipe's name or file, and settings")
    parser.add_argument("--cfg", choices=["job"], help="print the composed config, as Hydra does, and train nothing")
    parser.add_argument("--name", help="of the run; one that exists goes on from its last checkpoint")
    parser.add_argument("--runs", metavar="DIR", type=Path, default=Path("runs"), help="where runs go (default runs/)")
    parser.add_argument("--reward-timeout", metavar="S", type=float, default=TIMEOUT_S, help="seconds the reward "
        "function has for one answer (default %(default)s)")  # fmt: skip
    parser.add_argument("--stall-timeout", metavar="S", type=float, default=STALL_S, help="seconds without a sign of "
        "life after which a run is ended (default %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    for option, seconds in {"reward": args.reward_timeout, "stall": args.stall_timeout}.items():
        require(seconds > 0, f"--{option}-timeout", seconds, "seconds above 0")
    console = Console(markup=False)
    choice = recipes.choose(args.words, machine.find_device(args.words))
    name = args.name or f"{choice.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if args.cfg:
        config = recipes.compose_config(choice, [_engine(choice)])
        preflight.locate(config)
        print(_yaml(config), end="")
        return 0
    with prepared(choice, args.runs, name, args.reward_timeout) as launch:
        trainer = launch.config.trainer.get(recipes.TRAINER)
        engine, path, here = launch.config.actor_rollout_ref.rollout.name, launch.run_dir.path, Path.cwd()
        path = path.relative_to(here) if path.is_relative_to(here) else path
        console.print(f"{choice.name} on {choice.device}, rollouts by {trainer or engine}, {path}")
        if launch.changed:
            console.print(f"changed since its last start: {launch.changed}", soft_wrap=True)
        settings = Settings.from_config(launch.config) if trainer or uses_collector(launch.config) else None
        notes = [settings.summary(), *settings.without_effect()] if settings else [unread(launch.config)]
        for note in filter(None, [*notes, "" if trainer else untested("verl")]):
            console.print(note, soft_wrap=True, highlight=False)
        with interruptible(), Board(console) as board:
            line = LiveLine(console, partial(board.draw, name), notice=lambda seen: _few_updates(launch.config, seen))
            outcome = supervise(launch, line, args.stall_timeout)
    if outcome.failure is not None:
        print(f"goldilocks: the run failed: {outcome.failure}", file=sys.stderr)
        print(f"goldilocks: everything it printed: {launch.run_dir.log}", file=sys.stderr)
        return 1
    rows = [*outcome.progress.summary(outcome.seconds), ("run", str(path))]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        console.print(f"{label:<{width}}  {value}", highlight=False, soft_wrap=True)
    return 0


@dataclass(frozen=True)
class Launch:
    run_dir: RunDir
    config: DictConfig
    env: dict[str, str]
    changed: str  # since an earlier start of the run


@dataclass(frozen=True)
class Ended:
    """A run that has ended; ``failure`` says why it ended early."""

    progress: Progress
    seconds: float
    failure: str | None


@contextlib.contextmanager
def prepared(choice: recipes.Choice, runs: Path, name: str, reward_timeout: float = TIMEOUT_S) -> Iterator[Launch]:
    """Compose and check the config and make the run directory. Errors are raised before any process starts."""
    # Ray's sockets need a short path: a socket's has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="gl", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        config = composed(choice, runs / name, ray_folder)
        check_keys(config)
        preflight.provide(config)
        preflight.check_paths(config)
        guard(config, reward_timeout, workers=1 if on_trl.chosen(config) else None)
        run_dir = RunDir.create(runs, name)
        with held(run_dir.lock, "--name", name):
            env = _environment(choice, config, run_dir)
            if not machine.is_private(config):
                machine.join(config, env)
            changed = preflight.changes(run_dir, config)
            preflight.refuse_other_recipe(run_dir, choice, changed)
            goes_on = config.trainer.resume_mode != "disable"
            run_dir.begin(appends=goes_on and (on_trl.chosen(config) or uses_collector(config)))
            write_text(run_dir.config, _yaml(config))
            yield Launch(run_dir, config, env, changed)


def check_keys(config: DictConfig) -> None:
    """Check the keys of a composed config, before anything is made or fetched and without importing verl."""
    recipes.refuse_sections(config)
    check_names(config)
    preflight.locate(config)
    preflight.check_budget(config)
    if on_trl.chosen(config) or uses_collector(config):
        Settings.from_config(config)
    if on_trl.chosen(config):
        on_trl.check_keys(config)


def composed(choice: recipes.Choice, run_path: Path, ray_folder: str = "") -> DictConfig:
    """Return the config of a run; nothing is made, and only names and types are checked.

    Settings of a run that no recipe has come before the user's own overrides.
    """
    # A Ray for this run alone, on this machine; ray_kwargs.ray_init.address=auto joins a cluster instead.
    private = [
        f"++ray_kwargs.ray_init.address={machine.PRIVATE}",
        "++ray_kwargs.ray_init.include_dashboard=false",
        "++ray_kwargs.ray_init._node_ip_address=127.0.0.1",
        f"++ray_kwargs.ray_init._temp_dir={recipes.quoted(ray_folder)}",
    ]
    cluster = machine.ray_address([choice.recipe, *choice.overrides]) != machine.PRIVATE
    own = [
        _engine(choice),
        "trainer.logger=[console,file]",
        "trainer.project_name=goldilocks",
        f"trainer.experiment_name={recipes.quoted(run_path.name)}",
        f"trainer.default_local_dir={recipes.quoted(run_path.resolve() / 'checkpoints')}",
        f"trainer.rollout_data_dir={recipes.quoted(run_path.resolve() / 'rollouts')}",
    ]
    return recipes.compose_config(choice, own if cluster else own + private)


def supervise(launch: Launch, line: LiveLine, stall_s: float = STALL_S, stop: threading.Event | None = None) -> Ended:
    """Start the run and watch it to its end, or until ``stop`` is set; nothing of it is left running."""
    run_dir, config = launch.run_dir, launch.config
    rollouts_per_step = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    steps: float = int(config.trainer.total_training_steps or 0)
    if not steps:  # as verl counts them; infinite where the training files are no parquet files on this machine
        rows = preflight.rows_in(config.data.train_files)
        steps = math.inf if rows is None else rows // config.data.train_batch_size * config.trainer.total_epochs
    progress = Progress(steps, rollouts_per_step, spent=[0.0] if preflight.budget_of(config).costs else [])
    started, stop = time.monotonic(), stop or threading.Event()
    tail = Tail(run_dir.metrics)
    with contextlib.closing(line), Supervisor(run_dir, launch.env) as driver:
        life = SignOfLife((run_dir.log, run_dir.metrics), stall_s)
        while driver.running:
            line.show(_records(tail, progress), progress, time.monotonic() - started)
            if life.lost() or stop.wait(POLL_S):
                break
        ended = "interrupted" if stop.is_set() else f"no sign of life for {stall_s:g} s"
        cut = ended if driver.running else None
        line.show(_records(tail, progress), progress, time.monotonic() - started)  # written since the last look
    failure = cut or (None if driver.status == 0 else run_dir.failure(driver.status))
    return Ended(progress, time.monotonic() - started, failure)


def _few_updates(config: DictConfig, progress: Progress) -> str | None:
    """Say when a recipe that drops groups makes far fewer updates of its rollouts than GRPO would."""
    said = hint(config, progress.generated)
    return said if said and Settings.from_config(config).drops_groups else None


def _engine(choice: recipes.Choice) -> str:
    """Name the fastest installed engine: vLLM on a GPU, else our own, which TRL takes into its process."""
    quick = choice.device == "cuda" and not choice.on_trl and "vllm" in machine.rollout_engines()
    return f"actor_rollout_ref.rollout.name={'vllm' if quick else 'transformers'}"


def _environment(choice: recipes.Choice, config: DictConfig, run_dir: RunDir) -> dict[str, str]:
    env = platform_env(choice.device) | {
        "VERL_FILE_LOGGER_PATH": str(run_dir.metrics),
        "PYTHONUNBUFFERED": "1",
        # verl's faster serialisation of rows, 0.3 ms instead of 1.4 for a reward; all processes must use the same.
        "VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy",
    }
    if config.trainer.nnodes == 1:  # works without a network
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if choice.device == "cpu" and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        # The user hides the GPUs. Ray counts the ranks on the CPU as devices and wants as many names here: none exists.
        env["CUDA_VISIBLE_DEVICES"] = ",".join(["-1"] * config.trainer.n_gpus_per_node)
    if machine.is_private(config):
        # Other users of the machine cannot connect to the run's Ray.
        env["RAY_AUTH_MODE"] = os.environ.get("RAY_AUTH_MODE", "token")
        env["RAY_AUTH_TOKEN_PATH"] = str(run_dir.secret)
        os.environ.pop("RAY_ADDRESS", None)
    return env


def _yaml(config: DictConfig) -> str:
    try:
        return OmegaConf.to_yaml(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(" ".join(str(error).split())) from None


def _records(tail: Tail, progress: Progress) -> bool:
    """Add new records to the progress; return whether there were any."""
    records = list(tail.new())
    for record in records:
        progress.add(record)
    return bool(records)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- the driver --------------------------------------------------------------------------------------------------------


def drive(folder: str) -> int:
    """Train with the run directory's config; return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    run_dir = RunDir(Path(folder))
    config = OmegaConf.load(run_dir.config)
    assert isinstance(config, DictConfig)
    try:
        check_settings(config)
        preflight.check_columns(config)
        preflight.check_prompts(config)
        if on_trl.chosen(config):
            on_trl.train(config, run_dir.path)
        else:
            _train_on_verl(config)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        with contextlib.suppress(OSError):  # the disk may be full, which RunDir.failure finds
            run_dir.reason.write_text(explain(error, run_dir))
        raise
    return 0


def _train_on_verl(config: DictConfig) -> None:
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    check_run(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    runner: Any = TaskRunnerV1
    if not config.trainer.use_v1:
        from verl.trainer.main_ppo_v0 import TaskRunner as runner
    with machine.naming_lost_nodes(runner) as watched:
        run_ppo(config, task_runner_class=watched)


def explain(error: BaseException, run_dir: RunDir) -> str:
    """Return the reason in one line. torch does not report a full disk, so the disk is checked too."""
    from goldilocks.verl.dispatch.failures import reason

    # These messages are for the user: they get no type and no place.
    line = " ".join((str(error) if type(error) in (ValueError, machine.NodeLost) else reason(error)).split())
    full = run_dir.full_disk()
    return f"{full}: {line}" if full else line


if __name__ == "__main__":
    sys.exit(drive(sys.argv[1]))
