"""``python validate_implementation.py``: is this recipe what it says, on this machine?

It looks at its own files, composes the published config, drives the collector that config describes, trains two real
steps of a tiny model, and looks at what was trained. A line for each; the exit status is 0 when all hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from goldilocks.config.recipes import choose, compose_config
from goldilocks.config.settings import Settings
from goldilocks.core import Collector, ListSource
from goldilocks.runs.records import group_uid, read_records
from goldilocks.types import Account, Group, Rollout, mean_and_std

HERE = Path(__file__).resolve().parent
CONFIG = str(HERE / "config" / "gspo_dynamic_sampling.yaml")
FILES = (
    "README_dynamic_sampling.md",
    "README_dynamic_sampling.zh.md",
    "config/gspo_dynamic_sampling.yaml",
    "gspo_dynamic_sampling_3b_math.sh",
    "main_gspo_dynamic.py",
    "test_gspo_3b_math.sh",
    "test_gspo_dynamic_sampling.py",
    "validate_implementation.py",
)
PROMPTS, ROLLOUTS, STEPS = 8, 8, 2
SMALL = [
    "task=arithmetic",
    f"data.train_batch_size={PROMPTS}",
    f"data.gen_batch_size={4 * PROMPTS}",
    f"actor_rollout_ref.rollout.n={ROLLOUTS}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
]


def main() -> int:
    """Every check in turn; those behind one that failed are still made."""
    failed = 0
    for check in (files, config, collector, training):
        try:
            print(f"ok      {check.__name__}: {check()}", flush=True)
        except (ValueError, SyntaxError, yaml.YAMLError) as error:
            failed += 1
            print(f"FAILED  {check.__name__}: {error}", flush=True)
    return int(failed > 0)


def files() -> str:
    """Every file of the recipe is there and can be read by what runs it."""
    missing = [name for name in FILES if not (HERE / name).is_file()]
    holds("files that are missing", missing, [])
    for name in FILES:
        text = (HERE / name).read_text(encoding="utf-8")
        if name.endswith(".py"):
            compile(text, name, "exec")
        elif name.endswith(".yaml"):
            holds(f"{name} has keys", isinstance(yaml.safe_load(text), dict), True)
        elif name.endswith(".sh"):
            done = subprocess.run(["bash", "-n", str(HERE / name)], capture_output=True, text=True, check=False)
            holds(f"what bash says of {name}", done.stderr.strip(), "")
            holds(f"{name} is executable", os.access(HERE / name, os.X_OK), True)
    return f"{len(FILES)} are there; YAML, shell and Python can be read"


def config() -> str:
    """The published run composes, and its loss is GSPO's."""
    composed = published()
    actor, groups = composed.actor_rollout_ref.actor, composed.algorithm.filter_groups
    holds("loss_mode", actor.policy_loss.loss_mode, "gspo")
    holds("loss_agg_mode", actor.loss_agg_mode, "seq-mean-token-mean")
    holds("trainer_mode", composed.trainer.v1.trainer_mode, "goldilocks")
    holds("filter_groups.enable", groups.enable, True)
    model = composed.actor_rollout_ref.model.path
    return f"{model}, GSPO clipped at {actor.clip_ratio_low:g} and {actor.clip_ratio_high:g}, groups by {groups.metric}"


def collector() -> str:
    """What the config makes of groups that are all right, all wrong, and mixed: only the last are in the batch."""
    contents = [(index, ("wrong", "right", "mixed")[index % 3]) for index in range(6000)]
    built = Settings.from_config(published()).collector(ListSource(contents))
    batch = collect(built)
    holds("groups in a batch", len(batch), 512)
    holds("groups without variance in it", len([group for group in batch if not varies(group.rewards)]), 0)
    built.accounts.check()
    issued = built.prompts_issued
    return f"{len(batch)} groups of {len(batch[0])} from {issued} prompts, a third of which have variance; none without"


def training() -> str:
    """Two updates for real: what verl was given to train is what verl itself wrote down."""
    with tempfile.TemporaryDirectory(prefix="gspo") as runs:
        command = [sys.executable, str(HERE / "main_gspo_dynamic.py"), "--runs", runs, "--name", "validate", *SMALL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"the run ended with status {done.returncode}: {done.stderr.strip()}")
        run = Path(runs) / "validate"
        trained = {step: trained_groups(run / "rollouts" / f"{step}.jsonl") for step in range(1, STEPS + 1)}
        metrics = last_metrics(run / "metrics.jsonl")
    for step, groups in trained.items():
        holds(f"groups trained in step {step}", len(groups), PROMPTS)
        holds("groups without variance among them", [uid for uid, row in groups.items() if not varies(row)], [])
    rows = sum(len(scores) for groups in trained.values() for scores in groups.values())
    holds("rollouts trained", metrics["accounts/trained_rollouts"], rows)
    accounted = sum(metrics[f"accounts/{name}_tokens"] for name in Account)
    holds("tokens accounted for", accounted, metrics["accounts/generated_tokens"])
    if not metrics["accounts/filtered_rollouts"]:
        raise ValueError("no group was filtered, so nothing is shown: all of them had variance")
    return summary(rows, metrics)


def summary(rows: int, metrics: dict[str, float]) -> str:
    """What is said of the training. Which groups fill a batch depends on which finish first, so the metrics differ."""
    ratio = metrics["actor/seq_importance_ratio"]
    return (
        f"{STEPS} steps, {STEPS * PROMPTS} groups, {rows} rollouts of {metrics['accounts/generated_rollouts']:.0f}, "
        f"{metrics['accounts/filtered_rollouts']:.0f} filtered, none without variance; sequence ratio {ratio:.4f}"
    )


def published() -> Any:
    """The config of the 3B run."""
    return compose_config(choose([CONFIG, "task=gsm8k_3b"], "cuda"))


def collect(built: Collector) -> tuple[Group, ...]:
    """One batch, from an engine that answers at once."""
    right: dict[str, Callable[[int], bool]] = {
        "wrong": lambda index: False,
        "right": lambda index: True,
        "mixed": lambda index: index % 2 == 0,
    }
    while not built.ready:
        for request in built.requests():
            answer = right[request.prompt.payload[1]]
            for index in range(request.first, request.first + request.n):
                built.observe(Rollout(request.uid, index, reward=float(answer(index)), tokens=100))
    return built.take()


def trained_groups(dump: Path) -> dict[str, list[float]]:
    """The scores of every group in verl's dump of a step; padding is no group."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in read_records(dump):
        if not (uid := group_uid(row)).startswith("pad"):
            groups[uid].append(float(str(row["score"])))
    return dict(groups)


def last_metrics(path: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads(path.read_text().splitlines()[-1])["data"]
    return metrics


def varies(rewards: list[float]) -> bool:
    return mean_and_std(rewards)[1] > 1e-6


def holds(what: str, found: object, wanted: object) -> None:
    """A ValueError that says what was found and what was wanted."""
    if found != wanted:
        raise ValueError(f"{what}: {found}, not {wanted}")


if __name__ == "__main__":
    sys.exit(main())
