"""A model in a GGUF file becomes the folder that transformers loads."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldilocks.tasks.smollm2 import GgufFile, convert, tokenizer_of

WIDTH, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abcdeĠĊ", "ab", "Ġab", "12"]
MERGES = ["a b", "Ġ ab", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A Llama of two layers whose matrices are quantised as SmolLM2's are."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    _add_tensors(writer)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def _add_tensors(writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, width: int, kind: gguf.GGMLQuantizationType) -> None:
        values = rng.standard_normal((rows, width), np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    matrix("token_embd.weight", len(TOKENS), WIDTH, q8)
    for layer in range(2):
        for name, rows, width in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH * KV_HEADS // HEADS, WIDTH),
            ("attn_v", WIDTH * KV_HEADS // HEADS, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ):
            matrix(f"blk.{layer}.{name}.weight", rows, width, q4)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.standard_normal(WIDTH).astype(np.float32))
    writer.add_tensor("output_norm.weight", rng.standard_normal(WIDTH).astype(np.float32))


def test_weights_equal_those_that_transformers_takes_from_the_file(file, tmp_path):
    convert(file, tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in ours.state_dict().items())
    for key in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "eos_token_id", "pad_token_id"):
        assert getattr(ours.config, key) == pytest.approx(getattr(theirs.config, key)), key


def test_the_tokenizer_keeps_digits_apart_and_ends_with_the_end_of_a_message(file, tmp_path):
    convert(file, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("ab 12 ab") == ["ab", "Ġ", "1", "2", "Ġab"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12\nab"}], tokenize=False)
    assert text == "<|im_start|>12\nab<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_token_keeps_its_number(file):
    tokenizer = tokenizer_of(GgufFile(file))
    assert [tokenizer.convert_ids_to_tokens(place) for place in range(len(TOKENS))] == TOKENS


def test_another_file_is_refused(tmp_path):
    (tmp_path / "other").write_bytes(b"PK" + bytes(64))
    with pytest.raises(ValueError, match="is not accepted: a GGUF file"):
        GgufFile(tmp_path / "other")
