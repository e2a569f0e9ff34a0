#!/usr/bin/env bash
# GSPO without dynamic sampling: gspo_dynamic_sampling_3b_math.sh to compare with, every group trained.
#
#   bash test_gspo_3b_math.sh [key=value …]               MODEL as there
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

exec bash "$here/gspo_dynamic_sampling_3b_math.sh" algorithm.filter_groups.enable=false "$@"
