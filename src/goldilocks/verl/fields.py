"""Names of fields by which a trainer, a worker and a server of a run speak to one another."""

TOP = "goldilocks_top_log_probs"  # in a request's extra_args: the largest log-prob at each position is wanted
HOLDS = "goldilocks_holds_outputs"  # marks the loop of a vLLM engine that keeps outputs back (``held-outputs``)
# Beside the rows of an update: the rows and response tokens of the whole batch, by which the loss is normalised.
WHOLE_ROWS, WHOLE_TOKENS = "goldilocks_whole_rows", "goldilocks_whole_tokens"
DISTANCE = "rollout_probs_diff"  # how far the trainer's probabilities are from the rollout engine's: verl's own name
GAP_SUM, GAP_TOKENS = "weights_gap_sum", "weights_gap_tokens"  # of tokens that this very policy wrote
MOVED_SUM, MOVED_TOKENS = "moved_sum", "moved_tokens"  # of tokens that an older policy wrote
