"""``goldilocks filter``: the batch filter on saved rollouts.

Prints the metrics that a training run would have logged, and writes the kept rows to a file. Every field of
``PPOFilterConfig`` that needs only rewards and lengths is an option; the gates need log-probs per token, which saved
rollouts do not have.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from goldilocks.filtering.batch_filter import PPOBatchFilter
from goldilocks.filtering.config import STRATEGIES, PPOFilterConfig
from goldilocks.runs.records import (
    TEXT_COLUMNS,
    Record,
    each_row,
    first_column,
    group_uids,
    number,
    read_records,
    write_records,
)

REWARD_COLUMNS = ("reward", "rewards", "score")  # the last is verl's
LENGTH_COLUMNS = ("response_length", "response_lengths", "length", "tokens")

_OPTIONS: dict[str, tuple[str, type, str]] = {
    "--target-group-size": ("target_group_size", int, "samples a group has at most; default 16"),
    "--target-num-groups": ("target_num_groups", int, "groups to keep at most, of each step where rows have one"),
    "--min-group-size": ("min_group_size", int, "samples a group has at least; default target // 2 + 1"),
    "--temperature": ("selection_temperature", float, "of efficiency_stochastic: towards 0 greedy, large is uniform"),
    "--reward-threshold": ("reward_threshold", float, "drop samples below it"),
    "--max-response-length": ("max_response_length", int, "drop groups all of whose samples reach it"),
    "--min-rollout-n": ("min_rollout_n", int, "short samples a group needs with --remove-clip"),
    "--prompt-oversampling-factor": ("prompt_oversampling_factor", float, "prompts generated per prompt trained"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help=".jsonl, .csv, .parquet, or verl's rollout_data_dir")
    add("--out", type=Path, help="write the kept rows here, as .jsonl or .parquet")
    add("--strategy", dest="sample_selection_strategy", choices=STRATEGIES, help="how to cut groups")
    for option, (field, kind, text) in _OPTIONS.items():
        add(option, dest=field, type=kind, metavar="N", help=text)
    add("--remove-clip", action="store_true", default=None, help="drop groups with too few short samples")
    add("--varying-group-sizes", action="store_true", default=None, help="groups were given different sizes")
    add("--keep-low-variance", dest="reject_low_variance_groups", action="store_false", default=None,
        help="keep groups whose rewards are all equal")  # fmt: skip
    add("--drop-invalid", dest="invalid_rows", action="store_const", const="drop",
        help="drop rows with a NaN reward or no response")  # fmt: skip
    add("--seed", type=int, default=1, help="of the draws; default 1")
    add("--uid-column", help="names the group; default uid, or what verl's dumps let us tell")
    add("--reward-column", help=f"default the first there is of {', '.join(REWARD_COLUMNS)}")
    add("--length-column", help=f"default the first there is of {', '.join(LENGTH_COLUMNS)}, else words of the answer")


def run(args: argparse.Namespace) -> int:
    """Filter the rows of a file; every step of a verl dump is a batch, as it was in training."""
    config = _config(args)
    records = read_records(args.file)
    rewards = _numbers(records, _column(records, args.reward_column, REWARD_COLUMNS, "--reward-column"))
    lengths, unit = _lengths(records, args.length_column)
    uids = group_uids(records, args.uid_column)
    steps: dict[object, list[int]] = {}  # the rows of each training step; one step if the file has no steps
    for row, record in enumerate(records):
        steps.setdefault(record.get("step"), []).append(row)
    kept, metrics = _filter_by_step(config, args.seed, steps, rewards, lengths, uids)
    _print_metrics(args.file, unit, metrics)
    if args.out is not None:
        write_records(args.out, [records[row] for row in kept])
        print(f"{len(kept)} of {len(records)} rows written to {args.out}")
    return 0


def _config(args: argparse.Namespace) -> PPOFilterConfig:
    names = [field for field in PPOFilterConfig.__dataclass_fields__ if getattr(args, field, None) is not None]
    return PPOFilterConfig(**{name: getattr(args, name) for name in names})


def _filter_by_step(
    config: PPOFilterConfig,
    seed: int,
    steps: Mapping[object, Sequence[int]],
    rewards: Sequence[float],
    lengths: Sequence[float],
    uids: Sequence[str],
) -> tuple[list[int], list[dict[str, float]]]:
    batch_filter = PPOBatchFilter(config, {"seed": seed})
    kept: list[int] = []
    metrics: list[dict[str, float]] = []
    for rows in steps.values():
        batch = {
            "rewards": torch.tensor([rewards[row] for row in rows], dtype=torch.float64),
            "response_lengths": torch.tensor([lengths[row] for row in rows], dtype=torch.int64),
        }
        index, of_step = batch_filter.filter_batch(batch, [uids[row] for row in rows], return_indices=True)
        kept += [rows[place] for place in index.tolist()]
        metrics.append(of_step)
    return kept, metrics


def _column(records: Sequence[Record], given: str | None, usual: Sequence[str], option: str) -> str:
    found = first_column([given] if given else usual, records[0])
    accepted = f"a column of the file, which has {', '.join(records[0])}"
    if found is None:
        raise ValueError(f"{option}={given or ' or '.join(usual)} is not accepted: {accepted}")
    return found


def _numbers(records: Sequence[Record], column: str) -> list[float]:
    return each_row(lambda record: number(record, column, finite=False), records)


def _lengths(records: Sequence[Record], given: str | None) -> tuple[list[float], str]:
    """Return the length of each answer and its unit; a dump has no token counts, so its words are counted."""
    text = first_column(TEXT_COLUMNS, records[0])
    if given is None and text is not None and first_column(LENGTH_COLUMNS, records[0]) is None:
        words = [max(1.0, len(str(record.get(text)).split())) for record in records]  # an empty answer still ended
        return words, f"words of {text!r}, for want of a column with token counts (--length-column)"
    column = _column(records, given, LENGTH_COLUMNS, "--length-column")
    return _numbers(records, column), f"column {column!r}"


def _print_metrics(file: Path, unit: str, metrics: Sequence[Mapping[str, float]]) -> None:
    many = len(metrics) > 1
    table = Table(title=f"{file}: mean of {len(metrics)} steps" if many else str(file), title_justify="left")
    table.add_column("metric")
    table.add_column("mean" if many else "value", justify="right")
    for name in sorted(metrics[0]):
        mean = statistics.fmean(of_step[name] for of_step in metrics)
        table.add_row(name, f"{mean:,.0f}" if mean.is_integer() else f"{mean:,.4f}")
    Console().print(table)
    print(f"lengths: {unit}")
