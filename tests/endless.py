"""A model that is asked two kinds of prompts: to some it answers at random, its answers to the others never end.

What a test says of rollouts that are unfinished when a batch is full must not hang on how fast an engine is beside the
trainer. An answer that ends only at its limit, far away, is unfinished on any machine.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

KIND = 0.1  # in the first place of every embedding, with a sign; the other places have a deviation of 0.02
FIRM = 12.0  # makes logits of about 35


def make_endless(folder: Path, tokens: list[str]) -> None:
    """Change the random Llama in ``folder``: after one of ``tokens`` comes one of them again, and never after others.

    The first place of a hidden state has the kind of the last token. No layer writes there, and the logits of
    ``tokens`` follow it.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(tokens)
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding[:, 0], head[:, 0] = -KIND, 0.0
        embedding[ids, 0], head[ids, 0] = KIND, FIRM
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0], layer.mlp.down_proj.weight[0] = 0.0, 0.0
    model.save_pretrained(folder)
