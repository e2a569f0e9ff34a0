"""Lessons before RL: supervised training on problems with answers, some of them wrong on purpose.

A model that has learnt the form of an answer and a part of the task is right sometimes, which is where RL begins.
Invariant: no lesson is a validation problem.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch.optim import Optimizer

from goldilocks.tasks.registry import Problem, WarmStart

WARM_UP = 30  # steps in which the learning rate rises

Lesson = tuple[list[int], list[int]]  # the tokens of a question and of its answer
Lessons = Callable[[random.Random], Iterator[Problem]]


def teach(model: str, out: Path, taught: Lessons, plan: WarmStart) -> None:
    """Train a copy of ``model`` on the lessons, on the GPU where there is one, and save it to ``out``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    started, name = time.monotonic(), Path(model).name
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    pupil = auto.from_pretrained(model, dtype="auto")
    kept = pupil.dtype
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pupil = pupil.to(device, torch.float32)
    optimizer = torch.optim.AdamW(pupil.parameters(), plan.lr, betas=(0.9, 0.99), weight_decay=0.0)
    with mixed_precision(device.type, enabled=device.type == "cuda"), _repeatable():
        loss = warm_start(pupil, tokenizer, taught, optimizer, plan, f"teaching {name} its first lessons")
    pupil.to(kept).save_pretrained(out)
    tokenizer.save_pretrained(out)
    del pupil, optimizer
    torch.cuda.empty_cache()  # 24 GiB of an H200 after GSM8K's lessons, which the runs would lack
    said = f"{name} has had {plan.steps} × {plan.batch} lessons, loss {loss:.3f}, {time.monotonic() - started:.0f} s"
    Console(stderr=True).print(said, highlight=False)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Have a GPU of one kind compute the same weights each time, so that arms made on several days begin alike."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS adds in any order
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def warm_start(
    model: torch.nn.Module, tokenizer: Any, taught: Lessons, optimizer: Optimizer, plan: WarmStart, title: str
) -> float:
    """Train the model in place under a progress bar; return the mean loss of the last fifty steps.

    The learning rate of the optimizer rises at first, then falls to zero.
    """
    rng = random.Random(plan.seed)
    source = batches(tokenizer, taught(rng), rng, plan.batch)
    losses: list[float] = []
    model.train()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for step in bar.track(range(plan.steps), description=title):
            optimizer.param_groups[0]["lr"] = plan.lr * min(1.0, (step + 1) / WARM_UP) * (1 - step / plan.steps)
            loss = loss_of(model, next(source))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    recent = losses[-50:]
    return sum(recent) / len(recent)


def batches(tokenizer: Any, endless: Iterator[Problem], rng: random.Random, size: int) -> Iterator[list[Lesson]]:
    """Yield batches of lessons of similar length, to save padding."""
    while True:
        pool = [encode(tokenizer, one.question, one.answer) for one in itertools.islice(endless, size * 16)]
        pool.sort(key=lambda lesson: len(lesson[0]) + len(lesson[1]))
        chunks = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(chunks)
        yield from chunks


def encode(tokenizer: Any, question: str, answer: str) -> Lesson:
    """Return the tokens of the prompt, by the chat template, and those of the answer with its end token."""
    messages = [{"role": "user", "content": question}]
    prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return prompt, [*tokenizer.encode(answer), tokenizer.eos_token_id]


def loss_of(model: torch.nn.Module, lessons: list[Lesson]) -> torch.Tensor:
    """Return the mean loss of the answers' tokens."""
    width = max(len(prompt) + len(answer) for prompt, answer in lessons)
    ids = torch.zeros(len(lessons), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(lessons):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    device = next(model.parameters()).device
    ids, labels = ids.to(device), labels.to(device)
    # Padding is on the right, where causal attention never looks: no mask is needed.
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def mixed_precision(device: str, *, enabled: bool) -> torch.autocast:
    """Return a context for many steps of training in bfloat16.

    autocast keeps a bfloat16 copy of each weight until its context ends, so that within one context an update would
    never reach the next forward pass: the copies are switched off.
    """
    return torch.autocast(device, torch.bfloat16, enabled=enabled, cache_enabled=False)
