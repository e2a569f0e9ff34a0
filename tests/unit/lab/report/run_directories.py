"""Run directories as training makes them: the real collector, its metrics and its checkpoints, against the simulator.

verl's own part of a line (score, timing, the actor's ratios, validation) is written under verl's names from the same
simulated batches; answers are dumped in the shape of ``trainer.rollout_data_dir``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from goldilocks.core.source import ListSource
from goldilocks.lab.simulate.engine import EngineConfig, SimulatedEngine
from goldilocks.lab.simulate.pass_rates import PassRates
from goldilocks.lab.simulate.run import Setup, batches, recipe_settings
from goldilocks.runs.checkpoints import save_state
from goldilocks.types import Group

HOSTILE = "What is <script>alert(1)</script> & </script><img src=x onerror=alert(2)> minus 7?"
VALIDATION = "val-core/arithmetic/acc/mean@1"
SECONDS_A_TOKEN = 2e-3


def questions(count: int) -> PassRates:
    """Arithmetic of all difficulties, and among it a prompt that would like to be a script."""
    rng = random.Random(7)
    texts = [f"What is {rng.randint(2, 999)} × {rng.randint(2, 99)} + {number}?" for number in range(count - 1)]
    rates = np.clip(np.linspace(-0.15, 1.15, count), 0, 1)
    messages = [[{"role": "user", "content": text}] for text in [*texts, HOSTILE]]
    rates[-1] = 0.5
    return PassRates(tuple(messages), rates, 60 + 240 * (1 - rates))


def write_run(
    path: Path, policy: str = "dapo", *, steps: int = 24, prompts: int = 200, groups: int = 16, seed: int = 1
) -> Path:
    """A whole run: ``steps`` updates, validation every fourth, a checkpoint every eighth, answers at every second."""
    data = questions(prompts)
    settings = recipe_settings(policy, Setup(target_groups=groups, gen_batch_size=2 * groups, seed=seed))
    collector = settings.collector(ListSource(data.contents))
    engine = SimulatedEngine(data, EngineConfig(slots=128, failure_rate=0.01, improvement=0.4), seed=seed)
    path.mkdir(parents=True)
    write_config(path, data)
    clock = 0
    with (path / "metrics.jsonl").open("w") as log:
        log.write(_line(0, {VALIDATION: engine.learner.mean_pass_rate}))
        for step, batch in enumerate(islice(batches(collector, engine, 10**9), steps), start=1):
            metrics = {**collector.metrics(), **verl_metrics(batch, step, engine.clock - clock)}
            clock = engine.clock
            log.write(_line(step, metrics))
            if step % 4 == 0:
                log.write(_line(step, {VALIDATION: engine.learner.mean_pass_rate}))
            if step % 8 == 0:
                checkpoint = path / "checkpoints" / f"global_step_{step}"
                checkpoint.mkdir(parents=True)
                save_state({"collector": collector.state_dict(), "gate": {}}, checkpoint / "goldilocks.npz")
            if step % 2 == 0:
                write_dump(path / "rollouts" / f"{step}.jsonl", step, batch, data)
    return path


def write_config(path: Path, data: PassRates) -> None:
    """The configuration, and the training data it points at: where the prompts' texts are found."""
    pq.write_table(pa.table({"prompt": list(data.contents)}), path / "train.parquet")
    config = {
        "data": {"train_batch_size": 16, "train_files": [str(path / "train.parquet")], "prompt_key": "prompt"},
        "actor_rollout_ref": {
            "rollout": {"n": 8},
            "actor": {"policy_loss": {"loss_mode": "gspo"}, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
        },
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))


def verl_metrics(batch: Sequence[Group], step: int, tokens: int) -> dict[str, Any]:
    """What verl, and GSPO's clipping, log for one update."""
    lengths = [rollout.tokens for group in batch for rollout in group.rollouts]
    ratios = np.exp(np.random.default_rng(step).normal(2e-5, 4e-4, 256))
    low, middle, high = np.quantile(ratios, [0.05, 0.5, 0.95]).tolist()
    return {
        "training/global_step": step,
        "critic/score/mean": float(np.mean([reward for group in batch for reward in group.rewards])),
        "response_length/mean": float(np.mean(lengths)),
        "timing_s/step": 1.0 + SECONDS_A_TOKEN * tokens,
        "perf/total_num_tokens": sum(lengths),
        "actor/seq_importance_ratio": float(ratios.mean()),
        "actor/seq_importance_ratio_p05": low,
        "actor/seq_importance_ratio_p50": middle,
        "actor/seq_importance_ratio_p95": high,
        "actor/pg_clipfrac": float(np.mean((ratios < 1 - 3e-4) | (ratios > 1 + 4e-4))),
        "actor/pg_clipfrac_lower": float(np.mean(ratios < 1 - 3e-4)),
        "actor/pg_clipfrac_upper": float(np.mean(ratios > 1 + 4e-4)),
        "actor/grad_norm": None,  # how the logger writes a NaN
    }


def write_dump(file: Path, step: int, batch: Sequence[Group], data: PassRates) -> None:
    """The batch's answers as verl's V1 trainer dumps them."""
    file.parent.mkdir(exist_ok=True)
    rows = [
        {
            "input": f"user\n{data.contents[group.prompt.index][0]['content']}\nassistant\n",
            "output": f"<think>step by step & carefully</think> The answer is {rollout.tokens}."
            + ("</pre></script><script>alert(3)</script>" if rollout.reward else ""),
            "gts": "42",
            "score": rollout.reward,
            "step": step,
            "uid": f"{group.uid}_{rollout.index}_0",
        }
        for group in batch
        for rollout in group.rollouts
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _line(step: int, metrics: dict[str, Any]) -> str:
    return json.dumps({"step": step, "data": metrics}) + "\n"
