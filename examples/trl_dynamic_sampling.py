"""Dynamic sampling in TRL: ``GRPOTrainer`` and the same trainer that refills what teaches nothing, side by side.

    python examples/trl_dynamic_sampling.py

trains the tiny model of ``goldilocks model make`` on arithmetic, on the CPU, and prints what each made of its rollouts.
With ``MODEL`` and a data set of your own, everything below stays the same.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig

from goldilocks.tasks.arithmetic import Arithmetic
from goldilocks.tasks.tiny_model import tiny_model
from goldilocks.trl import GoldilocksGRPOTrainer

STEPS = int(os.environ.get("STEPS", "10"))


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for the right number, 0 for anything else."""
    return [float(one[0]["content"].strip() == truth) for one, truth in zip(completions, answer, strict=True)]


def questions() -> Dataset:
    problems = Arithmetic().problems("train", 512, seed=0)
    rows = [{"prompt": [{"role": "user", "content": one.question}], "answer": one.answer} for one in problems]
    return Dataset.from_list(rows)


def train(model: str, out: Path, **sections: Any) -> dict[str, float]:
    """Train, and return the last step's metrics."""
    arguments = GRPOConfig(
        output_dir=str(out),
        num_generations=8,
        per_device_train_batch_size=128,
        max_completion_length=8,
        learning_rate=3e-4,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
    )
    trainer = GoldilocksGRPOTrainer(
        model=model, reward_funcs=right, args=arguments, train_dataset=questions(), **sections
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record][-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        model = os.environ.get("MODEL") or str(tiny_model("arithmetic"))
        runs = {
            "everything off": train(model, out / "off", goldilocks={}),
            "dynamic sampling": train(model, out / "on", filter_groups={"enable": True, "max_num_gen_batches": 10}),
        }
    print(f"{'after ' + str(STEPS) + ' updates':<20} {'rollouts':>9} {'trained':>8} {'groups without a gradient':>26}")
    for name, last in runs.items():
        generated, trained = last["accounts/generated_rollouts"], last["accounts/trained_rollouts"]
        flat = last["frac_reward_zero_std"]
        print(f"{name:<20} {generated:>9,.0f} {trained:>8,.0f} {flat:>25.0%}")


if __name__ == "__main__":
    main()
