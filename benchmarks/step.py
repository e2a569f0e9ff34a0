"""A step of the trainer beside the floor: the same work in one process, with nothing between the model and its rows.

    python benchmarks/step.py --device cuda                   # SmolLM2, 64 prompts × 8 rollouts
    python benchmarks/step.py --device cuda --model tiny
    python benchmarks/step.py --device cpu --model tiny --prompts 32

The trainer is ``goldilocks train grpo``. The floor is our rollout engine, the task's grader, then one forward and
backward pass over the rows that have a signal, sorted by length, and an optimizer step. Same model, data, batch size
and lengths; both are timed from their third step on, and the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldilocks.config.recipes import choose, compose_config
from goldilocks.drive.driver import TIMED
from goldilocks.engine import Engine, SamplingParams
from goldilocks.engine.cpu import avoid_cudnn, threads_for
from goldilocks.launch import preflight
from goldilocks.tasks.registry import compute_score
from goldilocks.verl.patches.speed import cut_by_length

WARM_UP = 2
TASKS = {"smollm2": "sums", "tiny": "arithmetic"}
PARTS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")


def words(args: argparse.Namespace) -> list[str]:
    """The run that is timed."""
    return [
        "grpo",
        f"task={TASKS[args.model]}",
        f"device={args.device}",
        f"data.train_batch_size={args.prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        f"actor_rollout_ref.rollout.n={args.n}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *args.words,
    ]


def trainer(args: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of the trainer's steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "goldilocks.cli", "train", *words(args), "--runs", folder, "--name", "run"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            log = Path(folder, "run", "log")
            sys.exit(done.stdout + done.stderr + (log.read_text()[-4000:] if log.exists() else ""))
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    return [step for step in steps if "timing_s/step" in step][WARM_UP:]


@dataclass
class Floor:
    """One process with the model twice: in fp32 to train, and in the engine's precision to generate."""

    config: Any
    device: str
    n: int
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        avoid_cudnn()  # as the trainer does
        path, rollout = self.config.actor_rollout_ref.model.path, self.config.actor_rollout_ref.rollout
        self.half = self.device == "cuda" and rollout.dtype != "float32"
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        copy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if self.half else torch.float32)
        self.model.to(self.device)
        if self.device == "cpu":
            torch.set_num_threads(threads_for(self.model, 1))  # as the trainer does
        data = self.config.data
        self.limit = data.max_response_length
        length = data.max_prompt_length + data.max_response_length + 1
        ends = [self.tokenizer.eos_token_id]
        self.engine = Engine(
            copy.to(self.device), slots=rollout.max_num_seqs, max_length=length, eos_ids=ends,
            pad_id=self.tokenizer.pad_token_id, device=self.device,
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.actor_rollout_ref.actor.optim.lr)

    def generate(self, rows: list[dict[str, Any]], step: int) -> tuple[list[Any], np.ndarray]:
        """Prompts and answers, and the reward of each answer."""
        prompts = [
            self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            for row in rows
        ]
        for i, prompt in enumerate(prompts):
            for k in range(self.n):
                seed = (step * len(rows) + i) * self.n + k
                self.engine.submit(f"{i}-{k}", prompt, SamplingParams(max_tokens=self.limit, seed=seed))
        answers: list[Any] = [[None] * self.n for _ in rows]
        rewards = np.zeros((len(rows), self.n))
        while self.engine.busy:
            for done in self.engine.step():
                i, k = map(int, done.request_id.split("-"))
                answers[i][k] = (prompts[i], list(done.token_ids))
                text = self.tokenizer.decode(done.token_ids, skip_special_tokens=True)
                truth = rows[i]["reward_model"]["ground_truth"]
                rewards[i, k] = compute_score(rows[i]["data_source"], text, truth, rows[i]["extra_info"])["score"]
        self.tokens += [len(answer) for group in answers for _, answer in group]
        return answers, rewards

    def update(self, answers: list[Any], rewards: np.ndarray) -> int:
        """One optimizer step over the rows that have a signal; how many there were."""
        mean, deviation = rewards.mean(1, keepdims=True), rewards.std(1, keepdims=True, ddof=1)
        advantages = (rewards - mean) / (deviation + 1e-6)
        rows = [
            (*answers[i][k], advantages[i, k])
            for i, k in zip(*np.nonzero(np.broadcast_to(deviation > 0, rewards.shape)), strict=True)
        ]
        total = sum(len(answer) for group in answers for _, answer in group)
        limit = self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        for part in cut_by_length([len(prompt) + len(answer) for prompt, answer, _ in rows], limit) if rows else []:
            self._loss([rows[place] for place in part], total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.engine.load_weights(self.model.state_dict().items())
        return len(rows)

    def _loss(self, rows: list[Any], total: int) -> torch.Tensor:
        width = max(len(prompt) + len(answer) for prompt, answer, _ in rows)
        first = min(len(prompt) for prompt, _, _ in rows) - 1
        ids, inside = np.zeros((len(rows), width), np.int64), np.zeros((2, len(rows), width), np.float32)
        for place, (prompt, answer, _) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[place, :end] = prompt + answer
            inside[0, place, :end] = 1
            inside[1, place, len(prompt) : end] = 1
        tokens, mask = torch.from_numpy(ids).to(self.device), torch.from_numpy(inside).to(self.device)
        weight = torch.tensor([row[2] for row in rows], dtype=torch.float32, device=self.device).unsqueeze(1)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            hidden = self.model.model(tokens, attention_mask=mask[0]).last_hidden_state[:, first:-1]
            logits = self.model.lm_head(hidden)
        labels = tokens[:, first + 1 :]
        lost = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        ratio = torch.exp(-lost.view(labels.shape) + lost.view(labels.shape).detach())
        return -(ratio * weight * mask[1][:, first + 1 :]).sum() / total


def floor(args: argparse.Namespace) -> tuple[list[dict[str, float]], float]:
    """The seconds of each step's parts, and the mean length of an answer."""
    config = compose_config(choose(words(args), args.device))
    preflight.provide(config)
    rows = pq.read_table(config.data.train_files).to_pylist()
    one = Floor(config, args.device, args.n)
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    steps = []
    for step in range(args.steps):
        chosen = [rows[(step * args.prompts + i) % len(rows)] for i in range(args.prompts)]
        started = time.perf_counter()
        answers, rewards = one.generate(chosen, step)
        wait()
        generated = time.perf_counter()
        trained = one.update(answers, rewards)
        wait()
        steps.append({"gen": generated - started, "update_actor": time.perf_counter() - generated, "rows": trained})
    return steps[WARM_UP:], float(np.mean(one.tokens))


def median(steps: list[dict[str, float]], key: str) -> float:
    """Of the steps that have the figure; 0 if none has."""
    found = [step[key] for step in steps if key in step]
    return statistics.median(found) if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=list(TASKS), default="smollm2")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("words", nargs="*", help="settings for the trainer, key=value")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    least, length = floor(args)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    steps = trainer(args)
    whole = median(steps, "timing_s/step")
    bare = [{**step, "step": step["gen"] + step["update_actor"]} for step in least]
    print(f"{args.model}, {args.device}, {args.prompts} prompts × {args.n}, {len(steps)} steps after {WARM_UP}")
    print(f"{'seconds':>16} {'trainer':>9} {'floor':>9}")
    for part in PARTS:
        print(f"{part:>16} {median(steps, f'timing_s/{part}'):>9.3f} {median(bare, part):>9.3f}")
        for inside in TIMED if part == "gen" else ():
            print(f"{'· ' + inside.removeprefix('timing_s/gen_'):>16} {median(steps, inside):>9.3f}")
    known = sum(median(steps, f"timing_s/{part}") for part in PARTS)
    print(f"{'rest':>16} {whole - known:>9.3f} {0:>9.3f}")
    print(f"{'step':>16} {whole:>9.3f} {median(bare, 'step'):>9.3f}   ratio {whole / median(bare, 'step'):.2f}")
    print(f"{'rows computed':>16} {median(steps, 'train/rows_computed'):>9.0f} {median(bare, 'rows'):>9.0f}")
    print(f"{'answer tokens':>16} {median(steps, 'response_length/mean'):>9.1f} {length:>9.1f}")


if __name__ == "__main__":
    main()
