"""``goldilocks completion bash``: a script that completes commands, their options and the recipes in that shell.

The words are read from the parsers when the script is printed, so that a press of the tab key starts no Python. A
command whose extra is not installed is completed by its name alone.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from goldilocks.cli import COMMANDS, parsers
from goldilocks.config.recipes import names

EPILOG = """\
to install:
  bash   goldilocks completion bash > ~/.local/share/bash-completion/completions/goldilocks
  zsh    echo 'eval "$(goldilocks completion zsh)"' >> ~/.zshrc        after compinit
  fish   goldilocks completion fish > ~/.config/fish/completions/goldilocks.fish
"""
TAKES_RECIPES = {"train", "compare", "simulate"}

BASH = """\
_goldilocks() {{
    local words
    case "$((COMP_CWORD == 1)) ${{COMP_WORDS[1]}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o bashdefault -o default -F _goldilocks goldilocks
"""
ZSH = "autoload -Uz bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=SCRIPTS, help="the shell that is to complete")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(SCRIPTS[args.shell](), end="")
    return 0


def bash() -> str:
    """Return the script for bash: one line of words for each command."""
    lines = [f'        "1 "*) words="{" ".join([*COMMANDS, "--help", "--version"])}" ;;']
    lines += [f'        "0 {name}") words="{" ".join(words)}" ;;' for name, words in completed().items()]
    return BASH.format(cases="\n".join(lines))


def zsh() -> str:
    """Return the script for zsh, which reads that of bash."""
    return ZSH + bash()


def fish() -> str:
    """Return the script for fish: one line for each command, and one for the words of each."""
    lines = [
        f"complete -c goldilocks -n __fish_use_subcommand -a {name} -d '{about}'"
        for name, (_, about) in COMMANDS.items()
    ]
    lines += [
        f"complete -c goldilocks -n '__fish_seen_subcommand_from {name}' -a '{' '.join(words)}'"
        for name, words in completed().items()
    ]
    return "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def completed() -> dict[str, list[str]]:
    """Return the words that complete each command: recipes where it takes them, choices and options."""
    found = {}
    for name in COMMANDS:
        found[name] = names() if name in TAKES_RECIPES else []
        with contextlib.suppress(ModuleNotFoundError):
            found[name] += dict.fromkeys(_words(parsers(name)[1][name]))
    return found


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the choices of a parser's positional words and its long options, those of its own commands among them."""
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if not action.option_strings:
            yield from map(str, action.choices or ())
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _words(below)
