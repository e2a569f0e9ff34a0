"""``goldilocks filter``: the batch filter on saved rollouts.

What a training run would have kept of them, as a table of metrics, and the kept rows as a file. Every field of
``PPOFilterConfig`` that can be judged on rewards and lengths is an option; the gates need log-probs per token, which
saved rollouts do not have.
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
from goldilocks.runs.records import Record, group_uids, read_records, write_records

REWARD_COLUMNS = ("reward", "rewards", "score")  # the last is verl's
LENGTH_COLUMNS = ("response_length", "response_lengths", "length", "tokens")
TEXT_COLUMNS = ("output", "response")  # the first is verl's

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
    """The options of ``goldilocks filter``."""
    parser.add_argument("file", type=Path, metavar="FILE", help=".jsonl, .csv, .parquet, or verl's rollout_data_dir")
    parser.add_argument("--out", type=Path, help="write the kept rows here, as .jsonl or .parquet")
    parser.add_argument("--strategy", dest="sample_selection_strategy", choices=STRATEGIES, help="how to cut groups")
    for option, (field, kind, text) in _OPTIONS.items():
        parser.add_argument(option, dest=field, type=kind, metavar="N", help=text)
    parser.add_argument(
        "--remove-clip", action="store_true", default=None, help="drop groups with too few short samples"
    )
    parser.add_argument(
        "--keep-low-variance",
        dest="reject_low_variance_groups",
        action="store_false",
        default=None,
        help="keep groups whose rewards are all equal",
    )
    parser.add_argument(
        "--drop-invalid",
        dest="invalid_rows",
        action="store_const",
        const="drop",
        help="drop rows with a NaN reward or no response",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draws; default 1")
    parser.add_argument("--uid-column", help="names the group; default uid, or what verl's dumps let us tell")
    parser.add_argument("--reward-column", help=f"default the first there is of {', '.join(REWARD_COLUMNS)}")
    parser.add_argument(
        "--length-column", help=f"default the first there is of {', '.join(LENGTH_COLUMNS)}, else words of the answer"
    )


def run(args: argparse.Namespace) -> int:
    """Filter the rows of a file; every step of a verl dump is a batch of its own, as it was in training."""
    config = _config(args)
    records = read_records(args.file)
    rewards = _numbers(records, _column(records, args.reward_column, REWARD_COLUMNS, "--reward-column"))
    lengths, unit = _lengths(records, args.length_column)
    uids = group_uids(records, args.uid_column)
    kept, metrics = _filter_by_step(config, args.seed, _steps(records), rewards, lengths, uids)
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


def _steps(records: Sequence[Record]) -> dict[object, list[int]]:
    """The rows of each training step; one step where the file does not say."""
    steps: dict[object, list[int]] = {}
    for row, record in enumerate(records):
        steps.setdefault(record.get("step"), []).append(row)
    return steps


def _column(records: Sequence[Record], given: str | None, usual: Sequence[str], option: str) -> str:
    there = list(records[0])
    found = next((name for name in ([given] if given else usual) if name in there), None)
    if found is None:
        wanted = repr(given) if given else f"any of {', '.join(usual)}"
        raise ValueError(f"{option}: no column {wanted}; the file has {', '.join(there)}")
    return found


def _numbers(records: Sequence[Record], column: str) -> list[float]:
    for row, record in enumerate(records):
        if not isinstance(record.get(column), (int, float)):  # a bool is the number it counts as
            raise ValueError(f"row {row}: {column}={record.get(column)!r}: expected a number")
    return [float(record[column]) for record in records]  # type: ignore[arg-type]


def _lengths(records: Sequence[Record], given: str | None) -> tuple[list[float], str]:
    """Length of each answer and what it was measured in; a dump has no token counts, so its words are counted."""
    text = next((name for name in TEXT_COLUMNS if name in records[0]), None)
    if given is None and text is not None and not any(name in records[0] for name in LENGTH_COLUMNS):
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
