"""The turns of conversations with tools, for an engine that wants a seed and a length for each.

TRL asks for the first turn of all conversations, then for the next turn of those that called a tool. It keeps their
order and does not say which they are, so each is found again by what it has written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from goldilocks.hashing import hashed

Ids = Sequence[int]


@dataclass(frozen=True)
class Turn:
    """What the engine is asked for: a seed and a limit in tokens for each conversation that goes on."""

    seeds: list[int]
    limits: list[int]


class Turns:
    """The conversations of one round. ``longest`` bounds what the model and the tools write in all turns together."""

    def __init__(self, prompts: Sequence[Ids], seeds: Sequence[int], longest: int) -> None:
        self._texts = [list(ids) for ids in prompts]
        self._prompts = [len(ids) for ids in prompts]
        self._seeds = seeds
        self._longest = longest
        self._turn = 0
        self._places: list[int] = []  # of the conversations that this turn is of

    def next(self, asked: Sequence[Ids]) -> Turn:
        """Begin a turn. A conversation's noise is a function of its seed and of the turn's number."""
        self._places = list(self._found(asked))
        written = [len(ids) - self._prompts[place] for ids, place in zip(asked, self._places, strict=True)]
        seeds = [self._seeds[place] for place in self._places]
        later = [hashed(seed, self._turn) for seed in seeds] if self._turn else seeds
        self._turn += 1
        return Turn(later, [max(1, self._longest - length) for length in written])

    def wrote(self, asked: Sequence[Ids], answers: Sequence[Ids]) -> None:
        """Note what the model has answered in the turn that was begun last."""
        for place, ids, answer in zip(self._places, asked, answers, strict=True):
            self._texts[place] = [*ids, *answer]

    def _found(self, asked: Sequence[Ids]) -> Iterator[int]:
        """Yield each conversation's place. Two with the same text are told apart by their order, which TRL keeps."""
        place = 0
        for ids in asked:
            while list(ids[: len(self._texts[place])]) != self._texts[place]:
                place += 1
            yield place
            place += 1
