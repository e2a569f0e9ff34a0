"""Every metric that Goldilocks logs beside verl's own, and what it means: ``make_reference.py`` prints the list.

A test holds the list against the code, both ways. ``<reason>`` and the like stand for any word: of a filter, of a
failure, of a column.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

METRICS: dict[str, str] = {
    # One update: what was generated for it.
    "train/num_gen_batches": "generation batches begun, at least 1: then enough groups survived, not that all vary",
    "train/filtered_prompts_ratio": "groups kept, by the filter and by the gate / groups judged",
    "train/prompts_issued": "prompts rolled out",
    "train/groups_judged": "groups that were complete and shown to the filter",
    "train/groups_expired": "kept groups that grew older than `max_carry_steps` and were not trained",
    "train/groups_rejected": "groups taken back after log-probs were known",
    "train/groups_backfilled": "dropped groups that filled up the batch (`on_exhausted: backfill`)",
    "train/rollout_failures": "rollouts that failed, or had no finite reward",
    "train/rollout_failures/<reason>": "the same by reason",
    "train/padding_rollouts": "TRL: rollouts made so that every process has as many; in no account",
    "train/keep_rate": "share of groups expected to survive the filter: what a refill is sized by",
    "train/groups_carried": "kept groups beyond the batch, waiting for the next update",
    "train/groups_open": "groups whose rollouts are not all there",
    "train/informative_groups": "groups of the batch whose rewards differ",
    "train/rows_computed": "rows the update computed: those with an advantage, others add nothing (patch `one-pass`)",
    "train/signal": "Σ(r − r̄)² over the rollouts of the batch; the baseline r̄ is over all rollouts of a group",
    "train/stale_rows": "rows of the batch that an older policy wrote",
    "train/stale_tokens": "tokens of the batch that an older policy wrote",
    "train/stale_log_prob_diff_mean": "mean over their tokens of |log π now − log π of the policy that wrote them|",
    "filter/dropped/<reason>": "groups dropped, by the filter's reason: `too_easy`, `too_hard`, `overlong`, …",
    "length/generated_mean": "mean tokens of a rollout, over the groups judged",
    "length/kept_mean": "the same over the groups kept",
    "length/kept_over_generated": "their ratio: below 1, the filter favours short answers",
    "length/trained_over_started": "mean length trained over the mean length started, which is estimated from finished "
    "and aborted rollouts (Kaplan-Meier); 1 where no length is favoured",
    "difficulty/generated_mean_reward": "mean reward over the groups judged",
    "difficulty/kept_mean_reward": "the same over the groups kept",
    "difficulty/pass_rate": "share of their rollouts whose reward is at or above `positive_threshold`",
    "difficulty/reward_std": "mean standard deviation of the rewards of a group judged: `min_std` judges it",
    "reward/<name>": "mean score of a function of `goldilocks.rewards.functions`, over the groups judged",
    "adaptive_rollout/iterations": "most times that one group was asked for more",
    "adaptive_rollout/total_rollouts": "rollouts that ended in this step, failed and cancelled ones too",
    "adaptive_rollout/avg_rollouts_per_sample": "rollouts / groups judged",
    "adaptive_rollout/min_rollouts_per_sample": "fewest rollouts of a group judged",
    "adaptive_rollout/max_rollouts_per_sample": "most rollouts of a group judged",
    "adaptive_rollout/samples_with_positive": "groups with a reward at or above `positive_threshold`",
    "adaptive_rollout/samples_without_positive": "groups without one",
    "adaptive_rollout/positive_rate": "groups with one / groups judged",
    "adaptive_rollout/efficiency": "groups judged / `total_rollouts`: sampling less raises it",
    "adaptive_rollout/informative_groups_per_1k_rollouts": "groups whose rewards differ, per 1,000 of `total_rollouts`",
    "train/age_mean": "mean updates between the policy that wrote a group's oldest token and the one that is trained",
    "train/age_max": "the same of the oldest group; at most `algorithm.filter_groups.max_carry_steps`",
    "train/rollouts_paused": "rollouts that stopped when the batch was full and go on after the update",
    # The guard for old weights (`goldilocks.on_stale_weights`).
    "rollout/weights_gap": "mean over tokens that the newest weights wrote of |log π − log π of the rollout engine|: "
    "rounding, or an engine with other weights",
    # Running totals.
    "data/epoch": "prompts issued / prompts there are: epochs by what was generated, not by updates",
    "data/prompts_issued": "prompts rolled out since the run began",
    "accounts/generated_rollouts": "rollouts since the run began; the classes below sum to it",
    "accounts/generated_tokens": "tokens since the run began; the classes below sum to it",
    "accounts/tool_tokens": "tokens that tools wrote into rollouts that arrived; not generated, and in no class below",
    "accounts/open_rollouts": "in groups that have not been judged",
    "accounts/carried_rollouts": "in kept groups that wait to be trained",
    "accounts/trained_rollouts": "handed to the trainer",
    "accounts/trimmed_rollouts": "in trained groups, beyond the rows trained; their baseline counts them",
    "accounts/backfilled_rollouts": "in dropped groups that filled up a batch",
    "accounts/filtered_rollouts": "in dropped groups",
    "accounts/filtered/<reason>_rollouts": "the same by the filter's reason",
    "accounts/expired_rollouts": "in kept groups that grew too old",
    "accounts/cancelled_rollouts": "no longer needed when they came, or never finished",
    "accounts/rejected_rollouts": "taken back after log-probs were known",
    "accounts/rejected/<reason>_rollouts": "the same by gate: `batch_filter`, `no_variance_after_kl`",
    "accounts/failed_rollouts": "lost, or without a finite reward",
    "accounts/paused_rollouts": "not finished: they go on with the next policy (`on_full: partial`)",
    "accounts/duplicate_rollouts": "sent twice",
    "accounts/reward_<what>": "with `goldilocks.rewards`, since the run began: `calls`, `retries`, `failures` after "
    "the last try, `seconds` of all calls together, and `cost`, the sum of what functions return as `cost`",
    "aborts/asked": "requests that rollout servers were asked to end, since the run was started: not needed, or paused",
    "aborts/ended": "those that ended before their answer was complete; 0 of many: the server does not abort",
    "aborts/tokens": "tokens that those had when they ended",
    "aborts/left": "requests still at the rollout servers when they were put to sleep; above 0 only where aborts fail",
    # Where the time of `timing_s/gen` goes (V1).
    "timing_s/gen_submit": "driver: prompts chosen, read from the dataset and sent",
    "timing_s/gen_wait": "driver: waiting for rollouts",
    "timing_s/gen_pause": "driver: with `on_full: partial`, until every server has stopped with what it has",
    "timing_s/gen_drain": "driver: waiting until nothing is left at the servers",
    "timing_s/gen_clear": "driver: rows freed that nobody needs",
    "budget/spent": "share of `goldilocks.budget` that is spent: the largest of its costs; at 1 the run ends",
    "val/<column>/<value>/acc": "validation accuracy over the rows with this value of a column of "
    "`goldilocks.validate_by`",
    "val/failed_answers": "V1: answers of a validation that have no reward, since the rollout or the reward function "
    "failed; verl's `acc` counts them as wrong, its `acc_success_only` and the accuracy by column leave them out",
    # Policies.
    "selector/informative_groups": "`thompson`, `frontier`: groups judged since the run began whose rewards differ",
    "selector/explored_groups": "groups of prompts that were drawn uniformly (`explore`)",
    "selector/uniform_rollouts": "rollouts that uniform sampling would need for as many informative groups, by the "
    "explored ones; from 20 of them that differ, and with n rollouts a prompt or `sequential`",
    "selector/greso_p": "`greso`: probability that a prompt with a streak of one visit without variance is tried",
    "selector/greso_skipped": "`greso`: prompts skipped since the run began",
    "belief/strata": "`goldilocks.prior=strata`: strata over all divisions of the prompts",
    "belief/worth": "rollouts of a prompt that the prior counts as: 0.5 (prompts of one stratum differ at will) to 64",
    "belief/drift": "what training a group adds to the log-odds of its strata, as believed",
    "belief/wander": "variance, in squared log-odds, that training a group adds to its strata, as believed",
    "belief/<column>/<value>": "pass rate that is believed of the training prompts with this value of a column of both "
    "`goldilocks.strata.columns` and `goldilocks.validate_by`: the mean of 256 at most",
    "belief/skill": "share of the log-loss of the mean pass rate that beliefs save on the last 512 groups or so",
    "allocator/price": "`sequential`: what the run earns per token (`goldilocks.cost`): informative groups, or signal",
    "allocator/given_up": "`sequential`: groups given up before they had n rollouts, since the run began",
    # The batch filter, over all calls of a step.
    "batch/total_samples_generated": "rows that came in",
    "batch/total_groups_generated": "groups that came in",
    "batch/solve_none_ratio": "share of those groups without a positive reward",
    "batch/solve_all_ratio": "share of those groups with positive rewards only",
    "batch/response_clip_ratio": "share of those rows that reach `max_response_length`",
    "batch/low_variance_groups": "groups dropped for want of variance",
    "batch/overlong_groups": "groups dropped for length",
    "batch/filter_all_groups": "groups dropped for either",
    "batch/single_sample_groups_rejected": "groups below `min_group_size` with one row left",
    "batch/poor_groups_rejected": "other groups below `min_group_size`",
    "batch/variance_lost_groups": "groups whose variance went with the rows that were dropped or cut",
    "batch/groups_before_selection": "groups that could be trained",
    "batch/groups_after_selection": "those of them within `target_num_groups`",
    "batch/total_samples_selected": "rows that go out",
    "batch/selected_groups": "groups that go out",
    "batch/complete_groups_selected": "those of `target_group_size` rows",
    "batch/selection_rate": "rows out / rows in",
    "batch/avg_group_size": "rows out / groups out",
    "batch/batch_size_ratio": "rows out / rows wanted",
    "batch/low_batch_size_warning": "1 when that is below a half",
    "batch/critical_empty_batch": "1 when no row goes out",
    "rejection/invalid_rows": "rows dropped by `invalid_rows: drop`",
    "rejection/two_gate_insufficient_groups": "groups that the gates left below `min_group_size`",
    "rejection/reward_rejection_rate": "share of the rows reaching it that `reward_threshold` drops",
    "filter/gate1_rejection_rate": "share of the rows judged that fail gate 1",
    "filter/gate2_rejection_rate": "share of the rows judged that fail gate 2",
    "filter/acceptance_rate": "share that pass both",
    "filter/gate1_missing_tensors": "1 when gate 1 was skipped for want of its tensors",
    "filter/gate2_missing_tensors": "1 when gate 2 was skipped for want of its tensors",
    "filter/ppl_drift": "mean over rows of |perplexity by the trainer / perplexity by the engine − 1|",
    "filter/extreme_token_rate": "share of response tokens at or below `gate2_instability_threshold`",
    # GSPO.
    "actor/pg_clipfrac_lower": "share of tokens with s < 1 − ε_low and A < 0 (with `loss_mode: gspo`)",
    "actor/pg_clipfrac_upper": "share of tokens with s > 1 + ε_high and A > 0",
    "actor/seq_importance_ratio": "mean of s over answers",
    "actor/seq_importance_ratio_p05": "quantile of s over answers",
    "actor/seq_importance_ratio_p50": "quantile of s over answers",
    "actor/seq_importance_ratio_p95": "quantile of s over answers",
}
METRICS |= {
    name.removesuffix("rollouts") + "tokens": meaning
    for name, meaning in METRICS.items()
    if name.startswith("accounts/") and name.endswith("_rollouts") and not name.startswith("accounts/generated")
}

OURS = frozenset(name.partition("/")[0] for name in METRICS) - {"actor", "timing_s"}  # verl logs there too


def undocumented(names: Iterable[str]) -> list[str]:
    """Return those of these names that have a prefix of ours and are not in the list; TRL's ``reward`` has none."""
    return sorted(name for name in names if "/" in name and name.partition("/")[0] in OURS and entry(name) is None)


def entry(name: str) -> str | None:
    """Return the name in the list that stands for this one, or None."""
    if name in METRICS:
        return name
    return next((listed for listed, pattern in _patterns().items() if pattern.fullmatch(name)), None)


@cache
def _patterns() -> dict[str, re.Pattern[str]]:
    return {name: re.compile(re.sub(r"<\w+>", ".+", re.escape(name))) for name in METRICS if "<" in name}
