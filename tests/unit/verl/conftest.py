"""A TransferQueue of its own for each test that asks for it."""

from __future__ import annotations

import pytest
from verl_world import Queue


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)
