"""Small stand-ins for published data and real models; each function returns the word of a command that names it."""

from __future__ import annotations

import json
import string
from pathlib import Path

from goldilocks.tasks.tiny_model import build, character_tokenizer


def gsm8k_files(folder: Path, problems: int = 12) -> str:
    """Write a folder as GSM8K is published."""
    folder.mkdir()
    for split, first in (("train", 0), ("test", 1000)):
        sums = [(n, n + 1) for n in range(first, first + problems)]
        rows = [{"question": f"What is {n} and 1?", "answer": f"{n}+1=<<{n}+1={m}>>{m}.\n#### {m}"} for n, m in sums]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"task.data={folder}"


def math_files(folder: Path, problems: int = 12) -> str:
    """Write a folder as MATH and MATH-500 are published."""
    folder.mkdir()
    for split, first in (("train", 0), ("test500", 1000)):
        numbers = range(first, first + problems)
        rows = [
            {"problem": f"What is ${n}$?", "answer": str(n), "level": n % 2 + 1, "type": "Algebra"} for n in numbers
        ]
        (folder / f"{split}.json").write_text(json.dumps(rows))
    return f"task.data={folder}"


def small_model(folder: Path) -> str:
    """Save an untrained model of 85 thousand parameters that reads and writes any text."""
    tokenizer = character_tokenizer(string.printable)
    model = build(tokenizer, seed=0)
    model.config.max_position_embeddings = 2048
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"
