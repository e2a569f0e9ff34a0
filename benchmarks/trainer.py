"""The V1 trainer against verl's own, on the same data and seed: seconds a step, and what a trained group costs.

    python benchmarks/trainer.py [--steps 12]

Four short runs of the default task, one after another: verl's ``sync`` and ours with everything off; verl's
native ``filter_groups`` and ours. The first two steps warm up and are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

VERL = ["trainer.v1.trainer_mode=sync"]
FILTER = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"]
ARMS = {
    "verl sync": ["grpo", *VERL],
    "goldilocks, all off": ["grpo"],
    "verl filter_groups": ["grpo", *VERL, *FILTER],
    "goldilocks filter_groups": ["grpo", *FILTER],
}
SIZES = ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "data.seed=1"]
WARM_UP = 2


def run(words: list[str], steps: int, folder: Path, name: str) -> list[dict[str, float]]:
    """One training run; its metrics step by step."""
    quiet = ["trainer.val_before_train=False", "trainer.test_freq=-1", f"trainer.total_training_steps={steps}"]
    command = [sys.executable, "-m", "goldilocks.cli", "train", *words, *SIZES, *quiet, "--runs", str(folder)]
    print(f"running {name} …", file=sys.stderr, flush=True)
    directory = re.sub(r"\W+", "-", name)
    subprocess.run([*command, "--name", directory], check=True, stdout=subprocess.DEVNULL)
    lines = (folder / directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line)["data"] for line in lines]
    return [record for record in records if "timing_s/step" in record][WARM_UP:]


def groups_generated(steps: list[dict[str, float]], batch: int) -> tuple[float, float]:
    """Groups generated for each one trained, and groups with signal that were thrown away."""
    trained = batch * len(steps)
    if "accounts/generated_rollouts" in steps[0]:
        generated = sum(step["train/groups_judged"] for step in steps)
        return generated / trained, sum(step["train/groups_expired"] for step in steps)
    evicted = sum(step.get("training/filter_groups/evicted_samples", 0) for step in steps)
    discarded = sum(step.get("training/filter_groups/discarded_surplus_samples", 0) for step in steps)
    return (trained + evicted + discarded) / trained, discarded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    batch = int(SIZES[0].split("=")[1])
    print(f"{'':>26} {'s/step':>7} {'gen s':>7} {'groups per trained':>19} {'qualified, discarded':>21}")
    with tempfile.TemporaryDirectory() as folder:
        for name, words in ARMS.items():
            records = run(words, steps, Path(folder), name)
            seconds = statistics.median(record["timing_s/step"] for record in records)
            generation = statistics.median(record["timing_s/gen"] for record in records)
            generated, discarded = groups_generated(records, batch)
            print(f"{name:>26} {seconds:>7.2f} {generation:>7.2f} {generated:>19.2f} {discarded:>21.0f}", flush=True)


if __name__ == "__main__":
    main()
