"""A model that is asked two kinds of prompts: to some it answers at random, its answers to the others never end.

What a test says of rollouts that are unfinished when a batch is full must not hang on how fast an engine is beside the
trainer. An answer that ends only at its limit, far away, is unfinished on any machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

KIND = 0.1  # in the first place of every embedding, with a sign; the other places have a deviation of 0.02
FIRM = 12.0  # makes logits of about 35


def make_endless(folder: Path, tokens: list[str]) -> None:
    """Change the random Llama in ``folder``: ``tokens`` are those of answers that do not end."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    never_ends(model, AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(tokens))
    model.save_pretrained(folder)


def never_ends(model: Any, ids: list[int], place: int = 0) -> None:
    """After one of the tokens ``ids`` comes one of them again, and never after others.

    This place of a hidden state has the kind of the last token. No layer writes there, and the logits of ``ids`` follow
    it.
    """
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding[:, place], head[:, place] = -KIND, 0.0
        embedding[ids, place], head[ids, place] = KIND, FIRM
        for layer in model.get_decoder().layers:
            layer.self_attn.o_proj.weight[place], layer.mlp.down_proj.weight[place] = 0.0, 0.0
