"""One form for every message to a user: ``key=value is not accepted: what would be``."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

TASKS, NEEDED_BY_TASKS = "tasks", ("reasoning_gym", "math_verify", "gguf")
PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}


def refuse(key: str, value: object, accepted: str) -> NoReturn:
    """Raise a ``ValueError`` that names the key, the value and what is accepted."""
    raise ValueError(f"{key}={value!r} is not accepted: {accepted}")


def require(condition: bool, key: str, value: object, accepted: str) -> None:
    """Refuse the value unless the condition holds."""
    if not condition:
        refuse(key, value, accepted)


def require_known(key: str, value: str, known: Iterable[str], or_else: str = "") -> None:
    """Raise a ``ValueError`` that lists the known words and suggests the nearest, unless the value is one of them."""
    known = list(known)
    accepted = " ".join(filter(None, (f"one of {', '.join(known)}", or_else)))
    require(value in known, key, value, accepted + nearest(value, known))


def refuse_unknown(section: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ``ValueError`` for the first key of a section that is not known; it suggests the nearest."""
    known = list(known)
    for key in given:
        if key not in known:
            there = ", ".join(known) or "none"
            raise ValueError(f"{section}.{key} is not a key{nearest(key, known)}; there are: {there}")


def require_type(key: str, value: object, hint: object) -> None:
    """Raise a ``ValueError`` unless the value has the hinted type: plain, a union, a mapping or a list of words."""
    if hint == Sequence[str]:
        words = isinstance(value, Sequence) and all(isinstance(word, str) for word in value)
        require(words and not isinstance(value, str), key, value, "a list of words, such as [level]")
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    accepted = set(typing.get_args(hint)) if union else {hint}
    if Mapping in map(typing.get_origin, accepted) and not (value is None and type(None) in accepted):
        require(isinstance(value, Mapping), key, value, "keys with their values, such as {key: 1}")
    if accepted <= set(PLAIN):
        fits = type(value) in accepted or (float in accepted and type(value) is int)
        require(fits, key, value, " or ".join(PLAIN[one] for one in PLAIN if one in accepted))


def missing_extra(error: ModuleNotFoundError, extra: str) -> str:
    """Return the message for a missing module of one of our extras."""
    return f"{error}; install it with: {install_command(TASKS if error.name in NEEDED_BY_TASKS else extra)}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from a clone, for no version is on a package index yet."""
    return f"pip install '.[{extra}]' in a clone of goldilocks"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` for the known word closest to ``word``, or an empty string if none is close."""
    close = closest(word, known, most=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def closest(word: str, known: Iterable[str], *, most: int = 3, likeness: float = 0.6) -> list[str]:
    """Return the known words most like ``word``, the closest first. With ``likeness`` 0 any word is like any other."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=likeness)
