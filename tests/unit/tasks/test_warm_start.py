"""A model that is taught lessons: another model in another folder, the first one as it was."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldilocks.tasks import ladder
from goldilocks.tasks.registry import WarmStart
from goldilocks.tasks.tiny_model import build, character_tokenizer
from goldilocks.tasks.warm_start import encode, loss_of, mixed_precision, teach


def weights(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return torch.cat([one.detach().flatten().float() for one in model.parameters()])


def test_the_pupil_learns_and_the_model_stays(tmp_path):
    tokenizer = character_tokenizer(ladder.CHARACTERS)
    build(tokenizer, seed=0).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    before = weights(tmp_path / "model")
    plan = WarmStart(steps=8, lr=1e-4, batch=64, seed=0)
    teach(str(tmp_path / "model"), tmp_path / "taught", ladder.lessons, plan)
    assert torch.equal(weights(tmp_path / "model"), before)
    teach(str(tmp_path / "model"), tmp_path / "again", ladder.lessons, plan)
    assert torch.equal(weights(tmp_path / "again"), weights(tmp_path / "taught"))
    lessons = [encode(AutoTokenizer.from_pretrained(tmp_path / "taught"), "sort 321", "123")]
    folders = [tmp_path / "model", tmp_path / "taught"]
    assert {AutoModelForCausalLM.from_pretrained(one, dtype="auto").dtype for one in folders} == {torch.bfloat16}
    untaught, taught = (
        loss_of(AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32), lessons).item() for one in folders
    )
    assert taught < untaught


def test_in_mixed_precision_a_forward_pass_sees_the_last_update():
    layer = torch.nn.Linear(4, 4)
    with mixed_precision("cpu", enabled=True):
        first = layer(torch.ones(4))
        with torch.no_grad():
            layer.weight.add_(1)
        assert not torch.equal(layer(torch.ones(4)), first)
