"""``batch_filter.*`` as a gate. Needs torch; where the tensors come from, a trainer's subclass says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from goldilocks.drive.gate import Gate, Judgement, Metrics, by_group
from goldilocks.drive.rows import Place
from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.filtering.batch_filter import combined_metrics


class FilterGate(Gate):
    """The two gates, the group filters and the selection of ``PPOBatchFilter``."""

    reason = "batch_filter"

    def __init__(self, config: PPOFilterConfig, seed: int) -> None:
        self.filter = PPOBatchFilter(config, {"seed": seed})

    def judge_rows(self, places: Sequence[Place], data: Mapping[str, torch.Tensor]) -> Judgement:
        """Judge rows whose tensors are at hand; ``places`` says which rollout each row is of."""
        chosen, cut, metrics = self.filter.select(data, [uid for uid, _ in places])
        staying = {*chosen.tolist(), *cut.tolist()}
        refused = by_group(place for number, place in enumerate(places) if number not in staying)
        return Judgement(refused, by_group(places[number] for number in cut.tolist()), metrics)

    def combined(self, judgements: Iterable[Metrics]) -> Metrics:
        return combined_metrics(judgements)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.filter.state_dict()["generator"].numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.filter.load_state_dict({"generator": torch.from_numpy(state["generator"])})
