"""A GGUF file of SmolLM2 or Qwen2.5 becomes the folder that transformers loads: weights, config, tokenizer.

The package ``gguf`` reads the file and dequantises its tensors; the weights are rounded to bf16. transformers converts
such files too, and gets SmolLM2's tokenizer wrong: it merges digits, which the rule ``smollm`` keeps apart, and takes
another token for the end. Both models use one matrix to embed tokens and to score them. Qwen's file has that matrix
twice: as ``output.weight``, in six bits a weight, and as ``token_embd.weight``, in four. The finer one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from goldilocks.errors import require_known

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
