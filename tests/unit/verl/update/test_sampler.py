"""The collector's loop on verl, over agent loops that answer when told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from goldilocks.core import Collector, Surplus
from goldilocks.core.allocators import Fixed
from goldilocks.core.filters import Everything
from goldilocks.core.selectors import Uniform
from goldilocks.types import Failure, Rollout
from goldilocks.verl.source import DatasetSource
from goldilocks.verl.store.rows import ANSWERS, FIRST, ROLLOUTS, VISIT_SEED
from goldilocks.verl.update.sampler import CollectorSampler, NeverPausing

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
    """In the place of ``StreamingManager``: as soon as one rollout is told of, the next has ended."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.ended: list[Rollout | Failure] = []
        self._to_end: list[Rollout | Failure] = []

    def start(self, prompts: list[dict[str, Any]]) -> None:
        self.started += prompts
        for prompt in prompts:
            uid, first = prompt["uid"], prompt[FIRST]
            indices = range(first, first + prompt[ROLLOUTS])
            self._to_end += [Rollout(uid, index, float(index % 2), 1, payload=[]) for index in indices]

    def go_on(self) -> None:
        self.ended += self._to_end[:1]
        del self._to_end[:1]

    def events(self, within: float | None = None) -> list[Rollout | Failure]:
        told, self.ended = self.ended, []
        self.go_on()
        return told

    def answers(self) -> list[Any]:
        return [[rollout.uid, rollout.index, "an answer"] for rollout in self._to_end]

    def so_far(self) -> tuple[list[Rollout | Failure], list[Any]]:
        answers = self.answers()
        return self.events(), answers

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


def test_a_checkpoint_of_servers_that_never_stop_is_of_one_moment_and_has_every_rollout_once(tmp_path: Path) -> None:
    """Rollouts go on ending while it is written. To the checkpoint they are unfinished, with what they had."""
    subject = sampler(NeverPausing, prompts=9, target_groups=8, surplus=Surplus(4, "partial"))
    subject._submit(subject.collector.requests(), 1)
    subject.manager.go_on()
    subject.manager.go_on()
    subject.observe_all()
    assert subject.collector.accounts.generated_rollouts == 2
    assert subject.collector.in_flight == 14
    subject.manager.go_on()
    subject.rows.unfinished.save(tmp_path)
    reborn = sampler(NeverPausing, prompts=9, target_groups=8, surplus=Surplus(4, "partial"))
    reborn.collector.load_state_dict(subject.collector.state_dict())
    reborn.collector.reissue(known=reborn.rows.unfinished.load(tmp_path))
    reborn._submit(reborn.collector.requests(), 1)
    again = [prompt for prompt in reborn.manager.started if prompt["uid"] != "g8"]  # which takes the place of g0
    assert sum(prompt[ROLLOUTS] for prompt in again) == sum(len(prompt[ANSWERS]) for prompt in again) == 14
