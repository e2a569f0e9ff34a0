"""Rows are taken out of TRL's padded tensors and put together again without a loss, their images too."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trl_world as world
from datasets import Dataset, Features, Image, Value
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture

from goldilocks.filtering import PPOFilterConfig
from goldilocks.trl.rows import (
    LOG_PROBS,
    SAMPLED,
    CompletionGate,
    CompletionRow,
    CompletionRows,
    DatasetPrompts,
    join_rows,
    split_rows,
    texts_alone,
)
from goldilocks.types import Group, Prompt, Rollout

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


def test_a_truncated_answer_whose_loss_is_masked_keeps_its_length_before_the_batch_filter(tmp_path: Path) -> None:
    batch_filter = {"enable": True, "max_response_length": 6}
    trainer = world.trainer(tmp_path, sections={"batch_filter": batch_filter}, mask_truncated_completions=True)
    world.collect(trainer)
    groups: dict[str, list[CompletionRow]] = {}
    for uid, index in trainer.collection.trained:
        groups.setdefault(uid, []).append(trainer.collection.rows[uid, index])
    assert any(row.truncated and not row.loss_mask.any() for group in groups.values() for row in group)
    assert all(any(row.tokens < 6 for row in group) for group in groups.values())


def test_the_gates_pass_a_truncated_answer_of_which_no_token_is_trained() -> None:
    store, made = CompletionRows(), rows([(1, 3), (1, 4), (1, 2), (1, 4)])
    rollouts = []
    for index, row in enumerate(made):
        cut = {"completion_mask": row.tensors["completion_mask"] * 0} if index == 1 else {}
        wrong = -9.0 if index < 2 else 0.0  # of a truncated answer TRL's log-probs are those without its attention
        store.put(("g", index), replace(row, tensors={**row.tensors, **cut, SAMPLED: row.tensors[LOG_PROBS] + wrong}))
        rollouts.append(Rollout("g", index, float(index % 2), row.tokens))
    group = Group("g", Prompt(key=1, index=0), tuple(rollouts), 4, 0, tuple(rollouts))
    config = PPOFilterConfig(enable_two_gate_filter=True, gate_always=True, target_group_size=4)
    judgement = CompletionGate(config, 1, store).judge([group])
    assert {uid: [*indices] for uid, indices in judgement.refused.items()} == {"g": [0]}


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


# -- images ------------------------------------------------------------------------------------------------------------


def batch(counts: list[int], **more: Any) -> dict[str, Any]:
    """Return a batch as TRL makes it: prompts of two and completions of one to three tokens."""
    rows = len(counts)
    lengths = [1 + place % 3 for place in range(rows)]
    mask = torch.tensor([[1] * length + [0] * (max(lengths) - length) for length in lengths])
    return {
        "prompt_ids": torch.arange(2 * rows).view(rows, 2) % 9,
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": torch.where(mask.bool(), torch.full_like(mask, 5), PAD),
        "completion_mask": mask,
        "num_images": counts,
        **more,
    }


def again(made: dict[str, Any]) -> dict[str, Any]:
    """Split a batch into rows and join them."""
    ids = [
        row[: int(mask.sum())].tolist()
        for row, mask in zip(made["completion_ids"], made["completion_mask"], strict=True)
    ]
    return join_rows([CompletionRow(one, (1.0,), "", "") for one in split_rows(made, ids)], PAD, None)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(value)), name


def test_patches_of_grids_follow_their_rows() -> None:
    """Qwen2-VL: an image has as many patches as its grid, and the tokens of images are marked."""
    grids = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 2]])
    marks = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    made = batch([1, 2, 0], image_grid_thw=grids, pixel_values=torch.rand(20, 3), mm_token_type_ids=marks)
    assert_same(again(made), made)


def test_one_row_for_each_image_and_one_row_for_each_prompt() -> None:
    """LLaVA has the first, Idefics the second."""
    flat = batch([1, 2, 1], pixel_values=torch.rand(4, 3, 2, 2))
    assert_same(again(flat), flat)
    padded = batch([1, 2, 2], pixel_values=torch.rand(3, 2, 3, 4, 4), pixel_attention_mask=torch.ones(3, 2, 4, 4))
    assert_same(again(padded), padded)


def test_rows_of_rounds_with_other_images_and_with_none_make_one_batch() -> None:
    first = batch([1, 1], pixel_values=torch.rand(2, 1, 3, 4, 4))
    second = batch([2, 2], pixel_values=torch.rand(2, 2, 3, 2, 2))
    ids = [[5], [5, 5]]
    rows = [CompletionRow(one, (1.0,), "", "") for made in (first, second) for one in split_rows(made, ids)]
    assert join_rows(rows, PAD, None)["pixel_values"].shape == (4, 2, 3, 4, 4)
    plain = {name: value for name, value in batch([0, 0]).items() if name != "num_images"}
    llava = batch([1, 1], pixel_values=torch.rand(2, 3, 2, 2))
    mixed = [CompletionRow(one, (1.0,), "", "") for made in (plain, llava) for one in split_rows(made, ids)]
    columns = join_rows(mixed, PAD, None)
    assert columns["num_images"] == [0, 0, 1, 1]
    assert torch.equal(columns["pixel_values"], llava["pixel_values"])


def test_prompts_that_differ_in_their_images_have_keys_of_their_own() -> None:
    pictures = [Picture.new("RGB", (4, 4), color) for color in ("red", "blue", "red")]
    rows = [{"prompt": "what?", "image": one} for one in pictures]
    plain = DatasetPrompts(rows).keys().tolist()
    assert plain[0] == plain[2] != plain[1]
    stored = Dataset.from_list(rows, features=Features({"prompt": Value("string"), "image": Image()}))
    keys = DatasetPrompts(stored).keys().tolist()
    assert keys[0] == keys[2] != keys[1]
    of_two_columns = [{"prompt": "what?", "image": pictures[0], "images": [one]} for one in pictures[:2]]
    assert len(set(DatasetPrompts(of_two_columns).keys().tolist())) == 2, "the one that TRL reads counts"


def test_prompts_may_be_made_by_a_transform_of_the_data_set() -> None:
    stored = Dataset.from_list([{"question": "1+1="}, {"question": "1+2="}])
    prompts = DatasetPrompts(stored.with_transform(lambda rows: {"prompt": rows["question"]}))
    assert list(prompts.messages()) == ["1+1=", "1+2="]
    assert prompts.rows([1]) == [{"prompt": "1+2="}]


def test_images_may_be_made_by_a_transform_which_reads_whole_rows() -> None:
    """The key is of what is stored: an image that is cut at random is another one at the next start."""
    stored = Dataset.from_list([{"prompt": "what?", "file": name} for name in ("red", "blue")])

    def drawn(rows: dict[str, list[str]]) -> dict[str, list[Any]]:
        sizes = [random.randint(1, 99) for _ in rows["prompt"]]
        return {"prompt": rows["prompt"], "image": [Picture.new("RGB", (size, 4)) for size in sizes]}

    for one in (stored, stored.rename_column("file", "image")):
        made = one.with_transform(drawn)
        keys, again = DatasetPrompts(made).keys().tolist(), DatasetPrompts(made).keys().tolist()
        assert keys == again
        assert keys[0] != keys[1]


def test_a_data_set_of_ones_own_may_name_the_columns_that_it_stores_alone() -> None:
    class Painted:
        column_names = ("prompt",)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, key: Any) -> Any:
            made = [{"prompt": "what?", "image": Picture.new("RGB", (1 + place, 4))} for place in range(2)]
            return [row[key] for row in made] if isinstance(key, str) else made[key]

    assert len(set(DatasetPrompts(Painted()).keys().tolist())) == 2


def test_a_conversation_is_written_down_without_its_images() -> None:
    content = [{"type": "image", "image": object()}, {"type": "text", "text": "what?"}]
    assert texts_alone([{"role": "user", "content": content}]) == [{"role": "user", "content": "<image>what?"}]
    assert texts_alone("what?") == "what?"
