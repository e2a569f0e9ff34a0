from __future__ import annotations

import os

import pytest

from goldilocks.launch.machine import THREADS, share_of_cores


def test_runs_at_the_same_time_share_the_cores_unless_the_user_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert share_of_cores(1) == {}
    assert share_of_cores(5) == {THREADS: "3"}
    assert share_of_cores(40) == {THREADS: "1"}
    monkeypatch.setenv(THREADS, "7")
    assert share_of_cores(5) == {}
