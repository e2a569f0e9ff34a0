#!/usr/bin/env bash
# GRPO with adaptive rollouts: each prompt until one answer is right, at most 128. Qwen2.5-0.5B-Instruct on GSM8K.
#
#   bash run_adaptive_rollout_experiment.sh [key=value …]
#   MODEL=tiny bash run_adaptive_rollout_experiment.sh    a tiny model on arithmetic, on whatever is here
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/common.sh"

exec "$goldilocks" train adaptive "${setup[@]}" "${adaptive[@]}" "$@"
