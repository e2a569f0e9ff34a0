"""Which sources of another package's functions are known."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from goldilocks.hashing import digest, is_known


def test_a_function_is_known_by_any_of_its_sources() -> None:
    assert is_known(digest, digest(digest))
    assert is_known(digest, ("0" * 16, digest(digest)))
    assert not is_known(digest, digest(is_known))


@pytest.mark.parametrize(
    "function", [len, functools.partial(digest), eval("lambda: 1")], ids=["builtin", "partial", "eval"]
)
def test_what_has_no_source_is_not_known(function: Any) -> None:
    assert not is_known(function, "0" * 16)
