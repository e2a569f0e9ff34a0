"""``GoldilocksAsyncGRPOTrainer`` beside a real vLLM server: every version of the adapter reaches it, over a restart.

An adapter goes there as a folder, by TRL's own way. All weights would go by NCCL, which a machine without a GPU lacks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

pytest.importorskip("vllm")
pytest.importorskip("goldilocks.trl.async_trainer", exc_type=ImportError)

import trl_async_world as asynchronous
from peft import LoraConfig, PeftModel
from run_files import batches_of, json_lines
from transformers import AutoModelForCausalLM
from vllm.utils.network_utils import get_open_port

from goldilocks.trl.async_rollouts import CollectedQueue

from .conftest import log_probs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

SERVED = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
OPTIONS = ["--dtype=float32", "--max-model-len=64", "--max-num-seqs=8", "--enforce-eager", "--enable-lora"]
RANK, ADAPTERS = 8, 10  # more adapters than are made here, so that every version stays
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@contextmanager
def served(model: str, log: Path) -> Iterator[str]:
    """Start vLLM's server; yield its address."""
    port = get_open_port()
    address, lora = f"http://127.0.0.1:{port}", [f"--max-lora-rank={RANK}", f"--max-loras={ADAPTERS}"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--host=127.0.0.1", *OPTIONS, *lora],
            env={**os.environ, **SERVED},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        while not is_up(address):
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_up(address: str) -> bool:
    try:
        return requests.get(f"{address}/health", timeout=5).status_code == 200
    except (requests.ConnectionError, requests.Timeout):
        return False


def test_the_server_answers_with_every_version_of_the_adapter_and_a_run_goes_on_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asynchronous.on_the_cpu(monkeypatch.setattr, threads=False)
    taken: list[Any] = []
    get = CollectedQueue.get
    monkeypatch.setattr(CollectedQueue, "get", lambda *args, **kwargs: taken.append(get(*args, **kwargs)) or taken[-1])
    out, model = tmp_path / "run", asynchronous.model_folder(tmp_path)
    chosen = {
        "sections": {"filter_groups": {"enable": True, "max_carry_steps": 3}, "gen_batch_size": 4},
        "peft_config": LoraConfig(r=RANK, target_modules=LAYERS),
        "max_staleness": ADAPTERS - 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    with served(model, tmp_path / "server.log") as address:
        for steps, resume in ((3, None), (4, str(out / "checkpoint-2"))):
            asynchronous.trainer(out, address, max_steps=steps, **chosen).train(resume_from_checkpoint=resume)
    policies = versions(model, out / ".vllm_lora")
    assert sorted(policies) == [1, 2, 3, 4, 5, 6, 7]  # at the start of a run, and after each update
    for sample in taken:  # by the weights that were there when it was asked for, or by later ones
        gaps = {version: gap(policies[version], sample) for version in policies}
        assert min(gaps[version] for version in policies if version >= sample.model_version) < 1e-4, gaps
    for before in (1, 2, 3, 5, 6):  # an update is larger than what rounding explains
        assert apart(policies[before], policies[before + 1], taken[0]) > 1e-3
    lines = [one["data"] for one in json_lines(out / "metrics.jsonl")]
    assert max(line["train/age_max"] for line in lines if "train/age_max" in line) <= 3
    for groups in batches_of(out):
        assert [len({row["score"] for row in rows}) for rows in groups.values()] == [2, 2]


def versions(model: str, folder: Path) -> dict[int, Any]:
    """Return the policy of each version of the adapter."""
    base = AutoModelForCausalLM.from_pretrained
    names = {int(one.name.partition("-v")[2]): str(one) for one in folder.glob("trl-policy-v*")}
    return {version: PeftModel.from_pretrained(base(model), name).eval() for version, name in names.items()}


def gap(policy: Any, sample: Any) -> float:
    """Return the largest difference between the server's log-probs of an answer and the policy's."""
    sampled = sample.old_log_probs[sample.completion_mask.tolist().index(1) :]
    return float((answer_of(policy, sample) - torch.tensor(sampled)).abs().max())


def apart(one: Any, other: Any, sample: Any) -> float:
    return float((answer_of(one, sample) - answer_of(other, sample)).abs().max())


def answer_of(policy: Any, sample: Any) -> torch.Tensor:
    """Return the policy's log-probs of an answer."""
    ids, begins = sample.input_ids.tolist(), sample.completion_mask.tolist().index(1)
    return log_probs(policy, ids[:begins], ids[begins:])
