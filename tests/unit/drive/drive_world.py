"""A trainer without a model: a faulty engine as a backend, rows as files of JSON, and a gate that draws by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unit.core.driver import FaultyEngine, uniforms

from goldilocks.drive.backend import Backend, Rounds, places
from goldilocks.drive.gate import Gate, Judgement
from goldilocks.drive.rows import MemoryRows, Place
from goldilocks.runs.history import Mean
from goldilocks.types import Event, Group, Paused, Request, Rollout


class Killed(Exception):
    """The process dies here."""


class Rows(MemoryRows[str]):
    """Rows are words. ``unfinished`` is what the backend has not finished."""

    unfinished: Collection[Place] = ()

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        folder.mkdir(parents=True)
        kept = [[*place, row] for place, row in self.of_groups(rollouts).items()]
        (folder / "rows.json").write_text(json.dumps([kept, sorted(self.unfinished)]))

    def load(self, folder: Path) -> list[Place]:
        kept, unfinished = json.loads((folder / "rows.json").read_text())
        for uid, index, row in kept:
            self.put((uid, index), row)
        return [(uid, index) for uid, index in unfinished]


@dataclass
class Streaming(FaultyEngine, Backend):
    """Ends rollouts in random order. A new one goes on in the same order once it is asked again for what was lost."""

    rows: Rows = field(default_factory=Rows)
    dies_at: float = float("inf")  # the event at which the process is killed
    asked: list[Request] = field(default_factory=list)
    lost: list[list[Any]] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.free

    def submit(self, requests: Sequence[Request]) -> None:  # type: ignore[override]
        for request in requests:
            super().submit(request)
        self.asked += requests

    def events(self, within: float | None = None) -> Iterator[Event]:
        if within is not None:
            return
        missing = [item for item in self.lost if item not in self.pending]
        assert missing == [], "after a restart everything that was in flight is asked for again"
        self.pending = [*self.lost, *(item for item in self.pending if item not in self.lost)]
        self.lost = []
        for event in self.step():
            yield self._told(event)

    def _told(self, event: Event) -> Event:
        self.dies_at -= 1
        if self.dies_at <= 0:
            raise Killed
        if isinstance(event, Rollout):
            self.rows.put((event.uid, event.index), f"row {event.uid} {event.index}")
        return event

    def cancel(self, uids: Sequence[str]) -> None:
        for uid in uids:
            self.abort(uid)

    def pause(self) -> list[Paused]:
        paused = super().pause()
        self.rows.unfinished = [(event.uid, event.index) for event in paused]
        return paused

    def resume(self) -> None:
        self.rows.unfinished = ()

    def drain(self) -> None:
        """Do nothing: what is late does not hold the trainer up."""

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tick", "pending", "delivered", "written")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tick, self.delivered, self.written = state["tick"], state["delivered"], state["written"]
        self.lost = state["pending"]


class InRounds(Rounds):
    """Ends every request of a round at once, in the order of the requests."""

    def __init__(self, seed: int, rows: Rows, dies_at: float = float("inf")) -> None:
        super().__init__(self._round, room=48)
        self._engine = Streaming(seed, rows=rows, dies_at=dies_at)

    def _round(self, requests: Sequence[Request]) -> Iterator[Event]:
        for request, index, _ in places(requests):
            yield self._engine._told(self._engine.outcome(request.uid, index, request.prompt.index))


class DrawnGate(Gate):
    """Refuses a share of all rollouts and cuts a share of the others, by their names; it counts what it was shown."""

    reason = "drawn"

    def __init__(self, seed: int, refused: float, cut: float, rows: Rows) -> None:
        self.seed, self._shares, self._rows = seed, (refused, cut), rows
        self.judged: list[str] = []
        self.prepared: list[str] = []
        self.refused: set[Place] = set()

    def prepare(self, groups: Sequence[Group]) -> None:
        self.prepared += [group.uid for group in groups]

    def judge(self, groups: Sequence[Group]) -> Judgement:
        self.judged += [group.uid for group in groups]
        refused: dict[str, list[int]] = {}
        cut: dict[str, list[int]] = {}
        for group in groups:
            self._rows.get([(rollout.uid, rollout.index) for rollout in group.rollouts])  # all of them are there
            refused[group.uid], left = self._split(group.uid, [one.index for one in group.trained], self._shares[0])
            cut[group.uid] = self._split(group.uid + " cut", left, self._shares[1])[0][: len(left) - 1]
        self.refused |= {(uid, index) for uid, indices in refused.items() for index in indices}
        share = Mean(sum(map(len, refused.values())), sum(len(group.trained) for group in groups))
        return Judgement(refused, cut, {"gate/groups": len(groups), "gate/refused": share})

    def _split(self, name: str, indices: list[int], share: float) -> tuple[list[int], list[int]]:
        out = [index for index in indices if uniforms(f"{self.seed} gate {name} {index}")[0] < share]
        return out, [index for index in indices if index not in out]

    def state_dict(self) -> dict[str, Any]:
        return {"judged": self.judged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.judged = list(state["judged"])


BACKENDS = {
    "streaming": lambda seed, rows, dies_at: Streaming(seed, late_rate=0.0, rows=rows, dies_at=dies_at),
    "rounds": InRounds,
}
