"""The ``goldilocks`` command: a table of subcommands, each in a module beside the code that it runs.

A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``; it is imported only when it is asked
for, so that ``goldilocks simulate`` starts without torch, verl or Ray. A ``ValueError`` or ``OSError`` is for the user:
it is printed as one line, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import platform
import select
import shutil
import signal
import sys
from collections.abc import Sequence

from goldilocks import __version__
from goldilocks.errors import missing_extra
from goldilocks.verl.tested import installed

# name: (module, what it does); EXTRAS: what to install for it beside the core
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("goldilocks.launch.train", "train a recipe with verl on this machine or cluster"),
    "compare": ("goldilocks.lab.compare.command", "recipes side by side at equal cost, over seeds"),
    "advise": ("goldilocks.lab.simulate.advise", "which recipe pays on my data? From pass rates, in plain words"),
    "simulate": ("goldilocks.lab.simulate.run", "what would each policy cost on my data? No model, no GPU"),
    "pass-rates": ("goldilocks.lab.pass_rates", "how often does a model answer each prompt right? One pass, one file"),
    "report": ("goldilocks.lab.report.page", "a run directory, or several, as one page to look at"),
    "data": ("goldilocks.tasks.registry", "make a data set as verl parquet files"),
    "model": ("goldilocks.tasks.download", "get SmolLM2 or Qwen2.5-Coder, or make a tiny model, to train"),
    "doctor": ("goldilocks.launch.doctor", "is everything installed, and does it work on this machine?"),
}
RUNS_ON = ("numpy", "torch", "transformers", "verl", "ray", "trl", "vllm", "sglang")  # by their distributions

EXTRAS = {"train": "verl", "compare": "verl", "pass-rates": "verl", "report": "report"}
OTHERS = "verl"  # data, model and doctor do some of their work without it

ABOUT = """\
Spend rollouts where they teach: which prompts to roll out, how many rollouts each gets, and which rows are trained."""
EPILOG = """\
examples:
  goldilocks simulate --policy grpo --policy dapo --policy contrast --rollouts 20000
  goldilocks train                         trains a tiny model on arithmetic, on whatever is here
  goldilocks COMMAND --help                what a command takes
"""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Options may stand before, between and behind a subcommand's other words.

    Of the subcommands' modules only the chosen one's is imported.
    """
    chosen = next((word for word in words if not word.startswith("-")), None)
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="goldilocks", description=ABOUT, epilog=EPILOG, formatter_class=layout)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of this and of what it runs on")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        about = summary[0].upper() + summary[1:] + "." * (summary[-1] != "?")
        sub = commands.add_parser(name, help=summary, description=about, formatter_class=layout)
        if name == chosen:
            importlib.import_module(module).add_arguments(sub)
    if chosen not in COMMANDS or chosen != words[0]:
        return parser.parse_args(words)
    return commands.choices[chosen].parse_intermixed_args(words[1:], argparse.Namespace(command=chosen))


class _Version(argparse.Action):
    """Print the versions, one on a line. They are looked up only if they are asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"goldilocks {__version__}\npython {platform.python_version()} {platform.machine()}")
        for name in RUNS_ON:
            if version := installed(name):
                print(name, version)
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = argparse.Namespace()
    try:
        args = parse(words)
        status = int(importlib.import_module(COMMANDS[args.command][0]).run(args) or 0)
        sys.stdout.flush()
        return status
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_ended():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is not printed yet
            return 128 + signal.SIGPIPE  # as a shell has it
        said: object = error
        if isinstance(error, shutil.Error):  # of several files; the first says what is wrong
            said = error.args[0][0][2]
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            said = f"{error} ({getattr(args, 'out', 'the file is not known')})"
        print(f"goldilocks: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("goldilocks: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        print(f"goldilocks: {missing_extra(error, EXTRAS.get(words[0], OTHERS))}", file=sys.stderr)
        return 2


def _reader_has_ended() -> bool:
    """Whether nobody reads what is printed any more, as behind ``| head``."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))  # a pipe that is whole has no event


if __name__ == "__main__":
    sys.exit(main())
