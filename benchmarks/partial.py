"""What ``on_full: partial`` saves, and what it does to the answers that are trained.

    python benchmarks/partial.py                # the simulated engine: seconds
    python benchmarks/partial.py --real         # a tiny model on this machine, through verl: minutes

Every row trains the same number of groups. Lengths vary tenfold, and the longest answer is five times the mean, so that
a step that waits for it is mostly waiting. In the real runs a model that was taught nothing ends its answer with the
same small probability at each token, and the reward is a hash of the answer: no length is worth more than another, so
that lengths differ only if the choice of what is trained favours some.

Columns: the time of a step over that of ``finish``; mean length of what is trained over the mean length of what was
started; mean and largest age, in updates, of the oldest token of a trained group; share of the generated tokens that
were thrown away. Of real runs also the seconds of a step and of its generation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from goldilocks.core import Collector, ListSource, Surplus
from goldilocks.core.allocators import Adaptive, Allocator, Fixed
from goldilocks.core.filters import Variance
from goldilocks.core.selectors import Uniform
from goldilocks.simulate import EngineConfig, PassRates, SimulatedEngine, batches
from goldilocks.types import OnFull, StopRule

STEPS, PROMPTS, TARGET, MEAN, LONGEST, SPREAD = 20, 20_000, 64, 200, 1_000, 0.7
ALLOCATORS: dict[str, Allocator] = {"n=8": Fixed(8), "contrast": Adaptive(max_n=32, stop=StopRule.CONTRAST)}
CHOICES = [
    Surplus(),
    Surplus(on_full=OnFull.REQUEUE),
    *(Surplus(carry, OnFull.PARTIAL) for carry in (1, 2, 4, 8)),
]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    step_time: float
    trained_over_started: float
    age_mean: float
    age_max: float
    wasted: float
    seconds: str = ""

    def text(self, finish: Row) -> str:
        """The line, with the step's time over that of ``finish``."""
        return (
            f"{self.name:<34}{self.step_time / finish.step_time:>10.2f}{self.trained_over_started:>18.3f}"
            f"{self.age_mean:>10.2f}{self.age_max:>9.0f}{self.wasted:>10.1%}{self.seconds}"
        )


HEADER = f"{'':<34}{'step time':>10}{'trained/started':>18}{'mean age':>10}{'max age':>9}{'wasted':>10}"


def simulated(name: str, allocator: Allocator, surplus: Surplus) -> Row:
    """Twenty steps of a simulated engine that has a slot for every rollout."""
    data = PassRates(tuple(range(PROMPTS)), np.full(PROMPTS, 0.3), np.full(PROMPTS, float(MEAN)))
    collector = Collector(
        ListSource(data.contents), Uniform(), allocator, Variance(), target_groups=TARGET, surplus=surplus
    )
    engine = SimulatedEngine(data, EngineConfig(slots=8_192, spread=SPREAD, wait=0.0, max_tokens=LONGEST), seed=3)
    lengths: list[int] = []
    ages: list[float] = []
    for _, batch in zip(range(STEPS), batches(collector, engine, rollouts=10**9), strict=False):
        lengths += [rollout.tokens for group in batch for rollout in group.trained]
        ages += [collector.step - group.version for group in batch]
    accounts = collector.accounts
    lost = sum(accounts.by_class(accounts.tokens)[name] for name in ("cancelled", "expired"))
    return Row(
        name,
        engine.clock / STEPS,
        float(np.mean(lengths)) / mean_length(),
        float(np.mean(ages)),
        max(ages),
        lost / accounts.generated_tokens,
    )


def mean_length() -> float:
    """The mean of the engine's lengths: log-normal, cut at the longest."""
    drawn = np.random.default_rng(1).lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, 10**6)
    return float(np.minimum(drawn, LONGEST).mean())


def label(surplus: Surplus) -> str:
    """A choice as the config has it."""
    return f"{surplus.on_full}, max_carry_steps={surplus.max_carry_steps}"


def print_simulated() -> None:
    """Print the table of the simulated engine."""
    print(f"simulated: {STEPS} steps of {TARGET} groups, mean length {mean_length():.0f}, longest {LONGEST}\n{HEADER}")
    for policy, allocator in ALLOCATORS.items():
        rows = [simulated(f"{policy}, {label(surplus)}", allocator, surplus) for surplus in CHOICES]
        print(*(row.text(rows[0]) for row in rows), sep="\n", flush=True)


# -- real runs ---------------------------------------------------------------------------------------------------------

REWARD = """
import zlib

def by_hash(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    acc = float(zlib.crc32(solution_str.encode()) & 1)
    return {"score": acc, "acc": acc}
"""
REAL = ["finish", "requeue", "partial"]
WARM_UP = 2


def make_task(folder: Path, mean: int, longest: int) -> list[str]:
    """Write a model whose answers have this mean length, prompts and a reward; return the settings that use them."""
    import pandas
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<user>", "<assistant>"]
    words = [*special, *(f"w{index}" for index in range(mean - len(special)))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=special[2:]
    )
    tokenizer.chat_template = "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}<assistant>"
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=longest + 32, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "hash",
            "prompt": [{"role": "user", "content": f"w{index % 20} w{index // 20}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(400)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)
    return [
        f"data.train_files={folder}/data.parquet",
        f"data.val_files={folder}/data.parquet",
        "data.max_prompt_length=16",
        f"data.max_response_length={longest}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=by_hash",
    ]


def real_steps(folder: Path, name: str, settings: list[str]) -> list[dict[str, float]]:
    """Run ``goldilocks train`` and return the metrics of its steps."""
    command = [
        sys.executable,
        "-m",
        "goldilocks.cli",
        "train",
        "dapo",
        *settings,
        "--runs",
        str(folder),
        "--name",
        name,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        log = folder / name / "log.txt"
        sys.exit(done.stdout[-4000:] + done.stderr[-4000:] + (log.read_text()[-4000:] if log.exists() else ""))
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [step for step in (json.loads(line)["data"] for line in lines) if "timing_s/step" in step]


def real(name: str, steps: list[dict[str, float]], mean: float) -> Row:
    """The line of a real run; ``mean`` is the length of what is started."""
    end, timed = steps[-1], steps[WARM_UP:]
    step, gen = (float(np.mean([one[f"timing_s/{part}"] for one in timed])) for part in ("step", "gen"))
    lost = end["accounts/cancelled_tokens"] + end["accounts/expired_tokens"]
    return Row(
        name,
        step,
        end["accounts/trained_tokens"] / end["accounts/trained_rollouts"] / mean,
        float(np.mean([one["train/age_mean"] for one in timed])),
        max(one["train/age_max"] for one in steps),
        lost / end["accounts/generated_tokens"],
        f"{step:>9.2f}{gen:>9.2f}",
    )


def print_real(args: argparse.Namespace) -> None:
    """Print the table of the real runs. With ``finish`` every answer ends, so its mean is that of what is started."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = [
            *make_task(folder, args.mean, 5 * args.mean),
            f"device={args.device}",
            f"data.train_batch_size={args.groups}",
            f"data.gen_batch_size={args.groups}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={args.groups}",
            "actor_rollout_ref.rollout.n=8",
            f"actor_rollout_ref.rollout.max_num_seqs={16 * args.groups}",
            "algorithm.filter_groups.metric=acc",
            "algorithm.filter_groups.max_carry_steps=4",
            f"trainer.total_training_steps={STEPS + WARM_UP}",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            *args.words,
        ]
        runs = {one: real_steps(folder, one, [*common, f"algorithm.filter_groups.on_full={one}"]) for one in REAL}
    end = runs["finish"][-1]
    mean = end["accounts/generated_tokens"] / end["accounts/generated_rollouts"]
    rows = [real(f"{one}, max_carry_steps=4", steps, mean) for one, steps in runs.items()]
    print(f"{args.device}: {STEPS} steps of {args.groups} groups after {WARM_UP}, mean length {mean:.0f}")
    print(f"{HEADER}{'step s':>9}{'gen s':>9}")
    print(*(row.text(rows[0]) for row in rows), sep="\n")


def main() -> None:
    """Print the table asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="train a tiny model through verl")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mean", type=int, default=64, help="mean length of an answer of the real runs")
    parser.add_argument("--groups", type=int, default=16, help="groups per batch of the real runs")
    parser.add_argument("words", nargs="*", help="settings for the real runs, key=value")
    args = parser.parse_args()
    print_real(args) if args.real else print_simulated()


if __name__ == "__main__":
    main()
