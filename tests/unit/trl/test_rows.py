"""Rows are taken out of TRL's padded tensors and put together again without a loss."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.trl.rows import CompletionRow, CompletionRows, join_rows, split_rows
from goldilocks.types import Rollout

PAD = 9
lengths = st.tuples(st.integers(1, 6), st.integers(1, 5))


def rows(sizes: list[tuple[int, int]], *, tools: bool = False) -> list[CompletionRow]:
    generator = torch.Generator().manual_seed(len(sizes))
    made = []
    for prompt, completion in sizes:
        tensors = {
            "prompt_ids": torch.randint(9, (prompt,), generator=generator),
            "prompt_mask": torch.ones(prompt, dtype=torch.long),
            "completion_ids": torch.randint(9, (completion,), generator=generator),
            "completion_mask": torch.ones(completion, dtype=torch.long),
            "old_per_token_logps": -torch.rand(completion, generator=generator),
        }
        if tools:
            tensors["tool_mask"] = torch.arange(completion) % 2
        by_tools = (completion + 1) // 2 if tools else 0
        made.append(CompletionRow(tensors, (1.0, 0.0), "two", "four", tool_tokens=by_tools))
    return made


@given(sizes=st.lists(lengths, min_size=1, max_size=6), multiple=st.sampled_from([None, 4]), tools=st.booleans())
def test_what_is_joined_can_be_split_again(sizes: list[tuple[int, int]], multiple: int | None, tools: bool) -> None:
    made = rows(sizes, tools=tools)
    columns = join_rows(made, PAD, multiple)
    width = max(prompt for prompt, _ in sizes)
    assert columns["prompt_ids"].shape[1] in (width, -(-width // 4) * 4)
    again = split_rows(columns, [row.tensors["completion_ids"].tolist() for row in made])
    for row, tensors in zip(made, again, strict=True):
        assert tensors.keys() == row.tensors.keys()
        for name in tensors:
            torch.testing.assert_close(tensors[name], row.tensors[name])


def test_a_row_is_apart_from_the_batch_it_came_in() -> None:
    columns = join_rows(rows([(2, 3), (1, 4)]), PAD, None)
    (first, _) = split_rows(columns, [[1, 2, 3], [1, 2, 3, 4]])
    row = CompletionRow(first, (1.0,), "two", "four")
    assert row.tokens == 3
    before = row.tensors["completion_ids"].tolist()
    columns["completion_ids"].fill_(0)
    assert row.tensors["completion_ids"].tolist() == before


def test_prompts_are_padded_on_the_left_and_completions_on_the_right() -> None:
    columns = join_rows(rows([(1, 3), (3, 1)]), PAD, None)
    assert columns["prompt_ids"][0].tolist()[:2] == [PAD, PAD]
    assert columns["completion_ids"][1].tolist()[1:] == [PAD, PAD]
    assert columns["prompt_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert columns["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_silent_row_trains_nothing_and_a_tools_tokens_are_not_the_models() -> None:
    (row,) = rows([(2, 4)], tools=True)
    assert row.tokens == 2
    assert row.loss_mask.tolist() == [0, 1, 0, 1]
    assert row.silent().loss_mask.sum() == 0


def test_a_store_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    store, again = CompletionRows(), CompletionRows()
    for place, row in enumerate(rows([(2, 3), (1, 1)])):
        store.put(("g0", place), row)
    store.save([Rollout("g0", 0, 1.0, 3)], tmp_path)
    again.load(tmp_path)
    for place in (("g0", 0), ("g0", 1)):
        assert again[place].rewards == store[place].rewards
        assert again[place].completion == "four"
        for name, tensor in store[place].tensors.items():
            torch.testing.assert_close(again[place].tensors[name], tensor)
