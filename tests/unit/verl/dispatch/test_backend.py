"""verl's agent loops as a backend, over workers that answer when told to."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from goldilocks.core import Collector, Surplus
from goldilocks.core.allocators import Fixed
from goldilocks.core.filters import Everything
from goldilocks.core.selectors import Uniform
from goldilocks.drive.driver import MAX_FAILURES, Driver
from goldilocks.types import Failure, Paused, Rollout
from goldilocks.verl.dispatch.backend import ANSWERS, FIRST, ROLLOUTS, VISIT_SEED, AgentLoops, NeverPausing
from goldilocks.verl.driven import DatasetSource
from goldilocks.verl.update.trainer import several_rows_estimator

CONFIG = OmegaConf.create(
    {
        "data": {"seed": 1},
        "actor_rollout_ref": {"rollout": {"seed": 0}},
        "trainer": {
            "v1": {"sampler": {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}}
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
        if within is None and not self.ended:  # the real one waits
            self.go_on()
        told, self.ended = self.ended, []
        self.go_on()
        return told

    def answers(self) -> list[Any]:
        return [[rollout.uid, rollout.index, "an answer"] for rollout in self._to_end]

    def so_far(self, *, with_answers: bool) -> tuple[list[Rollout | Failure], list[Any]]:
        answers = self.answers() if with_answers else []
        return self.events(), answers

    def cancel(self, uids: list[str]) -> None:
        pass

    def resume(self) -> None:
        pass

    def rewards_spent(self) -> dict[str, float]:
        return {"calls": 1}

    def drain(self) -> None:
        pass


def driver(of: type[AgentLoops], prompts: int, **bounds: Any) -> tuple[Driver, Any]:
    data = [{"raw_prompt": [{"role": "user", "content": f"prompt {index}"}]} for index in range(prompts)]
    backend = of(CONFIG, data, nullcontext)
    backend.manager = Manager()  # type: ignore[assignment]
    collector = Collector(DatasetSource(data), Uniform(), Fixed(2), Everything(), **bounds)
    return Driver(collector, backend, backend.rows), backend


def submitted(subject: Driver, backend: Any) -> list[dict[str, Any]]:
    backend.submit(subject.collector.requests())
    return backend.manager.started


def test_a_prompt_is_sent_without_the_placeholder_of_verls_data_set() -> None:
    subject, backend = driver(AgentLoops, prompts=1, target_groups=1)
    backend._dataset[0]["dummy_tensor"] = torch.zeros(1, dtype=torch.uint8)
    (sent,) = submitted(subject, backend)
    assert sent["raw_prompt"] == backend._dataset[0]["raw_prompt"]
    assert not any(isinstance(value, torch.Tensor) for value in sent.values())


@pytest.mark.parametrize("name", [ROLLOUTS, "__do_sample__"])
def test_a_column_by_which_verl_samples_a_prompt_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"columns of data\.train_files=\['{name}'\] is not accepted: other names"):
        AgentLoops(CONFIG, [{"raw_prompt": [], name: 1}], nullcontext)


def test_no_two_rollouts_of_a_batch_that_spans_two_epochs_draw_the_same_noise() -> None:
    started = submitted(*driver(AgentLoops, prompts=3, target_groups=8))
    assert len(started) == 8
    assert len({prompt[VISIT_SEED] for prompt in started}) == 8


def test_a_checkpoint_of_servers_that_never_stop_is_of_one_moment_and_has_every_rollout_once(tmp_path: Path) -> None:
    """Rollouts go on ending while it is written. To the checkpoint they are unfinished, with what they had."""
    bounds = {"prompts": 9, "target_groups": 8, "surplus": Surplus(4, "partial")}
    subject, backend = driver(NeverPausing, **bounds)
    submitted(subject, backend)
    backend.manager.go_on()
    subject.observe(backend.events(0))  # of another moment, and of no use to the checkpoint
    subject.save(tmp_path)
    assert subject.collector.accounts.generated_rollouts == 2
    assert subject.collector.in_flight == 14
    reborn, again = driver(NeverPausing, **bounds)
    reborn.load(tmp_path)
    started = [prompt for prompt in submitted(reborn, again) if prompt["uid"] != "g8"]  # which takes the place of g0
    assert sum(prompt[ROLLOUTS] for prompt in started) == sum(len(prompt[ANSWERS]) for prompt in started) == 14


def test_a_paused_rollout_that_was_graded_before_the_save_is_in_the_checkpoint(tmp_path: Path) -> None:
    """Its answer was complete when generation paused, and its reward came while the trainer had the batch."""
    bounds = {"prompts": 9, "target_groups": 8, "surplus": Surplus(4, "partial")}
    subject, backend = driver(AgentLoops, **bounds)
    submitted(subject, backend)
    subject.observe([Paused(f"g{number // 2}", number % 2, 1) for number in range(16)])
    backend.manager.go_on()
    backend.manager.go_on()
    subject.save(tmp_path)
    reborn, again = driver(AgentLoops, **bounds)
    reborn.load(tmp_path)
    assert len(reborn.collector.kept) == 1
    assert reborn.collector.accounts.by_class(reborn.collector.accounts.rollouts)["cancelled"] == 0
    started = [prompt for prompt in submitted(reborn, again) if prompt["uid"] != "g8"]  # which takes the place of g0
    assert sum(prompt[ROLLOUTS] for prompt in started) == sum(len(prompt[ANSWERS]) for prompt in started) == 14


def test_the_first_rollout_of_several_rows_ends_a_run_that_cannot_train_it() -> None:
    subject, backend = driver(AgentLoops, prompts=4, target_groups=2)
    algorithm = SimpleNamespace(adv_estimator="gdpo", use_kl_in_reward=False)
    backend.check_several_rows = lambda: several_rows_estimator(algorithm)
    submitted(subject, backend)
    backend.manager.ended = [Rollout("g0", 0, 1.0, 2, payload=[["g0_0_0", {}]])]
    subject.observe(backend.events())
    backend.manager.ended = [Rollout("g0", 1, 1.0, 2, payload=[["g0_1_0", {}], ["g0_1_1", {}]])]
    with pytest.raises(ValueError, match=r"algorithm\.adv_estimator='gdpo' is not accepted: .* several rows"):
        subject.observe(backend.events())


def test_servers_that_take_turns_with_the_trainer_are_waited_for_and_those_that_never_stop_are_not() -> None:
    taking_turns, _ = driver(AgentLoops, prompts=9, target_groups=2, gen_batch_size=5)
    never_stopping, _ = driver(
        NeverPausing, prompts=9, target_groups=2, gen_batch_size=5, surplus=Surplus(4, "partial")
    )
    never_stopping.collector.ahead = 3
    assert len(taking_turns.batch()) == len(never_stopping.batch()) == 2
    assert taking_turns.collector.in_flight == 0
    assert taking_turns.metrics()["accounts/reward_calls"] == 1
    assert never_stopping.collector.in_flight > 0


def test_the_error_that_is_named_is_of_the_failures_in_a_row_whatever_comes_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rollout that arrives together with the failures, and after them, is not the last success before them."""
    asked: list[float] = []
    monkeypatch.setattr("goldilocks.verl.dispatch.backend.published_error", asked.append)
    subject, backend = driver(AgentLoops, prompts=99, target_groups=40)
    submitted(subject, backend)
    places = [(prompt["uid"], index) for prompt in backend.manager.started for index in range(prompt[ROLLOUTS])]
    failures = [Failure(*place, "lost") for place in places[:MAX_FAILURES]]
    backend.manager.ended = [*failures, Rollout(*places[MAX_FAILURES], 1.0, 1, payload=[])]
    with pytest.raises(RuntimeError, match="failed in a row"):
        subject.observe(backend.events())
    assert asked == [0.0]  # no rollout has succeeded before
