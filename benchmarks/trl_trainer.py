"""TRL's ``GRPOTrainer`` and ours: a step with everything off, one with our engine, and what dynamic sampling makes.

    python benchmarks/trl_trainer.py [STEPS] [REPEATS]

Both trainers run in one process, in turns, so that a busy machine slows both down; the overhead is a ratio of medians
over all steps but each run's first.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from goldilocks.tasks.arithmetic import Arithmetic
from goldilocks.tasks.tiny_model import make
from goldilocks.trl import GoldilocksGRPOTrainer

N = 8


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(one[0]["content"].strip() == truth) for one, truth in zip(completions, answer, strict=True)]


def questions() -> Dataset:
    problems = Arithmetic().problems("train", 1024, seed=0)
    rows = [{"prompt": [{"role": "user", "content": one.question}], "answer": one.answer} for one in problems]
    return Dataset.from_list(rows)


def train(
    kind: type[GRPOTrainer], model: Path, out: Path, steps: int, seed: int, **sections: Any
) -> list[dict[str, Any]]:
    """Return what TRL logged of each step."""
    arguments = GRPOConfig(
        output_dir=str(out),
        num_generations=N,
        per_device_train_batch_size=32 * N,
        max_completion_length=8,
        learning_rate=3e-4,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        seed=seed,
    )
    trainer = kind(model=str(model), reward_funcs=right, args=arguments, train_dataset=questions(), **sections)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def informative(log: list[dict[str, Any]], rollouts: float) -> float:
    """Return the groups with a gradient that were trained, per 1,000 rollouts generated."""
    return 1000 * sum(32 * (1 - record["frac_reward_zero_std"]) for record in log) / rollouts


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    steps, repeats = (*given, *(8, 3)[len(given) :])
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        make(out / "model")
        runs: dict[str, tuple[type[GRPOTrainer], dict[str, Any]]] = {
            "GRPOTrainer": (GRPOTrainer, {}),
            "no section": (GoldilocksGRPOTrainer, {}),
            "an empty section": (GoldilocksGRPOTrainer, {"goldilocks": {}}),
            "engine, only signal": (
                GoldilocksGRPOTrainer,
                {"goldilocks": {}, "engine_slots": 32 * N, "only_signal": True},
            ),
        }
        for seed in range(repeats):
            for name, (kind, sections) in runs.items():
                log = train(kind, out / "model", out / f"{name}{seed}", steps, seed, **sections)
                seconds.setdefault(name, []).extend(record["step_time"] for record in log[1:])
        theirs = statistics.median(seconds["GRPOTrainer"])
        print(f"{'everything off':<24} {'ms per step':>12} {'ratio':>7}")
        for name, values in seconds.items():
            own = statistics.median(values)
            print(f"{name:<24} {1000 * own:>12.1f} {own / theirs:>7.3f}")
        plain = train(GoldilocksGRPOTrainer, out / "model", out / "plain", steps, 0, goldilocks={})
        filtered = train(GoldilocksGRPOTrainer, out / "model", out / "on", steps, 0, filter_groups={"enable": True})
    print(f"\n{'32 groups a batch':<24} {'rollouts':>9} {'informative groups trained per 1,000 rollouts':>46}")
    for name, log in (("everything off", plain), ("dynamic sampling", filtered)):
        generated = log[-1]["accounts/generated_rollouts"]
        print(f"{name:<24} {generated:>9,.0f} {informative(log, generated):>46.1f}")


if __name__ == "__main__":
    main()
