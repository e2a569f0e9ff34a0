"""Lessons before RL: supervised training that leaves a model imperfect, so that RL has something to teach.

A tiny model learns the easy sums and forgets most carries. A larger one learns the form of an answer, and some of the
lowest levels. Invariant: no lesson is a validation problem. What RL teaches afterwards carries over to unseen problems,
since one mistake, the forgotten carry, causes most wrong sums of two digits and one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from goldilocks.tasks.arithmetic import ArithmeticLevel, split_key
from goldilocks.tasks.registry import Problem, split_of

MOMENTUM, WEIGHT_DECAY = 0.95, 0.01
# Coefficients of the quintic that drives singular values towards one, from the paper's reference code.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
STEPS, PUPIL_STEPS = 600, 300
BATCH = 64
LR, MATRIX_LR, PUPIL_LR = 6e-3, 1e-2, 1e-4
WARM_UP = 30
SLIPS = 0.65  # of the carries are forgotten in the lessons

# How often each level is taught. The model never learns the other levels.
LESSONS: Mapping[ArithmeticLevel, float] = {
    **{ArithmeticLevel(operation, (1, 1)): 2 for operation in "+-"},
    **{ArithmeticLevel(operation, (2, 1)): 6 for operation in "+-"},
    **{ArithmeticLevel(operation, (2, 2)): 1 for operation in "+-"},
    ArithmeticLevel("*", (1, 1)): 1,
}

Encode = Callable[[str, str], tuple[list[int], list[int]]]
Lesson = tuple[list[int], list[int]]


def slip(question: str) -> str:
    """Return the answer without carries and borrows."""
    operation = "+" if "+" in question else "-"
    a, b = question.rstrip("=").split(operation)
    width = max(len(a), len(b))
    sign = 1 if operation == "+" else -1
    digits = [(int(x) + sign * int(y)) % 10 for x, y in zip(a.zfill(width), b.zfill(width), strict=True)]
    return str(int("".join(map(str, digits))))


def lessons(rng: random.Random) -> Iterator[Problem]:
    """Yield problems without end, some of them with the answer of ``slip``."""
    while True:
        level = rng.choices(list(LESSONS), list(LESSONS.values()))[0]
        problem = level.draw(rng)
        if split_of(split_key(problem.question)) == "val":
            continue
        if level.digits == (2, 1) and level.operation in "+-" and rng.random() < SLIPS:
            problem = Problem(problem.question, slip(problem.question), problem.difficulty)
        yield problem


def batches(encode: Encode, endless: Iterator[Problem], rng: random.Random) -> Iterator[list[Lesson]]:
    """Yield batches of lessons of similar length, to save padding."""
    while True:
        pool = [
            encode(problem.question, problem.answer) for _, problem in zip(range(BATCH * 16), endless, strict=False)
        ]
        pool.sort(key=lambda lesson: len(lesson[0]) + len(lesson[1]))
        chunks = [pool[start : start + BATCH] for start in range(0, len(pool), BATCH)]
        rng.shuffle(chunks)
        yield from chunks


def warm_start(
    model: torch.nn.Module,
    encode: Encode,
    seed: int,
    steps: int = STEPS,
    told: Callable[[int], None] = lambda step: None,
    taught: Callable[[random.Random], Iterator[Problem]] = lessons,
    optimizers: Sequence[tuple[torch.optim.Optimizer, float]] | None = None,
) -> float:
    """Train the model in place on the lessons ``taught``; return the mean loss of the last fifty steps.

    ``optimizers`` have their learning rate beside them; without any they are those of a tiny model.
    """
    optimizers = optimizers or _of_a_tiny_model(model)
    rng = random.Random(seed)
    source = batches(encode, taught(rng), rng)
    recent: list[float] = []
    model.train()
    for step in range(steps):
        loss = _loss(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, lr in optimizers:
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
        recent = [*recent[-49:], loss.item()]
        told(step + 1)
    model.eval()
    return sum(recent) / len(recent)


def _of_a_tiny_model(model: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return Muon for the hidden matrices and AdamW for the rest, each with its learning rate."""
    hidden = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    return [
        (Muon(hidden, MATRIX_LR), MATRIX_LR),
        (torch.optim.AdamW(others, LR, betas=(0.9, 0.99), weight_decay=0.05), LR),
    ]


def _loss(model: torch.nn.Module, lessons: list[Lesson]) -> torch.Tensor:
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


def teach(
    model: Path, out: Path, taught: Callable[[random.Random], Iterator[Problem]], steps: int = PUPIL_STEPS
) -> None:
    """Train a copy of ``model`` on the lessons, on the GPU where there is one, and save it to ``out``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    pupil = auto.from_pretrained(model, dtype="auto")
    kept = pupil.dtype
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pupil = pupil.to(device, torch.float32)
    optimizers = [(torch.optim.AdamW(pupil.parameters(), PUPIL_LR, betas=(0.9, 0.99), weight_decay=0.0), PUPIL_LR)]
    with Progress(transient=True) as bar, mixed_precision(device.type, enabled=device.type == "cuda"):
        line = bar.add_task(f"teaching {model.name} its first lessons", total=steps)
        encoded = partial(encode, tokenizer)
        warm_start(pupil, encoded, 0, steps, lambda done: bar.update(line, completed=done), taught, optimizers)
    pupil.to(kept).save_pretrained(out)
    tokenizer.save_pretrained(out)


def mixed_precision(device: str, *, enabled: bool) -> torch.autocast:
    """Return a context for many steps of training in bfloat16.

    autocast keeps a bfloat16 copy of each weight until its context ends, so that within one context an update would
    never reach the next forward pass: the copies are switched off.
    """
    return torch.autocast(device, torch.bfloat16, enabled=enabled, cache_enabled=False)


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, by the chat template, and those of the answer with its end token."""
    messages = [{"role": "user", "content": question}]
    prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return prompt, [*tokenizer.encode(answer), tokenizer.eos_token_id]


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are orthogonal matrices (Jordan et al. 2024), for a model's hidden matrices.

    Steps have the size of Adam's, so that one learning rate fits both. torch's own Muon computes in bfloat16, which is
    slow on a CPU without bfloat16 units; this one keeps the type of the parameters.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step along the orthogonalised Nesterov momentum."""
        for group in self.param_groups:
            for matrices in _alike(group["params"]):
                # Matrices of one shape are stacked: the number of operations costs more than their size.
                updates = orthogonal(torch.stack([self._momentum(matrix) for matrix in matrices]))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * WEIGHT_DECAY)
                    matrix.add_(update, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)
        return None

    def _momentum(self, matrix: torch.Tensor) -> torch.Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        momentum = state.setdefault("momentum", torch.zeros_like(matrix))
        momentum.lerp_(matrix.grad, 1 - MOMENTUM)
        return matrix.grad.lerp(momentum, MOMENTUM)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return the matrices with their singular values moved close to one, by Newton–Schulz iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x


def _alike(matrices: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    return by_shape.values()
