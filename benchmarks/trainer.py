"""verl's own trainer beside ours, on the same data, seed and sizes: seconds a step, and what a trained group costs.

    python benchmarks/trainer.py                                                    # the tiny model on the CPU
    python benchmarks/trainer.py --device cuda --model 1.5b --engine vllm --out trainer.json

Runs of ``goldilocks train grpo``, one after another, on a task whose model has random weights and ends its answers by
chance (``random_task.py``): the longest answer is eight times the mean. The arms are verl's ``sync`` and ours with
everything off, which train every group; then, for each share of prompts that teach something (``--keep``), verl's own
``filter_groups``, ours, and ours with ``on_full: partial``. All run with the plug-in's patches, so that verl's trainer
has its quicker rows too; ``--verl-patches cpu,log-probs`` takes them from verl's arms. The first steps warm up and are
left out; seconds are medians.

``--out`` keeps each arm's figures as soon as it ends. An arm that it has is not run again, so that the same command
goes on where it was cut; an arm that failed is tried again. ``--seconds`` ends an arm: its steps so far count.

Columns: seconds of a step, and of its generation, log-probs, update, weights and rest; rollouts generated for a trained
group; groups with a signal that were thrown away; tokens generated in a second of the step; peak memory, of the GPU, or
of the run's processes on the CPU; steps that count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import random_task
from rich.console import Console

from goldilocks.config.recipes import choose
from goldilocks.launch.live import LiveLine
from goldilocks.launch.supervisor import processes_of
from goldilocks.launch.train import Launch, interruptible, prepared, supervise

LONGEST = 8  # times the mean
OPEN = 3  # prompts open at once, in batches: a batch of answers keeps the engine busy to its end
VERL, PATCHES = "verl", "GOLDILOCKS_PATCHES"
FILTER = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"]
PARTS = {
    "gen": ("gen",),
    "log-probs": ("old_log_prob", "ref"),
    "update": ("update_actor",),
    "weights": ("update_weights",),
}
MEMORY_S = 2.0
FREE_GIB, FREE_S = 4, 30.0  # a GPU that holds less than this is free; how long it is waited for


@dataclass(frozen=True)
class Arm:
    """One run of the table; ``keep`` is None where every group is trained."""

    trainer: str
    kind: str
    keep: float | None

    @property
    def name(self) -> str:
        """As the table and the file have it."""
        return f"{self.trainer} {self.kind}" + ("" if self.keep is None else f", keep {self.keep}")

    @property
    def folder(self) -> str:
        """The name of its run."""
        return self.name.replace(", keep ", "-").replace(" ", "-")

    def words(self, groups: int) -> list[str]:
        """Return the settings that no other arm has."""
        mode = ["trainer.v1.trainer_mode=sync"] if self.trainer == VERL else []
        if self.keep is None:
            return mode
        own = [f"data.gen_batch_size={OPEN * groups}"] if self.trainer != VERL else []
        paused = ["algorithm.filter_groups.on_full=partial", "algorithm.filter_groups.max_carry_steps=4"]
        return [*mode, *FILTER, *own, *(paused if self.kind == "partial" else [])]


def arms(keeps: Sequence[float]) -> list[Arm]:
    """Return every arm, those that are compared next to each other."""
    every = [Arm(VERL, "sync", None), Arm("ours", "all off", None)]
    kinds = [(VERL, "filter_groups"), ("ours", "filter_groups"), ("ours", "partial")]
    return every + [Arm(trainer, kind, keep) for keep in keeps for trainer, kind in kinds]


@dataclass(frozen=True)
class Figures:
    """What an arm cost; seconds by part of a step."""

    steps: int
    step: float
    parts: dict[str, float]
    rollouts_per_group: float
    thrown_away: int
    tokens_per_s: float
    length: float  # of the rows trained
    started: float  # mean length of what was generated
    memory_gib: float = 0.0
    cut: bool = False  # by the limit on its seconds

    def line(self, name: str) -> str:
        """The line of the table."""
        parts = "".join(f"{self.parts[part]:>10.2f}" for part in [*PARTS, "rest"])
        return (
            f"{name:<30}{self.step:>8.2f}{parts}{self.rollouts_per_group:>16.1f}{self.thrown_away:>13}"
            f"{self.tokens_per_s:>9,.0f}{self.memory_gib:>7.1f}{self.steps:>7}"
        )


HEADER = (
    f"{'':<30}{'s/step':>8}" + "".join(f"{part:>10}" for part in [*PARTS, "rest"]) + f"{'rollouts/group':>16}"
    f"{'thrown away':>13}{'tok/s':>9}{'GiB':>7}{'steps':>7}"
)


def figures(records: Sequence[dict[str, float]], warm_up: int, groups: int, n: int) -> Figures:
    """Return the figures of a run's steps after the warm-up."""
    timed = records[warm_up:]
    step = statistics.median(record["timing_s/step"] for record in timed)
    of_steps = [_parts(record) for record in timed]
    parts = {name: statistics.median(one[name] for one in of_steps) for name in of_steps[0]}
    length = statistics.fmean(record["response_length/mean"] for record in timed)
    rollouts, tokens, lost = generated(records, warm_up, groups, n)
    return Figures(
        steps=len(timed),
        step=step,
        parts=parts,
        rollouts_per_group=rollouts / (groups * len(timed)),
        thrown_away=int(lost),
        tokens_per_s=tokens / sum(record["timing_s/step"] for record in timed),
        length=length,
        started=tokens / rollouts,
    )


def generated(records: Sequence[dict[str, float]], warm_up: int, groups: int, n: int) -> tuple[float, float, float]:
    """Return the rollouts and tokens generated after the warm-up, and the groups with a signal that were thrown away.

    Ours are counted. verl counts the groups that it drops, and not their tokens: lengths depend on nothing here, so the
    mean of the trained rows stands for them.
    """
    timed, total = records[warm_up:], records[-1]
    if "accounts/generated_rollouts" in total:
        before = records[warm_up - 1] if warm_up else {}
        counts = [
            total[f"accounts/generated_{what}"] - before.get(f"accounts/generated_{what}", 0)
            for what in ("rollouts", "tokens")
        ]
        return counts[0], counts[1], sum(record["train/groups_expired"] for record in timed)
    dropped, lost = (
        sum(record.get(f"training/filter_groups/{key}_samples", 0) for record in timed)
        for key in ("evicted", "discarded_surplus")
    )
    rollouts = (groups * len(timed) + dropped + lost) * n
    length = statistics.fmean(record["response_length/mean"] for record in timed)
    return rollouts, rollouts * length, lost


def _parts(record: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the parts of one step, and the rest of them."""
    found = {name: sum(record.get(f"timing_s/{key}", 0.0) for key in keys) for name, keys in PARTS.items()}
    return {**found, "rest": record["timing_s/step"] - sum(found.values())}


# -- one arm -----------------------------------------------------------------------------------------------------------


def words(args: argparse.Namespace, arm: Arm, model: Path, data: Path) -> list[str]:
    """Return the words of ``goldilocks train``."""
    longest = LONGEST * args.mean
    return [
        "grpo",
        *random_task.settings(model, data, longest),
        f"device={args.device}",
        f"actor_rollout_ref.rollout.name={args.engine}",
        f"data.train_batch_size={args.groups}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.groups}",
        f"actor_rollout_ref.rollout.n={args.n}",
        f"actor_rollout_ref.rollout.max_num_seqs={args.slots}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max(16_384, longest + 2 * random_task.PROMPT_WORDS)}",
        "actor_rollout_ref.actor.optim.lr=0",  # in bf16 even 1e-6 changes how long the random model's answers are
        "data.seed=1",
        f"trainer.total_training_steps={args.warm_up + args.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *(on_gpu(args) if args.device == "cuda" else []),
        *arm.words(args.groups),
        *args.words,
    ]


def on_gpu(args: argparse.Namespace) -> list[str]:
    """bf16 with fp32 master weights, as verl trains a model of this size by default."""
    precision = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
    return [
        "actor_rollout_ref.rollout.dtype=bfloat16",
        f"{precision}.param_dtype=bf16",
        f"{precision}.reduce_dtype=fp32",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        *(["actor_rollout_ref.rollout.gpu_memory_utilization=0.4"] if args.engine == "vllm" else []),
    ]


def run(args: argparse.Namespace, arm: Arm, model: Path, data: Path) -> Figures:
    """Train; end at the limit. RuntimeError says why there are no figures."""
    shutil.rmtree(args.runs / arm.folder, ignore_errors=True)
    patches = {PATCHES: args.verl_patches} if arm.trainer == VERL and args.verl_patches else {}
    with prepared(choose(words(args, arm, model, data), args.device), args.runs, arm.folder) as launch:
        stop = threading.Event()
        limit = threading.Timer(args.seconds, stop.set)
        limit.daemon = True
        limit.start()
        with Memory(args.device, launch.run_dir.path) as memory:
            line = LiveLine(Console(file=sys.stderr), lambda text: None)
            ended = supervise(replace(launch, env=launch.env | patches), line, stop=stop)
        limit.cancel()
        records = steps_of(launch)
    if len(records) <= args.warm_up or (ended.failure and not stop.is_set()):
        raise RuntimeError(f"{ended.failure}\n{launch.run_dir.log.read_text()[-3000:]}")
    found = figures(records, args.warm_up, args.groups, args.n)
    return replace(found, memory_gib=memory.peak / 2**30, cut=ended.failure is not None)


def steps_of(launch: Launch) -> list[dict[str, float]]:
    """Return the metrics of the steps that were made."""
    lines = launch.run_dir.metrics.read_text().splitlines() if launch.run_dir.metrics.exists() else []
    return [record for record in (json.loads(line)["data"] for line in lines) if "timing_s/step" in record]


class Memory:
    """The largest memory of a run: of the GPU, or of its processes on the CPU with shared pages counted once."""

    def __init__(self, device: str, run: Path) -> None:
        self._used = _gpu if device == "cuda" else lambda: _processes(run)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(MEMORY_S):
            self.peak = max(self.peak, self._used())


def _gpu() -> int:
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def await_gpu() -> None:
    """Wait until the processes of the arm before have given the GPU's memory back."""
    deadline = time.monotonic() + FREE_S
    while (used := _gpu()) > FREE_GIB << 30:
        if time.monotonic() > deadline:
            print(f"the GPU still holds {used / 2**30:.1f} GiB", file=sys.stderr, flush=True)
            return
        time.sleep(0.5)


def _processes(run: Path) -> int:
    used = 0
    for process in processes_of(run):
        with contextlib.suppress(psutil.Error):
            used += process.memory_full_info().pss
    return used


# -- all arms ----------------------------------------------------------------------------------------------------------


class Kept:
    """The figures that ``--out`` keeps, written anew after each arm."""

    def __init__(self, file: Path | None, sizes: dict[str, Any]) -> None:
        self._file, self._sizes = file, sizes
        self.arms: dict[str, Figures] = {}
        if file and file.exists():
            kept = json.loads(file.read_text())
            if kept["sizes"] != sizes:
                sys.exit(f"--out={file}: expected a file of {sizes}, it has {kept['sizes']}")
            self.arms = {name: Figures(**found) for name, found in kept["arms"].items()}

    def add(self, arm: Arm, found: Figures) -> None:
        """Keep an arm."""
        self.arms[arm.name] = found
        if self._file:
            new = self._file.with_suffix(".new")
            named = {name: asdict(one) for name, one in self.arms.items()}
            new.write_text(json.dumps({"sizes": self._sizes, "arms": named}, indent=1))
            os.replace(new, self._file)


def ratios(found: dict[str, Figures], keeps: Sequence[float]) -> list[str]:
    """Return the comparisons whose two sides are both there."""
    pairs = [("ours all off", "verl sync")]
    for keep in keeps:
        pairs += [(f"ours filter_groups, keep {keep}", f"verl filter_groups, keep {keep}")]
        pairs += [(f"ours partial, keep {keep}", f"ours filter_groups, keep {keep}")]
    there = [(own, other) for own, other in pairs if own in found and other in found]
    lines = [
        f"{own} / {other}: {found[own].step / found[other].step:.2f} of its seconds a step" for own, other in there
    ]
    lengths = [
        f"{own}: trained over started length {found[own].length / found[other].started:.3f}"
        for own, other in there
        if "partial" in own
    ]
    return lines + lengths


def measure(args: argparse.Namespace, kept: Kept) -> list[str]:
    """Run the arms that are asked for and not there; return why some have no figures."""
    shape, failures = random_task.SHAPES[args.model], []
    model = args.runs / f"model-{args.model}-{args.mean}"
    todo = [arm for arm in arms(args.keep) if arm.name not in kept.arms and args.only in arm.name]
    if todo and not (model / "tokenizer.json").exists():  # written last
        precision = "bfloat16" if args.device == "cuda" else "float32"
        random_task.make_model(model, shape, args.mean, LONGEST * args.mean, precision)
    for arm in todo:
        keep = args.keep[0] if arm.keep is None else arm.keep
        data = args.runs / f"data-{args.model}-{keep}"
        random_task.make_data(data, shape, keep)
        print(f"{time.strftime('%H:%M:%S')} {arm.name}", file=sys.stderr, flush=True)
        if args.device == "cuda":
            await_gpu()
        try:
            kept.add(arm, run(args, arm, model, data))
        except RuntimeError as error:
            failures.append(f"{arm.name}: {error}")
            continue
        except KeyboardInterrupt:  # the table has what there is
            failures.append(f"{arm.name}: interrupted")
            break
        print(kept.arms[arm.name].line(arm.name), file=sys.stderr, flush=True)
    return failures


def sizes() -> argparse.ArgumentParser:
    """Return the options of the load, which ``patches.py`` has too."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=list(random_task.SHAPES), default="tiny")
    parser.add_argument("--groups", type=int, help="of a batch (64 on a GPU, 16 on the CPU)")
    parser.add_argument("--n", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--mean", type=int, help="length of an answer (400 on a GPU, 16 on the CPU)")
    parser.add_argument("--slots", type=int, help="answers at once (512 on a GPU, 256 with our engine from 1.5b on)")
    return parser


def sized(args: argparse.Namespace) -> argparse.Namespace:
    """Choose the sizes that were not given, by the device."""
    cuda = args.device == "cuda"
    large = args.engine == "transformers" and args.model in ("1.5b", "3b")
    args.groups = args.groups or (64 if cuda else 16)
    args.mean = args.mean or (400 if cuda else 16)
    args.slots = args.slots or ((256 if large else 512) if cuda else 128)
    return args


def load(args: argparse.Namespace) -> str:
    """Return the line above the table."""
    lengths = f"answers of {args.mean} tokens, {LONGEST * args.mean} at most"
    return f"{args.model} on {args.device}, rollouts by {args.engine}: {args.groups} groups of {args.n}, {lengths}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[sizes()]
    )
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--steps", type=int, default=5, help="that count, of each arm")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument(
        "--keep", type=float, nargs="+", default=[0.5, 0.2], help="share of prompts that teach something"
    )
    parser.add_argument("--only", default="", help="arms whose name has this in it")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit of an arm, its start included")
    parser.add_argument("--verl-patches", help="GOLDILOCKS_PATCHES of verl's arms (default: all)")
    parser.add_argument("--runs", type=Path, help="a folder for models, data and runs (default: one that is removed)")
    parser.add_argument("--out", type=Path, help="a JSON file that keeps the figures of each arm")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of every arm")
    return sized(parser.parse_args())


def main() -> int:
    args = parsed()
    named = ("device", "model", "engine", "steps", "warm_up", "groups", "n", "mean", "slots", "verl_patches", "words")
    kept = Kept(args.out, {name: getattr(args, name) for name in named})
    with contextlib.ExitStack() as stack:
        folder = args.runs or stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        args.runs = Path(folder).resolve()
        args.runs.mkdir(parents=True, exist_ok=True)
        stack.enter_context(interruptible())
        failures = measure(args, kept)
    print(f"{load(args)}\n{HEADER}")
    print(*(found.line(name) for name, found in kept.arms.items()), "", sep="\n")
    print(*ratios(kept.arms, args.keep), *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
