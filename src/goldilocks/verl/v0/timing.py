"""Timings of one step's generation calls, as the timings of one: verl's names, over all that was generated."""

from __future__ import annotations

from collections.abc import Sequence

Timing = dict[str, float]

SLOWEST = "agent_loop/slowest/"


def merge_timings(calls: Sequence[tuple[int, Timing]]) -> Timing:
    """Each call is its number of rollouts and what verl measured of it."""
    if not calls:
        return {}
    slowest = max((timing for _, timing in calls), key=_of_slowest)
    merged = dict(slowest)
    for name in slowest:
        values = [(rollouts, timing[name]) for rollouts, timing in calls if name in timing]
        if name.startswith(SLOWEST):
            continue
        if name.endswith("/min"):
            merged[name] = min(value for _, value in values)
        elif name.endswith("/mean"):
            merged[name] = sum(n * value for n, value in values) / sum(n for n, _ in values)
        else:
            merged[name] = max(value for _, value in values)
    return merged


def _of_slowest(timing: Timing) -> float:
    parts = ("generate_sequences", "tool_calls", "compute_score")
    return sum(timing.get(SLOWEST + part, 0.0) for part in parts)
