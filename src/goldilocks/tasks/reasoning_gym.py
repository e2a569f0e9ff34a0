"""Any generator of the ``reasoning-gym`` library that grades an answer without running it.

Invariant: a row names its problem (generator, seed, index), and grading makes that very problem again: what a grader
needs to know does not have to survive a trip through parquet.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from goldilocks.tasks.base import VALIDATION_SHARE, Problem, Score, Split, split_of

# Their graders hand the model's answer to eval, sympify or the like: model output would be run as code.
EVALUATING = frozenset(
    {
        "binary_matrix",
        "codeio",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "number_sorting",
        "polynomial_multiplication",
        "propositional_logic",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)

_RIGHT = 0.999  # the library gives part marks; an answer counts as accurate from here on


class ReasoningGym:
    """One generator as a task. Part marks stay in ``score``; ``acc`` is 1 for full marks only."""

    def __init__(self, generator: str) -> None:
        known = _generators()
        if generator not in known:
            near = ", ".join(difflib.get_close_matches(generator, known, n=3)) or ", ".join(sorted(known)[:5]) + ", …"
            raise ValueError(f"generator={generator!r} is not one of reasoning-gym's {len(known)}; nearest: {near}")
        if generator in EVALUATING:
            raise ValueError(f"generator={generator!r} grades by running the answer as code; choose another")
        self.generator = generator
        self.data_source = f"reasoning_gym/{generator}"

    def problems(self, split: Split, size: int, seed: int) -> list[Problem]:
        """The first ``size`` different problems of the generator that belong to the split."""
        chosen: dict[str, Problem] = {}
        for index in range(2 * VALIDATION_SHARE * size + 100):
            if len(chosen) == size:
                break
            entry = _entry(self.generator, seed, index)
            question = entry["question"]
            if question in chosen or split_of(question) != split:
                continue
            origin = {"generator": self.generator, "seed": seed, "source_index": index}
            chosen[question] = Problem(question, str(entry["answer"]), _difficulty(entry["metadata"]), origin)
        return list(chosen.values())

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """The generator's own marks for the answer to the problem that ``extra`` names."""
        seed, index = int(extra["seed"]), int(extra["source_index"])
        marks = float(_dataset(self.generator, seed).score_answer(answer.strip(), _entry(self.generator, seed, index)))
        return {"score": marks, "acc": float(marks >= _RIGHT)}


def _generators() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return list(DATASETS)


@lru_cache(maxsize=16)
def _dataset(generator: str, seed: int) -> Any:
    import reasoning_gym

    # Entries are made one by one when they are asked for: the size is only the bound of the index.
    return reasoning_gym.create_dataset(generator, seed=seed, size=2**31 - 1)


@lru_cache(maxsize=4096)
def _entry(generator: str, seed: int, index: int) -> dict[str, Any]:
    return _dataset(generator, seed)[index]


def _difficulty(metadata: Mapping[str, Any]) -> float:
    """The mean of the generator's own difficulty knobs for this problem, 0 where it has none."""
    knobs = [metadata[name] for name in metadata.get("difficulty", {}) if isinstance(metadata.get(name), int | float)]
    return float(sum(knobs) / len(knobs)) if knobs else 0.0
