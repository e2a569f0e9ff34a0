#!/usr/bin/env bash
# Packs Goldilocks and everything it needs beside a stock PyTorch image into one archive, for a GPU machine without network.
#
#   scripts/offline_bundle.sh OUT       writes OUT/bundle.tar.xz and OUT/packages.txt; docs/offline.md says how to use it
#
# The machine must be x86_64 with its own Python (PYVER), torch, numpy, pandas, pyarrow, accelerate, peft, huggingface_hub,
# safetensors, aiohttp, psutil, sympy and tensorboard. This script runs anywhere with network: wheels are fetched for that machine.
#
# Set to change: PYVER (3.12), PYTHON (the Python whose pip fetches), EXTRA (more requirements, space-separated).
set -euo pipefail
OUT=${1:?usage: offline_bundle.sh OUT}
PYVER=${PYVER:-3.12}
PYTHON=${PYTHON:-python3}
[[ $PYTHON != */* ]] || PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
LIMIT_MIB=55
REPOSITORY=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$OUT"; OUT=$(cd "$OUT" && pwd)
WORK=$(mktemp -d); trap 'rm -rf "$WORK"' EXIT
WHEELS=$WORK/wheels; SITE=$WORK/site
mkdir -p "$WHEELS" "$SITE"

# 1. What travels, pinned to what was run.
PACKAGES=(
  verl==0.9.1 trl==1.16.0 ray==2.60.0
  transformers==5.10.4 tokenizers==0.22.2          # verl 0.9.1 wants transformers<5.11, and that wants tokenizers<=0.23.0
  tensordict==0.10.0 pyvers==0.1.0 orjson==3.13.0 importlib_metadata==10.2.0 zipp==4.1.2 lazy-importer==0.1.0
  torchdata==0.11.0 codetiming==1.4.0 cachetools==8.0.0 pylatexenc==2.11
  TransferQueue==0.1.11 pyzmq==27.3.0 msgspec==0.22.0
  hydra-core==1.3.8 omegaconf==2.3.1
  datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0
  pydantic==2.14.3 pydantic_core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5
  jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1
  fastapi==0.162.4 starlette==1.10.0 uvicorn==0.54.0 annotated-doc==0.0.6 opentelemetry-api==1.45.2
  rich==15.0.0 markdown-it-py==4.3.0 mdurl==0.1.2 pygments==2.21.0
  math-verify==0.9.0 latex2sympy2_extended==1.11.0
  gguf==0.19.0 platformdirs==4.14.5                # SmolLM2 from its GGUF file
  pytest==9.2.0 pytest-timeout==2.4.0 iniconfig==2.3.1 pluggy==1.7.0 hypothesis==6.170.15 sortedcontainers==2.4.0
)
SOURCE_ONLY=(antlr4-python3-runtime==4.9.3)        # hydra needs it; pure Python, published as source only

# 2. Fetch. Every platform tag a recent glibc accepts is named, since pip takes only exact tags when it cross-fetches.
TAGS=(); for tag in manylinux1 manylinux2010 manylinux2014 manylinux_2_{5,12,17,24,26,27,28,31,34}; do TAGS+=(--platform "${tag}_x86_64"); done
"$PYTHON" -m pip download -qq --no-deps --only-binary=:all: --implementation cp --python-version "$PYVER" \
  "${TAGS[@]}" --dest "$WHEELS" "${PACKAGES[@]}" ${EXTRA:-}
"$PYTHON" -m pip wheel -qq --no-deps --wheel-dir "$WHEELS" "${SOURCE_ONLY[@]}"
# A copy, so that building leaves nothing in the checkout.
mkdir "$WORK/goldilocks"
cp -r "$REPOSITORY"/{pyproject.toml,README.md,LICENSE,src} "$WORK/goldilocks"
"$PYTHON" -m pip wheel -qq --no-deps --wheel-dir "$WHEELS" "$WORK/goldilocks"

# 3. Unpack into one folder. A wheel is a zip of what belongs in site-packages, its .data/purelib and platlib too; the
#    metadata stays, since verl finds its plug-in by the entry point in it.
"$PYTHON" - "$SITE" "$WHEELS"/*.whl <<'PY'
import sys, zipfile
from pathlib import Path

site, wheels = Path(sys.argv[1]), sys.argv[2:]
for wheel in map(zipfile.ZipFile, wheels):
    for info in wheel.infolist():
        top, _, rest = info.filename.partition("/")
        kind, _, inside = rest.partition("/")
        if info.is_dir() or (top.endswith(".data") and kind not in ("purelib", "platlib")):
            continue
        path = site / (inside if top.endswith(".data") else info.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wheel.read(info))
        if info.external_attr >> 16 & 0o111:
            path.chmod(0o755)
PY

# 4. Trim. Ray: only its core stays (tasks, actors, object store, placement groups, runtime environments).
cd "$SITE"
rm -rf ray/{rllib,serve,train,tune,data,llm,workflow,jars,cpp} ray/dashboard/client ray/autoscaler/{aws,azure,gcp,aliyun,vsphere,spark,local}
rm -rf ray/core/src/ray/thirdparty ray/_private/runtime_env/agent/thirdparty_files/*/tests ray/core/generated/ray/serialization
find . -type d \( -name tests -o -name test -o -name __pycache__ \) -not -path './verl/*' -prune -exec rm -rf {} +
find . \( -name '*.pyi' -o -name '*.pxd' -o -name '*.pyx' -o -name '*.c' -o -name '*.h' -o -name '*.a' \) -delete
find . -type d -empty -delete
chmod -R u+w .
STRIP=$(command -v x86_64-linux-gnu-strip || { [ "$(uname -m)" = x86_64 ] && command -v strip; } || true)
if [ -n "$STRIP" ]; then
  find . -type f \( -name '*.so' -o -name '*.so.*' -o -name raylet -o -name gcs_server \) -exec "$STRIP" --strip-unneeded {} +
else
  echo "no strip for x86_64 (Debian: binutils-x86-64-linux-gnu); the archive is larger for it" >&2
fi
cd "$OUT"

# 5. Pack. Ray's three binaries share most of their code, so a window that spans them all is worth its memory.
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$WORK" -cf - site |
  xz --threads=1 --x86 --lzma2=preset=9e,dict=256MiB > "$OUT/bundle.tar.xz"

# 6. Say what is in it: each package, its size unpacked.
"$PYTHON" - "$SITE" > "$OUT/packages.txt" <<'PY'
import csv, sys
from pathlib import Path

site = Path(sys.argv[1])
rows = []
for info in site.glob("*.dist-info"):
    name, version = info.name.removesuffix(".dist-info").rsplit("-", 1)
    with open(info / "RECORD", newline="") as record:
        files = [site / row[0] for row in csv.reader(record) if row]
    rows.append((sum(path.stat().st_size for path in files if path.is_file()), name, version))
for size, name, version in sorted(rows, reverse=True):
    print(f"{size / 2**20:9.2f} MiB  {name}=={version}")
PY
PACKED=$(du -m "$OUT/bundle.tar.xz" | cut -f1)
echo "$PACKED MiB packed, $(du -sm "$SITE" | cut -f1) MiB unpacked: $OUT/bundle.tar.xz"
[ "$PACKED" -lt "$LIMIT_MIB" ] || { echo "the archive is over $LIMIT_MIB MiB" >&2; exit 1; }
