"""Generators of the ``reasoning-gym`` library that grade an answer without running it: one, or a mixture of several.

Invariant: a row names its problem (generator, knobs, seed, index), and grading generates the same problem again. So the
grader's data need not be stored in parquet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from goldilocks.errors import nearest, require
from goldilocks.tasks.registry import VALIDATION_SHARE, Problem, Score, Split, split_of

# Their graders pass the model's answer to eval, sympify or the like, which would run model output as code.
EVALUATING = frozenset([
    "binary_matrix", "codeio", "countdown", "intermediate_integration", "n_queens", "number_sorting",
    "polynomial_multiplication", "propositional_logic", "puzzle24", "simple_integration", "spiral_matrix",
    "string_insertion",
])  # fmt: skip

INSTRUCTION = "Give the final answer between <answer> and </answer>."
SHARE = "share"  # of a mixture's problems; everything else in a generator's settings is a knob of its own
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_RIGHT = 0.999  # the library gives part marks; an answer counts as accurate from here on

Generators = Mapping[str, Mapping[str, Any]]


class ReasoningGym:
    """Generators as one task. Part marks stay in ``score``; ``acc`` is 1 for full marks only.

    ``generators`` has the knobs of each by name, and its ``share`` of the problems, 1 unless given.
    """

    def __init__(self, generators: Generators | str) -> None:
        chosen = {name: {} for name in generators.split("+")} if isinstance(generators, str) else generators
        require(len(chosen) > 0, "generators", dict(chosen), "at least one of reasoning-gym's, by name")
        self._shares = {name: settings.get(SHARE, 1) for name, settings in chosen.items()}
        self._knobs = {name: {k: v for k, v in given.items() if k != SHARE} for name, given in chosen.items()}
        for name, share in self._shares.items():
            _check_generator(name)
            above = isinstance(share, int | float) and share > 0
            require(above, f"generators.{name}.{SHARE}", share, "a number above 0")
            _dataset(name, 0, json.dumps(self._knobs[name], sort_keys=True))  # raises for a wrong knob
        self.data_source = f"reasoning_gym/{'+'.join(chosen)}"

    def problems(self, split: Split, size: int, seed: int) -> list[Problem]:
        """Return ``size`` different problems of the split, each generator with its share."""
        shares = list(self._shares.values())
        ends = [0, *(round(size * share / sum(shares)) for share in accumulate(shares))]
        drawn = zip(self._shares, (end - start for start, end in pairwise(ends)), strict=True)
        return [problem for name, count in drawn for problem in self._problems_of(name, split, count, seed)]

    def grade(self, answer: str, truth: str, extra: Mapping[str, Any]) -> Score:
        """Return the generator's marks for the text in the last ``<answer>``, else for the whole text.

        ``extra`` names the problem.
        """
        name, seed, index = str(extra["generator"]), int(extra["seed"]), int(extra["source_index"])
        _check_generator(name)
        knobs = str(extra.get("knobs", "{}"))
        entry, marked = _entry(name, seed, knobs, index), _ANSWER.findall(answer)
        final = (marked[-1] if marked else answer).strip()
        marks = float(_dataset(name, seed, knobs).score_answer(final, entry))
        return {"score": marks, "acc": float(marks >= _RIGHT)}

    def _problems_of(self, name: str, split: Split, size: int, seed: int) -> Iterator[Problem]:
        """Yield the first ``size`` different problems of one generator that belong to the split."""
        knobs = json.dumps(self._knobs[name], sort_keys=True)
        seen: set[str] = set()
        for index in range(2 * VALIDATION_SHARE * size + 100):
            if len(seen) == size:
                return
            entry = _entry(name, seed, knobs, index)
            question = entry["question"]
            if question in seen or split_of(question) != split:
                continue
            seen.add(question)
            origin = {"generator": name, "knobs": knobs, "seed": seed, "source_index": index}
            # The difficulty is the mean of the generator's own difficulty knobs, 0 where it has none.
            metadata = entry["metadata"]
            values = [metadata.get(knob) for knob in metadata.get("difficulty", {})]
            numbers = [value for value in values if isinstance(value, int | float)]
            difficulty = sum(numbers) / len(numbers) if numbers else 0.0
            yield Problem(f"{question}\n{INSTRUCTION}", str(entry["answer"]), float(difficulty), origin)


def _check_generator(name: str) -> None:
    from reasoning_gym.factory import DATASETS

    known = list(DATASETS)
    accepted = f"one of reasoning-gym's {len(known)} generators{nearest(name, known)}"
    require(name in known, "generator", name, accepted)
    require(name not in EVALUATING, "generator", name, "one whose grader does not run the answer as code")


@lru_cache(maxsize=64)
def _dataset(generator: str, seed: int, knobs: str) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    given = json.loads(knobs)
    fields = [name for name in DATASETS[generator][1].__dataclass_fields__ if name not in ("seed", "size")]
    for knob, value in given.items():
        require(knob in fields, f"generators.{generator}.{knob}", value, f"a knob: {', '.join(sorted(fields))}")
    try:
        # Entries are made one by one when they are asked for: the size is only the bound of the index.
        return reasoning_gym.create_dataset(generator, seed=seed, size=2**31 - 1, **given)
    except AssertionError as error:
        raise ValueError(f"generators.{generator}={given} is not accepted: {error}") from None


@lru_cache(maxsize=4096)
def _entry(generator: str, seed: int, knobs: str, index: int) -> dict[str, Any]:
    return _dataset(generator, seed, knobs)[index]
