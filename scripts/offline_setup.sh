# Source this on the machine without network: it unpacks the bundle and sets PYTHONPATH. Nothing is installed.
#
#   . scripts/offline_setup.sh BUNDLE.tar.xz [ROOT]      ROOT: where to unpack, default /tmp/goldilocks-offline
#
# A checkout of Goldilocks beside this script goes before the copy in the bundle. Byte code is kept in ROOT/pyc and made
# once: an image without byte code would have each of the ~20 processes of a run compile torch anew.
_bundle=$1 _root=${2:-/tmp/goldilocks-offline} _python=${PYTHON:-python3}
_source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/src
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$_root/pyc
if [ ! -e "$_root/ready" ]; then
  mkdir -p "$_root" && tar -C "$_root" -xJf "$_bundle" || return 1
  _image=$($_python - <<'PY'
import importlib.util, os

names = "torch sympy mpmath numpy pandas scipy accelerate peft huggingface_hub tensorboard aiohttp httpx pyarrow fsspec urllib3 requests triton"
specs = filter(None, map(importlib.util.find_spec, names.split()))
print(*(os.path.dirname(spec.origin) for spec in specs if spec.origin), os.path.dirname(os.__file__))
PY
)
  # A few files of any distribution are not meant to be compiled: those failures say nothing.
  $_python -m compileall -q -j 0 "$_root/site" $_image -x 'dist-packages/[^/]*/tests?/|site-packages/.*/tests?/|/test/' >/dev/null 2>&1 || true
  touch "$_root/ready"
fi
[ -d "$_source/goldilocks" ] && export PYTHONPATH=$_source:$_root/site || export PYTHONPATH=$_root/site
export HF_HUB_OFFLINE=1
