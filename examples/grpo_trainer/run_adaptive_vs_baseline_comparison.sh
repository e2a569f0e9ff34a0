#!/usr/bin/env bash
# Adaptive rollouts against five of every prompt, at equal cost: every rollout is charged, whether or not it is trained.
#
#   bash run_adaptive_vs_baseline_comparison.sh both|adaptive|baseline [key=value …]
#
#   both       both, over the same seeds, each until its budget is spent; ends with a table and a report
#   adaptive   run_adaptive_rollout_experiment.sh alone
#   baseline   run_baseline_fixed_n5.sh alone
#
# MODEL as there. BUDGET=rollouts=N, tokens=N or seconds=N is what each run of `both` may spend; --seeds K and --out DIR
# change what is set below. The same command again goes on where it was interrupted.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/common.sh"

which="${1:-both}"
[[ $# -eq 0 ]] || shift
case "$which" in
    adaptive) exec bash "$here/run_adaptive_rollout_experiment.sh" "$@" ;;
    baseline) exec bash "$here/run_baseline_fixed_n5.sh" "$@" ;;
    both) ;;
    *)
        echo "usage: ${BASH_SOURCE[0]##*/} both|adaptive|baseline [key=value …], not '$which'" >&2
        exit 2
        ;;
esac

batches=100  # of the baseline's, 32 × 5 rollouts each
if [[ $tiny ]]; then
    batches=20
fi
exec "$goldilocks" compare grpo adaptive --budget "${BUDGET:-rollouts=$((batches * 32 * 5))}" --seeds 3 \
    --out runs/adaptive-vs-baseline "${setup[@]}" "${adaptive[@]}" "${baseline[@]}" "$@"
