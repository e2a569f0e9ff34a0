"""A trainer of its own on Goldilocks' driver: everything that an adapter has to write, in one file.

    python examples/toy_trainer.py [--streaming]

The model is a table: for each question the logits of ten answers, of which one is right. It learns by GRPO. What is
asked, how often, and what is trained is Goldilocks'. docs/adding-a-trainer.md goes through the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from goldilocks.config.settings import Settings
from goldilocks.core import ListSource
from goldilocks.drive.backend import Backend, Rounds, places
from goldilocks.drive.driver import Driver
from goldilocks.drive.rehearsal import rehearse
from goldilocks.drive.rows import MemoryRows
from goldilocks.types import Event, Group, Paused, Request, Rollout, hashed

QUESTIONS, ANSWERS, LEARNING_RATE = 64, 10, 2.0
CONFIG: dict[str, Any] = {  # the keys of docs/reference.md
    "data": {"train_batch_size": 8, "max_response_length": 1, "seed": 1},
    "actor_rollout_ref": {"rollout": {"n": 8}},
    "algorithm": {"filter_groups": {"enable": True}},
    "goldilocks": {"selector": "thompson", "budget": {"rollouts": 6_000}},
}


Row = tuple[int, float]  # an answer, and how likely the policy was that wrote it


class Policy:
    """The model: a question's answer is drawn from its row of logits."""

    def __init__(self) -> None:
        self.logits = np.zeros((QUESTIONS, ANSWERS))

    def probabilities(self, question: int) -> np.ndarray:
        raised = np.exp(self.logits[question] - self.logits[question].max())
        return np.asarray(raised / raised.sum())

    def answer(self, question: int, seed: int) -> Row:
        chances = self.probabilities(question)
        answer = int(np.random.default_rng(seed).choice(ANSWERS, p=chances))
        return answer, float(chances[answer])

    def update(self, question: int, rows: Sequence[Row], advantages: np.ndarray) -> None:
        """Follow the policy gradient, against the policy that wrote each row."""
        answers, written = [answer for answer, _ in rows], np.array([chance for _, chance in rows])
        now = self.probabilities(question)
        weights = advantages * now[answers] / written
        self.logits[question] += LEARNING_RATE * np.mean(weights[:, None] * (np.eye(ANSWERS)[answers] - now), axis=0)


class AnswerRows(MemoryRows[Row]):
    """What is trained on. Of a language model these would be tensors."""

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [[*place, row] for place, row in self.of_groups(rollouts).items()]
        (folder / "rows.json").write_text(json.dumps(rows))

    def load(self, folder: Path) -> tuple[()]:
        for uid, index, (answer, chance) in json.loads((folder / "rows.json").read_text()):
            self.put((uid, index), (answer, chance))
        return ()  # nothing that was unfinished can go on


class Threads(Backend):
    """A backend whose rollouts end one by one: a thread answers each."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self._pool = ThreadPoolExecutor(4)
        self._running: dict[Future[Rollout], str] = {}  # with the group of each

    def submit(self, requests: Sequence[Request]) -> None:
        for request, index, _ in places(requests):
            self._running[self._pool.submit(self._answer, request, index)] = request.uid

    def events(self, within: float | None = None) -> list[Event]:
        ended = wait(self._running, within, return_when=FIRST_COMPLETED).done
        self._forget(ended)
        return [future.result() for future in ended]

    def cancel(self, uids: Sequence[str]) -> None:
        """Cancel what no thread has begun; the rest ends, and the collector counts it."""
        self._forget([future for future, uid in self._running.items() if uid in uids and future.cancel()])

    def pause(self) -> Iterable[Paused]:
        return ()  # an answer is one token: nothing stops half-way

    def resume(self) -> None:
        """Do nothing: nothing was paused."""

    def drain(self) -> None:
        wait(self._running)

    def _forget(self, ended: Iterable[Future[Rollout]]) -> None:
        for future in list(ended):
            del self._running[future]


class ToyTrainer:
    """Asks the driver for a batch, trains on it, and saves what is its own beside what is the driver's."""

    def __init__(self, *, streaming: bool = False, config: dict[str, Any] = CONFIG) -> None:
        settings, questions = Settings.from_config(config), ListSource([f"question {i}" for i in range(QUESTIONS)])
        rehearse(settings, questions)
        self.policy, self.rows, self.updates = Policy(), AnswerRows(), 0
        backend = Threads(self._rollout) if streaming else Rounds(self._round)
        self.driver = Driver(settings.collector(questions), backend, self.rows, budget=settings.budget())

    def train(self, updates: int | None = None) -> Iterator[dict[str, float]]:
        """Yield the metrics of each update until the budget is spent."""
        while not self.driver.over and self.updates != updates:
            self.driver.meter.begin_update()
            for group in self.driver.batch():
                self._update(group)
            self.updates += 1
            self.driver.meter.end_update()
            yield {**self.driver.metrics(), "accuracy": self.accuracy}

    @property
    def accuracy(self) -> float:
        return float(np.mean([self.policy.probabilities(index)[index % ANSWERS] for index in range(QUESTIONS)]))

    def save(self, folder: Path) -> None:
        self.driver.save(folder, updates=self.updates)
        np.save(folder / "logits.npy", self.policy.logits)

    def load(self, folder: Path) -> None:
        self.updates = self.driver.load(folder)["updates"]
        self.policy.logits = np.load(folder / "logits.npy")

    def _round(self, requests: Sequence[Request]) -> Iterator[Event]:
        return (self._rollout(request, index) for request, index, _ in places(requests))

    def _rollout(self, request: Request, index: int) -> Rollout:
        """Answer once. The seed is of this rollout alone: a run that is cut and goes on draws the same."""
        question = request.prompt.index
        row = self.policy.answer(question, hashed(request.prompt.key, request.visit, index))
        self.rows.put((request.uid, index), row)
        return Rollout(request.uid, index, reward=float(row[0] == question % ANSWERS), tokens=1)

    def _update(self, group: Group) -> None:
        """Baselines are over all rollouts of a group, whether or not all of them are trained."""
        rows = self.rows.get([(rollout.uid, rollout.index) for rollout in group.trained])
        rewards = np.array([rollout.reward for rollout in group.trained])
        self.policy.update(group.prompt.index, rows, rewards - np.mean(group.rewards))


def main() -> None:
    """Train until the budget is spent."""
    for number, metrics in enumerate(ToyTrainer(streaming="--streaming" in sys.argv).train(), start=1):
        if number % 10 == 0:
            shown = {name: metrics[name] for name in ("accuracy", "budget/spent", "train/keep_rate")}
            print(number, *(f"{name} {value:.2f}" for name, value in shown.items()))


if __name__ == "__main__":
    main()
