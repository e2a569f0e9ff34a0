"""What cancelling does inside a rollout engine: ``on_full=requeue``, answers of 40 tokens, eight at a time.

    python benchmarks/cancelling.py                     # our engine
    python benchmarks/cancelling.py --engine vllm       # verl's vLLM server

Every answer that is not aborted has 40 tokens, and one in four is called right, whatever it says. Twice the prompts of
a batch are begun: once the batch is full, nobody needs the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENS = 40
DIFFERENCE = "training/rollout_probs_diff_max"

REWARD = """
import hashlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(hashlib.sha256(solution_str.encode()).digest()[0] < 64)}
"""


def words(engine: str, steps: int, folder: Path) -> list[str]:
    """The run that is looked at; its reward function is written to the folder."""
    (folder / "reward.py").write_text(REWARD)
    return [
        "dapo",
        f"actor_rollout_ref.rollout.name={engine}",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"data.max_response_length={TOKENS}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.gen_batch_size=16",
        "actor_rollout_ref.rollout.n=8",
        "algorithm.filter_groups.metric=score",
        "algorithm.filter_groups.on_full=requeue",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "reward.custom_reward_function.name=compute_score",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]


def run(engine: str, steps: int) -> list[dict[str, float]]:
    """Train; return the metrics of every step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "goldilocks.cli", "train", "--runs", folder, "--name", "run"]
        subprocess.run([*command, *words(engine, steps, Path(folder))], check=True, stdout=sys.stderr)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [record["data"] for record in map(json.loads, lines) if record["step"] > 0]


def rows(steps: list[dict[str, float]]) -> list[tuple[str, str]]:
    last = steps[-1]
    mean = last["aborts/tokens"] / last["aborts/ended"] if last["aborts/ended"] else float("nan")
    return [
        ("aborts that took effect", f"{last['aborts/ended']:.0f} of {last['aborts/asked']:.0f}"),
        ("tokens of an aborted rollout", f"{mean:.1f} of {TOKENS}"),
        ("requests left at the servers when put to sleep", f"{max(step['aborts/left'] for step in steps):.0f}"),
        ("largest difference of a probability", f"{max(step[DIFFERENCE] for step in steps):.1e}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engine", default="transformers", help="actor_rollout_ref.rollout.name (default transformers)"
    )
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    print(f"requeue, {TOKENS}-token answers, 8 slots, {args.steps} steps, rollouts by {args.engine}")
    for label, value in rows(run(args.engine, args.steps)):
        print(f"{label:<48}{value:>12}")


if __name__ == "__main__":
    main()
