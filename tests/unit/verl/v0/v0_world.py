"""A small world for verl's V0: the real trainer and its real ``fit`` over stand-ins of its workers.

A prompt's content is its pass rate in percent. An answer is a few tokens, right or wrong by a hash of the prompt and of
how often it has been asked. Each update makes every token less likely by the same factor.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch.utils.data import Dataset
from transformers import GenerationConfig
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches

from goldilocks import RayPPOTrainerWithSampling, TrainerConfig

PROMPT, RESPONSE = 4, 6
INITIAL_LOG_PROB, UPDATE = -1.0, 0.125


class Prompts(Dataset):
    """Prompts with these pass rates."""

    def __init__(self, pass_rates: list[int]) -> None:
        self.pass_rates = pass_rates

    def __len__(self) -> int:
        return len(self.pass_rates)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "raw_prompt": [{"role": "user", "content": f"{index}"}],
            "data_source": "world",
            "reward_model": {"ground_truth": str(self.pass_rates[index])},
            "extra_info": {"index": index},
            "index": index,
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }


class Engine:
    """Stands for verl's ``AgentLoopManager``: every row of a batch is answered and graded."""

    STANDS_FOR = ("generate_sequences",)

    def __init__(self, workers: int, actor: Workers) -> None:
        self.agent_loop_workers = [None] * workers
        self.actor = actor
        self.calls: list[int] = []
        self.asked: Counter[int] = Counter()

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        assert len(prompts) % len(self.agent_loop_workers) == 0, "verl splits a batch evenly or not at all"
        self.calls.append(len(prompts))
        lengths, right = [], []
        rows = prompts.non_tensor_batch
        for index, model in zip(rows["index"], rows["reward_model"], strict=True):
            self.asked[index] += 1
            draw = random.Random(f"{index}/{self.asked[index]}")
            right.append(float(draw.random() * 100 < float(model["ground_truth"])))
            lengths.append(draw.randint(1, RESPONSE))
        answers = _answered(np.array(lengths), np.array(right), rows["raw_prompt"])
        answers.batch["rollout_log_probs"] = answers.batch["response_mask"] * self.actor.log_prob
        return answers


def _answered(lengths: np.ndarray, right: np.ndarray, prompts: np.ndarray) -> DataProto:
    rows = len(lengths)
    mask = torch.arange(RESPONSE)[None] < torch.tensor(lengths)[:, None]
    attention = torch.cat([torch.ones(rows, PROMPT, dtype=torch.long), mask.long()], 1)
    ids = torch.randint(1, 9, (rows, PROMPT + RESPONSE)) * attention
    scores = torch.zeros(rows, RESPONSE)
    scores[torch.arange(rows), torch.tensor(lengths) - 1] = torch.tensor(right, dtype=torch.float32)
    nothing = np.empty(rows, dtype=object)
    nothing[:] = [{} for _ in range(rows)]
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :PROMPT],
            "responses": ids[:, PROMPT:],
            "response_mask": mask.long(),
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "rm_scores": scores,
        },
        # verl makes arrays of what a reward function returns; that of math_dapo returns a text as well
        non_tensors={
            "acc": right,
            "pred": np.full(len(right), "1/2"),
            "raw_prompt": prompts,
            "multi_modal_inputs": nothing,
        },
        meta_info={"timing": {"agent_loop/slowest/generate_sequences": 1.0}, "reward_extra_keys": ["acc", "pred"]},
    )


class Workers:
    """Stands for verl's groups of ``ActorRolloutRefWorker`` and ``TrainingWorker``.

    A batch is split over ``ranks`` as they do; ``trained`` are the batches of all updates.
    """

    STANDS_FOR = (
        "compute_log_prob",
        "compute_ref_log_prob",
        "infer_batch",
        "update_actor",
        "train_mini_batch",
        "save_checkpoint",
        "load_checkpoint",
    )

    def __init__(self, ranks: int) -> None:
        self._dispatch_info = {"actor": list(range(ranks))}
        self.ranks, self.micro_batch = ranks, 1
        self.trained: list[Any] = []

    @property
    def log_prob(self) -> float:
        """Return the log-prob of every token after the updates so far."""
        return INITIAL_LOG_PROB - UPDATE * len(self.trained)

    def compute_log_prob(self, data: Any) -> Any:
        return self._per_token(data, log_probs=self.log_prob, entropy=0.5)

    def compute_ref_log_prob(self, data: Any) -> Any:
        return self._per_token(data, log_probs=INITIAL_LOG_PROB)

    def infer_batch(self, data: Any) -> Any:
        return SimpleNamespace(get=lambda: self._per_token(data, values=0.25))

    def update_actor(self, data: Any) -> Any:
        return self._train(data)

    def train_mini_batch(self, data: Any) -> Any:
        return SimpleNamespace(get=lambda: self._train(data))

    def save_checkpoint(
        self, local_path: str, hdfs_path: None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        Path(local_path).mkdir(parents=True)  # which fails where weights are saved twice

    def load_checkpoint(self, local_path: str, hdfs_path: None = None, del_local_after_load: bool = False) -> None:
        assert Path(local_path).is_dir()

    def _train(self, batch: Any) -> Any:
        mini_batch, rows = tu.get(batch, "mini_batch_size"), batch.shape[0]
        assert rows % mini_batch == 0
        self._divide(mini_batch)
        self.trained.append(batch)
        return tu.get_tensordict({}, {"metrics": {"mfu": 0.0, "mini_batches": rows // mini_batch}})

    def _divide(self, rows: int) -> None:
        """Divide rows among the ranks, and a rank's among its micro-batches, as verl does."""
        assert rows % self.ranks == 0
        share = tu.get_tensordict({"row": torch.zeros(rows // self.ranks)}, {"use_dynamic_bsz": False})
        tu.assign_non_tensor(share, micro_batch_size_per_gpu=self.micro_batch)
        prepare_micro_batches(share)

    def _per_token(self, batch: Any, **fields: float) -> Any:
        self._divide(batch.shape[0])
        ids = batch["input_ids"]
        values = {
            name: torch.nested.nested_tensor_from_jagged(torch.full(ids.values().shape, value), ids.offsets())
            for name, value in fields.items()
        }
        assert batch["temperature"] > 0
        metrics = {"mfu": 0.0} if tu.get(batch, "global_token_num") is not None else {}  # as verl's workers have it
        return tu.get_tensordict(values, {"metrics": metrics})


class World:
    """A trainer over the stand-ins above; ``steps`` are the metrics that verl logged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 1, agents: int = 1) -> None:
        self.actor, self.critic = Workers(ranks), Workers(ranks)
        self.engine = Engine(agents, self.actor)
        self.steps: list[dict[str, float]] = []
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(RayPPOTrainer, "init_workers", lambda trainer: self._init_workers(trainer))
        monkeypatch.setattr("verl.utils.tracking.Tracking", lambda **kwargs: SimpleNamespace(log=self._log))

    def trainer(self, config: TrainerConfig, pass_rates: list[int], **arguments: Any) -> RayPPOTrainerWithSampling:
        """Return our trainer over these workers; a test calls its ``fit``."""
        GenerationConfig(eos_token_id=[0, 9]).save_pretrained(config.actor_rollout_ref.model["path"])
        return RayPPOTrainerWithSampling(
            config=config,
            tokenizer=SimpleNamespace(eos_token_id=0, pad_token_id=0, decode=lambda ids, **_: ""),
            role_worker_mapping={Role.ActorRolloutRef: object},
            resource_pool_manager=SimpleNamespace(get_n_gpus=lambda: 1),
            train_dataset=Prompts(pass_rates),
            **arguments,
        )

    def _init_workers(self, trainer: Any) -> None:
        trainer.actor_rollout_wg = trainer.ref_policy_wg = self.actor
        trainer.critic_wg = self.critic
        trainer.async_rollout_manager = self.engine
        trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None, update_weights=lambda version: None)
        trainer.llm_server_manager = SimpleNamespace(start_profile=lambda: None, stop_profile=lambda: None)
        trainer.distillation_config = None

    def _log(self, data: dict[str, float], step: int) -> None:
        self.steps.append({**data, "step": step})
