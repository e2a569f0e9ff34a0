# Sourced by the scripts of this folder: the settings of both experiments, so that only the rollouts differ.
source "$here/../../recipe/common.sh" gsm8k

setup=("${model[@]}" data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size=32)

# Until one answer is right: two rollouts, then eight at a time.
adaptive=(
    adaptive_rollout.max_n=128
    adaptive_rollout.rollouts_per_batch=8
    adaptive_rollout.positive_threshold=0.5
    adaptive_rollout.min_rollouts=2
)
if [[ $tiny ]]; then
    adaptive[0]=adaptive_rollout.max_n=32  # sums beyond the tiny model would get 128 each
fi

# Five rollouts of every prompt.
baseline=(actor_rollout_ref.rollout.n=5)
