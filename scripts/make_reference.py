#!/usr/bin/env python3
"""Writes ``docs/reference.md`` and ``docs/patches.md`` from the code; ``make docs`` runs it.

The first has every config key, policy, recipe and metric, the second every attribute of verl that is replaced.

Nothing is described here. A key's meaning is the comment beside it, a policy's its docstring, a metric's its entry in
``documented_metrics.py``; what has none is an error.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from documented_metrics import METRICS

from goldilocks.cli import COMMANDS
from goldilocks.config import recipes
from goldilocks.core.allocators import ALLOCATORS
from goldilocks.core.filters import FILTERS
from goldilocks.core.policy import Policy
from goldilocks.core.selectors import SELECTORS
from goldilocks.filtering import PPOFilterConfig
from goldilocks.verl.patches import PATCHES

DOCS = Path(__file__).resolve().parents[1] / "docs"
KEYS = recipes.CONFIG / "goldilocks" / "defaults.yaml"

INTRODUCTION = """\
# Reference

Written by `make docs` from the code; a test fails when it is stale. Keys of verl's own are in verl's YAML files
(`python -m verl.trainer.main_ppo --cfg job` prints them all). The guides say how things work together:
[dynamic sampling](dynamic-sampling.md), [adaptive rollouts](adaptive-rollouts.md), [batch filter](batch-filter.md),
[GSPO](gspo.md), [choosing a policy](choosing-a-policy.md).
"""
VERL_KEYS = """\
On verl's own command line a key of `adaptive_rollout`, `goldilocks` or `batch_filter` is added with `+`; in a recipe of
`goldilocks train` it is there already. Of verl's own keys these decide too:

| Key | |
|---|---|
| `algorithm.filter_groups.enable` | dynamic sampling: groups without variance are dropped and replaced |
| `algorithm.filter_groups.metric` | `seq_reward`, `seq_final_reward`, or a number of the reward function's: `acc`, … |
| `algorithm.filter_groups.max_num_gen_batches` | generation batches an update may cost; 0 or less: no limit |
| `data.gen_batch_size` | prompts of a generation batch, and open at once; default `data.train_batch_size` |
| `data.train_batch_size` | groups of a training batch |
| `actor_rollout_ref.rollout.n` | rollouts of a prompt, unless an allocator says otherwise |
| `actor_rollout_ref.rollout.name` | `transformers` is [ours](rollout-server.md); `vllm`, `sglang` are verl's |
| `algorithm.adv_estimator` | `grpo_pool`, `rloo_pool`, … are ours: [baselines over all rollouts](gspo.md) of a group |
"""
POLICIES = """\
`goldilocks.selector`, `allocator` and `filter` take a name below or `package.module:Class`; parameters go to
`goldilocks.selector_kwargs`, `allocator_kwargs` and `filter_kwargs`.
"""
TWO_CLOCKS = """\
Beside verl's own. Those of `data/`, `accounts/`, `selector/` and `budget/` run on from update to update and over
restarts; the others are of one update.
"""
PATCHES_INTRODUCTION = """\
# What is replaced in verl

Written by `make docs` from `goldilocks.verl.patches`; a test fails when it is stale, and another when anything
else is replaced. Most of Goldilocks gets into verl by verl's registries (`goldilocks.verl.plugin.ADDITIONS`) and
replaces nothing. Where verl has no registry, attributes are replaced or wrapped. Each patch has the digests of the
sources it was written for, in each [release that was tested](compatibility.md), and is skipped, with a sentence in the
log, where a source is another. `goldilocks doctor` lists the patches that are live in a Ray worker, and what a run
loses without the others:

```
ok    plug-in         live in a Ray worker, 10 additions
ok    patches         15 of 15 live: process-group, critic-attention, trl-value-heads, log-probs, one-pass, …
```

With the package installed and nothing of ours asked for, every function is verl's own. The environment variable
`GOLDILOCKS_PATCHES` chooses, for the processes that have it:

| `GOLDILOCKS_PATCHES` | applied |
|---|---|
| unset | nothing; with `VERL_PLATFORM=cpu` the kind `cpu` |
| `none` | nothing: without a GPU verl then does not run |
| `cpu` | what verl needs to run without a GPU |
| `all` | every patch: `goldilocks train` and `python -m goldilocks.main_ppo` set this, unless it is set |
| names or kinds | those, with commas between: `cpu,log-probs` |

With `trainer.v1.trainer_mode=goldilocks` the trainer and its rollout workers apply the kind `reports` by themselves
where the variable is unset. On verl's own command line (`python -m verl.trainer.main_ppo`) with a Ray that is already
running, hand the variable on: `++ray_kwargs.ray_init.runtime_env.env_vars.GOLDILOCKS_PATCHES=all`.

| Kind | |
|---|---|
| `cpu` | verl does not run without it on a machine with no GPU, no flash-attn, or a TRL it does not know |
| `speed` | the same values in less time |
| `reports` | a run that fails says why |
| `algorithm` | an algorithm gets or measures what verl does not give it |
| `trainer` | part of a trainer of ours, which applies it in its own processes whatever the variable says |

"Without it" is what fails, or by how much a step of the default run grows in the time of all its processors:
`benchmarks/patches.py` switches each patch off for single steps of one run ([below](#measured)). A speed-up worth less
than 3 % of a step on the CPU and on a GPU is left out, since each patch is something that a release of verl can break.
"Needless when" is the change upstream that would end the patch.
"""

PATCHES_NOTES = """\
## Metrics without the log-prob pass

With one optimizer step per batch the patch `one-pass` leaves out verl's pass for `old_log_probs`. What verl read off
that pass goes with it:

| Metric of verl's | with `one-pass` |
|---|---|
| `timing_s/old_log_prob` | about 0 |
| `actor/entropy` | absent |
| `rollout_corr/*` | absent |
| `training/rollout_probs_diff_std` | absent |
| `training/rollout_actor_probs_pearson_corr` | absent |
| `training/rollout_probs_diff_valid`, `_mean`, `_max` | of the rows that the update computed, mean over micro-batches |
| `train/stale_log_prob_diff_mean` (ours) | of the rows that the update computed |
| other `actor/*` of the loss (`pg_loss`, `pg_clipfrac`, `ppo_kl`, …) | of the rows that the update computed |

`GOLDILOCKS_PATCHES` without `one-pass`, a gate, several mini-batches or epochs, `algorithm.use_kl_in_reward` and a
`rollout_correction` that does something each bring the pass and these metrics back.

## Measured

By an earlier form of the benchmark, which counted the seconds of the processors, on two CPU cores that other work kept
busy (`cpu`: seconds of processors, `wall`: of the clock), before the four patches went that a step does not notice:
`grpo-advantages` (GRPO's advantages a group at a time), `padded-responses` and `nested-responses` (responses cut out of
all rows at once; the loss of `one-pass` keeps the latter for itself), and `loss-padding` (the responses of a loss
padded at once, which that loss now does too). `group-numbers` was another patch then, which gave verl numbers in
the place of uids.

```
$ python benchmarks/patches.py
tiny, cpu, 32 prompts × 8, 8 rounds, 208 steps

default: a step takes 1.613 s, 1.161 s of processors
                           without      cpu  95 %                   wall
                          one-pass   +66.5%  [+49.8%, +88.2%]     +61.4%
                    rows-by-length    -1.6%  [-2.1%, +1.8%]       -10.5%
                      loss-padding    -0.7%  [-3.3%, +2.9%]       -10.7%
                   response-logits    +1.6%  [-1.2%, +2.4%]       -10.4%
                         log-probs    +3.8%  [-0.1%, +7.2%]        +6.5%
                     row-selection    +2.8%  [-0.7%, +4.4%]        +9.5%
                     one-partition   +14.2%  [+8.8%, +18.8%]      +13.8%
                  nested-responses    +1.6%  [-1.5%, +4.7%]        +7.1%
                  padded-responses    -0.4%  [-0.9%, +3.0%]       -16.3%
                       packed-rows   +25.7%  [+20.3%, +31.5%]     +28.6%
                   grpo-advantages    +0.6%  [-0.7%, +1.6%]        -2.9%
                     group-numbers    +1.7%  [-2.0%, +6.2%]        -5.7%

loop: a step takes 2.885 s, 2.473 s of processors
                           without      cpu  95 %                   wall
                      rewards-here   +18.4%  [+14.3%, +23.9%]     +24.8%
                     gathered-puts   +62.9%  [+59.8%, +68.2%]     +61.8%

passes: a step takes 2.915 s, 1.927 s of processors
                           without      cpu  95 %                   wall
                    rows-by-length    -1.1%  [-2.4%, +1.3%]        -7.4%
                  nested-responses    +0.2%  [-0.9%, +1.6%]        -1.5%
                     row-selection    +3.8%  [-0.3%, +5.9%]       -20.2%

$ python benchmarks/patches.py --rounds 16 --seconds 420 --cases group-numbers row-selection loss-padding \\
    rows-by-length response-logits log-probs loop:rewards-here
tiny, cpu, 32 prompts × 8, 14 rounds, 168 steps

default: a step takes 1.603 s, 1.125 s of processors
                           without      cpu  95 %                   wall
                     group-numbers    +4.6%  [+2.1%, +9.0%]        +6.0%
                     row-selection    +0.4%  [-3.1%, +3.0%]        +0.6%
                      loss-padding    +0.6%  [-1.7%, +2.3%]       -10.3%
                    rows-by-length    +0.8%  [-0.6%, +2.0%]        -2.1%
                   response-logits    +0.7%  [-2.3%, +1.0%]        -7.7%
                         log-probs    +4.0%  [+3.4%, +5.6%]        +7.4%

loop: a step takes 2.871 s, 2.432 s of processors
                           without      cpu  95 %                   wall
                      rewards-here   +18.5%  [+16.5%, +21.3%]     +26.8%
```

The tiny model has 21 tokens and answers of three. What `rows-by-length`, `response-logits` and `log-probs` save grows
with the vocabulary, with lengths that differ, and with the kernels that a GPU runs row by row. None has been switched
off by itself on a GPU yet, which is why those below 3 % here are still in the table.

## What is followed and not replaced

Single-turn rollouts on our rollout server and on vLLM are not made by verl's agent loop: our workers render a prompt
once, send a wave of rollouts in one message, and grade and store together what ends together. The rows are the same,
which a test checks field by field. It is done only where the functions of verl that it follows have the sources it was
written for (`goldilocks.verl.dispatch.single_turn.FOLLOWED`) and `GOLDILOCKS_PATCHES` asks for the kind `speed`;
otherwise verl's loop is run.

`tests/unit/test_canary.py` holds every digest against the installed verl, TransferQueue and TRL: it is the test to run
first with a new release of one of them.
"""


def render_patches() -> str:
    """The page of patches."""
    head = ("Name", "Kind", "Replaced", "Why", "What it changes", "Without it", "Needless when")
    return PATCHES_INTRODUCTION + "\n" + table(head, patch_rows()) + "\n" + PATCHES_NOTES


def patch_rows() -> Iterator[tuple[str, ...]]:
    """A line for each."""
    for patch in PATCHES:
        replaced = f"`{patch.module}`: " + ", ".join(f"`{attribute}`" for attribute in patch.replaced)
        why = patch.reason, patch.changes, patch.without, patch.needless_when
        yield f"`{patch.name}`", patch.kind.value, replaced, *why


def render() -> str:
    """The reference."""
    sections = [
        INTRODUCTION,
        "## Commands\n",
        table(("Command", ""), ((f"`goldilocks {name}`", about) for name, (_, about) in COMMANDS.items())),
        "## Config keys\n",
        VERL_KEYS,
        table(("Key", "Default", ""), config_keys()),
        "## Policies\n",
        POLICIES,
        table(("", "Name", "Parameters", ""), policies()),
        "## Recipes and tasks\n",
        "`goldilocks train RECIPE task=TASK device=DEVICE`; a recipe may also be a YAML file.\n",
        table(("", "Name", ""), groups()),
        "## Metrics\n",
        TWO_CLOCKS,
        table(("Metric", ""), ((f"`{name}`", meaning) for name, meaning in metrics())),
    ]
    return "\n".join(sections)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def config_keys() -> Iterator[tuple[str, str, str]]:
    """Every key that is added to verl's, with its default and its comment."""
    fields = filter_comments()
    for key, value, comment in yaml_lines(KEYS.read_text().splitlines()):
        if key.endswith("._target_"):  # verl's own, and nobody's to set
            continue
        yield row(key, value, comment or fields.get(key.removeprefix("batch_filter."), ""))
        if key == "batch_filter.enable":
            yield row("batch_filter.target_group_size", "rollout.n", fields["target_group_size"])


def row(key: str, value: str, meaning: str) -> tuple[str, str, str]:
    if not meaning:
        raise ValueError(f"{key} has no comment that says what it means")
    return f"`{key}`", f"`{value}`", meaning


def yaml_lines(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """``key: value  # comment`` by dotted key; YAML's own parser drops the comments."""
    path: list[str] = []
    for line in lines:
        found = re.fullmatch(r"( *)([\w.]+): *([^#]*?) *(?:# *(.*))?", line)
        if found is None:
            continue
        indent, key, value, comment = found.groups()
        path = [*path[: len(indent) // 2], key]
        if value:
            yield ".".join(path), value, comment or ""


def filter_comments() -> dict[str, str]:
    """What the comments beside the fields of ``PPOFilterConfig`` say."""
    lines = re.findall(r"^    (\w+): .*  # (.*)$", inspect.getsource(PPOFilterConfig), re.MULTILINE)
    return dict(lines)


def policies() -> Iterator[tuple[str, str, str, str]]:
    """Each family's, by name."""
    families: dict[str, dict[str, type[Policy]]] = {
        "selector": dict(SELECTORS),
        "allocator": dict(ALLOCATORS),
        "filter": dict(FILTERS),
    }
    for family, known in families.items():
        for name, cls in known.items():
            parameters = inspect.signature(cls).parameters.values()
            values = ", ".join(f"`{one.name}={one.default}`" for one in parameters)
            yield family, f"`{name}`", values, first_sentence(cls.__doc__)


def groups() -> Iterator[tuple[str, str, str]]:
    """Recipes, tasks and devices: each file's comment under its first line."""
    for group in ("recipe", "task", "device"):
        for name in recipes.names(group):
            lines = (recipes.CONFIG / group / f"{name}.yaml").read_text().splitlines()[1:]
            comment = []
            for line in lines:
                if not line.startswith("#"):
                    break
                comment.append(line.lstrip("# "))
            yield group, f"`{name}`", " ".join(comment)


def metrics() -> Iterator[tuple[str, str]]:
    """Rollouts and tokens of one account in one line."""
    for name, meaning in METRICS.items():
        if name.startswith("accounts/") and name.endswith("_tokens"):
            if name in ("accounts/generated_tokens", "accounts/tool_tokens"):
                yield name, meaning
        elif name.startswith("accounts/") and not name.startswith("accounts/generated"):
            yield name.replace("_rollouts", "_rollouts`, `_tokens"), meaning
        else:
            yield name, meaning


def first_sentence(text: str | None) -> str:
    """Up to the first stop, on one line."""
    if not text:
        raise ValueError("a policy has no docstring")
    words = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", words, maxsplit=1)[0].replace("``", "`")


if __name__ == "__main__":
    (DOCS / "reference.md").write_text(render())
    (DOCS / "patches.md").write_text(render_patches())
    print(DOCS / "reference.md", DOCS / "patches.md")
