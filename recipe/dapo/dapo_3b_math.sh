#!/usr/bin/env bash
# Needs pip install '.[verl,tasks]' in a clone: math-verify grades the answers.
# DAPO: Qwen2.5-3B-Instruct on GSM8K, 500 updates on eight GPUs.
#
#   bash dapo_3b_math.sh [key=value …]
#   MODEL=Qwen/Qwen2.5-7B bash dapo_3b_math.sh            another model
#   MODEL=tiny bash dapo_3b_math.sh                       the same algorithm on arithmetic, on whatever is here
#   bash dapo_3b_math.sh --cfg job                        the composed config, nothing is trained
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common.sh" gsm8k_3b

if [[ $tiny ]]; then
    # A right answer has at most 8 tokens; from there to the limit of 12 it costs.
    set -- data.max_response_length=12 reward.reward_kwargs.overlong_buffer_cfg.len=4 \
        actor_rollout_ref.actor.ppo_mini_batch_size=8 "$@"
else
    set -- data.gen_batch_size=1536 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
        actor_rollout_ref.actor.optim.lr_warmup_steps=10 "$@"
fi
exec "$goldilocks" train "$here/config/dapo.yaml" "${model[@]}" "$@"
