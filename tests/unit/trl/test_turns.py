"""Conversations that go on after a tool are told apart, and get seeds and limits of their own."""

from __future__ import annotations

from goldilocks.trl.engine_rollouts import Turns

PROMPTS = [[1], [1], [1], [2, 3]]
SEEDS = [10, 11, 12, 13]
TOOL = [8, 8]


def test_the_first_turn_has_the_rollouts_own_seeds() -> None:
    turn = Turns(PROMPTS, SEEDS, longest=6).next(PROMPTS)
    assert turn.seeds == SEEDS
    assert turn.limits == [6, 6, 6, 6]


def test_a_later_turn_is_known_by_what_its_conversation_has_written() -> None:
    """The first and the third have the same text; the second calls no tool."""
    turns = Turns(PROMPTS, SEEDS, longest=6)
    turns.next(PROMPTS)
    turns.wrote(PROMPTS, [[5], [6], [5], [7, 7]])
    asked = [[1, 5, *TOOL], [1, 5, *TOOL], [2, 3, 7, 7, *TOOL]]
    second = turns.next(asked)
    assert len({*second.seeds, *SEEDS}) == len(second.seeds) + len(SEEDS)
    assert second.limits == [3, 3, 2]
    turns.wrote(asked, [[4], [4], [9]])
    alone = turns.next([[2, 3, 7, 7, *TOOL, 9, *TOOL]])
    assert alone.limits == [1]  # TRL cuts what does not fit
    again = Turns([[2, 3]], [13], longest=6)
    again.next([[2, 3]])
    again.wrote([[2, 3]], [[7, 7]])
    assert again.next([[2, 3, 7, 7, *TOOL]]).seeds == [second.seeds[2]]  # whatever is generated beside it
