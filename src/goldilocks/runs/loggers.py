"""Where people look: TensorBoard, Weights & Biases and MLflow show our metrics in groups, and name the report.

verl's ``Tracking`` has made the backends; each is told how to show what will come. Without one of the three nothing is
done.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from goldilocks.runs.files import RunDir

REPORT = "goldilocks/report"  # the command that writes the report, in each backend's own place for a text
COST = "accounts/generated_rollouts"  # the axis of our metrics in W&B: two runs differ by what they spent
# Charts of TensorBoard's tab "Custom scalars"; a tag is a regular expression.
CHARTS: dict[str, dict[str, list[str]]] = {
    "Goldilocks: what is trained": {
        "groups of a batch": ["train/informative_groups", "train/groups_(judged|carried|open|expired|rejected)"],
        "signal": ["train/signal"],
        "dropped groups by reason": [r"filter/dropped/.*"],
        "parts of the reward": [r"reward/.*"],
        "difficulty": [r"difficulty/.*"],
        "length": [r"length/.*_mean"],
        "length ratios": ["length/kept_over_generated", "length/trained_over_started"],
        "age": [r"train/age_.*"],
    },
    "Goldilocks: what it costs": {
        "tokens by account": [r"accounts/(?!generated|tool)[a-z]+_tokens"],
        "rollouts by account": [r"accounts/(?!generated)[a-z]+_rollouts"],
        "informative groups per 1,000 rollouts": ["adaptive_rollout/informative_groups_per_1k_rollouts"],
        "rollouts per prompt": [r"adaptive_rollout/(avg|min|max)_rollouts_per_sample"],
        "failures": [r"train/rollout_failures.*"],
        "reward calls": [r"accounts/reward_.*"],
        "seconds of generation": [r"timing_s/gen_.*"],
        "budget": ["budget/spent"],
    },
    "Goldilocks: beliefs and gates": {
        "beliefs": [r"belief/.*", r"selector/.*"],
        "batch filter": ["batch/selection_rate", r"filter/.*_rate", r"rejection/.*_rate"],
        "accuracy by column": [r"val/.*/acc"],
    },
}
FAMILIES = ("adaptive_rollout", "batch", "belief", "difficulty", "length", "rejection", "reward", "selector")
PARENT = "train/rollout_failures"  # a metric that others are below: MLflow's folders cannot hold both


def logged_before(trainer: Any) -> bytes:
    """Return what an earlier start of the run has logged to the file that verl will open anew."""
    path = log_file(trainer)
    earlier = path.read_bytes() if trainer.resume_mode != "disable" and path.is_file() else b""
    return earlier + b"\n" if earlier and not earlier.endswith(b"\n") else earlier


def log_file(trainer: Any) -> Path:
    """Return the file of verl's file logger; ``trainer`` is that section of the config."""
    folder = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser() / trainer.project_name
    return Path(os.environ.get("VERL_FILE_LOGGER_PATH") or folder / f"{trainer.experiment_name}.jsonl")


def show_grouped(backends: dict[str, Any], checkpoints: str) -> None:
    """Tell the backends of a ``Tracking`` how to show our metrics; ``checkpoints`` is ``trainer.default_local_dir``."""
    run = RunDir(Path(checkpoints).parent)
    report = f"goldilocks report {run.path}" if run.config.exists() else ""
    if "tensorboard" in backends:
        writer = backends["tensorboard"].writer
        layout = {group: {title: ["Multiline", tags] for title, tags in own.items()} for group, own in CHARTS.items()}
        writer.add_custom_scalars(layout)
        if report:
            writer.add_text(REPORT, f"`{report}`")
        writer.flush()
    if "wandb" in backends:  # it makes a section of each family by itself; totals keep their last value
        wandb = backends["wandb"]
        wandb.define_metric(COST, summary="last")
        for family in FAMILIES:
            wandb.define_metric(f"{family}/*", step_metric=COST, summary="mean")
        wandb.define_metric("accounts/*", summary="last")
        if report:
            wandb.run.summary[REPORT] = report
    if "mlflow" in backends:
        import mlflow

        backends["mlflow"] = InFolders(backends["mlflow"])
        if report and mlflow.active_run() is not None:
            mlflow.set_tag(REPORT.replace("/", "."), report)


class InFolders:
    """verl's adapter for MLflow. A store of files has a file for each metric, so no metric may be below another."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """``train/rollout_failures/lost`` is logged as ``train/rollout_failures_by/lost``."""
        beside = {name.replace(f"{PARENT}/", f"{PARENT}_by/", 1): value for name, value in data.items()}
        self._adapter.log(data=beside, step=step)

    def finish(self) -> None:
        self._adapter.finish()
