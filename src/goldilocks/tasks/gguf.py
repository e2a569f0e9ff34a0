"""A Llama model in a GGUF file, as the folder that transformers loads: safetensors, config, tokenizer, chat template.

The package ``gguf`` reads metadata as one NumPy slice of a memory map per token: eleven seconds for a vocabulary of
49,152 and its merges, and transformers reads the file anew for the tokenizer (twice), the config and the weights. This
reader takes 0.3 s. The arithmetic of the quantised types is the package's own. Invariant: the weights equal those that
transformers takes from the same file, rounded to bf16. The tokenizer follows the file more closely: transformers drops
the rule ``smollm`` (a token per digit) and takes another token for the end.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goldilocks.errors import require, require_known

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import LlamaConfig, PreTrainedTokenizerFast


MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # of the tensors, unless the metadata say otherwise
_PLAIN = {"F32": "<f4", "F16": "<f2"}  # types the package wants as numbers and not as bytes
ARCHITECTURE, TOKENIZER, DIGITS_APART = "llama", "gpt2", ("smollm",)
_NORMAL = 1  # the type of a token that is no special one

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in the file; ``shape`` is in PyTorch's order, slowest dimension first."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """``metadata`` by key, ``tensors`` by name; ``tensor(name)`` dequantises one."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._place = len(MAGIC)
        version = self._number("I") if self._bytes[: len(MAGIC)] == MAGIC else 0
        versions = " or ".join(map(str, VERSIONS))
        require(version in VERSIONS, "--source", str(path), f"a GGUF file of version {versions}")
        tensors, entries = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {self._string(): self._value(self._number("I")) for _ in range(entries)}
        self.tensors = dict(self._stored() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        self._data = -(-self._place // alignment) * alignment

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor in fp32."""
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.tensors[name]
        kind = GGMLQuantizationType(stored.kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        *rows, width = stored.shape
        shape = (*rows, width // block * block_bytes)
        start = self._data + stored.offset
        raw = np.frombuffer(self._bytes, np.uint8, count=int(np.prod(shape)), offset=start).reshape(shape)
        values = dequantize(raw.view(_PLAIN[kind.name]) if kind.name in _PLAIN else raw, kind)
        return values.astype(np.float32, copy=False).reshape(stored.shape)

    def _number(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._bytes, self._place)[0]
        self._place += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        start, self._place = self._place, self._place + length
        return self._bytes[start : self._place].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            return [self._value(inner) for _ in range(count)]
        return self._number(_NUMBERS[kind])

    def _stored(self) -> tuple[str, Stored]:
        name, dimensions = self._string(), self._number("I")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, Stored(shape, self._number("I"), self._number("Q"))


def convert(gguf: Path, out: Path, told: Callable[[float], None] = lambda share: None) -> None:
    """Write the folder; ``told`` is called with the share of the tensors that is done."""
    from transformers import GenerationConfig

    file = GgufFile(gguf)
    config = config_of(file)
    tokenizer = tokenizer_of(file)
    _save_weights(file, config, out, told)
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    ends = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ends).save_pretrained(out)


def config_of(file: GgufFile) -> LlamaConfig:
    """Return the shape of the model."""
    from transformers import LlamaConfig

    found = file.metadata
    require_known("general.architecture", found["general.architecture"], [ARCHITECTURE])
    heads = found["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=found["llama.embedding_length"],
        intermediate_size=found["llama.feed_forward_length"],
        num_hidden_layers=found["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=found.get("llama.attention.head_count_kv", heads),
        max_position_embeddings=found["llama.context_length"],
        rms_norm_eps=float(f"{found['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # written as fp32
        rope_parameters={"rope_type": "default", "rope_theta": found.get("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=found.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=found["tokenizer.ggml.eos_token_id"],
        pad_token_id=found.get("tokenizer.ggml.padding_token_id"),
    )


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """Return the byte-level BPE tokenizer of the file, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    found = file.metadata
    require_known("tokenizer.ggml.model", found["tokenizer.ggml.model"], [TOKENIZER])
    tokens: list[str] = found["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in found["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if found.get("tokenizer.ggml.pre") in DIGITS_APART else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, by_bytes])
    backend.decoder = decoders.ByteLevel()
    kinds = found["tokenizer.ggml.token_type"]
    special = [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind != _NORMAL]
    backend.add_special_tokens(special)
    named = {
        name: tokens[found[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if key in found
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=found["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )
    tokenizer.chat_template = found.get("tokenizer.chat_template")
    return tokenizer


def weights(file: GgufFile, config: LlamaConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor under the name transformers gives it, in fp32."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    for stored in file.tensors:
        values = file.tensor(stored)
        if stored in _OUTER:
            yield _OUTER[stored], values
            continue
        _, layer, part, ending = stored.split(".")
        if part in heads:
            values = _halves_apart(values, heads[part])
        yield f"model.layers.{layer}.{_NAMES[part]}.{ending}", values


def _halves_apart(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring pairs, transformers the two halves of a head: the rows are in another order."""
    rows, width = values.shape
    return values.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _save_weights(file: GgufFile, config: LlamaConfig, out: Path, told: Callable[[float], None]) -> None:
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, values in weights(file, config):
        tensors[name] = torch.tensor(values, dtype=torch.bfloat16)
        told(len(tensors) / len(file.tensors))
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
