"""Every attribute of verl, and of the TransferQueue under it, that Goldilocks replaces; ``docs/patches.md`` shows it.

torch and verl are imported only inside the replacements, so that this module costs a process nothing.
"""

from __future__ import annotations

from goldilocks.verl import failures
from goldilocks.verl.patches import checks, cpu, gspo, log_probs, nested_rows, packed_rows, trainers
from goldilocks.verl.patches.patch import Kind, Patch

SAME = "nothing: the same values"
NOTHING = "nothing that is computed"

# Applied by the worker of our V1 trainer in its own process: both, or neither, since they name the same digest.
GATHERED_PUTS = (
    Patch(
        "gathered-puts",
        Kind.TRAINER,
        "verl.trainer.ppo.v1.agent_loop_tq",
        "tq",
        "523edacbff73640d",
        trainers.gathering_queue,
        "verl packs and stores each rollout by itself; rollouts that end together are stored together",
        SAME,
        written_for="AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess",
    ),
    Patch(
        "gathered-rows",
        Kind.TRAINER,
        "verl.trainer.ppo.v1.agent_loop_tq",
        "list_of_dict_to_tensordict",
        "523edacbff73640d",
        trainers.rows_unpacked,
        "rows that are stored together are packed together",
        SAME,
        written_for="AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess",
    ),
)

# Applied by the task runner of our V0 trainer in its own process.
V0_TRAINER = Patch(
    "v0-trainer",
    Kind.TRAINER,
    "verl.trainer.main_ppo_v0",
    "RayPPOTrainer",
    "95ebfb4a9286d46a",
    trainers.sampling_trainer,
    "verl's V0 task runner hardcodes the class of its trainer",
    "the trainer is RayPPOTrainerWithSampling",
    written_for="TaskRunner.__ray_metadata__.modified_class.run",
)

PATCHES: tuple[Patch, ...] = (
    Patch(
        "process-group",
        Kind.CPU,
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        "761a94d1a2e058d3",
        cpu.gloo_group_on_cpu,
        "verl asks torch for two backends for one device on the CPU, which torch rejects",
        "nothing where there is an accelerator",
    ),
    Patch(
        "critic-attention",
        Kind.CPU,
        "verl.utils.model",
        "load_valuehead_model",
        "2371ca280654b53b",
        cpu.value_model_by_config,
        "verl loads every critic with flash_attention_2, which needs a GPU and flash-attn",
        "a critic whose config names another attention is loaded with that one, without verl's fallbacks",
    ),
    Patch(
        "trl-value-heads",
        Kind.CPU,
        "verl.utils.import_utils",
        "is_trl_available",
        "1a123c4fa66c9cb9",
        cpu.trl_with_value_heads,
        "verl takes any TRL for one that has a value-head model; TRL removed it in 1.13, and every FSDP worker fails",
        "nothing but that",
    ),
    Patch(
        "log-probs",
        Kind.SPEED,
        "verl.utils.torch_functional",
        "logprobs_from_logits_v2",
        "1074be97faf338ae",
        log_probs.logprobs_by_blocks,
        "without flash-attn verl loops over single tokens: 417 ms where this takes 2",
        "nothing on the CPU, gradients included; on a GPU a block may be summed in another order than a row",
    ),
    Patch(
        "row-selection",
        Kind.SPEED,
        "verl.utils.tensordict_utils",
        "index_select_tensor_dict",
        "ecca58fdcf80a3ed",
        nested_rows.select_rows_at_once,
        "verl unbinds a nested tensor into its rows; these are picked at once",
        SAME,
    ),
    Patch(
        "nested-responses",
        Kind.SPEED,
        "verl.workers.utils.padding",
        "response_from_nested",
        "41a4bf54aa981c09",
        nested_rows.responses_at_once,
        "verl reads a number from the device for every row; the offsets are read once",
        SAME,
    ),
    Patch(
        "padded-responses",
        Kind.SPEED,
        "verl.workers.utils.padding",
        "response_to_nested",
        "a2272158cd69af64",
        nested_rows.padded_at_once,
        "the same for responses of a padded tensor",
        SAME,
    ),
    Patch(
        "one-partition",
        Kind.SPEED,
        "verl.utils.seqlen_balancing",
        "get_seqlen_balanced_partitions",
        "5a3d752e6c5d5734",
        nested_rows.one_partition_is_all,
        "to balance rows over one worker verl compares all of them, and ends with all of them in order",
        SAME,
    ),
    packed_rows.PATCH,
    Patch(
        "first-error-published",
        Kind.REPORTS,
        "verl.trainer.ppo.v1.agent_loop_tq",
        "_settle_session_tasks",
        "21a713e8560104b4",
        failures.publish_first_error,
        "the error of a rollout stands in a worker's log only; it is put where the trainer finds it",
        NOTHING,
    ),
    Patch(
        "first-error-named",
        Kind.REPORTS,
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.sample",
        "cdcecebeb7f0b44e",
        failures.name_first_error,
        "a batch of which no rollout succeeded ends the run with the reason of the first",
        "a validation without one success ends the run, where verl goes on with an empty batch",
    ),
    Patch(
        "workers-remembered",
        Kind.REPORTS,
        "verl.trainer.ppo.v1.agent_loop_tq",
        "AgentLoopManagerTQ.generate_sequences",
        "de5ab7fe338523ca",
        failures.remember_workers,
        "so that the trainer can look after its workers while it waits",
        NOTHING,
    ),
    Patch(
        "workers-watched",
        Kind.REPORTS,
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._wait_for_next_poll",
        "10088bf03da69383",
        failures.look_after_workers,
        "a worker that died leaves its prompts running for ever; its death ends the run",
        NOTHING,
    ),
    Patch(
        "one-warning",
        Kind.REPORTS,
        "verl.utils.tokenizer.continuous_token_wiring",
        "infer_continuous_token_model_family",
        "bdb30f48e972d384",
        failures.asked_once,
        "verl warns at every rollout of a model type it has no builder for; the answer is kept",
        NOTHING,
    ),
    Patch(
        "gspo-metrics",
        Kind.ALGORITHM,
        "verl.trainer.ppo.core_algos",
        "compute_policy_loss_gspo",
        "fd4ceb495b6b2c75",
        gspo.measured,
        "the shares clipped on each side and the sequences' importance ratio are logged",
        "nothing but the metrics; the loss is verl's",
    ),
    Patch(
        "config-checks",
        Kind.ALGORITHM,
        "verl.utils.config",
        "validate_config",
        "ab4096deecfec745",
        checks.checked_first,
        "the driver says what an algorithm or our rollout server cannot do before anything starts",
        "a config that cannot be meant is refused",
    ),
    *GATHERED_PUTS,
    V0_TRAINER,
)
