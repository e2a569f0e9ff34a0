"""What a process sees that has imported neither verl nor torch; one process for all, since its imports take seconds."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from goldilocks.verl import plugin

plugin.additions()

ROWS = [torch.arange(size) for size in range(1, 20)]
# A storage unit of the TransferQueue first, which has nothing of ours; then the plug-in; then verl, by way of ours.
CHILD = """
import json, pickle, sys
from pathlib import Path

def loaded(*packages):
    return [name for name in packages if name in sys.modules]

folder = Path(sys.argv[1])
import goldilocks.verl.plugin
seen = {"by the plug-in": loaded("verl", "torch", "ray")}
for name in [name for name in sys.modules if name.startswith("goldilocks")]:
    del sys.modules[name]
from transfer_queue.utils.zmq_utils import ZMQMessage
seen["by the TransferQueue"] = loaded("verl", "goldilocks")
question = ZMQMessage.deserialize(pickle.loads((folder / "question").read_bytes()))
seen["by a packed message"] = loaded("verl")
(folder / "answer").write_bytes(pickle.dumps([bytes(part) for part in question.serialize()]))
import goldilocks.platforms.cpu as cpu
from verl.plugin.platform import PlatformRegistry as registry
seen["the platform is ours"] = registry.get("cpu") is cpu.PlatformCPU
(folder / "seen.json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the process found a message of packed rows, and left what it answered and what it saw."""
    folder = tmp_path_factory.mktemp("fresh")
    body = {"data": {"rows": ROWS}}
    question = ZMQMessage.create(request_type=ZMQRequestType.GET_DATA_RESPONSE, sender_id="sender", body=body)
    (folder / "question").write_bytes(pickle.dumps([bytes(part) for part in question.serialize()]))
    subprocess.run([sys.executable, "-c", CHILD, str(folder)], check=True, timeout=300)
    return folder


@pytest.fixture
def seen(folder: Path) -> Any:
    return json.loads((folder / "seen.json").read_text())


def test_the_plug_in_itself_imports_neither_verl_nor_torch(seen: Any) -> None:
    assert seen["by the plug-in"] == []


def test_a_process_that_was_never_told_understands_packed_rows_and_answers_in_kind(folder: Path, seen: Any) -> None:
    assert seen["by the TransferQueue"] == []
    assert seen["by a packed message"] == [], "a storage unit has no use for verl"
    parts = pickle.loads((folder / "answer").read_bytes())
    assert len(parts) == 1
    assert all(map(torch.equal, ZMQMessage.deserialize(parts).body["data"]["rows"], ROWS))


def test_a_module_of_an_addition_may_be_the_first_to_import_verl(seen: Any) -> None:
    assert seen["the platform is ours"]
