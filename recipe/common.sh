# Sourced by the scripts of recipe/ and examples/, with the name of the task of the full run. It sets
#
#   goldilocks   the command: on the PATH, else of the virtual environment that `make venv` makes
#   model        the words for `goldilocks train` that MODEL chooses
#   tiny         not empty where MODEL=tiny
#
# MODEL: unset, the model of the full run; `tiny`, the tiny model on arithmetic, which trains on whatever is here; else
# a folder, or a name on the hub, in the place of the full run's model.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

goldilocks="$(PATH="$PATH:$root/.venv/bin" command -v goldilocks)" || {
    echo "goldilocks is not installed: make venv, or pip install '.[verl,tasks]', in $root" >&2
    exit 127
}

tiny=
case "${MODEL:-}" in
    "") model=("task=$1") ;;
    tiny) model=(task=arithmetic) tiny=yes ;;
    *) model=("task=$1" "actor_rollout_ref.model.path=$MODEL") ;;
esac
