"""TRL's ``GRPOTrainer`` and ours: a step with everything off, one with our engine, and what dynamic sampling makes.

    python benchmarks/trl_trainer.py [STEPS] [--larger]

The trainers run in one process on one thread, a step each in turns, in an order that changes with every step and with
the same noise, so that those with everything off do the same work at the same time. The ratio is the median over steps
of a trainer's step over that of TRL's own; the interval holds the median of all such steps with 95 % confidence. TRL's
trainer runs twice: what the second one is off 1 is noise. ``--larger``: 6.8 million parameters and answers of 64 tokens
in the place of the tiny model's 8.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from goldilocks.tasks.arithmetic import Arithmetic
from goldilocks.tasks.tiny_model import character_tokenizer, tiny_model
from goldilocks.trl import GoldilocksGRPOTrainer

N = 8


@dataclass(frozen=True)
class Size:
    """A model in a folder, and a batch for it."""

    model: Path
    groups: int
    answer: int


ARMS: dict[str, tuple[type[GRPOTrainer], dict[str, Any]]] = {
    "GRPOTrainer": (GRPOTrainer, {}),
    "GRPOTrainer again": (GRPOTrainer, {}),
    "no section": (GoldilocksGRPOTrainer, {}),
    "an empty section": (GoldilocksGRPOTrainer, {"goldilocks": {}}),
    "engine, only signal": (GoldilocksGRPOTrainer, {"goldilocks": {}, "engine_slots": 32 * N, "only_signal": True}),
}


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(one[0]["content"].strip() == truth) for one, truth in zip(completions, answer, strict=True)]


def questions() -> Dataset:
    problems = Arithmetic().problems("train", 1024, seed=0)
    rows = [{"prompt": [{"role": "user", "content": one.question}], "answer": one.answer} for one in problems]
    return Dataset.from_list(rows)


def trainer(kind: type[GRPOTrainer], size: Size, out: Path, steps: int, **sections: Any) -> GRPOTrainer:
    """Return a trainer that logs every step and saves nothing."""
    arguments = GRPOConfig(
        output_dir=str(out),
        num_generations=N,
        per_device_train_batch_size=size.groups * N,
        max_completion_length=size.answer,
        learning_rate=3e-4,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
    )
    made = kind(model=str(size.model), reward_funcs=right, args=arguments, train_dataset=questions(), **sections)
    made.remove_callback(PrinterCallback)
    return made


@dataclass
class Turns(TrainerCallback):
    """Lets one trainer of several go on from the beginning of a step to that of the next, and measures it."""

    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.waits.release()
        self.may_go.acquire()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.waits.release()

    def begin(self, one: GRPOTrainer) -> None:
        """Have the trainer set itself up, as far as its first step."""
        one.add_callback(self)
        threading.Thread(target=one.train, daemon=True).start()
        self.waits.acquire()

    def step(self, seed: int) -> None:
        """Have the trainer take a step, from a random state that is the same for all."""
        torch.manual_seed(seed)
        wall, cpu = time.perf_counter(), time.process_time()
        self.may_go.release()
        self.waits.acquire()
        self.seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.process_time() - cpu)


def in_turns(size: Size, out: Path, steps: int) -> dict[str, Turns]:
    """Return the times of each arm's steps, all but the first."""
    turns = {name: Turns() for name in ARMS}
    for name, (kind, sections) in ARMS.items():
        turns[name].begin(trainer(kind, size, out / name, steps + 1, **sections))
    names = list(ARMS)
    for step in range(steps + 1):
        for place in range(len(names)):
            turns[names[(step + place) % len(names)]].step(seed=step)
    for one in turns.values():
        del one.seconds[0], one.cpu_seconds[0]
    return turns


def median_ratio(own: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median of the paired ratios and the interval between the ranks that hold it with 95 %."""
    ratios = sorted(a / b for a, b in zip(own, theirs, strict=True))
    rank = max(0, math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2))
    return f"{statistics.median(ratios):.3f} ({ratios[rank]:.3f} to {ratios[-1 - rank]:.3f})"


def print_overhead(turns: dict[str, Turns]) -> None:
    theirs = turns["GRPOTrainer"]
    print(f"{'':<20} {'ms per step':>12} {'ratio':>24} {'CPU ms':>9} {'ratio':>24}")
    for name, own in turns.items():
        wall, cpu = median_ratio(own.seconds, theirs.seconds), median_ratio(own.cpu_seconds, theirs.cpu_seconds)
        medians = [1000 * statistics.median(times) for times in (own.seconds, own.cpu_seconds)]
        print(f"{name:<20} {medians[0]:>12.1f} {wall:>24} {medians[1]:>9.1f} {cpu:>24}")


def print_informative(size: Size, out: Path, steps: int) -> None:
    """Print the groups with a gradient that were trained, per 1,000 rollouts generated."""
    print(f"\n{'32 groups a batch':<20} {'rollouts':>9} {'informative groups trained per 1,000 rollouts':>46}")
    for name, sections in {
        "everything off": {"goldilocks": {}},
        "dynamic sampling": {"filter_groups": {"enable": True}},
    }.items():
        one = trainer(GoldilocksGRPOTrainer, size, out / name, steps, **sections)
        one.train()
        log = [record for record in one.state.log_history if "loss" in record]
        rollouts = log[-1]["accounts/generated_rollouts"]
        trained = sum(size.groups * (1 - record["frac_reward_zero_std"]) for record in log)
        print(f"{name:<20} {rollouts:>9,.0f} {1000 * trained / rollouts:>46.1f}")


def larger(out: Path) -> Size:
    """Make a model of some million parameters, untrained, whose answers seldom end before their limit."""
    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{model.num_parameters() / 1e6:.1f} million parameters, 64 tokens an answer, 8 groups of {N}")
    return Size(out, groups=8, answer=64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int, nargs="?", default=24)
    parser.add_argument("--larger", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if given.larger:
            print_overhead(in_turns(larger(out / "model"), out, given.steps))
            return
        size = Size(tiny_model("arithmetic"), groups=32, answer=8)
        print_overhead(in_turns(size, out, given.steps))
        print_informative(size, out, given.steps)


if __name__ == "__main__":
    main()
