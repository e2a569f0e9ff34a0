"""The quicker update has the loss and the gradients of verl's own, on verl's own engine."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested
from verl_world import nested

from goldilocks.verl.patches import speed

WORDS = 50


class Engine(FSDPEngineWithLMHead):
    """verl's engine around a model in this process: its own way from rows to gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module, self.scaler, self.pad_to_length = model, None, False
        self.use_ulysses_sp, self.ulysses_sequence_parallel_size = False, 1
        self._autocast_dtype = torch.float32
        self.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)

    def get_data_parallel_group(self):
        return torch.distributed.group.WORLD

    def get_data_parallel_size(self):
        return 1

    def _gradient_sync_context(self, is_last_micro_batch):
        return nullcontext()


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(path), 1), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """As the platform cpu says, which is chosen once in a process."""
    for module in ("engine.fsdp.transformer_impl", "engine.utils"):
        found = importlib.import_module(f"verl.workers.{module}")
        for name in ("get_device_id", "get_device_name"):
            monkeypatch.setattr(found, name, lambda: "cpu", raising=False)
    monkeypatch.setattr("verl.utils.seqlen_balancing.get_device_name", lambda: "cpu")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=64, **shape)
    config._attn_implementation = "sdpa"
    return Qwen2ForCausalLM(config)


def batch_of(rows=24, seed=0, signal=0.5):
    """Rows of different lengths, some of them with advantages of zero, some with a hole in their mask."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    prompts = [torch.randint(3, WORDS, (rng.randint(2, 9),)) for _ in range(rows)]
    responses = [torch.randint(3, WORDS, (rng.randint(1, 20),)) for _ in range(rows)]
    inputs = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones_like(row) for row in responses]
    for mask in masks[::5]:
        mask[len(mask) // 2 :] = 0
    values = [rng.gauss(0, 1) if rng.random() < signal else 0.0 for _ in range(rows)]
    fields = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested(inputs),
        "position_ids": nested([torch.arange(len(row)) for row in inputs]),
        "response_mask": nested(masks),
        "loss_mask": nested(masks),
        "advantages": nested([v * torch.ones(len(row)) for v, row in zip(values, responses, strict=True)]),
    }
    data = TensorDict(fields, batch_size=rows)
    settings = {"use_remove_padding": False, "use_dynamic_bsz": True, "max_token_len_per_gpu": 160}
    tu.assign_non_tensor(data, temperature=1.0, global_batch_size=rows, calculate_entropy=False, **settings)
    return data


def actor(**changes):
    made = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "loss_scale_factor": None}
    return FSDPActorConfig(**{**made, "use_dynamic_bsz": True, **changes})


def update(model, data, loss):
    """The gradient and the loss of one update; nothing is stepped."""
    model.zero_grad(set_to_none=True)
    output = Engine(model).forward_backward_batch(data, loss)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return gradient, sum(output["loss"]), output["metrics"]


def old_log_probs(model, data):
    """As the trainer computes them: a pass of its own."""
    output = Engine(model).forward_backward_batch(data, None, forward_only=True)
    return response_from_nested(output["model_output"]["log_probs"], data["response_mask"])


ENGINE = "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead"
REPLACED = {
    "verl.workers.engine.utils.rearrange_micro_batches": speed.rows_by_length,
    f"{ENGINE}.prepare_model_inputs": speed.ask_for_a_window,
    f"{ENGINE}.prepare_model_outputs": speed.read_a_window,
}


def verls_own(name):
    return inspect.unwrap(pkgutil.resolve_name(name))


@pytest.fixture(autouse=True)
def _verl_as_it_is(monkeypatch):
    """What is compared with is verl's own, also where the process has our patches."""
    for name in REPLACED:
        monkeypatch.setattr(name, verls_own(name))


@pytest.fixture
def quick(monkeypatch):
    """Every patch of the update."""
    for name, replace in REPLACED.items():
        monkeypatch.setattr(name, replace(verls_own(name)))
    return speed.own_log_probs(ppo_loss)


def whole(data):
    return {speed.WHOLE_ROWS: len(data), speed.WHOLE_TOKENS: int(data["response_mask"].values().sum())}


def with_signal(data):
    found = [place for place in range(len(data)) if data["advantages"][place].any()]
    part = tu.index_select_tensor_dict(data, found)
    tu.assign_non_tensor(part, **whole(data))
    return part


def assert_equal(one, other):
    (gradient, loss, _), (other_gradient, other_loss, _) = one, other
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-4, atol=1e-7)
    assert loss == pytest.approx(other_loss, rel=1e-4, abs=1e-7)


LOSSES = [
    ({"loss_agg_mode": "token-mean"}),
    ({"loss_agg_mode": "seq-mean-token-mean"}),
    ({"loss_agg_mode": "seq-mean-token-sum"}),
    ({"loss_agg_mode": "seq-mean-token-mean", "policy_loss": {"loss_mode": "gspo"}}),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_rows_with_signal_in_one_pass_have_the_gradient_of_the_whole_batch_in_two(model, loss, request):
    config, data = actor(**loss), batch_of()
    data["old_log_probs"] = old_log_probs(model, data)
    expected = update(model, data, partial(ppo_loss, config))
    found = update(model, with_signal(batch_of()), partial(request.getfixturevalue("quick"), config))
    assert expected[0].abs().max() > 1e-4
    assert_equal(found, expected)


@pytest.mark.parametrize("older_part", ["every second row", "the beginning of each row"])
def test_what_an_older_policy_wrote_keeps_its_log_probs(model, request, older_part):
    config, data = actor(), batch_of(signal=1.0)
    fresh = old_log_probs(model, data)
    stale = []
    for place, row in enumerate(fresh.unbind()):
        first = len(row) * (place % 2) if older_part == "every second row" else len(row) // 2
        stale.append(torch.arange(len(row)) < first)
    older = [torch.where(old, row - 0.3, row) for row, old in zip(fresh.unbind(), stale, strict=True)]
    data["old_log_probs"] = nested(older)
    expected = update(model, data, partial(ppo_loss, config))
    quick = request.getfixturevalue("quick")
    data = batch_of(signal=1.0)
    data["old_log_probs"] = nested([torch.where(old, row, torch.nan) for row, old in zip(older, stale, strict=True)])
    tu.assign_non_tensor(data, **whole(data))
    assert_equal(update(model, data, partial(quick, config)), expected)


def test_without_the_size_of_the_whole_batch_the_loss_is_verls(model, request):
    config = actor(entropy_coeff=0.01)
    data = batch_of()
    tu.assign_non_tensor(data, calculate_entropy=True)
    data["old_log_probs"] = old_log_probs(model, data)
    expected = update(model, data, partial(ppo_loss, config))
    found = update(model, data, partial(request.getfixturevalue("quick"), config))
    assert_equal(found, expected)
    assert reduce_metrics(found[2]).keys() == reduce_metrics(expected[2]).keys()


class WithoutWindows(torch.nn.Module):
    """A model that computes the logits of every token."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids, use_cache):
        return self.model(input_ids, attention_mask, position_ids, use_cache=use_cache)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["nested", "V0 pads responses", "a model without windows", "entropy_checkpointing"])
def test_log_probs_and_entropies_of_responses_are_those_of_the_whole_rows(model, temperature, kind, request):
    data = batch_of()
    tu.assign_non_tensor(data, temperature=temperature, calculate_entropy=True)
    expected = Engine(model).forward_backward_batch(data, None, forward_only=True)["model_output"]
    request.getfixturevalue("quick")
    if kind == "V0 pads responses":
        data["responses"] = torch.nested.to_padded_tensor(data["responses"], padding=0)
    engine = Engine(WithoutWindows(model) if kind == "a model without windows" else model)
    engine.engine_config.entropy_checkpointing = kind == "entropy_checkpointing"
    found = engine.forward_backward_batch(data, None, forward_only=True)["model_output"]
    for name in ("log_probs", "entropy"):
        one, other = (response_from_nested(side[name], data["response_mask"]) for side in (found, expected))
        torch.testing.assert_close(one.values(), other.values(), rtol=1e-4, atol=1e-5)


def test_the_distance_to_the_rollout_engine_is_measured_in_the_update(model, request):
    config, data = actor(), batch_of()
    data["rollout_log_probs"] = old_log_probs(model, data)
    tu.assign_non_tensor(data, **whole(data))
    _, _, metrics = update(model, data, partial(request.getfixturevalue("quick"), config))
    assert max(metrics["rollout_probs_diff_max"]) < 1e-5


def test_the_gap_to_the_rollout_engine_is_told_apart_from_the_way_since_an_older_policy(model, request):
    """Every second row is an older policy's; the engine's log-probs are a quarter below the trainer's in the others."""
    config, data = actor(), batch_of(signal=1.0)
    fresh = old_log_probs(model, data)
    older = [place % 2 == 0 for place in range(len(data))]
    rows = zip(fresh.unbind(), older, strict=True)
    data["old_log_probs"] = nested([row if old else torch.full_like(row, torch.nan) for row, old in rows])
    rows = zip(fresh.unbind(), older, strict=True)
    data["rollout_log_probs"] = nested([row - (3.0 if old else 0.25) for row, old in rows])
    tu.assign_non_tensor(data, **whole(data))
    _, _, metrics = update(model, data, partial(request.getfixturevalue("quick"), config))
    tokens = sum(int(mask.sum()) for mask, old in zip(data["response_mask"].unbind(), older, strict=True) if not old)
    assert sum(metrics[speed.GAP_TOKENS]) == tokens > 0
    assert sum(metrics[speed.GAP_SUM]) / tokens == pytest.approx(0.25, abs=1e-4)
    others = sum(int(mask.sum()) for mask, old in zip(data["response_mask"].unbind(), older, strict=True) if old)
    assert sum(metrics[speed.MOVED_TOKENS]) == others > 0
    assert sum(metrics[speed.MOVED_SUM]) / others == pytest.approx(3.0, abs=1e-4)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=80), st.integers(100, 1000), st.integers(0, 500))
def test_parts_have_every_row_once_and_keep_to_the_limit(lengths, limit, start):
    parts = speed.cut_by_length(lengths, limit, start)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[place] for place in part) <= limit for part in parts)


def test_micro_batches_have_the_rows_that_verl_selects():
    data = batch_of(rows=6)
    data["of_pictures"] = tu.nested_tensor_from_tensor_list([torch.rand(3, 2 + row) for row in range(6)], ragged_idx=2)
    data["weights"] = torch.rand(6, 2)
    parts = [[4, 0], [5], [1, 2, 3]]
    for ours, part in zip(speed._divided(data, parts), parts, strict=True):
        verls = tu.index_select_tensor_dict(data, part)
        assert set(ours.keys()) == set(verls.keys())
        for key, value in verls.items():
            if getattr(value, "is_nested", False):
                assert [row.tolist() for row in ours[key].unbind()] == [row.tolist() for row in value.unbind()]
            elif isinstance(value, torch.Tensor):
                assert torch.equal(ours[key], value)
            else:
                assert tu.unwrap_non_tensor_data(ours[key]) == tu.unwrap_non_tensor_data(value)


def test_rows_of_like_length_are_computed_together():
    lengths = [10, 90] * 50
    assert speed.cut_by_length(lengths, 10_000, start=100) == [list(range(0, 100, 2)), list(range(1, 100, 2))]
    assert speed.cut_by_length(lengths, 10_000, start=100_000) == [list(range(100))]
