"""What a prompt's row carries from the sampler to the agent loops."""

ROLLOUTS = "__rollout_n__"  # how many sessions to run: verl's own name
FIRST = "__rollout_first__"  # the number of the first of them
VISIT_SEED = "__visit_seed__"  # what the noise of all of them comes from
PARTITION = "train"  # where rollouts are stored in the TransferQueue
