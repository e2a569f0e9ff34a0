"""``batch_filter.*`` as a gate. Needs torch; where the tensors come from, a trainer's subclass says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from goldilocks.drive.gate import Gate, Judgement, Metrics, by_group
from goldilocks.drive.rows import Place
from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.filtering.batch_filter import batch_size_metrics
from goldilocks.runs.history import combine
from goldilocks.types import Group


class FilterGate(Gate):
    """The two gates, the group filters and the selection of ``PPOBatchFilter``."""

    reason = "batch_filter"

    def __init__(self, config: PPOFilterConfig, seed: int) -> None:
        self.filter = PPOBatchFilter(config, {"seed": seed})

    def judge_rows(self, places: Sequence[Place], data: Mapping[str, torch.Tensor]) -> Judgement:
        """Judge rollouts whose tensors are at hand; ``places`` says which rollout each row is of.

        A rollout of several rows is judged as one: by its reward, and by the tokens of all its rows.
        """
        if len(set(places)) < len(places):
            places, data = list(dict.fromkeys(places)), joined(places, data)
        chosen, cut, metrics = self.filter.select(data, [uid for uid, _ in places])
        staying = {*chosen.tolist(), *cut.tolist()}
        refused = by_group(place for number, place in enumerate(places) if number not in staying)
        return Judgement(refused, by_group(places[number] for number in cut.tolist()), metrics)

    def combined(self, judgements: Sequence[Metrics], trained: Sequence[Group], batches: int = 1) -> Metrics:
        """Return the metrics of all judgements; how full the batch is, is said of the batch, not of its parts."""
        if not judgements:
            return {}
        config, complete = self.filter.config, self.filter.config.target_group_size
        missing = batches * config.target_num_groups - len(trained) if config.target_num_groups else 0
        sizes = [min(complete, len(group)) if config.varying_group_sizes else complete for group in trained]
        samples = sum(len(group.trained) for group in trained)
        return combine(judgements) | batch_size_metrics(samples, sum(sizes) + missing * complete)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.filter.state_dict()["generator"].numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.filter.load_state_dict({"generator": torch.from_numpy(state["generator"])})


def joined(places: Sequence[Place], data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return one row for each rollout, in the order of their first rows.

    Of a value for each token, the rows of a rollout stand side by side; of a value for each row, the last row's is its.
    """
    rows: dict[Place, list[int]] = {}
    for row, place in enumerate(places):
        rows.setdefault(place, []).append(row)
    most = max(map(len, rows.values()))

    def whole(values: torch.Tensor) -> torch.Tensor:
        if values.dim() == 1:
            return values[[own[-1] for own in rows.values()]]
        wide = values.new_zeros(len(rows), most, *values.shape[1:])
        for number, own in enumerate(rows.values()):
            wide[number, : len(own)] = values[own]
        return wide.flatten(1, 2)

    return {name: whole(values) for name, values in data.items()}
