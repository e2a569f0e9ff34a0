"""A model that is taught a task's lessons before RL: the form of an answer, and some of the lowest levels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from goldilocks.tasks.base import Problem
from goldilocks.tasks.tiny_model import encode
from goldilocks.tasks.warm_start import warm_start

STEPS = 300
LR = 1e-4


def teach(
    model: Path, out: Path, taught: Callable[[random.Random], Iterator[Problem]], steps: int = STEPS, seed: int = 0
) -> None:
    """Train a copy of ``model`` on the lessons, on the GPU where there is one, and save it to ``out``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    pupil = auto.from_pretrained(model, dtype="auto")
    kept = pupil.dtype
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pupil = pupil.to(device, torch.float32)
    optimizers = [(torch.optim.AdamW(pupil.parameters(), LR, betas=(0.9, 0.99), weight_decay=0.0), LR)]
    with Progress(transient=True) as bar, mixed_precision(device.type, enabled=device.type == "cuda"):
        line = bar.add_task(f"teaching {model.name} its first lessons", total=steps)
        told = partial(_tell, bar, line)
        warm_start(pupil, partial(encode, tokenizer), seed, steps, told, taught, optimizers)
    pupil.to(kept).save_pretrained(out)
    tokenizer.save_pretrained(out)


def mixed_precision(device: str, *, enabled: bool) -> torch.autocast:
    """Return a context for many steps of training in bfloat16.

    autocast keeps a bfloat16 copy of each weight until its context ends, so that within one context an update would
    never reach the next forward pass: the copies are switched off.
    """
    return torch.autocast(device, torch.bfloat16, enabled=enabled, cache_enabled=False)


def _tell(bar: Progress, line: Any, done: int) -> None:
    bar.update(line, completed=done)
