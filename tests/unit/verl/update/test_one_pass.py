"""Which rows an update computes, and when it needs no other pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl_world import nested

from goldilocks.config.recipes import choose, compose_config
from goldilocks.verl.patch import WHOLE_ROWS, WHOLE_TOKENS
from goldilocks.verl.plugin import in_force
from goldilocks.verl.update.log_probs import OnePass, balanced, chosen, use_behaviour_log_probs
from goldilocks.verl.update.trainer import CollectorTrainer


@pytest.fixture(scope="module")
def config():
    return compose_config(choose(["grpo", "task=gsm8k"], "cpu"))


def of(config, mini_batches=1, gate=False, patched=True, **changes):
    config = config.copy()
    OmegaConf.set_struct(config, False)
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        node = {"actor": config.actor_rollout_ref.actor, "algorithm": config.algorithm}[section.split("__")[0]]
        for part in section.split("__")[1:]:
            node = node[part]
        node[name] = value
    return OnePass.of(config, mini_batches=mini_batches, gate=gate, patched=patched)


def test_plain_grpo_needs_one_pass_over_the_rows_with_signal(config):
    assert of(config) == OnePass(own_log_probs=True, rows_with_signal=True)


@pytest.mark.parametrize(
    ("changes", "own", "skipped"),
    [
        ({"mini_batches": 2}, False, False),
        ({"actor__ppo_epochs": 2}, False, False),
        ({"gate": True}, False, True),
        ({"algorithm__use_kl_in_reward": True}, False, True),
        ({"algorithm__rollout_correction__rollout_is": "token"}, False, False),
        ({"algorithm__rollout_correction__bypass_mode": True}, False, False),
        ({"actor__strategy": "megatron", "actor__megatron": {"router_replay": {"mode": "R2"}}}, False, True),
        ({"actor__use_kl_loss": True}, True, False),
        ({"actor__entropy_coeff": 0.01}, True, False),
        ({"actor__policy_loss__loss_mode": "kl_cov"}, True, False),
        ({"actor__loss_agg_mode": "seq-mean-token-sum-norm"}, True, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_needs_more_gets_it(config, changes, own, skipped):
    assert of(config, **changes) == OnePass(own, skipped)


def test_verls_update_is_left_alone_where_the_patch_is_not_chosen(config, monkeypatch):
    monkeypatch.setenv("GOLDILOCKS_PATCHES", "none")
    assert of(config, patched=in_force("one-pass")) == OnePass(False, False)


@given(st.lists(st.booleans(), min_size=8, max_size=40), st.integers(1, 8))
def test_rows_with_signal_are_all_there_and_ranks_can_share_them(signal, ranks):
    places = chosen([*signal, *[False] * ranks], ranks)
    assert {place for place, has in enumerate(signal) if has} <= set(places)
    assert len(places) % ranks == 0
    assert ranks <= len(places) < sum(signal) + 2 * ranks


class Counted(str):
    """A key that counts how often it is looked up."""

    __slots__ = ()
    looked_up = 0

    def __hash__(self):
        Counted.looked_up += 1
        return super().__hash__()


class Trainer(CollectorTrainer):
    """The trainer before its update, without workers: notes the rows whose log-probs are computed.

    ``micro_batches``: of the update, of the log-probs and of the reference, where they have a fixed number of rows.
    """

    use_reference_policy, use_critic = True, False

    def __init__(self, ranks, micro_batches=()):
        update, log_probs, ref = micro_batches or (None, None, None)
        sizes = {"ppo_micro_batch_size_per_gpu": update, "ppo_mini_batch_size": 4}
        parts = {
            "actor": {"use_dynamic_bsz": not micro_batches, **sizes},
            "rollout": {"log_prob_micro_batch_size_per_gpu": log_probs},
            "ref": {"log_prob_use_dynamic_bsz": not micro_batches, "log_prob_micro_batch_size_per_gpu": ref},
        }
        self.config = OmegaConf.create({"actor_rollout_ref": parts, "data": {"train_batch_size": 8}})
        self.one_pass = OnePass(own_log_probs=True, rows_with_signal=True)
        self.global_steps = 3
        self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})

    def _log_probs(self, batch, metrics):
        self.computed = batch.keys


@pytest.mark.parametrize("rows", [64, 256])
def test_old_rows_are_told_from_new_ones_in_as_many_lookups_as_there_are_rows(queue, rows):
    for number in range(rows):
        queue.add(Counted(f"g{number}_0_0"), version=1 + number % 2, length=2 + number % 5, rollout_log_probs=-1.0)
    batch = queue.batch()
    Counted.looked_up = 0
    use_behaviour_log_probs(batch, 2, None, own=True)
    assert Counted.looked_up <= 16 * rows
    own = {key for key, row in queue.rows.items() if row["old_log_probs"].isnan().all()}
    assert {int(key[1:-4]) % 2 for key in own} == {1}
    assert len(own) == rows // 2


def test_no_pass_is_made_for_rows_of_an_older_policy(queue):
    """Its log-probs were stored with them, and the update's own pass gives those of all other tokens."""
    trainer = Trainer(ranks=1)
    queue.add("g1_0_0", version=1, length=2)
    queue.add("g2_0_0", version=2, length=2)
    trainer._compute_old_log_prob(queue.batch(), {})
    assert not hasattr(trainer, "computed")


def test_with_micro_batches_of_fixed_size_every_rank_gets_whole_ones():
    """verl refuses any other number of rows. The update has two mini-batches of three rows for each rank."""
    assert Trainer(ranks=2, micro_batches=(3, 4, 6))._get_required_batch_multiple(dp_size=2) == 2 * 12
    assert Trainer(ranks=2)._get_required_batch_multiple(dp_size=2) == 2 * 2


def test_ranks_get_equally_many_rows_and_about_the_same_work():
    keys = [f"a_{i}_0" for i in range(8)]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{"seq_len": 10 + 90 * (i < 4)} for i in range(8)])
    order = balanced(keys, batch, 2)
    assert sorted(order) == sorted(keys)
    assert sum(int(key.split("_")[1]) < 4 for key in order[:4]) == 2


def test_the_update_is_told_of_the_whole_batch(monkeypatch):
    fields = {
        "advantages": nested(map(torch.tensor, [[0.5, 0.5], [0.0, 0.0, 0.0], [0.0], [0.7, -0.7]])),
        "response_mask": nested(map(torch.tensor, [[1, 1], [1, 1, 1], [0], [0, 1]])),
    }
    monkeypatch.setattr(tq, "kv_batch_get", lambda **wanted: TensorDict(fields, batch_size=4))
    keys = [f"a_{i}_0" for i in range(4)]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{"seq_len": 5}] * 4, extra_info={"temperature": 1.0})
    part = OnePass(True, True).rows(batch, 1)
    assert part.keys == ["a_0_0", "a_3_0"]
    assert part.extra_info == {"temperature": 1.0, WHOLE_ROWS: 4, WHOLE_TOKENS: 6}
    assert batch.extra_info == {"temperature": 1.0}
    assert len(OnePass(True, True).rows(batch, ranks=1, micro_batch=3).keys) == 3
    assert OnePass(True, False).rows(batch, 1).keys == keys
    assert OnePass(False, False).rows(batch, 1) is batch
