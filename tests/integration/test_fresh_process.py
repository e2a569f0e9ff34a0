"""What a process sees that has imported neither verl nor torch; one process for all, since its imports take seconds:
it forks for each."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from goldilocks.verl import plugin
from goldilocks.verl.patch import Kind
from goldilocks.verl.patches import PATCHES

plugin.additions()

ROWS = [torch.arange(size) for size in range(1, 20)]
FILTER = """
import torch
from goldilocks.filtering import PPOBatchFilter
reward, length = (torch.arange(64) % 3 == 0).float(), torch.arange(64) * 7 % 50 + 1
chooser = PPOBatchFilter({"target_group_size": 8, "target_num_groups": 2}, {"seed": 5})
batch, uids = {"rewards": reward, "response_lengths": length}, [f"prompt {row // 16}" for row in range(64)]
chosen = chooser.filter_batch(batch, uids, return_indices=True)[0].tolist()
"""
# Each fork sees what it imports itself. The plug-in; the batch filter; a storage unit of the TransferQueue, which
# has nothing of ours, gets a packed message and then imports verl by way of ours; verl is imported without plug-ins.
CHILD = """
import gc, json, os, pickle, sys
from pathlib import Path

gc.disable()
folder = Path(sys.argv[1])

def loaded(*packages):
    return [name for name in packages if name in sys.modules]

def forked(see):
    if os.fork() == 0:
        (folder / f"{see.__name__}.json").write_text(json.dumps(see()))
        os._exit(0)
    assert os.wait()[1] == 0, see.__name__

def plugin():
    import goldilocks.verl.plugin
    return loaded("verl", "torch", "ray")

def filtered():
    exec(sys.argv[3], globals())
    return {"chosen": chosen, "verl": loaded("verl")}

def storage():
    seen = {"before": loaded("verl", "goldilocks")}
    question = ZMQMessage.deserialize(pickle.loads((folder / "question").read_bytes()))
    seen["after a packed message"] = loaded("verl")
    (folder / "answer").write_bytes(pickle.dumps([bytes(part) for part in question.serialize()]))
    import goldilocks.engine.cpu.verl_platform as cpu
    from verl.plugin.platform import PlatformRegistry as registry
    return seen | {"the platform is ours": registry.get("cpu") is cpu.PlatformCPU}

def log_probs():
    import goldilocks.verl.update.log_probs
    return loaded("goldilocks.verl.update.log_probs")

def replaced():
    sys.path.insert(0, sys.argv[2])
    import replaced
    return replaced.compared()

forked(plugin)
import torch
forked(filtered)
import transformers  # before the forks that import verl, which needs it
from transfer_queue.utils.zmq_utils import ZMQMessage
forked(storage)
forked(log_probs)
forked(replaced)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the process found a message of packed rows, and left what it answered and what it saw."""
    folder = tmp_path_factory.mktemp("fresh")
    body = {"data": {"rows": ROWS}}
    question = ZMQMessage.create(request_type=ZMQRequestType.GET_DATA_RESPONSE, sender_id="sender", body=body)
    (folder / "question").write_bytes(pickle.dumps([bytes(part) for part in question.serialize()]))
    command = [sys.executable, "-c", CHILD, str(folder), str(Path(__file__).parent), FILTER]
    subprocess.run(command, check=True, timeout=800, env={**os.environ, "PYTHONHASHSEED": "12345"})
    return folder


def seen(folder: Path, by: str) -> Any:
    return json.loads((folder / f"{by}.json").read_text())


def test_the_plug_in_itself_imports_neither_verl_nor_torch(folder: Path) -> None:
    assert seen(folder, "plugin") == []


def test_another_process_with_another_hash_seed_filters_the_same_rows_and_needs_no_verl(folder: Path) -> None:
    here: dict[str, list[int]] = {}
    exec(FILTER, here)
    assert len(here["chosen"]) == 16
    assert seen(folder, "filtered") == {"chosen": here["chosen"], "verl": []}


def test_a_process_that_was_never_told_understands_packed_rows_and_answers_in_kind(folder: Path) -> None:
    storage = seen(folder, "storage")
    assert storage["before"] == []
    assert storage["after a packed message"] == [], "a storage unit has no use for verl"
    parts = pickle.loads((folder / "answer").read_bytes())
    assert len(parts) == 1
    assert all(map(torch.equal, ZMQMessage.deserialize(parts).body["data"]["rows"], ROWS))


def test_a_module_of_an_addition_may_be_the_first_to_import_verl(folder: Path) -> None:
    assert seen(folder, "storage")["the platform is ours"]


def test_any_module_of_the_v1_trainer_may_be_imported_first(folder: Path) -> None:
    assert seen(folder, "log_probs") == ["goldilocks.verl.update.log_probs"]


def test_with_nothing_asked_for_every_function_is_verls_own_and_with_all_the_table_is_what_is_replaced(
    folder: Path,
) -> None:
    replaced = seen(folder, "replaced")
    assert replaced["nothing"] == []
    at_import = {
        target for patch in PATCHES if patch.kind is not Kind.TRAINER and patch.possible for target in patch.targets
    }
    assert set(replaced["all"]) == at_import | {"verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY[gspo]"}
