"""What is there when the work begins is not looked at again, and garbage of the work is still found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from goldilocks.verl.lasting import MADE_BETWEEN_LOOKS, work_begins


class Node:
    """May point to itself."""


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_only_what_comes_later_is_looked_at() -> None:
    lasting = Node()
    work_begins()
    assert gc.get_threshold()[0] == MADE_BETWEEN_LOOKS
    node = Node()
    node.itself, gone = node, weakref.ref(node)  # type: ignore[attr-defined]
    looked_at = gc.get_objects()
    assert any(one is node for one in looked_at)
    assert not any(one is lasting for one in looked_at)
    del node, looked_at
    gc.collect()
    assert gone() is None
