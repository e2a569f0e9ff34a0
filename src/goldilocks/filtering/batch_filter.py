"""``PPOBatchFilter``: which rows of a finished batch are trained.

``select`` runs the stages in order. Each takes the rows still in play and returns those left, with metrics that count
the rows it dropped. A dropped group is counted exactly once.

The selection is distinct rows of the batch, whole groups in the order of first occurrence, each with ``min_group_size``
to ``target_group_size`` samples and, unless configured otherwise, with variance in its rewards. No sample is dropped
for its own length.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from goldilocks.errors import require
from goldilocks.filtering.config import PPOFilterConfig
from goldilocks.filtering.rows import Rows, Uids, count_tokens, read_rows, row_blocks, row_tensor, take_rows, valid_rows
from goldilocks.filtering.selection import Draws, Samples, cut
from goldilocks.runs.history import Mean

logger = logging.getLogger(__name__)

LOW_VARIANCE_STD = 1e-3
LOW_BATCH_SIZE_RATIO = 0.5

Metrics = dict[str, float]

GATE1_FIELDS = ("response_mask", "old_log_probs", "rollout_log_probs")
GATE2_FIELDS = ("response_mask", "rollout_log_probs", "top_log_probs")


class Selection(NamedTuple):
    """Which rows of a batch are trained, which were only cut, and the metrics.

    ``trained`` and ``cut`` are indices of rows. Cut rows are sound rows of trained groups, below ``reward_threshold``
    or beyond ``target_group_size``. They belong to the group's baseline; rows that failed a gate do not.
    """

    trained: Tensor
    cut: Tensor
    metrics: Metrics


class PPOBatchFilter:
    """Takes a batch of tensors and the uid of each row; returns the rows to train on, and metrics.

    ``config`` is a ``PPOFilterConfig``, or a mapping of its fields. ``data_config["seed"]`` (default 1) seeds the one
    generator, which is advanced by one number a call.
    """

    def __init__(
        self, config: PPOFilterConfig | Mapping[str, Any], data_config: Mapping[str, Any] | None = None
    ) -> None:
        self.config = config if isinstance(config, PPOFilterConfig) else PPOFilterConfig.from_mapping(config)
        seed = (data_config or {}).get("seed")
        require(seed is None or type(seed) is int, "data.seed", seed, "an integer, or null")
        self._generator = torch.Generator().manual_seed(1 if seed is None else seed)
        self._gates = TwoGateRejectionFilter(self.config)

    @overload
    def filter_batch(
        self, batch: Mapping[str, Any], uids: Uids, return_indices: Literal[False] = False
    ) -> tuple[dict[str, Any], Metrics]: ...
    @overload
    def filter_batch(
        self, batch: Mapping[str, Any], uids: Uids, return_indices: Literal[True]
    ) -> tuple[Tensor, Metrics]: ...

    def filter_batch(
        self, batch: Mapping[str, Any], uids: Uids, return_indices: bool = False
    ) -> tuple[dict[str, Any] | Tensor, Metrics]:
        """Return the rows to train on, or their indices, and metrics of the others.

        Args:
            batch: ``rewards`` [rows], ``response_lengths`` [rows] or ``response_mask`` [rows, tokens]; for the gates
                ``old_log_probs``, ``rollout_log_probs``, ``top_log_probs`` [rows, tokens]; anything else with rows.
            uids: the group of each row; rows of a group need not be neighbours.
            return_indices: return the indices of the rows instead of the rows.

        """
        selected, _, metrics = self.select(batch, uids)
        if metrics["batch/critical_empty_batch"]:
            logger.warning("the batch filter kept none of %d rows", metrics["batch/total_samples_generated"])
        return (selected if return_indices else take_rows(batch, selected, len(uids))), metrics

    def select(self, batch: Mapping[str, Any], uids: Uids) -> Selection:
        """Return the rows to train on and the sound rows of their groups that were left out, of a batch as above."""
        salt = int(torch.randint(1 << 62, (), generator=self._generator))
        generated = read_rows(batch, uids)
        metrics = self._describe(generated)

        rows = valid_rows(generated, self.config.invalid_rows)
        metrics["rejection/invalid_rows"] = len(generated) - len(rows)
        sound = rows = self._gate(rows, batch, metrics)
        rows = self._filter_groups(rows, metrics)
        rows = self._filter_samples(rows, metrics)
        wanted = self.config.groups_to_keep(len(generated.groups))
        rows = self._select(rows, salt, wanted, metrics)
        self._summarise(rows, wanted, metrics)

        trained = torch.zeros(len(generated), dtype=torch.bool, device=rows.index.device)
        trained = trained.index_fill_(0, rows.index, True)[sound.index]
        left_out = sound.groups.spread(sound.groups.sum(trained) > 0) & ~trained
        return Selection(rows.index, sound.index[left_out], metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next call depends on."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])

    def _describe(self, rows: Rows) -> Metrics:
        groups = rows.groups
        positives = groups.sum(rows.reward > 0)
        return {
            "batch/total_samples_generated": len(rows),
            "batch/total_groups_generated": len(groups),
            "batch/solve_none_ratio": _share(positives == 0),
            "batch/solve_all_ratio": _share(positives == groups.sizes),
            "batch/response_clip_ratio": Mean(int((groups.sizes - self._short(rows)).sum()), len(rows)),
        }

    def _gate(self, rows: Rows, batch: Mapping[str, Any], metrics: Metrics) -> Rows:
        """Stage 0: reject rows on which trainer and engine disagree, and groups that this leaves too small."""
        metrics["rejection/two_gate_insufficient_groups"] = 0
        oversampled = bool((rows.groups.sizes > self.config.target_group_size).any())
        if not self.config.enable_two_gate_filter:
            return rows
        if not oversampled and not self.config.gate_always:
            self._gates.warn_once(
                "enable_two_gate_filter=True judged nothing: no group has more than target_group_size=%d samples; "
                "gate_always=True judges every group",
                self.config.target_group_size,
            )
            return rows
        judged = torch.zeros_like(batch["rewards"], dtype=torch.bool).index_fill_(0, rows.index, True)
        verdict = self._gates.judge(batch, judged)
        metrics.update(verdict.metrics)
        accepted, least = verdict.accepted[rows.index], self._least(rows)
        insufficient = (rows.groups.sizes >= least) & (rows.groups.sum(accepted) < least)
        metrics["rejection/two_gate_insufficient_groups"] = int(insufficient.sum())
        return rows.where(accepted & ~rows.groups.spread(insufficient))

    def _filter_groups(self, rows: Rows, metrics: Metrics) -> Rows:
        """Stage 1: drop groups that teach nothing or are cut short, judged on the rows that are left."""
        least = self.config.min_rollout_n if self.config.remove_clip else 1
        overlong, flat = self._short(rows) < least, self._flat(rows)
        metrics["batch/low_variance_groups"] = int(flat.sum())
        metrics["batch/overlong_groups"] = int(overlong.sum())
        metrics["batch/filter_all_groups"] = int((flat | overlong).sum())
        return rows.where_group(~(flat | overlong))

    def _filter_samples(self, rows: Rows, metrics: Metrics) -> Rows:
        """Stage 2: drop samples by their reward, never by their length."""
        threshold = self.config.reward_threshold
        kept = rows.reward >= (-torch.inf if threshold is None else threshold)
        metrics["rejection/reward_rejection_rate"] = _share(~kept)
        return rows.where(kept)

    def _select(self, rows: Rows, salt: int, wanted: int, metrics: Metrics) -> Rows:
        """Stage 3: drop groups that are too small, cut those that are too large, and choose among the rest.

        Groups are cut before they are chosen, so that a group which loses its variance to the cut leaves its place to
        another. Neither step looks at other groups' samples, so the order changes no cut.
        """
        sizes = rows.groups.sizes
        large = sizes >= self._least(rows)
        single = int(((sizes == 1) & ~large).sum())
        fates = ("rejection/two_gate_insufficient_groups", "batch/filter_all_groups")
        left = int(metrics["batch/total_groups_generated"]) - sum(int(metrics[fate]) for fate in fates)
        metrics["batch/single_sample_groups_rejected"] = single
        # By subtraction: a group that lost all its rows on the way is not in `sizes`.
        metrics["batch/poor_groups_rejected"] = left - single - int(large.sum())
        rows = rows.where_group(large)
        draws = Draws.keyed_by_content(salt, rows.reward, rows.length, rows.groups)
        samples = Samples(rows.groups, rows.reward, rows.length, draws.row)
        config = self.config
        kept = cut(config.sample_selection_strategy, samples, config.target_group_size, config.selection_temperature)
        rows = rows.where(kept)  # at least one row of every group, so draws.group still fits
        flat = self._flat(rows)
        metrics["batch/variance_lost_groups"] = int(flat.sum())
        metrics["batch/groups_before_selection"] = len(flat) - int(flat.sum())
        incomplete = rows.groups.sizes < self._complete(rows)  # chosen where complete groups do not suffice
        order = torch.argsort(draws.group + incomplete.double() + 2 * flat.double(), stable=True)
        rows = rows.where_group(torch.zeros_like(flat).index_fill_(0, order[:wanted], True) & ~flat)
        metrics["batch/groups_after_selection"] = len(rows.groups)
        return rows

    def _summarise(self, rows: Rows, wanted: int, metrics: Metrics) -> None:
        """Stage 4: compare the trained rows with those generated and wanted."""
        samples, sizes = len(rows), rows.groups.sizes
        metrics["batch/total_samples_selected"] = samples
        metrics["batch/selection_rate"] = Mean(samples, int(metrics["batch/total_samples_generated"]))
        metrics["batch/selected_groups"] = len(sizes)
        metrics["batch/complete_groups_selected"] = int((sizes == self._complete(rows)).sum())
        metrics["batch/avg_group_size"] = Mean(samples, len(sizes))
        missing = (wanted - len(sizes)) * self.config.target_group_size
        metrics.update(batch_size_metrics(samples, int(self._complete(rows).sum()) + missing))

    def _least(self, rows: Rows) -> Tensor:
        """Return how many samples each group must have; at most as many as it was given, and two for a variance."""
        least, sizes = self.config.min_group_size, rows.groups.sizes
        if not self.config.varying_group_sizes:
            return torch.full_like(sizes, least)
        return rows.given[rows.groups.starts].clamp(2 if self.config.reject_low_variance_groups else 1, least)

    def _complete(self, rows: Rows) -> Tensor:
        """Return how many samples each group has if it is complete."""
        target, sizes = self.config.target_group_size, rows.groups.sizes
        if not self.config.varying_group_sizes:
            return torch.full_like(sizes, target)
        return rows.given[rows.groups.starts].clamp(max=target)

    def _flat(self, rows: Rows) -> Tensor:
        """Return which groups have no variance, if those are rejected. A group of one is judged by its size."""
        if not self.config.reject_low_variance_groups:
            return torch.zeros_like(rows.groups.sizes, dtype=torch.bool)
        return rows.groups.std(rows.reward) < LOW_VARIANCE_STD

    def _short(self, rows: Rows) -> Tensor:
        """Return how many samples of each group stay under ``max_response_length``, which cuts answers off."""
        limit = self.config.max_response_length
        return rows.groups.sizes if limit is None else rows.groups.sum(rows.length < limit)


def batch_size_metrics(samples: int, wanted: int) -> Metrics:
    """Return what is said of a batch that trains ``samples`` of the ``wanted`` rows."""
    ratio = Mean(samples, wanted)
    return {
        "batch/batch_size_ratio": ratio,
        "batch/low_batch_size_warning": float(ratio < LOW_BATCH_SIZE_RATIO),
        "batch/critical_empty_batch": float(samples == 0),
    }


def _share(true: Tensor) -> Mean:
    return Mean(int(true.sum()), true.numel())


@dataclass(frozen=True)
class RowVerdicts:
    """The gates' verdict on each row of the batch, and their metrics."""

    accepted: Tensor
    metrics: dict[str, float]


class TwoGateRejectionFilter:
    """Stage 0: reject rows on whose log-probs the trainer and the rollout engine disagree.

    Gate 1 rejects a disagreement on average (lower precision, a stale weight): it keeps a row if the mean over its
    tokens of old − rollout log-prob is nearer to zero than ``gate1_bias_epsilon``. Gate 2 rejects tokens that the
    engine itself thought next to impossible: it keeps a row if every token's rollout log-prob is above the most likely
    token's plus ``gate2_instability_threshold``. A comparison with NaN is false, so a row with an undefined log-prob is
    rejected. A gate whose tensors are missing is skipped: logged once, counted every time.
    """

    def __init__(self, config: PPOFilterConfig) -> None:
        self.config = config
        self._warned: set[str] = set()

    def judge(self, batch: Mapping[str, Any], judged: Tensor) -> RowVerdicts:
        """Judge the rows of the batch for which ``judged`` is true; the others are not accepted and not counted."""
        accepted = judged.clone()
        metrics: dict[str, float] = {}
        rows = int(judged.sum())
        for name, fields, gate in (("gate1", GATE1_FIELDS, self._gate1), ("gate2", GATE2_FIELDS, self._gate2)):
            missing = [field for field in fields if field not in batch]
            metrics[f"filter/{name}_missing_tensors"] = Mean(rows * bool(missing), rows)
            if missing:
                said = "enable_two_gate_filter=True, but %s is skipped: no %s in the batch"
                self.warn_once(said, name, ", ".join(missing))
                continue
            mask, first, second = (row_tensor(batch, field, 2, judged) for field in fields)
            shapes = [tuple(tensor.shape) for tensor in (mask, first, second)]
            require(len(set(shapes)) == 1, ", ".join(fields), shapes, "one shape")
            passed, statistics = gate(mask, first, second, judged)
            metrics[f"filter/{name}_rejection_rate"] = Mean(int((judged & ~passed).sum()), rows)
            metrics.update(statistics)
            accepted &= passed
        metrics["filter/acceptance_rate"] = Mean(int(accepted.sum()), rows)
        return RowVerdicts(accepted, metrics)

    def _gate1(self, mask: Tensor, old: Tensor, rollout: Tensor, judged: Tensor) -> tuple[Tensor, dict[str, float]]:
        signed = torch.empty(len(mask), dtype=torch.float64, device=mask.device)
        bias = torch.empty_like(signed)
        for block in row_blocks(mask):
            difference = _masked_difference(old[block], rollout[block], mask[block], 0.0)
            signed[block] = difference.sum(-1)
            bias[block] = signed[block].abs() if self.config.gate1_mode == "mean" else difference.abs_().sum(-1)
        tokens = count_tokens(mask)
        bias /= tokens
        drift = signed.div_(-tokens).expm1_().abs_()[judged]  # perplexity is exp(−mean log-prob)
        drift = drift[drift.isfinite()]  # a row whose drift is not finite is rejected below
        return bias < self.config.gate1_bias_epsilon, {"filter/ppl_drift": Mean(float(drift.sum()), len(drift))}

    def _gate2(self, mask: Tensor, rollout: Tensor, top: Tensor, judged: Tensor) -> tuple[Tensor, dict[str, float]]:
        lowest = torch.empty(len(mask), dtype=torch.float32, device=mask.device)
        extreme = torch.empty(len(mask), dtype=torch.int64, device=mask.device)
        for block in row_blocks(mask):
            gap = _masked_difference(rollout[block], top[block], mask[block], torch.inf)
            lowest[block] = gap.amin(-1)
            extreme[block] = (gap <= self.config.gate2_instability_threshold).sum(-1, dtype=torch.int32)
        tokens = count_tokens(mask)
        rate = Mean(int(extreme[judged].sum()), int(tokens[judged].sum()))
        return (lowest > self.config.gate2_instability_threshold) & (tokens > 0), {"filter/extreme_token_rate": rate}

    def warn_once(self, said: str, *values: object) -> None:
        """Log a warning, unless the same one was logged before."""
        text = said % values
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)


def _masked_difference(left: Tensor, right: Tensor, mask: Tensor, fill: float) -> Tensor:
    """Return left − right in single precision where the mask is set, and ``fill`` elsewhere."""
    difference = left.float() - right.float()
    return torch.where(mask.bool(), difference, difference.new_tensor(fill), out=difference)
