"""TRL's ``GRPOTrainer`` and ``RLOOTrainer`` with the collector in the place of their batches.

``CollectedTrainer`` is what they share. Here is what depends on the algorithm: advantages, and what the loss does with
a row. Advantages are as TRL defines them, for groups of any size: the baseline and the standard deviation are over all
rollouts of a group, whether or not all of them are trained.

RLOO has one ratio a completion, so every row comes with the log-prob of its whole completion under the policy that
wrote it. The KL penalty is a part of the score: it is read off TRL's own two passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from goldilocks.trl.collection import Rewards, WrittenFor
from goldilocks.trl.rows import CompletionRow
from goldilocks.trl.trainer import CollectedTrainer

EPSILON = 1e-4  # TRL's
PREPARE_INPUTS, PER_TOKEN_LOGPS = "f824e7fb07147956", ("dc17fee20840b7eb", "ea73c3909275851d")  # sources that both have
BY_ROW = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")  # each row's term is proportional to its advantage
MEAN_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")  # losses whose policy term is divided by the number of rows
KL = "goldilocks_kl"  # a column of the batch: how far each completion is from the reference model


class GoldilocksGRPOTrainer(CollectedTrainer, GRPOTrainer):  # type: ignore[misc]
    """``GRPOTrainer`` and, if asked for, what ``CollectedTrainer`` adds."""

    trl_versions = "1.14 to 1.16"
    written_for: WrittenFor = (
        (GRPOTrainer._generate_and_score_completions, ("2deae91942535170", "e03ed7a34c24a6b3", "1fa48922792dcd5c")),
        (GRPOTrainer._calculate_rewards, "736ae29b083840b5"),
        (GRPOTrainer._prepare_inputs, PREPARE_INPUTS),
        (GRPOTrainer._get_per_token_logps_and_entropies, PER_TOKEN_LOGPS),
    )
    _ratio_per_token = True

    def _generate(self, prompts: list[Any]) -> Any:
        found = super()._generate(prompts)
        masks = found[2]  # what tools wrote is 0; TRL masks all of a truncated answer later, where it is asked to
        self._tool_tokens = None if masks is None else [len(mask) - sum(mask) for mask in masks]
        return found

    def _rewards(self) -> Rewards:
        weights = self.reward_weights.cpu()
        each, scale, aggregation = weights.tolist(), self.scale_rewards, self.multi_objective_aggregation

        def found(groups: Sequence[Sequence[CompletionRow]]) -> list[Tensor]:
            values = [torch.tensor([row.rewards for row in group]) for group in groups]
            return advantages(values, weights, scale, aggregation)

        return Rewards(self.reward_func_names, lambda row: row.reward(each), found)

    @property
    def _rows_stand_alone(self) -> bool:
        args = self.args
        plain = args.beta == 0 and args.top_entropy_quantile == 1 and args.off_policy_mask_threshold is None
        bonus = args.entropy_coef != 0 or args.use_adaptive_entropy
        return args.loss_type in BY_ROW and plain and not bonus

    @property
    def _mean_of_rows(self) -> bool:
        return self.loss_type in MEAN_OF_ROWS


class GoldilocksRLOOTrainer(CollectedTrainer, RLOOTrainer):  # type: ignore[misc]
    """``RLOOTrainer`` and, if asked for, what ``CollectedTrainer`` adds."""

    trl_versions = "1.16"
    written_for: WrittenFor = (
        (RLOOTrainer._generate_and_score_completions, "93ebbf5e70d31778"),
        (RLOOTrainer._calculate_rewards, "81ef76d93756be6f"),
        (RLOOTrainer._prepare_inputs, PREPARE_INPUTS),
        (RLOOTrainer._get_per_token_logps_and_entropies, PER_TOKEN_LOGPS),
    )
    _ratio_per_token = False
    _mean_of_rows = True
    _rows_stand_alone = True
    _passes: list[Tensor] | None = None  # the log-probs that TRL computes of a round: the policy's, the reference's

    def _rewards(self) -> Rewards:
        weights, bounds = self.reward_weights.tolist(), self.reward_clip_range
        beta, normalize = self.beta, self.normalize_advantages

        def score(row: CompletionRow) -> float:
            """Return the clipped reward; filters and selectors judge it without the penalty."""
            reward = row.reward(weights)
            return min(max(reward, bounds[0]), bounds[1]) if bounds else reward

        def penalized(row: CompletionRow) -> float:
            return score(row) - beta * float(row.tensors[KL]) if beta else score(row)

        def found(groups: Sequence[Sequence[CompletionRow]]) -> list[Tensor]:
            return leave_one_out([torch.tensor([penalized(row) for row in one]) for one in groups], normalize=normalize)

        return Rewards(self.reward_func_names, score, found)

    def _generate_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._passes = []
        output = super()._generate_and_score(inputs)
        passes, self._passes = self._passes, None
        if self.beta:
            policy, reference = passes
            output[KL] = ((policy - reference) * output["completion_mask"]).sum(1)
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._passes is not None:
            self._passes.append(found[0])
        return found


def advantages(groups: Sequence[Tensor], weights: Tensor, scale: str, aggregation: str) -> list[Tensor]:
    """Return the advantage of each rollout, by group.

    ``groups`` has a tensor ``[rollouts, reward functions]`` each, NaN where a function does not apply; ``scale`` and
    ``aggregation`` are ``GRPOConfig.scale_rewards`` and ``multi_objective_aggregation``.
    """
    if aggregation == "normalize_then_sum":  # within each group by function; the sums, over the batch
        normal = [(one - one.nanmean(0)) / (_std(one) + EPSILON) for one in groups]
        sums = [(one * weights).nansum(1) for one in normal]
        everything = torch.cat(sums)
        mean, spread = everything.mean(), _std(everything)
        return [(one - mean) / (spread + EPSILON) for one in sums]
    totals = [(rewards * weights).nansum(1) for rewards in groups]
    centred = [total - total.mean() for total in totals]
    if scale == "none":
        return centred
    if scale == "batch":
        spread = _std(torch.cat(totals))
        return [one / (spread + EPSILON) for one in centred]
    return [one / (_std(total) + EPSILON) for one, total in zip(centred, totals, strict=True)]


def leave_one_out(groups: Sequence[Tensor], *, normalize: bool) -> list[Tensor]:
    """Return RLOO's advantage of each rollout, by group: its score minus the mean of the others'.

    ``groups`` has the scores of each group, NaN where no reward function applies: such a rollout has no advantage.
    """
    found = [score - (score.nansum() - score) / ((~score.isnan()).sum() - 1) for score in groups]
    if normalize:
        everything = torch.cat(found)
        mean, spread = everything.nanmean(), _std(everything)
        found = [(one - mean) / (spread + EPSILON) for one in found]
    return [one.nan_to_num(0.0) for one in found]


def _std(values: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each column without NaNs; zero where there is one value only."""
    there = ~values.isnan()
    deviations = torch.where(there, values - values.nanmean(0, keepdim=True), 0.0)
    return ((deviations**2).sum(0) / (there.sum(0) - 1).clamp(min=1)).sqrt()
