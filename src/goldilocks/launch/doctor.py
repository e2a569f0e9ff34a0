"""``goldilocks doctor``: checks the installation and the machine. One line per check, with a remedy if it fails."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from goldilocks.engine.cpu import PATCHES_VARIABLE, platform_env
from goldilocks.errors import install_command
from goldilocks.launch.machine import PRIVATE, ask_ray, find_device, rollout_engines
from goldilocks.runs.files import cache_folder, write_secret
from goldilocks.verl.patch import Kind
from goldilocks.verl.patches import PATCHES
from goldilocks.verl.plugin import selected
from goldilocks.verl.tested import TESTED, installed, is_tested, is_within, tested_versions

GIB = 1 << 30
SHARED_MEMORY = GIB // 4  # Ray's object store on the CPU; below it Ray falls back to the disk
DISK = GIB
RAY_WITHIN_S = 240.0
PACKAGES = ("goldilocks-rl", "torch", "transformers", "verl", "ray")
NEEDED = {"transformers": "<5.11", "verl": ">=0.9.1"}  # what verl needs, and what we need of it
REMEDY = "install the same packages in the same place on every node, and give --runs a folder that all of them see"


@dataclass(frozen=True)
class Finding:
    """A line of ``goldilocks doctor``. Only essential findings fail the command."""

    what: str
    ok: bool
    detail: str
    remedy: str = ""
    essential: bool = True

    def __str__(self) -> str:
        """``ok    what       detail``, with the remedy on a second line if the check failed."""
        word = "ok" if self.ok else "FAILS" if self.essential else "note"
        text = f"{word:<6}{self.what:<16}{self.detail}"
        return text if self.ok or not self.remedy else f"{text}\n{'':<22}→ {self.remedy}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", metavar="DIR", type=Path, default=Path("runs"), help="where runs will go (default runs/)")
    add("--quick", action="store_true", help="start no Ray: neither it nor the plug-in in its workers is looked at")
    add("--address", help="of a running Ray (auto: the one of this machine): look at every node of it")


def run(args: argparse.Namespace) -> int:
    """Print every finding as it comes; return 1 if an essential one fails."""
    failed = False
    ray = plugin if args.address is None else lambda: cluster(args.address, args.runs)
    checks = [versions, device, shared_memory, lambda: places(args.runs)]
    for check in checks if args.quick else [*checks, ray]:
        for finding in check():
            print(finding, flush=True)
            failed |= finding.essential and not finding.ok
    return int(failed)


def versions() -> Iterator[Finding]:
    """Check Python and the packages that a run needs. A version that was not tested is no failure."""
    supported = (3, 10) <= sys.version_info[:2] <= (3, 12)
    yield Finding("python", supported, platform.python_version(), "use Python 3.10, 3.11 or 3.12")
    for name in PACKAGES:
        version = installed(name)
        if version is None:
            yield Finding(name, False, "not installed", install_command("verl"))
        elif name in NEEDED and not is_within(version, NEEDED[name]):
            yield Finding(name, False, version, f"pip install '{name}{NEEDED[name]}'")
        elif name in TESTED and not is_tested(name, version):
            found, remedy = f"{version}; tested with {tested_versions(name)}", "what was run: docs/compatibility.md"
            yield Finding(name, False, found, remedy, essential=False)
        else:
            yield Finding(name, True, version)


def device() -> Iterator[Finding]:
    """Report the device that a run would train on, and the installed rollout engines."""
    found, engines = find_device(), rollout_engines()
    if found == "cpu":
        yield Finding("device", True, f"cpu, {os.cpu_count()} cores (no NVIDIA GPU that torch can use)")
    else:
        import torch

        cards = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Finding("device", True, f"cuda: {cards}")
    yield Finding("rollouts by", "transformers" in engines, ", ".join(engines), install_command("verl"))
    if found == "cuda" and "vllm" not in engines:
        yield Finding("vllm", False, "not installed", "for large models on a GPU: pip install vllm", essential=False)


def shared_memory() -> Iterator[Finding]:
    """Check the shared memory, where Ray keeps its objects; containers often have only 64 MiB."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return
    free = shutil.disk_usage(path).free
    found, remedy = f"{free / GIB:.1f} GiB free in {path}", "docker run --shm-size=4g …; Ray works without, more slowly"
    yield Finding("shared memory", free >= SHARED_MEMORY, found, remedy, essential=False)


def places(runs: Path) -> Iterator[Finding]:
    """Write a file to each folder that a run writes to: this finds missing permissions, quotas and read-only mounts."""
    elsewhere = "choose another place: --runs DIR, GOLDILOCKS_TASK=DIR"
    for what, path in (("runs", runs), ("models and data", cache_folder()), ("Ray", Path("/tmp"))):
        nearest = _existing(path)
        try:
            with tempfile.NamedTemporaryFile(dir=nearest):
                free = shutil.disk_usage(nearest).free
        except OSError as error:
            yield Finding(what, False, f"{path}: {error.strerror}", elsewhere)
        else:
            found = f"{path} can be written, {free / GIB:.0f} GiB free"
            yield Finding(what, free >= DISK, found, "make room: 1 GiB at least")


def plugin() -> Iterator[Finding]:
    """Ask a worker of a private Ray whether our plug-in is loaded: verl hides errors in plug-ins."""
    remedy = "reinstall goldilocks-rl; python -c 'import goldilocks.verl.plugin as p; p.additions()' says what is wrong"
    with tempfile.TemporaryDirectory(prefix="gl", dir="/tmp") as folder:
        own = {
            "address": PRIVATE, "num_cpus": 1, "num_gpus": 0, "include_dashboard": False,
            "object_store_memory": 100 << 20, "_temp_dir": folder,
        }  # fmt: skip
        write_secret(token := Path(folder) / "token")
        reports = _ask_nodes(own, {}, {"RAY_AUTH_TOKEN_PATH": str(token)})
    if isinstance(reports, Finding):
        yield reports
        return
    live = reports[0].get("additions")
    yield Finding("Ray", True, "a worker starts and answers")
    added = set(live or ()) - {patch.name for patch in PATCHES}
    detail = f"live in a Ray worker, {len(added)} additions" if live else "verl in a Ray worker did not load it"
    yield Finding("plug-in", bool(live), detail, remedy)
    if live:
        yield from patches(live)


def patches(live: Sequence[str]) -> Iterator[Finding]:
    """Report the patches of verl that are live in a Ray worker, and what a run loses without each of the others.

    Not those of a package that is not installed or of another platform, nor those that a trainer of ours applies.
    """
    verls = platform_env(find_device())["VERL_PLATFORM"]
    due = [patch for patch in PATCHES if patch.kind is not Kind.TRAINER and patch.possible_on(verls)]
    here = [patch.name for patch in due if patch.name in live]
    yield Finding("patches", True, f"{len(here)} of {len(due)} live: {', '.join(here)}")
    chosen = os.environ.get(PATCHES_VARIABLE)
    for patch in (patch for patch in due if patch.name not in live):
        left_out = chosen is not None and not selected(patch)
        why = f"left out by {PATCHES_VARIABLE}={chosen}" if left_out else "verl's source is not the one it is for"
        yield Finding(patch.name, False, f"not live: {why}", f"without it: {patch.without}", essential=False)


def cluster(address: str, runs: Path) -> Iterator[Finding]:
    """Ask a worker on every node of a running Ray for its packages, its plug-in and the folders that all must see."""
    with contextlib.ExitStack() as stack:
        files = {}
        for folder in (runs, cache_folder()):
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", dir=_existing(folder), prefix=".doctor-"))
            file.write(text := secrets.token_hex(8))
            file.flush()
            files[file.name] = (text, str(folder))
        env = {"runtime_env": {"env_vars": platform_env(find_device())}}
        reports = _ask_nodes({"address": address, **env}, {path: text for path, (text, _) in files.items()}, {})
    if isinstance(reports, Finding):
        yield reports
        return
    yield Finding("Ray", True, f"{len(reports)} nodes at {address}")
    yield from compare_nodes(reports, {path: folder for path, (_, folder) in files.items()})


def compare_nodes(reports: Sequence[Mapping[str, Any]], files: Mapping[str, str]) -> Iterator[Finding]:
    """Compare every node's packages with what most nodes have. ``files`` all nodes should see, each with its folder."""
    versions = [report["versions"] for report in reports if "versions" in report]
    usual: Mapping[str, str] = max(versions, key=versions.count, default={})  # of a draw, those of the first node
    for report in reports:
        what, own = f"node {report['address']}", report.get("versions", {})
        if "error" in report:
            faults = [str(report["error"])]
        else:
            faults = [
                f"{name} {own.get(name, 'missing')}, on other nodes {usual.get(name, 'missing')}"
                for name in {**usual, **own}
                if own.get(name) != usual.get(name)
            ]
            faults += [] if report["additions"] else ["verl there did not load the plug-in"]
            faults += [f"does not see {folder}" for path, folder in files.items() if path not in report["sees"]]
        if faults:
            yield Finding(what, False, "; ".join(faults), REMEDY)
        else:
            folders = f", sees {len(files)} shared folders" if files else ""
            yield Finding(what, True, f"same packages, plug-in live with {len(report['additions'])} additions{folders}")


def _ask_nodes(ray_init: dict[str, Any], files: dict[str, str], env: dict[str, str]) -> list[dict[str, Any]] | Finding:
    env = {**platform_env(find_device()), **env}
    reports, wrong = ask_ray({"ray_init": ray_init, "files": files}, RAY_WITHIN_S, env)
    if wrong:
        own = ray_init["address"] == PRIVATE
        remedy = f"{install_command('verl')}; look in /tmp/ray and at ulimit -n" if own else "ray start; ray status"
        return Finding("Ray", False, wrong, remedy)
    return reports


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
