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
from goldilocks.core.filters import FILTERS, Policy
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
| `data.gen_batch_size` | prompts chosen, and open, at once; default `data.train_batch_size`, `frontier` twice that |
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
ok    plug-in         live in a Ray worker, 9 additions
ok    patches         11 of 11 live: process-group, critic-attention, trl-value-heads, log-probs, one-pass, …
```

With the package installed and nothing of ours asked for, every function is verl's own. The environment variable
`GOLDILOCKS_PATCHES` chooses, for the processes that have it:

| `GOLDILOCKS_PATCHES` | applied |
|---|---|
| unset | nothing; with `VERL_PLATFORM=cpu` the kind `cpu` |
| `none` | nothing: without a GPU verl then does not run. Attention by cuDNN, else switched off, stays on |
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
| `results` | what verl computes is wrong without it |
| `reports` | a run that fails says why |
| `algorithm` | an algorithm gets or measures what verl does not give it |
| `trainer` | part of a trainer of ours, which applies it in its own processes whatever the variable says |

"Without it" is what fails, or how much longer a step of a 1.5B shape takes on an H200 without flash-attn
([below](#measured)). Each patch is something that a release of verl can break, so speed-ups go from the smallest effect
upward, for as long as all that went cost at most 3 % of a step and 5 % of its peak memory together. "Needless when" is
the change upstream that would end the patch; [as diffs](upstream.md).
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

On one H200 on 18 November 2026, verl 0.9.1, without flash-attn (`use_remove_padding=False`), our engine: a 1.5B shape
of random weights in bf16, 64 prompts × 8, answers of 75 to 525 tokens, 300 in the mean.

```
$ python benchmarks/patches.py --device cuda --model 1.5b --spread 0.75
```

That is the benchmark as it was up to `838002d8`: the answers of every group in even steps of length, no group dropped,
all prompts of a step at hand at its begin. Since then it has the load of a run with `filter_groups`: geometric lengths
of `--mean` tokens, half of the prompts mixed, prompts that wait and more that come while answers are being written. No
table of a GPU was made with that form.

A step without each speed-up stands beside steps with all in one run. Seconds of a step and of its parts are medians;
the ratio is to the steps with all next before and after it, its median, least and largest; memory is the peak of the
training worker.

| without | s | gen | adv | update | weights | rest | ratio | GiB | ratio | steps |
|---|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|
| all on | 8.28 | 1.82 | 0.15 | 5.79 | 0.19 | 0.27 | 0.994 (0.925 to 1.084) | 38.62 | 1.000 | 12 |
| `log-probs` | 32.63 | 1.82 | 0.16 | 30.02 | 0.37 | 0.27 | 3.862 (3.849 to 3.875) | 38.40 | 0.994 | 2 |
| `rows-by-length` | 12.02 | 1.82 | 0.17 | 9.38 | 0.22 | 0.43 | 1.419 (1.372 to 1.467) | 49.01 | 1.269 | 2 |
| `single-turn` | 8.78 | 2.18 | 0.31 | 5.83 | 0.21 | 0.25 | 1.072 (1.052 to 1.091) | 38.62 | 1.000 | 2 |
| `packed-rows` | 8.62 | 1.82 | 0.20 | 5.98 | 0.16 | 0.45 | 1.051 (1.035 to 1.066) | 38.62 | 1.000 | 2 |
| `response-logits` | 8.53 | 1.83 | 0.12 | 6.17 | 0.19 | 0.22 | 1.043 (1.043 to 1.043) | 43.30 | 1.121 | 1 |
| `messages` | 8.66 | 2.14 | 0.12 | 5.94 | 0.21 | 0.26 | 1.031 (0.996 to 1.066) | 38.62 | 1.000 | 2 |

`single-turn` and `messages` are no patches: rollouts made many at a time ([below](#what-is-followed-and-not-replaced)),
and many requests in one message. `response-logits`, without which the logits of prompts are computed too, is part of
`log-probs` since. `one-pass` stays by decision and was not switched off: [1.7 s of a step](lab/trainer.md#on-a-gpu).

`held-outputs` acts on vLLM alone (0.20.2): 512 requests of 300 tokens to the same shape on one H200, 19 November 2026,
by `python benchmarks/vllm_requests.py --device cuda --model 1.5b --requests 512 --tokens 300`, then with `--plain`:

| asked | with the patch | without it |
|---|--:|--:|
| as verl asks: text, an output for every token | 19,666 tokens a second | 15,896 |
| as we ask: tokens and log-probs alone | **46,847** (10.9 ms a step) | 24,217 (21.1 ms) |

As verl asks, nothing is held back in either run, so that the first line shows how far two runs differ. The patch makes
a request 1.93 times as fast, or 1.56 times, if the first line is divided out: a batch of 64 × 8 answers of 300 tokens
takes 3.3 s with it and 5.1 to 6.3 s without, beside an update of some 8 s.

Five were removed after this, the smallest first. Alone, a step took 0.962 (`group-numbers`: advantages a group at a
time), 1.009 (`gathered-puts`: rollouts that end together put together, in any agent loop), 1.039 (`one-partition`: no
balancing over one rank) and 1.073 (`row-selection`: rows of a mini-batch picked at once) of the steps with all, from
one or two steps each. Two steps that had all differ by up to 8 %, so that these are not told apart from nothing one by
one; together, in a second run:

| without | s | gen | adv | update | weights | rest | ratio | GiB | ratio | steps |
|---|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|
| all on | 8.39 | 1.81 | 0.13 | 5.92 | 0.16 | 0.25 | 1.004 (0.946 to 1.038) | 38.62 | 1.000 | 6 |
| those four | 8.52 | 1.82 | 0.16 | 5.84 | 0.14 | 0.43 | 1.032 (0.987 to 1.088) | 38.62 | 1.000 | 5 |
| those four and `packed-rows` | 8.77 | 1.82 | 0.21 | 6.08 | 0.17 | 0.53 | 1.095 (1.024 to 1.138) | 38.62 | 1.000 | 5 |

The medians of the four differ by 1.6 %, their parts by 2.6 %, the median of the paired ratios is 3.2 %. The fifth,
`rewards-here`, graded in verl's own agent loop without asking verl's reward workers: 1.089 (one step) without it and
without `single-turn`, against 1.072.

**All that was removed**, also of our engine, beside the revision before: [1.19 of its
step](lab/trainer.md#before-and-after-the-cut) with lengths that differ more than here, where `row-selection` and
`one-partition` were felt. `rows-by-length` and our trainer now do both without a patch of their own: 1.10.

## What is followed and not replaced

Single-turn rollouts on our rollout server and on vLLM are not made by verl's agent loop: our workers render a prompt
once, send a wave of rollouts in one message, and grade and store together what ends together. The rows are the same,
which a test checks field by field. It is done only where the functions of verl that it follows have the sources it was
written for (`goldilocks.verl.dispatch.single_turn.FOLLOWED`) and `GOLDILOCKS_PATCHES` asks for the kind `speed`;
otherwise verl's loop is run.

The figures of a validation with several answers to a problem are computed by our trainers
(`goldilocks.verl.validation`), with all draws in one array. verl draws a thousand times from each problem's answers,
one draw after the other, while the GPU waits: 500 problems with rewards and accuracies took 8 to 13 s of one core for
two answers each and 16 to 28 s for four; 0.04 and 0.1 s here. With votes (the reward function returns `pred`) four
answers took 25 and 0.7 s. The figures are equal to verl's, which a test checks against the installed verl. In a [study
on MATH](lab/math.md#time) ten validations were 28 % of an arm's time, and the draws about a tenth. verl's own trainers
(`trainer.v1.trainer_mode=sync`, …) compute them in verl's way. So do ours where a value is a float32, not finite, 2^53
or larger, or no number, where a vote is no text, and where more than 128 answers vote; a column of texts alone is left
out, as verl does.

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
            studied = group == "recipe" and name not in recipes.ADVISED
            yield f"{group} for studies" if studied else group, f"`{name}`", " ".join(comment)


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
