"""A judgement after generation: which rollouts of the batch in hand may not be trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig

Place = tuple[str, int]  # a rollout: its group, and its number in the group
Rollouts = dict[str, list[int]]  # of each group, by their numbers


class Judgement(NamedTuple):
    """Rollouts that may not be trained, sound ones that their group can do without, and metrics.

    A refused rollout leaves its group; one that is cut stays in the group's baseline.
    """

    refused: Rollouts
    cut: Rollouts
    metrics: dict[str, float]


class FilterGate:
    """``batch_filter.*``: the two gates, the group filters and the selection of ``PPOBatchFilter``."""

    reason = "batch_filter"
    refuses_flat = False  # what it refuses may have a gradient, and fills up no batch

    def __init__(self, config: PPOFilterConfig, seed: int) -> None:
        self.filter = PPOBatchFilter(config, {"seed": seed})

    def judge_rows(self, places: Sequence[Place], data: Mapping[str, torch.Tensor]) -> Judgement:
        """Judge rows whose tensors are at hand; ``places`` says which rollout each row is of."""
        chosen, cut, metrics = self.filter.select(data, [uid for uid, _ in places])
        staying = {*chosen.tolist(), *cut.tolist()}
        refused = by_group(place for number, place in enumerate(places) if number not in staying)
        return Judgement(refused, by_group(places[number] for number in cut.tolist()), metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.filter.state_dict()["generator"].numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.filter.load_state_dict({"generator": torch.from_numpy(state["generator"])})


def by_group(places: Iterable[Place]) -> Rollouts:
    """Return the rollouts of each group, each once: a rollout of several turns has several rows."""
    found: Rollouts = defaultdict(list)
    for uid, index in places:
        if index not in found[uid]:
            found[uid].append(index)
    return dict(found)
