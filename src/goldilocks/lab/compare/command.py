"""``goldilocks compare``: recipes side by side at equal cost. Everything is checked before the first arm starts.

Each arm is a run of ``goldilocks train`` in the study's folder, several at a time. Arms that have ended are not run
again. An arm that fails is tried once more; if it fails again the others still run to their end, and then its failure
is raised.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from goldilocks.config.recipes import choose, key_of, listed, quoted
from goldilocks.errors import missing_extra, require
from goldilocks.hashing import content_key
from goldilocks.lab.compare import study as studies
from goldilocks.lab.compare.arm import GROUPS, SEEDS, STEPS, Arm, EqualCost, parse_grid
from goldilocks.lab.compare.show import LEGEND, in_markdown, notes, settings, tables
from goldilocks.lab.compare.study import Result, Results, Study, StudyFolder
from goldilocks.lab.compare.table import Table, make_table
from goldilocks.launch.live import Board, LiveLine
from goldilocks.launch.machine import find_device, share_of_cores
from goldilocks.launch.preflight import check_paths, files_of, provide, rows_in
from goldilocks.launch.train import STALL_S, check_keys, composed, interruptible, prepared, supervise
from goldilocks.runs.costs import MINI_BATCH, Progress, clock

OUT = Path("runs/compare")
WIDEST = 180  # columns, also on a narrower terminal: a wrapped row is readable, a truncated one is not
# Keys that are the same for every arm.
OWN = ("goldilocks.budget", "goldilocks.study", "trainer.val_before_train", "trainer.test_freq", "trainer.resume_mode")
OBJECT_STORE = 1 << 30  # bytes, of each of several Rays; alone, Ray takes a third of the machine's memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"""\
recipes: {listed()}; or a YAML file

examples:
  goldilocks compare grpo dapo contrast --budget rollouts=20000 --seeds 3
  goldilocks compare grpo dapo greso --budget seconds=1800 --seeds 5 --against grpo,dapo --tune-seeds 2 \\
      --tune groups_per_update=2,4,8,16 actor_rollout_ref.actor.optim.lr=5e-5,1e-4,2e-4,4e-4
  goldilocks compare grpo strata --budget rollouts=50000 --seeds 5 --parallel 5
  goldilocks compare grpo dapo --budget tokens=1000000 --seeds 3 task=gsm8k actor_rollout_ref.rollout.n=16

the same command goes on where it was interrupted: an arm that has ended is not run again
"""
    add = parser.add_argument
    add("words", nargs="*", metavar="RECIPE | key=value", help="recipes to compare, and settings for all of them")
    add("--budget", metavar="COST=N", action="append", required=True, help="what each arm may spend: rollouts=N, "
        "tokens=N or seconds=N; every rollout is charged")  # fmt: skip
    add("--seeds", metavar="K", type=int, required=True, help="runs of each recipe, with seeds 1 to K")
    add("--against", metavar="RECIPE,RECIPE", default="", help="the baselines (default: the first recipe)")
    add("--parallel", metavar="K", type=int, default=1, help="arms that run at the same time, each with a Ray of its "
        "own, on the same GPU or cores (default %(default)s)")  # fmt: skip
    add("--out", metavar="DIR", type=Path, default=OUT, help="the study's folder (default %(default)s)")
    add("--tune", metavar="key=value,value", nargs="+", action="extend", default=[], help="tried for every recipe, "
        f"with seeds of its own; the best is what is compared; {GROUPS}=2,4,8 are batch sizes in groups")  # fmt: skip
    add("--tune-budget", metavar="COST=N", help="what each try may spend (default: the budget)")
    add("--tune-seeds", metavar="K", type=int, default=1, help="tries of each combination; the best mean is "
        "chosen (default %(default)s)")  # fmt: skip
    add("--stall-timeout", metavar="S", type=float, default=STALL_S, help="seconds without a sign of life after which "
        "an arm is ended and started anew (default %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    study = _study(args)
    require(args.parallel >= 1, "--parallel", args.parallel, "1 or more arms at a time")
    alone = args.parallel == 1 or study.cost.kind != "seconds"
    accepted = "1 with a budget of seconds: arms at the same time slow each other down"
    require(alone, "--parallel", args.parallel, accepted)
    require(args.stall_timeout > 0, "--stall-timeout", args.stall_timeout, "seconds above 0")
    device, console = find_device(args.words), Console(soft_wrap=True)
    ended = len(list(args.out.glob("*/result.json"))) == study.arms  # shown again, also where no data or model is
    configs = [] if ended else check_study(study, device)
    with StudyFolder.open(args.out, study, partial(studies.origin_here, device)) as folder:
        split = split_for_tuning(configs, args.out / "tuning") if study.tuning_arms() and not ended else []
        try:
            with interruptible(), Board(console) as board:
                launcher = Launcher(study, folder, device, console, board, args.stall_timeout, tuning=split)
                results = run_study(study, folder, launcher, args.parallel, launcher.stop)
        except (ArmFailed, KeyboardInterrupt) as stop:
            reason, status = ("interrupted", 130) if isinstance(stop, KeyboardInterrupt) else (str(stop), 1)
            done = len(list(args.out.glob("*/result.json")))
            print(f"goldilocks: {reason}", file=sys.stderr)
            print(f"goldilocks: {done} of {study.arms} arms are done; the same command goes on", file=sys.stderr)
            return status
        table = make_table(study, results)
        _write(study, results, table, folder)
    _show(table, args.out)
    return 0


def _study(args: argparse.Namespace) -> Study:
    require(len(args.budget) == 1, "--budget", " and ".join(args.budget), "one at a time: arms are equal in one cost")
    recipes = tuple(word for word in args.words if "=" not in word and not word.startswith("~"))
    cost = EqualCost.parse(args.budget[0], "--budget")
    tune_cost = EqualCost.parse(args.tune_budget, "--tune-budget") if args.tune_budget else None
    alike = tune_cost is None or tune_cost.kind == cost.kind
    require(alike, "--tune-budget", args.tune_budget, f"{cost.kind}=N, as --budget has it")
    return Study(
        recipes=recipes,
        cost=cost,
        seeds=args.seeds,
        overrides=tuple(word for word in args.words if word not in recipes),
        grid=parse_grid(args.tune),
        tune_cost=tune_cost,
        tune_seeds=args.tune_seeds,
        against=tuple(filter(None, args.against.split(","))),
    )


def check_study(study: Study, device: str) -> list[DictConfig]:
    """Check that every recipe composes, and the first one with every value of the grid. Return their configs."""
    for word in (*study.overrides, *study.grid):
        if any(f"{key_of(word)}.".startswith(f"{own}.") for own in (*OWN, *SEEDS)):
            raise ValueError(f"{word!r} is not accepted: goldilocks compare sets {key_of(word)} itself")
        doubled = GROUPS in study.grid and key_of(word) == MINI_BATCH
        require(not doubled, MINI_BATCH, word.partition("=")[2], f"nothing beside --tune {GROUPS}, which sets it")
    arms = study.reported_arms(study.choose([]))[: len(study.recipes)]
    others = [{**study.combinations[0], key: value} for key, values in study.grid.items() for value in values[1:]]
    configs = []
    for arm in [*arms, *(replace(arms[0], settings=values) for values in others)]:
        config = composed(choose(arm.command(study.overrides), device), Path(arm.name))
        check_keys(config)
        if not any(key_of(word) == STEPS for word in study.overrides):
            _check_schedule(config)
        provide(config)
        check_paths(config)
        configs.append(config)
    return configs


def split_for_tuning(configs: Sequence[DictConfig], folder: Path) -> list[str]:
    """Hold a part of the training problems back; return the overrides by which tuning trains and validates on them.

    The reported validation problems have no say in what is tuned. As many are held back as those are, at most a tenth
    of the training problems, by a hash of the prompt: one that is there twice is on one side.
    """
    import pyarrow
    import pyarrow.parquet as pq

    data = configs[0].data
    for config in configs:
        files = [*files_of(config.data.train_files), *files_of(config.data.val_files)]
        alike = all(config.data[key] == data[key] for key in ("train_files", "val_files"))
        parquet = all(file.endswith(".parquet") and "://" not in file for file in files)
        require(alike and parquet, "--tune", ", ".join(files), "the same data for every recipe, in .parquet files here")
    tables = [pq.read_table(Path(file).expanduser()) for file in files_of(data.train_files)]
    train = pyarrow.concat_tables(tables, promote_options="default")
    keys = [content_key(prompt) for prompt in train[data.get("prompt_key", "prompt")].to_pylist()]
    most = min(rows_in(data.val_files) or 0, len(train) // 10)
    back = set(sorted(set(keys))[: max(1, most)])
    parts = {"train_files": [key not in back for key in keys], "val_files": [key in back for key in keys]}
    folder.mkdir(exist_ok=True)
    for name, chosen in parts.items():
        pq.write_table(train.filter(pyarrow.array(chosen)), folder / f"{name}.parquet")
    return [f"data.{name}={quoted((folder / f'{name}.parquet').resolve())}" for name in parts]


def _check_schedule(config: DictConfig) -> None:
    """Refuse a learning-rate schedule over all steps: with a budget the number of steps is not known."""
    optim = config.actor_rollout_ref.actor.optim
    warmup, kind = optim.get("lr_warmup_steps_ratio") or 0.0, optim.get("lr_scheduler_type") or "constant"
    if warmup or kind != "constant":
        given = f"lr_warmup_steps_ratio={warmup}" if warmup else f"lr_scheduler_type={kind}"
        raise ValueError(
            f"actor_rollout_ref.actor.optim.{given} needs a number of steps, and a budget gives none: "
            f"set lr_warmup_steps and a constant rate, or {STEPS}=N for the schedule alone"
        )


def _write(study: Study, results: Results, table: Table, folder: StudyFolder) -> None:
    """Write the table, then the picture and the report; without the packages they need, say so and go on."""
    studies.write_json(folder.path / "table.json", asdict(table))
    (folder.path / "table.md").write_text(in_markdown(table))
    try:
        from goldilocks.lab.compare.pictures import write_pictures
    except ModuleNotFoundError as error:
        print(f"goldilocks: no picture and no report: {missing_extra(error, 'report')}", file=sys.stderr)
    else:
        write_pictures(study, results, table, folder)


def _show(table: Table, folder: Path) -> None:
    console = Console(width=WIDEST)
    for sheet in tables(table):
        console.print(f"\n{sheet.title}\n", highlight=False, markup=False)
        console.print(sheet.on_terminal())
    console.print(f"\n{LEGEND}\n", highlight=False, markup=False)
    for note in notes(table):
        console.print(note, highlight=False, markup=False)
    for pattern in ("table.*", "report/curves*.png", "report.html"):
        for file in sorted(folder.glob(pattern)):
            console.print(str(file), highlight=False, markup=False)


class ArmFailed(Exception):
    """An arm failed; the message is for the user."""


@dataclass(frozen=True)
class Turn:
    """An arm's number in its study, its cost, the cost and time of the arms that have ended, and the cost to come."""

    number: int
    of: int
    cost: float
    cost_before: float
    cost_after: float
    seconds_before: float
    at_once: int = 1

    def seconds_left(self, elapsed: float, eta: float) -> float:
        """Return the seconds left of the study; this arm has run for ``elapsed`` seconds and has ``eta`` left.

        Estimated by cost, since tuning arms may have less to spend than the others.
        """
        seconds, cost = (self.seconds_before, self.cost_before) if self.cost_before > 0 else (elapsed + eta, self.cost)
        return eta + seconds / cost * self.cost_after / self.at_once


RunArm = Callable[[Arm, Turn], Result]


def run_study(
    study: Study, folder: StudyFolder, run_arm: RunArm, parallel: int = 1, stop: threading.Event | None = None
) -> Results:
    """Tune, choose, and run what is reported; ``parallel`` arms at a time. An interrupt sets ``stop``."""
    tries = study.tuning_arms()
    costs = [arm.cost.amount for arm in tries] + [study.cost.amount] * (study.arms - len(tries))
    crew = _Crew(costs, folder, run_arm, parallel, stop or threading.Event())
    tuned = crew.run(tries)
    return Results(tuned, crew.run(study.reported_arms(study.choose(tuned))))


@dataclass
class _Crew:
    """Runs arms, ``parallel`` at a time, and gives each its turn."""

    costs: Sequence[float]
    folder: StudyFolder
    run_arm: RunArm
    parallel: int
    stop: threading.Event
    begun: int = 0
    cost_before: float = 0.0  # of the arms that have ended, as their seconds
    seconds_before: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, arms: Sequence[Arm]) -> tuple[Result, ...]:
        """Return the results in the order of the arms. Any error other than ``ArmFailed`` stops all arms."""
        with ThreadPoolExecutor(self.parallel) as pool:
            futures = [pool.submit(self._result, arm) for arm in arms]
            try:
                errors = [error for future in futures if (error := future.exception())]
            except BaseException:  # an interrupt of the thread that waits here
                self.stop.set()
                raise
        for error in sorted(errors, key=lambda error: isinstance(error, ArmFailed)):
            raise error
        return tuple(future.result() for future in futures)

    def _result(self, arm: Arm) -> Result:
        """Return the arm's result, from its folder if it has ended, and count its cost."""
        if self.stop.is_set():
            raise ArmFailed(f"arm {arm.name} was not begun")
        with self.lock:
            number, self.begun = self.begun, self.begun + 1
            cost, after = self.costs[number], sum(self.costs[number + 1 :])
            before = self.cost_before, after, self.seconds_before
        turn = Turn(number + 1, len(self.costs), cost, *before, self.parallel)
        try:
            result = self.folder.result(arm) or self.folder.finish(arm, self._try(arm, turn))
        except ArmFailed:
            raise
        except BaseException:  # a user error would hit the next arm too
            self.stop.set()
            raise
        with self.lock:
            self.cost_before += cost
            self.seconds_before += result.wall_seconds
        return result

    def _try(self, arm: Arm, turn: Turn) -> Result:
        """Run the arm, and once more if it fails: a port in use or a lack of memory may be gone the next time."""
        self.folder.begin(arm)
        try:
            return self.run_arm(arm, turn)
        except ArmFailed:
            if self.stop.is_set():
                raise
        self.folder.begin(arm)
        return self.run_arm(arm, turn)


@dataclass(frozen=True)
class Launcher:
    """Runs the arms of a study, each with a Ray of its own. ``stop`` ends all running arms."""

    study: Study
    folder: StudyFolder
    device: str
    console: Console
    board: Board
    stall_s: float = STALL_S
    tuning: Sequence[str] = ()  # overrides of the arms that tune
    stop: threading.Event = field(default_factory=threading.Event)
    composing: threading.Lock = field(default_factory=threading.Lock)  # Hydra composes one config at a time

    def __call__(self, arm: Arm, turn: Turn) -> Result:
        """Run the arm to its end. Its failure is printed at once, since the other arms may run for hours."""
        title = f"arm {turn.number}/{turn.of} {arm.name}"

        def described(line: str, progress: Progress, elapsed: float) -> str:
            left = "" if progress.eta is None else f" · study {clock(turn.seconds_left(elapsed, progress.eta))} left"
            return f"{title} · {line}{left}"

        line = LiveLine(self.console, partial(self.board.draw, title), described)
        with ExitStack() as stack:
            with self.composing:
                shared = [f"++ray_kwargs.ray_init.object_store_memory={OBJECT_STORE}"] if turn.at_once > 1 else []
                tuning = self.tuning if arm.seed >= studies.TUNING_SEED else ()
                choice = choose(arm.command([*shared, *self.study.overrides, *tuning]), self.device)
                launch = stack.enter_context(prepared(choice, self.folder.path, arm.name))
                launch = replace(launch, env=share_of_cores(turn.at_once) | launch.env)
            outcome = supervise(launch, line, self.stall_s, self.stop)
        if outcome.failure is not None:
            failed = f"arm {arm.name} failed: {outcome.failure}; everything it printed: {launch.run_dir.log}"
            self.console.print(failed, highlight=False, markup=False, soft_wrap=True)
            raise ArmFailed(failed)
        result = studies.read_result(arm, launch.run_dir.path, outcome.seconds, alone=turn.at_once == 1)
        tried = f" ({settings(arm.settings)})" if arm.settings else ""
        first, last = result.validations[0].accuracy, result.validations[-1].accuracy
        ended = (
            f"{title}{tried}: {first:.1%} → {last:.1%}, {result.rollouts:,.0f} rollouts, {result.updates} updates, "
            f"{clock(result.wall_seconds)}"
        )
        self.console.print(ended, highlight=False, markup=False, soft_wrap=True)
        return result
