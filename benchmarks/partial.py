"""What ``on_full: partial`` saves, and what it does to the answers that are trained.

    python benchmarks/partial.py                # the simulated engine: seconds
    python benchmarks/partial.py --engine       # a tiny model on our engine, without verl: a minute or two
    python benchmarks/partial.py --real         # such a model trained through verl: two launches
    python benchmarks/partial.py --real --mean 200 --decode-ms 40      # as slow as a large model: half an hour

Every row trains the same number of groups. Lengths vary tenfold, and the longest answer is five times the mean, so that
a step that waits for it is mostly waiting. The tiny model (``random_task.py``) was taught nothing: it ends its answer
with the same small probability at each token, and the reward is a hash of the answer. No length is worth more than
another, so that lengths differ only if the choice of what is trained favours some. With ``--engine`` nothing is
trained, and a step's time is counted in decodes: each writes one token of every answer in flight. On a GPU a decode
takes about as long however few answers are in flight; on a CPU, whose seconds stand beside it, it takes less.
``--decode-ms`` has each decode of a real run on a CPU take at least so long, as that of a model of some billions of
parameters does on a GPU: the server sleeps.

Columns: the time of a step over that of ``finish``; mean length of what is trained over the mean length of what was
started; mean and largest age, in updates, of the oldest token of a trained group; share of the generated tokens that
were thrown away; then the figures of a step themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import random_task

from goldilocks.core import Collector, ListSource, Surplus
from goldilocks.core.allocators import Adaptive, Allocator, Fixed
from goldilocks.core.filters import Variance
from goldilocks.core.selectors import Uniform
from goldilocks.drive.backend import CANCELLED, Backend
from goldilocks.engine import Generation, SamplingParams
from goldilocks.lab.simulate import EngineConfig, PassRates, SimulatedEngine, batches
from goldilocks.types import Failure, Group, OnFull, Paused, Request, Rollout, StopRule, hashed

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
    length = float(np.mean(lengths)) / mean_length()
    return Row(name, engine.clock / STEPS, length, float(np.mean(ages)), max(ages), wasted(collector))


def wasted(collector: Collector) -> float:
    """The share of the generated tokens that were thrown away."""
    accounts = collector.accounts
    lost = sum(accounts.by_class(accounts.tokens)[name] for name in ("cancelled", "expired"))
    return lost / accounts.generated_tokens


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


# -- our engine --------------------------------------------------------------------------------------------------------


class LiveEngine(Backend):
    """A model on our engine, driven as the simulated one is. What pauses is submitted again with its prefix."""

    def __init__(self, folder: Path, slots: int, longest: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from goldilocks.engine import Engine

        torch.set_num_threads(1)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._engine = Engine(model, slots=slots, max_length=longest + 16, eos_ids=[1], pad_id=0, device="cpu")
        self._longest = longest
        self._written: dict[tuple[str, int], list[int]] = {}
        self._prompts: dict[str, list[int]] = {}
        self.lengths: list[int] = []  # of the answers that ended
        self.submitted = 0
        self.steps = 0  # of the decoder

    @property
    def room(self) -> int:
        """Slots that nothing occupies."""
        return self._engine.free

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._begin(request)

    def _begin(self, request: Request) -> None:
        self.submitted += request.n
        self._prompts[request.uid] = self._tokenizer.encode(request.prompt.payload)
        for index in range(request.first, request.first + request.n):
            self._ask((request.uid, index), [])

    def _ask(self, name: tuple[str, int], written: list[int]) -> None:
        self._written[name] = written
        params = SamplingParams(max_tokens=self._longest - len(written), seed=hashed(*name))
        self._engine.submit("/".join(map(str, name)), [*self._prompts[name[0]], *written], params)

    def events(self, within: float | None = None) -> list[Rollout | Failure]:
        """Return the rollouts that end next; empty: nothing in flight."""
        ended: list[Rollout | Failure] = []
        while within is None and self._engine.busy and not ended:
            self.steps += 1
            ended = [self._ended(generation) for generation in self._engine.step()]
        return ended

    def _ended(self, generation: Generation) -> Rollout | Failure:
        name = _name(generation)
        tokens = [*self._written.pop(name), *generation.token_ids]
        if generation.stop_reason == "aborted":
            return Failure(*name, CANCELLED, len(tokens))
        self.lengths.append(len(tokens))
        reward = float(zlib.crc32(bytes(str(tokens), "ascii")) & 1)
        return Rollout(*name, reward, len(tokens), {"acc": reward})

    def cancel(self, uids: Sequence[str]) -> None:
        """Stop every rollout of these groups."""
        for name in [name for name in self._written if name[0] in uids]:
            self._engine.abort("/".join(map(str, name)))

    def resume(self) -> None:
        """Do nothing: ``train`` goes on with what paused."""

    def drain(self) -> None:
        """Do nothing: the engine works only in ``events``."""

    def pause(self) -> list[Paused]:
        """Stop everything; return what it has written."""
        self._engine.abort_all()
        stopped = self._engine.step()
        for generation in stopped:
            self._written[_name(generation)] += generation.token_ids
        return [Paused(*name, len(tokens)) for name, tokens in self._written.items()]

    def train(self, batch: object) -> None:
        """Train nothing; what paused goes on."""
        if not self._engine.busy:
            for name, written in list(self._written.items()):
                self._ask(name, written)


def _name(generation: Generation) -> tuple[str, int]:
    uid, index = generation.request_id.split("/")
    return uid, int(index)


def print_live(args: argparse.Namespace) -> None:
    """Print the table of our engine. The choices take turns."""
    longest, choices = 5 * args.mean, [Surplus(4, one) for one in OnFull]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        make_task(Path(folder), args.mean, longest)
        for surplus in choices:
            engine = LiveEngine(Path(folder, "model"), 16 * args.groups, longest)
            source = ListSource([f"<user> w{index % 20} w{index // 20} <assistant>" for index in range(400)])
            own = Collector(source, Uniform(), Fixed(8), Variance(), target_groups=args.groups, surplus=surplus)
            runs.append((own, engine, batches(own, engine, rollouts=10**9), Tally()))  # type: ignore[arg-type]
    for step in range(STEPS + WARM_UP):
        for own, engine, batch, tally in runs:
            before, started = engine.steps, time.process_time()  # one thread: what it would take on a quiet machine
            groups = next(batch)
            tally.add(groups, own.step, engine.steps - before, time.process_time() - started, timed=step >= WARM_UP)
    mean = float(np.mean(runs[0][1].lengths))  # with ``finish`` every answer ends
    rows = [tally.row(label(own.surplus), own, mean) for own, _, _, tally in runs]
    print(f"our engine on the CPU: {STEPS} steps of {args.groups} groups after {WARM_UP}, mean length {mean:.0f}")
    print(f"{HEADER}{'decodes':>9}{'CPU s':>9}")
    print(*(row.text(rows[0]) for row in rows), sep="\n")


class Tally:
    """Sums over the batches of a run."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._ages: list[int] = []
        self._costs: list[tuple[int, float]] = []

    def add(self, batch: Sequence[Group], step: int, decodes: int, seconds: float, *, timed: bool) -> None:
        """Count a batch."""
        self._lengths += [rollout.tokens for group in batch for rollout in group.trained]
        self._ages += [step - group.version for group in batch]
        self._costs += [(decodes, seconds)] if timed else []

    def row(self, name: str, own: Collector, mean: float) -> Row:
        """The line; ``mean`` is the length of what is started."""
        decodes, seconds = np.mean(self._costs, axis=0)
        length, ages = float(np.mean(self._lengths)) / mean, self._ages
        costs = f"{decodes:>9.0f}{seconds:>9.2f}"
        return Row(name, float(decodes), length, float(np.mean(ages)), max(ages), wasted(own), costs)


# -- real runs ---------------------------------------------------------------------------------------------------------

# verl imports the module in each of its processes (VERL_USE_EXTERNAL_MODULES).
SLOW = """
import time
from goldilocks.engine.decoder import Decoder

at_once = Decoder.decode

def decode(self, rows, extent, noise, cuts):
    end = time.perf_counter() + len(noise) * {seconds}
    sampled = at_once(self, rows, extent, noise, cuts)
    time.sleep(max(0.0, end - time.perf_counter()))
    return sampled

Decoder.decode = decode
"""
REAL = ["finish", "partial"]
WARM_UP = 2
# Of the real runs, deep and narrow: on a CPU a decode costs about the same however few are in flight, as on a GPU, and
# an update, which is the same whatever `on_full` is, takes little of the step.
LAYERS, HEADS = 4, 1


def make_task(folder: Path, mean: int, longest: int, layers: int = 2, heads: int = 2) -> list[str]:
    """Write a model whose answers have this mean length, prompts and a reward; return the settings that use them."""
    shape = random_task.Shape(32 * heads, 64 * heads, layers, heads, heads, 1_024)
    random_task.make_model(folder / "model", shape, mean, longest, "float32")
    random_task.make_data(folder, shape, keep=1.0)
    return random_task.settings(folder / "model", folder, longest)


def real_steps(folder: Path, name: str, settings: list[str], env: dict[str, str]) -> list[dict[str, float]]:
    """Run ``goldilocks train``, unless the folder has that run, and return the metrics of its steps."""
    if not (folder / name).exists():
        train(folder, name, settings, env)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [step for step in (json.loads(line)["data"] for line in lines) if "timing_s/step" in step]


def train(folder: Path, name: str, settings: list[str], env: dict[str, str]) -> None:
    """Run ``goldilocks train``; if it fails, end with what it said."""
    place = ["--runs", str(folder), "--name", name]
    command = [sys.executable, "-m", "goldilocks.cli", "train", "dapo", *settings, *place]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
    if done.returncode:
        log = folder / name / "log"
        sys.exit(done.stdout[-4000:] + done.stderr[-4000:] + (log.read_text()[-4000:] if log.exists() else ""))


def slowed(folder: Path, decode_ms: float) -> dict[str, str]:
    """Return the environment in which a decode takes at least so long."""
    if not decode_ms:
        return {}
    (folder / "slow_decode.py").write_text(SLOW.format(seconds=decode_ms / 1e3))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"VERL_USE_EXTERNAL_MODULES": "slow_decode", "PYTHONPATH": path}


def real(name: str, steps: list[dict[str, float]], mean: float) -> Row:
    """The line of a real run; ``mean`` is the length of what is started."""
    end, timed = steps[-1], steps[WARM_UP:]
    # The median: a machine that does something else for a while makes a few steps long.
    step, gen = (float(np.median([one[f"timing_s/{part}"] for one in timed])) for part in ("step", "gen"))
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


def print_real(args: argparse.Namespace, folder: Path) -> None:
    """Print the table of the real runs. With ``finish`` every answer ends, so its mean is that of what is started."""
    env = slowed(folder, args.decode_ms)
    common = [
        *make_task(folder, args.mean, 5 * args.mean, LAYERS, HEADS),
        f"device={args.device}",
        f"data.train_batch_size={args.groups}",
        f"data.gen_batch_size={args.groups}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.groups}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr=1e-6",  # so that the answers of all runs are as long as each other
        f"actor_rollout_ref.rollout.max_num_seqs={8 * args.groups}",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_carry_steps=4",
        f"trainer.total_training_steps={STEPS + WARM_UP}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *args.words,
    ]
    runs = {
        one: real_steps(folder, one, [*common, f"algorithm.filter_groups.on_full={one}"], env) for one in args.on_full
    }
    if "finish" not in runs:
        return
    end = runs["finish"][-1]
    mean = end["accounts/generated_tokens"] / end["accounts/generated_rollouts"]
    rows = [real(f"{one}, max_carry_steps=4", steps, mean) for one, steps in runs.items()]
    steps = len(runs["finish"]) - WARM_UP
    print(f"{args.device}: {steps} steps of {args.groups} groups after {WARM_UP}, mean length {mean:.0f}")
    print(f"{HEADER}{'step s':>9}{'gen s':>9}")
    print(*(row.text(rows[0]) for row in rows), sep="\n")


def main() -> None:
    """Print the table asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="generate with a tiny model on our engine")
    parser.add_argument("--real", action="store_true", help="train a tiny model through verl")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mean", type=int, default=48, help="mean length of an answer of the real runs")
    parser.add_argument("--decode-ms", type=float, default=0.0, help="what a decode takes at least, on a CPU")
    parser.add_argument("--groups", type=int, default=8, help="groups per batch of the real runs")
    parser.add_argument("--on-full", nargs="+", choices=list(OnFull), default=REAL, help="which real runs")
    parser.add_argument(
        "--runs", type=Path, help="a folder to keep the real runs in; those that are there are only read"
    )
    parser.add_argument("words", nargs="*", help="settings for the real runs, key=value")
    args = parser.parse_args()
    if args.decode_ms and (args.device != "cpu" or not args.real):
        parser.error("--decode-ms is for --real runs with --device cpu: a GPU decodes in graphs, which do not sleep")
    if args.engine:
        print_live(args)
    elif not args.real:
        print_simulated()
    elif args.runs:
        args.runs.mkdir(parents=True, exist_ok=True)
        print_real(args, args.runs.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            print_real(args, Path(folder))


if __name__ == "__main__":
    main()
