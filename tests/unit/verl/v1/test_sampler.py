"""The collector's loop on verl, over agent loops that answer when told to."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from goldilocks.core import Collector
from goldilocks.core.allocators import Fixed
from goldilocks.core.filters import Everything
from goldilocks.core.selectors import Uniform
from goldilocks.types import Failure, Rollout
from goldilocks.verl.source import DatasetSource
from goldilocks.verl.v1.rows import FIRST, ROLLOUTS, VISIT_SEED
from goldilocks.verl.v1.sampler import CollectorSampler

CONFIG = OmegaConf.create(
    {
        "data": {"seed": 1},
        "actor_rollout_ref": {"rollout": {"seed": 0}},
        "trainer": {
            "v1": {
                "sampler": {
                    "max_off_policy_threshold": 8,
                    "max_off_policy_strategy": "drop",
                    "sampler_kwargs": {},
                }
            }
        },
    }
)


class Manager:
    """In the place of ``StreamingManager``: notes what is started, and answers what the test lets it."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.answered: list[list[Rollout | Failure]] = []

    def start(self, prompts: list[dict[str, Any]]) -> None:
        self.started += prompts

    def finish(self, prompt: dict[str, Any]) -> None:
        """Every rollout of a request ends."""
        uid, first, n = prompt["uid"], prompt[FIRST], prompt[ROLLOUTS]
        self.answered.append(
            [Rollout(uid, index, float(index % 2), 1, payload=[]) for index in range(first, first + n)]
        )

    def events(self, within: float | None = None) -> list[Rollout | Failure]:
        assert self.answered or within is not None, "nothing is to come, and it is waited for"
        return self.answered.pop(0) if self.answered else []

    def cancel(self, uids: list[str]) -> None:
        pass


def sampler(of: type[CollectorSampler], prompts: int, **bounds: Any) -> Any:
    data = [{"raw_prompt": [{"role": "user", "content": f"prompt {index}"}]} for index in range(prompts)]
    subject = of(CONFIG)
    subject.collector = Collector(DatasetSource(data), Uniform(), Fixed(2), Everything(), **bounds)
    subject.manager = Manager()
    return subject


def test_no_two_rollouts_of_a_batch_that_spans_two_epochs_draw_the_same_noise() -> None:
    subject = sampler(CollectorSampler, prompts=3, target_groups=8)
    subject._submit(subject.collector.requests(), 1)
    assert len(subject.manager.started) == 8
    assert len({prompt[VISIT_SEED] for prompt in subject.manager.started}) == 8
