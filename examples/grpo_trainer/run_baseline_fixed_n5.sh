#!/usr/bin/env bash
# GRPO with five rollouts of every prompt: the baseline of run_adaptive_rollout_experiment.sh.
#
#   bash run_baseline_fixed_n5.sh [key=value …]           MODEL as there
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/common.sh"

exec "$goldilocks" train grpo "${setup[@]}" "${baseline[@]}" "$@"
