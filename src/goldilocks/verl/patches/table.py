"""The functions of verl, and of the TransferQueue under it, that Goldilocks replaces: they have no registry.

torch and verl are imported only inside the replacements, so that this module costs a process nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

from goldilocks.verl import failures
from goldilocks.verl.patches import nested_rows, packed_rows
from goldilocks.verl.patches.patch import Function, Patch


def gloo_group_on_cpu(original: Function) -> Function:
    """verl asks torch for ``cpu:gloo,cpu:gloo``, which torch rejects; on the CPU one backend is the whole group."""

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        from verl.utils.device import get_device_name

        if backend is None and get_device_name() == "cpu":
            backend = "cpu:gloo"
        original(timeout_second=timeout_second, backend=backend)

    return initialize_global_process_group_ray


# Rows are taken together up to this many logits: 256 MiB in fp32, so that the peak stays what verl's loop keeps low.
LOGITS_PER_BLOCK = 1 << 26


def logprobs_by_blocks(original: Function) -> Function:
    """Without flash-attn verl takes log-probs row by row, and its rows are single tokens: 417 ms where this takes 2."""

    @functools.wraps(original)
    def logprobs_from_logits_v2(logits: Any, labels: Any) -> Any:
        import torch

        vocabulary = logits.shape[-1]
        rows, picks = logits.reshape(-1, vocabulary), labels.reshape(-1, 1)
        size = max(1, LOGITS_PER_BLOCK // vocabulary)
        blocks = zip(rows.split(size), picks.split(size), strict=True)
        return torch.cat([_logprobs(block, pick) for block, pick in blocks]).view(labels.shape)

    return logprobs_from_logits_v2


def _logprobs(rows: Any, picks: Any) -> Any:
    """verl's own two formulas, which differ by type: logsumexp loses too much in half precision."""
    import torch

    if rows.dtype in (torch.float32, torch.float64):
        return rows.gather(-1, picks).squeeze(-1) - rows.logsumexp(-1)
    return rows.log_softmax(-1).gather(-1, picks).squeeze(-1)


def value_model_by_config(original: Function) -> Function:
    """verl loads every critic with flash_attention_2; this loads it with the attention its config names."""

    @functools.wraps(original)
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        attention = model_config._attn_implementation
        if attention == "flash_attention_2":
            return original(local_path, torch_dtype, model_config, trust_remote_code)
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


def trl_with_value_heads(original: Function) -> Function:
    """verl takes any TRL for one that has a value-head model. TRL removed it in 1.13, and every FSDP worker failed."""

    @functools.wraps(original)
    def is_trl_available() -> bool:
        if not original():
            return False
        folders = importlib.util.find_spec("trl").submodule_search_locations or ()  # type: ignore[union-attr]
        return any(Path(folder, "experimental", "ppo").is_dir() for folder in folders)

    return is_trl_available


def rollout_limits_first(original: Function) -> Function:
    """What our rollout server cannot do is said by the driver, before Ray and twenty processes are started."""

    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        from omegaconf import OmegaConf

        from goldilocks.verl.server import limits

        if OmegaConf.select(config, "actor_rollout_ref.rollout.name") == limits.NAME:
            limits.check(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model)
        original(config, *args, **kwargs)

    return validate_config


PATCHES: tuple[Patch, ...] = (
    packed_rows.PATCH,
    Patch(
        "one partition, not balanced",
        "verl.utils.seqlen_balancing",
        "get_seqlen_balanced_partitions",
        "5a3d752e6c5d5734",
        nested_rows.one_partition_is_all,
    ),
    Patch(
        "rows selected at once",
        "verl.utils.tensordict_utils",
        "index_select_tensor_dict",
        "ecca58fdcf80a3ed",
        nested_rows.select_rows_at_once,
    ),
    Patch(
        "responses of a batch at once",
        "verl.workers.utils.padding",
        "response_from_nested",
        "41a4bf54aa981c09",
        nested_rows.responses_at_once,
    ),
    Patch(
        "padded responses of a batch at once",
        "verl.workers.utils.padding",
        "response_to_nested",
        "a2272158cd69af64",
        nested_rows.padded_at_once,
    ),
    Patch(
        "process group on the CPU",
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        "761a94d1a2e058d3",
        gloo_group_on_cpu,
    ),
    Patch(
        "log-probs by blocks",
        "verl.utils.torch_functional",
        "logprobs_from_logits_v2",
        "1074be97faf338ae",
        logprobs_by_blocks,
    ),
    Patch(
        "critic without flash-attn",
        "verl.utils.model",
        "load_valuehead_model",
        "2371ca280654b53b",
        value_model_by_config,
    ),
    Patch(
        "TRL without value heads, beside verl",
        "verl.utils.import_utils",
        "is_trl_available",
        "1a123c4fa66c9cb9",
        trl_with_value_heads,
    ),
    Patch(
        "limits of the rollout server",
        "verl.utils.config",
        "validate_config",
        "ab4096deecfec745",
        rollout_limits_first,
    ),
    Patch(
        "first error of a rollout, published",
        "verl.trainer.ppo.v1.agent_loop_tq",
        "_settle_session_tasks",
        "21a713e8560104b4",
        failures.publish_first_error,
    ),
    Patch(
        "workers of a rollout, remembered",
        "verl.trainer.ppo.v1.agent_loop_tq",
        "AgentLoopManagerTQ.generate_sequences",
        "de5ab7fe338523ca",
        failures.remember_workers,
    ),
    Patch(
        "first error of a rollout, named",
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.sample",
        "cdcecebeb7f0b44e",
        failures.name_first_error,
    ),
    Patch(
        "workers of a rollout, looked after",
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._wait_for_next_poll",
        "10088bf03da69383",
        failures.look_after_workers,
    ),
)
