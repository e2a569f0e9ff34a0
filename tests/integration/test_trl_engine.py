"""The engine, the rows with signal, and the log-probs that a loss compares with in TRL: the tiny model on the CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")

import trl_world as world
from peft import LoraConfig

from goldilocks.losses.log_probs import StaleWeights
from goldilocks.trl import GoldilocksGRPOTrainer
from goldilocks.trl.rows import LOG_PROBS

GAP = "rollout/weights_gap"
FILTERED = {"filter_groups": {"enable": True}}
CARRIES = {"reward_funcs": world.every_third, "seed": 5}  # at gen_batch_size=8 one group of the second batch


def test_the_engine_samples_from_the_policy_that_is_trained(tmp_path: Path) -> None:
    """After two updates: the log-probs that the engine returned are the model's own, so it has the new weights."""
    trainer = world.trainer(tmp_path, sections={**FILTERED, "engine_slots": 8}, max_steps=3)
    found = world.engine_errors(trainer)
    trainer.train()
    assert max(found) < 1e-4
    assert len(found) >= 3 * 16
    assert trainer.model.config._attn_implementation == "sdpa"  # the engine has its own


def test_the_engine_samples_from_the_adapter_that_is_trained(tmp_path: Path) -> None:
    """In every round, after every update, and in a run that goes on: an adapter of all layers."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    chosen = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant", "peft_config": lora}
    gaps: list[float] = []
    for steps, resumed in ((2, None), (4, True)):
        trainer = world.trainer(tmp_path, sections={**FILTERED, "engine_slots": 8}, max_steps=steps, **chosen)
        found = world.engine_errors(trainer)
        trainer.train(resume_from_checkpoint=resumed)
        gaps += found
    assert len(gaps) >= 4 * 16
    assert sum(gaps) / len(gaps) < 1e-5
    moved = [parameter for name, parameter in trainer.model.named_parameters() if "lora_B" in name]
    assert all(parameter.abs().max() > 1e-3 for parameter in moved)


def engine_late_by(updates: int, trainer: Any) -> None:
    """Have the engine sample with the weights of so many updates ago."""
    load, sent = trainer._engine._ready, []

    def ready(model: Any, *rest: Any) -> Any:
        engine = load(model, *rest)
        sent.append({name: value.clone() for name, value in model.state_dict().items()})
        engine.load_weights(sent[max(0, len(sent) - 1 - updates)].items())
        return engine

    trainer._engine._ready = ready


def test_yesterdays_weights_end_a_run_that_asked_for_it(tmp_path: Path) -> None:
    sections = {"goldilocks": {"on_stale_weights": "error"}, "engine_slots": 8}
    trainer: Any = world.trainer(tmp_path, sections=sections, max_steps=4)
    engine_late_by(1, trainer)
    with pytest.raises(StaleWeights, match=r"most likely the engine has older weights"):
        trainer.train()
    assert trainer.state.global_step == 2  # the first had the right weights; the third saw it for the second time


def test_two_runs_with_one_seed_sample_the_same_answers(tmp_path: Path) -> None:
    one, other = (world.run(tmp_path / name, {"goldilocks": {}, "engine_slots": 5}, max_steps=2) for name in "ab")
    assert list(one._logs["completion"]) == list(other._logs["completion"])
    assert torch.equal(world.weights(one), world.weights(other))
    third = world.run(tmp_path / "c", {"goldilocks": {}, "engine_slots": 5}, max_steps=2, seed=4)
    assert list(one._logs["completion"]) != list(third._logs["completion"])


def test_without_a_section_every_batch_has_noise_of_its_own(tmp_path: Path) -> None:
    """The same four prompts in the same rows, by the same weights."""
    chosen = {"data": world.dataset(4), "shuffle_dataset": False, "learning_rate": 0.0}
    one, two = (world.run(tmp_path / str(steps), {"engine_slots": 8}, max_steps=steps, **chosen) for steps in (1, 2))
    assert list(one._logs["prompt"]) == list(two._logs["prompt"])[-len(one._logs["prompt"]) :]
    assert list(one._logs["completion"]) != list(two._logs["completion"])[-len(one._logs["completion"]) :]


def test_leaving_out_rows_without_signal_changes_no_weight(tmp_path: Path) -> None:
    """Whatever the loss is, the gradient stays: tests/unit/trl/test_gradients.py."""
    chosen = {"loss_type": "dapo", "per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 3}
    whole = world.run(tmp_path / "whole", {"goldilocks": {}}, **chosen)
    part = world.run(tmp_path / "part", {"goldilocks": {}, "only_signal": True}, **chosen)
    assert part._only_signal
    flat = [one["frac_reward_zero_std"] for one in part.state.log_history if "frac_reward_zero_std" in one]
    assert any(0 < one < 1 for one in flat)
    assert world.losses(part) == pytest.approx(world.losses(whole), abs=1e-5)
    assert torch.allclose(world.weights(part), world.weights(whole), atol=2e-4)


def test_a_batch_without_any_signal_lets_the_momentum_move_on(tmp_path: Path) -> None:
    def reward_once() -> Any:
        calls = []

        def reward(completions: list[Any], right: list[int], **columns: Any) -> list[float]:
            calls.append(completions)
            return world.reward(completions, right, **columns) if len(calls) == 1 else [0.0 for _ in completions]

        return reward

    whole = world.run(tmp_path / "whole", {"goldilocks": {}}, max_steps=2, reward_funcs=reward_once())
    signal = {"goldilocks": {}, "only_signal": True}
    part = world.run(tmp_path / "part", signal, max_steps=2, reward_funcs=reward_once())
    assert world.losses(part)[1] == world.losses(whole)[1] == 0
    assert torch.allclose(world.weights(part), world.weights(whole), atol=2e-4)
    once = world.run(tmp_path / "once", {"goldilocks": {}}, max_steps=1, reward_funcs=reward_once())
    assert not torch.allclose(world.weights(part), world.weights(once), atol=2e-3)


def test_rows_without_signal_are_computed_where_the_loss_has_a_kl_term(tmp_path: Path) -> None:
    assert not world.trainer(tmp_path, sections={"only_signal": True}, beta=0.1)._only_signal


@pytest.mark.parametrize("slots", [None, 8])
def test_carried_groups_are_trained_against_the_policy_that_wrote_them(slots: int | None, tmp_path: Path) -> None:
    """The weights are the right ones, so that a run which asked to be ended by others goes on."""
    sections = {**FILTERED, "gen_batch_size": 8, "engine_slots": slots, "goldilocks": {"on_stale_weights": "error"}}
    trainer: Any = world.trainer(tmp_path, sections=sections, max_steps=4, **CARRIES)
    moved: list[float] = []
    before = trainer.collection._output

    def output(batch: Any, *args: Any) -> Any:
        result = before(batch, *args)
        trained = [(one, group.version < trainer.state.global_step) for group in batch.groups for one in group.trained]
        rows = [trainer.collection.rows[one.uid, one.index] for one, carried in trained if carried]
        if rows:
            fresh = [not carried for _, carried in trained]
            assert result[LOG_PROBS].isnan().any(1).tolist() == fresh, "which get those of the pass that trains them"
            now = trainer._log_probs(rows)
            moved.append(max(float((a - row.tensors[LOG_PROBS]).abs().max()) for a, row in zip(now, rows, strict=True)))
        return result

    trainer.collection._output = output
    trainer.train()
    assert moved
    assert min(moved) > 1e-3, "the stored log-probs are not those of the policy of now"
    assert all(loss == loss for loss in world.losses(trainer))
    gaps = [record[GAP] for record in trainer.state.log_history if GAP in record]
    assert len(gaps) == (4 if slots else 0)
    assert max(gaps, default=0) < 1e-5


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"repetition_penalty": 1.1}, r"repetition_penalty=1\.1 is not accepted: 1\.0 with engine_slots"),
        ({"min_p": 0.1}, r"min_p=0\.1 is not accepted: None with engine_slots"),
    ],
)
def test_what_the_engine_cannot_do_is_an_error_that_names_the_key(
    chosen: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        world.trainer(tmp_path, sections={"engine_slots": 8}, **chosen)


class Sharded(GoldilocksGRPOTrainer):  # type: ignore[misc]
    """A trainer whose processes each have a part of the weights."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = True


def test_the_engine_is_refused_where_no_process_has_all_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine_slots=4 is not accepted: none with FSDP or DeepSpeed ZeRO-3"):
        world.trainer(tmp_path, ours=Sharded, sections={"engine_slots": 4})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("iterations", [1, 2])
def test_on_a_gpu_the_batch_stays_on_the_host_and_the_model_does_not(iterations: int, tmp_path: Path) -> None:
    """With two updates of a batch TRL asks for the log-probs of its rows while it makes the batch."""
    sections = {**FILTERED, "engine_slots": 8}
    trainer = world.run(tmp_path, sections, max_steps=4, num_iterations=iterations, use_cpu=False)
    assert next(trainer.model.parameters()).is_cuda
    assert all(value.device.type == "cpu" for part in trainer._buffered_inputs for value in part.values())
    assert all(map(torch.isfinite, map(torch.tensor, world.losses(trainer))))


@pytest.mark.parametrize(("slots", "rounds"), [(16, [16]), (None, [4, 4, 4, 4])], ids=["engine", "generate"])
def test_a_batch_of_one_group_fills_the_slots_of_the_engine(
    slots: int | None, rounds: list[int], tmp_path: Path
) -> None:
    """Four prompts may be open, and no group is kept; TRL's own generation has as many rows as its batch."""

    def wrong(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    filtered = {"enable": True, "max_num_gen_batches": 1}
    sections = {"filter_groups": filtered, "gen_batch_size": 4, "engine_slots": slots}
    trainer = world.trainer(tmp_path, sections=sections, per_device_train_batch_size=4, reward_funcs=wrong)
    asked: list[int] = []
    generate = trainer._generate_round

    def counted(inputs: list[Any], *args: Any) -> Any:
        asked.append(len(inputs))
        return generate(inputs, *args)

    trainer._generate_round = counted
    with pytest.raises(ValueError, match="max_num_gen_batches"):
        trainer.train()
    assert asked == rounds


# -- several updates of a batch ----------------------------------------------------------------------------------------


Tokens = tuple[int, ...]


class Watching(GoldilocksGRPOTrainer):
    """Notes, outside of TRL's and our code, what wrote each answer and what each loss compares it with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.written: dict[tuple[Tokens, Tokens], tuple[int, Tensor]] = {}  # the update and its policy's log-probs
        self.compared: list[tuple[int, int, float]] = []  # update of the loss, update that wrote, largest difference
        super().__init__(*args, **kwargs)

    def _generate_round(self, inputs: Any, *args: Any) -> Any:
        made = super()._generate_round(inputs, *args)
        for row in made[1]:
            key = tokens(row.tensors["prompt_ids"]), tokens(row.tensors["completion_ids"])
            self.written[key] = self.state.global_step, self.policy_now(row.tensors)
        return made

    @torch.no_grad()
    def policy_now(self, row: Any) -> Tensor:
        """Log-probs of the completion, by a plain forward pass."""
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        logits = self.model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        for place, advantage in enumerate(inputs["advantages"]):
            prompt = inputs["prompt_ids"][place][inputs["prompt_mask"][place].bool()]
            completion = inputs["completion_ids"][place][inputs["completion_mask"][place].bool()]
            if len(completion) and bool((advantage != 0).any()):
                wrote, expected = self.written[tokens(prompt), tokens(completion)]
                now = self.state.global_step
                if LOG_PROBS in inputs:
                    used = inputs[LOG_PROBS][place, : len(completion)]
                    self.compared.append((now, wrote, float((used - expected).abs().max())))
                else:  # TRL compares with the policy of now
                    self.compared.append((now, wrote, 0.0 if now == wrote else math.inf))
        return loss


def tokens(ids: Tensor) -> Tokens:
    return tuple(ids.tolist())


def watched(out: Path, sections: dict[str, Any], **chosen: Any) -> Watching:
    made: Any = world.trainer(out, ours=Watching, sections=sections, **chosen)
    made.train()
    return made


@pytest.mark.parametrize(("accumulation", "only_signal"), [(1, False), (2, True)])
def test_later_mini_batches_and_epochs_compare_with_the_policy_that_wrote_the_token(
    tmp_path: Path, accumulation: int, only_signal: bool
) -> None:
    """Two epochs over four parts of a batch; each part is an update, or every two of them."""
    sections = {"goldilocks": {}, "only_signal": only_signal}
    sizes = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_iterations": 2}
    updates = {"gradient_accumulation_steps": accumulation, "max_steps": 16 // accumulation}
    one = watched(tmp_path, sections, **sizes, **updates)
    assert {now - wrote for now, wrote, _ in one.compared} == set(range(8 // accumulation))
    assert max(difference for *_, difference in one.compared) < 1e-4
