"""``goldilocks compare``: recipes side by side at equal cost. Everything is checked before the first arm starts."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from goldilocks.compare.arm import GROUPS, MINI_BATCH, SEEDS, STEPS, EqualCost, Grid, combinations, parse_grid
from goldilocks.compare.results import Results
from goldilocks.compare.run import ArmFailed, Launcher, run_study
from goldilocks.compare.show import LEGEND, in_markdown, notes, on_terminal, tables
from goldilocks.compare.study import GRID, ORDERS, Study, StudyFolder, write_json
from goldilocks.compare.table import Table, make_table
from goldilocks.config.recipes import names
from goldilocks.errors import missing_extra, require
from goldilocks.launch import defaults
from goldilocks.launch.display import Board
from goldilocks.launch.fork_server import ForkServer
from goldilocks.launch.machine import find_device
from goldilocks.launch.preflight import check_paths
from goldilocks.launch.recipe import choose
from goldilocks.launch.train import STALL_S, check_keys, composed, interruptible

OUT = Path("runs/compare")
FILES = ("table.md", "table.json", "curves.png", "report.html")
WIDEST = 180  # columns, also on a narrower terminal: a wrapped row is readable, a truncated one is not
# Keys that are the same for every arm.
OWN = ("goldilocks.budget", "goldilocks.study", "trainer.val_before_train", "trainer.test_freq", "trainer.resume_mode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = f"""\
recipes: {", ".join(names("recipe"))}, or a YAML file

examples:
  goldilocks compare grpo dapo contrast --budget rollouts=20000 --seeds 3
  goldilocks compare grpo dapo greso --budget minutes=30 --seeds 5 --against grpo,dapo --tune-seeds 2 \\
      --tune groups_per_update=2,4,8,16 actor_rollout_ref.actor.optim.lr=5e-5,1e-4,2e-4,4e-4
  goldilocks compare grpo replay --budget rollouts=50000 --seeds 5 --parallel 5
  goldilocks compare grpo dapo --budget tokens=1000000 --seeds 3 task=gsm8k actor_rollout_ref.rollout.n=16

the same command goes on where it was interrupted: an arm that has ended is not run again
"""
    add = parser.add_argument
    add("words", nargs="*", metavar="RECIPE | key=value", help="recipes to compare, and settings for all of them")
    add("--budget", metavar="COST=N", action="append", required=True, help="what each arm may spend: rollouts=N, "
        "tokens=N or minutes=N; every rollout is charged")  # fmt: skip
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
    add("--tune-order", choices=ORDERS, default=GRID, help="every combination, or one key after the other, with the "
        "best of the keys before it (default %(default)s)")  # fmt: skip
    add("--stall-timeout", metavar="S", type=float, default=STALL_S, help="seconds without a sign of life after which "
        "an arm is ended and started anew (default %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the study, or continue it; return 0 once the table is written."""
    study = _study(args)
    require(args.parallel >= 1, "--parallel", args.parallel, "1 or more arms at a time")
    require(args.stall_timeout > 0, "--stall-timeout", args.stall_timeout, "seconds above 0")
    device, console = find_device(), Console(soft_wrap=True)
    check_study(study, device)
    with StudyFolder.open(args.out, study) as folder:
        try:
            with interruptible(), ForkServer() as forks, Board(console) as board:
                launcher = Launcher(study, folder, device, console, board, forks, args.stall_timeout)
                results = run_study(study, folder, launcher, args.parallel, launcher.stop)
        except (ArmFailed, KeyboardInterrupt) as stop:
            reason, status = ("interrupted", 130) if isinstance(stop, KeyboardInterrupt) else (str(stop), 1)
            done = len(list(args.out.glob("*/result.json")))
            print(f"goldilocks: {reason}", file=sys.stderr)
            print(f"goldilocks: {done} of {study.arms} arms are done; the same command goes on", file=sys.stderr)
            return status
        table = make_table(study, results)
        _write(study, results, table, folder)
    _show(table, folder)
    return 0


def _study(args: argparse.Namespace) -> Study:
    one = len(args.budget) == 1
    require(one, "--budget", " and ".join(args.budget), "one at a time: arms are equal in one cost")
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
        tune_order=args.tune_order,
        against=tuple(filter(None, args.against.split(","))),
    )


def check_study(study: Study, device: str) -> None:
    """Check that every recipe composes, and the first one with every value of the grid."""
    _check_keys(study)
    arms = study.reported_arms(study.choose([]))[: len(study.recipes)]
    for arm in [*arms, *(replace(arms[0], settings=settings) for settings in _every_value(study.grid))]:
        config = composed(choose(arm.command(study.overrides), device), Path(arm.name))
        check_keys(config)
        if not any(_key(word) == STEPS for word in study.overrides):
            _check_schedule(config)
        defaults.provide(config)
        check_paths(config)


def _every_value(grid: Grid) -> list[dict[str, str]]:
    """Return combinations that have every value once, after the first of each, which is checked already."""
    first = combinations(grid)[0]
    return [{**first, key: value} for key, values in grid.items() for value in values[1:]]


def _check_keys(study: Study) -> None:
    for word in (*study.overrides, *study.grid):
        if any(f"{_key(word)}.".startswith(f"{own}.") for own in (*OWN, *SEEDS)):
            raise ValueError(f"{word!r} is not accepted: goldilocks compare sets {_key(word)} itself")
        doubled = GROUPS in study.grid and _key(word) == MINI_BATCH
        require(not doubled, MINI_BATCH, word.partition("=")[2], f"nothing beside --tune {GROUPS}, which sets it")


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


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _write(study: Study, results: Results, table: Table, folder: StudyFolder) -> None:
    """Write the table, then the picture and the report; without the packages they need, say so and go on."""
    write_json(folder.path / "table.json", table.as_dict())
    (folder.path / "table.md").write_text(in_markdown(table))
    try:
        from goldilocks.compare.pictures import write_pictures
    except ModuleNotFoundError as error:
        print(f"goldilocks: no picture and no report: {missing_extra(error, 'report')}", file=sys.stderr)
    else:
        write_pictures(study, results, table, folder)


def _show(table: Table, folder: StudyFolder) -> None:
    console = Console(width=WIDEST)
    for shown in tables(table):
        console.print(f"\n{shown.title}\n", highlight=False, markup=False)
        console.print(on_terminal(shown))
    console.print(f"\n{LEGEND}\n", highlight=False)
    for note in notes(table):
        console.print(note, highlight=False, markup=False)
    for file in filter(Path.exists, (folder.path / name for name in FILES)):
        console.print(str(file), highlight=False, markup=False)
