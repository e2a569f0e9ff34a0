"""A model in a GGUF file becomes the folder that transformers loads: a Llama as SmolLM2 is one, and a Qwen2."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldilocks.tasks.from_gguf import convert

WIDTH, HEADS, KV_HEADS, INNER, LAYERS = 256, 4, 2, 512, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, "<tool_call>", *"0123456789abcdeĠĊ", "ab", "Ġab", "12", "Ã©", "Ã", "©", "[PAD25]"]
MERGES = ["a b", "Ġ ab", "1 2", "Ã ©"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
RULES = {"llama": "smollm", "qwen2": "qwen2"}


def write(path: Path, architecture: str) -> Path:
    """Write a model of two layers; Qwen2 has biases, and its embedding a second time."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(RULES[architecture])
    writer.add_token_list(TOKENS)
    kinds = gguf.TokenType
    normal = len(TOKENS) - len(SPECIAL) - 2
    writer.add_token_types([kinds.CONTROL] * 3 + [kinds.USER_DEFINED] + [kinds.NORMAL] * normal + [kinds.UNUSED])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    add_tensors(writer, architecture)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


def add_tensors(writer: gguf.GGUFWriter, architecture: str) -> None:
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, width: int, kind: gguf.GGMLQuantizationType) -> None:
        values = rng.standard_normal((rows, width), np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name, rng.standard_normal(size).astype(np.float32))

    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    matrix("token_embd.weight", len(TOKENS), WIDTH, q4)
    vector("output_norm.weight", WIDTH)
    narrow = WIDTH * KV_HEADS // HEADS
    for layer in range(LAYERS):
        for name, rows, width in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", narrow, WIDTH),
            ("attn_v", narrow, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ):
            matrix(f"blk.{layer}.{name}.weight", rows, width, q4)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                vector(f"blk.{layer}.{name}.bias", rows)
        for name in ("attn_norm", "ffn_norm"):
            vector(f"blk.{layer}.{name}.weight", WIDTH)
    if architecture == "qwen2":
        matrix("output.weight", len(TOKENS), WIDTH, q8)


@pytest.fixture(scope="module", params=list(RULES))
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """The architecture, its GGUF file, and the folder that was made of it."""
    folder = tmp_path_factory.mktemp(request.param)
    file, out = write(folder / "tiny.gguf", request.param), folder / "model"
    out.mkdir()
    convert(file, out)
    return request.param, file, out


def test_weights_and_config_equal_those_that_transformers_takes_from_the_file(files):
    architecture, file, out = files
    ours = AutoModelForCausalLM.from_pretrained(out)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    expected = theirs.state_dict()
    expected["model.embed_tokens.weight"] = expected["lm_head.weight"]  # one matrix, the one that scores
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in ours.state_dict().items())
    assert ours.config.model_type == architecture
    for key in ("rope_parameters", "rms_norm_eps", "num_key_value_heads", "vocab_size", "eos_token_id", "pad_token_id"):
        assert getattr(ours.config, key) == pytest.approx(getattr(theirs.config, key)), key


def test_both_ends_of_a_text_end_an_answer(files):
    ends = AutoModelForCausalLM.from_pretrained(files[2]).generation_config.eos_token_id
    assert sorted(ends) == [0, 2]


def test_digits_are_apart_and_an_answer_ends_with_the_end_of_a_message(files):
    tokenizer = AutoTokenizer.from_pretrained(files[2])
    assert tokenizer.tokenize("ab 12 ab") == ["ab", "Ġ", "1", "2", "Ġab"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12\nab"}], tokenize=False)
    assert text == "<|im_start|>12\nab<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_token_keeps_its_number_and_special_ones_are_left_out_of_a_text(files):
    tokenizer = AutoTokenizer.from_pretrained(files[2])
    assert tokenizer.convert_ids_to_tokens(list(range(len(TOKENS) - 1))) == TOKENS[:-1]
    ids = tokenizer.encode("<|im_start|><tool_call>ab<|im_end|>")
    assert ids == [1, 3, TOKENS.index("ab"), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>ab"


def test_qwen2_composes_accents_and_smollm_takes_them_as_they_are(files):
    tokenizer = AutoTokenizer.from_pretrained(files[2])
    composed, apart = tokenizer.encode("é"), tokenizer.encode("e\u0301")
    assert composed == [TOKENS.index("Ã©")]
    assert (apart == composed) == (files[0] == "qwen2")
