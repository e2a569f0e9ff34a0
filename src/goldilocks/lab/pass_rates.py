"""``goldilocks pass-rates task=NAME --out FILE``: how often a model answers each prompt right, in one pass.

The file is read by ``goldilocks simulate --pass-rates`` and ``goldilocks advise``. A prompt is written when all its
answers are there. Started again, the command keeps what the file has and asks for the rest; a rollout's noise depends
on its prompt, its number and the seed alone, so the answers are those of a pass that was not cut.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from goldilocks.config.recipes import choose, compose_config
from goldilocks.core.source import conversation_text
from goldilocks.engine.cpu import threads_for
from goldilocks.errors import require
from goldilocks.hashing import content_key
from goldilocks.launch.live import counted
from goldilocks.launch.machine import find_device
from goldilocks.launch.on_trl import PROMPT, SCORE, Grader, RewardFunction, dataset
from goldilocks.launch.preflight import check_paths, prompt_tokens, provide
from goldilocks.rewards.calls import guard
from goldilocks.runs.files import Lines, held
from goldilocks.runs.history import place_of, value_of
from goldilocks.runs.records import Row, growing, whole_groups
from goldilocks.types import POSITIVE_THRESHOLD, hashed, row_key, split_row_key

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from goldilocks.engine import Engine

PROMPTS, N, BLOCK = 512, 8, 64
Answer = tuple[str, int]  # the text, and its tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
  goldilocks pass-rates task=ladder_tiny --out ladder.jsonl
  goldilocks pass-rates task=gsm8k actor_rollout_ref.model.path=smollm2 --prompts 1024 --out gsm8k.jsonl
then:
  goldilocks advise gsm8k.jsonl
"""
    add = parser.add_argument
    add("words", nargs="*", metavar="key=value", help="task=NAME, device=NAME and keys of verl's config")
    add("--out", metavar="FILE", type=Path, required=True, help="gets a line a rollout (.jsonl); "
        "a file that is there goes on")  # fmt: skip
    add("--prompts", metavar="N", type=int, default=PROMPTS, help="drawn from the training files "
        "(default %(default)s; 0: all of them)")  # fmt: skip
    add("--n", metavar="N", type=int, default=N, help="answers a prompt (default %(default)s)")
    add("--seed", metavar="S", type=int, default=1, help="of the draw and of the answers")


def run(args: argparse.Namespace) -> int:
    require(args.out.suffix == ".jsonl", "--out", str(args.out), "a file that ends in .jsonl")
    require(args.n >= 1, "--n", args.n, "1 or more answers a prompt")
    require(args.prompts >= 0, "--prompts", args.prompts, "0 (all) or more")
    choice = choose(args.words, find_device())
    config = compose_config(choice)
    turns = config.actor_rollout_ref.rollout.multi_turn.enable
    require(not turns, "actor_rollout_ref.rollout.multi_turn.enable", turns, "False: a pass asks for single answers")
    provide(config)
    check_paths(config, ["train"])
    data, model_path = dataset(config, "train"), str(Path(config.actor_rollout_ref.model.path).expanduser())
    drawn = {**_sampling(config), "seed": args.seed, **(config.data.get("apply_chat_template_kwargs") or {})}
    answered_by = " ".join([model_path, *(f"{key}={value}" for key, value in drawn.items())])
    with held(args.out.with_name(f".{args.out.name}.lock"), "--out", str(args.out)):
        kept = whole_groups(args.out, args.n)
        if args.out.exists():
            _require_same_pass(data, answered_by, args.out)
        if missing := [one for one in _asked(data, answered_by, args) if one.uid not in kept]:
            model = Model.load(model_path, config, choice.device, rollouts=len(missing) * args.n)
            with growing(args.out, kept) as append:
                guard(config, workers=1)
                _fill(model, missing, args, append, Grader(config.reward.custom_reward_function).value(SCORE))
        groups = list(whole_groups(args.out, args.n).values())
    print("\n".join(summary(groups, list(config.goldilocks.validate_by))))
    return 0


@dataclass(frozen=True)
class Asked:
    """A prompt of the pass: its row of the data, and the block of prompts that it was drawn in."""

    uid: str
    row: Row
    step: int
    answered_by: str

    def rollout(self, index: int, output: str, score: float, tokens: int) -> Row:
        return {
            **{name: value for name, value in self.row.items() if name not in (PROMPT, "reward_model")},
            "input": conversation_text(self.row[PROMPT]),
            "output": output,
            "gts": self.row["reward_model"]["ground_truth"],
            "score": score,
            "step": self.step,
            "answered_by": self.answered_by,
            "uid": row_key(self.uid, index, 0),
            "tokens": tokens,
        }


def _asked(data: Any, answered_by: str, args: argparse.Namespace) -> list[Asked]:
    """Return prompts of the training files in an order of their own, each content once."""
    places = list(range(len(data)))
    random.Random(args.seed).shuffle(places)
    rows: dict[str, Row] = {}
    for row in (data[place] for place in places):
        if args.prompts and len(rows) == args.prompts:
            break
        rows.setdefault(_uid(row[PROMPT]), row)
    return [Asked(uid, row, 1 + number // BLOCK, answered_by) for number, (uid, row) in enumerate(rows.items())]


def _sampling(config: DictConfig) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    return {
        "max_tokens": config.data.max_response_length,
        "temperature": rollout.temperature,
        "top_p": float(rollout.top_p),
        "top_k": rollout.top_k,
    }


def _require_same_pass(data: Any, answered_by: str, out: Path) -> None:
    """Refuse a file with answers of another model or draw, or to prompts of other data."""
    rows = list(Lines(out))
    others = {str(row.get("answered_by")) for row in rows} - {answered_by}
    accepted = f"another file: it has answers of {'; '.join(others)}; asked for are those of {answered_by}"
    require(not others, "--out", str(out), accepted)
    foreign = {split_row_key(str(row["uid"]))[0] for row in rows} - set(map(_uid, data[PROMPT]))
    accepted = f"another file: it has {len(foreign)} prompts that are not in data.train_files"
    require(not foreign, "--out", str(out), accepted)


def _uid(prompt: object) -> str:
    return f"{content_key(prompt):016x}"


@dataclass(frozen=True)
class Model:
    engine: Engine
    tokenizer: Any
    data: DictConfig
    sampling: Mapping[str, Any]

    @classmethod
    def load(cls, path: str, config: DictConfig, device: str, rollouts: int) -> Model:
        """Load a model in the precision it is rolled out with."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from verl.utils.torch_dtypes import PrecisionType

        from goldilocks.engine.engine import Engine, end_ids

        rollout = config.actor_rollout_ref.rollout
        auto: Any = AutoModelForCausalLM
        precision: Any = PrecisionType
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        network = auto.from_pretrained(path, dtype=precision.to_dtype(rollout.dtype)).eval()
        if device == "cpu":
            torch.set_num_threads(threads_for(network, ranks=1))
        ends = end_ids(tokenizer, network.generation_config)
        known = getattr(network.config, "max_position_embeddings", None)
        length = config.data.max_prompt_length + config.data.max_response_length
        engine = Engine(
            network,
            slots=min(rollout.max_num_seqs, rollouts),
            max_length=min(length, known or length),
            eos_ids=ends,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends),
            device=device,
        )
        return cls(engine, tokenizer, config.data, _sampling(config))


def _fill(
    model: Model,
    missing: Sequence[Asked],
    args: argparse.Namespace,
    append: Callable[[Sequence[Row]], None],
    reward: RewardFunction,
) -> None:
    """Generate, grade and write, a prompt as soon as its last answer is there."""
    started, prompts, rollouts, tokens = time.monotonic(), 0, 0, 0
    with counted(len(missing), "prompt") as begin:
        begin("answering")
        for one, answers in _answers(model, missing, args):
            row = {name: [value] * len(answers) for name, value in one.row.items() if name != PROMPT}
            scores = reward([text for text, _ in answers], **row)
            append([
                one.rollout(index, text, score or 0.0, size)  # None: it could not be graded
                for index, ((text, size), score) in enumerate(zip(answers, scores, strict=True))
            ])  # fmt: skip
            prompts, rollouts = prompts + 1, rollouts + len(answers)
            tokens += sum(size for _, size in answers)
            begin("answering")
    seconds, console = time.monotonic() - started, Console(stderr=True)
    console.print(f"{rollouts:,} answers, {tokens:,} tokens, {seconds:.0f} s", highlight=False)
    if left_out := len(missing) - prompts:
        said = f"{left_out:,} prompts are left out: longer than data.max_prompt_length={model.data.max_prompt_length}"
        console.print(said, highlight=False, soft_wrap=True)


def _answers(model: Model, missing: Sequence[Asked], args: argparse.Namespace) -> Iterator[tuple[Asked, list[Answer]]]:
    """Yield prompts with their answers as they are finished; one longer than ``data.max_prompt_length`` is left out."""
    from goldilocks.engine import SamplingParams

    waiting = iter(missing)
    parts: dict[str, tuple[Asked, dict[int, Answer]]] = {}
    engine, decode = model.engine, model.tokenizer.decode
    while True:
        while engine.free and (one := next(waiting, None)):
            tokens = prompt_tokens(model.tokenizer, one.row[PROMPT], model.data)
            if len(tokens) > model.data.max_prompt_length:
                continue
            parts[one.uid] = one, {}
            for number in range(args.n):
                params = SamplingParams(**model.sampling, seed=hashed(args.seed, one.uid, number))
                engine.submit(row_key(one.uid, number, 0), tokens, params)
        if not engine.busy:
            return
        for done in engine.step():
            uid, index, _ = done.request_id.rsplit("_", 2)
            one, found = parts[uid]
            found[int(index)] = (decode(done.token_ids, skip_special_tokens=True), len(done.token_ids))
            if len(found) == args.n:
                del parts[uid]
                yield one, [found[place] for place in range(args.n)]


def summary(groups: Sequence[Sequence[Row]], columns: Sequence[str]) -> list[str]:
    """Return the mean pass rate and the share of informative groups, of all prompts and by the columns named."""
    lines = [f"{len(groups):,} prompts × {len(groups[0]) if groups else 0}: {_figures(groups)}"]
    for column in columns:
        names = [str(value_of(group[0], column)) for group in groups]
        for value in sorted(set(names), key=place_of):
            own = [group for group, name in zip(groups, names, strict=True) if name == value]
            lines.append(f"  {column}={value:<10} {len(own):6,} prompts: {_figures(own)}")
    return lines


def _figures(groups: Sequence[Sequence[Row]]) -> str:
    passes = [sum(float(row["score"]) >= POSITIVE_THRESHOLD for row in group) for group in groups]
    informative = sum(0 < count < len(group) for count, group in zip(passes, groups, strict=True))
    answers = sum(map(len, groups))
    return f"pass rate {sum(passes) / max(answers, 1):.3f}, informative groups {informative / max(len(groups), 1):.1%}"
