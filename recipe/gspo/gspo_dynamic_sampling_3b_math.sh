#!/usr/bin/env bash
# Needs pip install '.[verl,tasks]' in a clone: math-verify grades the answers.
# GSPO with dynamic sampling: Qwen2.5-3B-Instruct on GSM8K, 500 updates on eight GPUs.
#
#   bash gspo_dynamic_sampling_3b_math.sh [key=value …]
#   MODEL=tiny bash gspo_dynamic_sampling_3b_math.sh      the same algorithm on arithmetic, on whatever is here
#   bash gspo_dynamic_sampling_3b_math.sh --cfg job       the composed config, nothing is trained
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common.sh" gsm8k_3b

if [[ $tiny ]]; then
    # Four mini-batches a batch, like 128 of 512: with one, no ratio moves and nothing is clipped.
    set -- actor_rollout_ref.actor.ppo_mini_batch_size=8 "$@"
fi
exec "$goldilocks" train "$here/config/gspo_dynamic_sampling.yaml" "${model[@]}" "$@"
