"""What ``scripts/faults.py`` checks of a run's directory: nothing trained twice, nothing lost, the accounts go on."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from goldilocks.runs.checkpoints import load_state, torn, trl_checkpoints
from goldilocks.runs.records import group_uid, read_records
from goldilocks.types import Account

CLASSES = [account.value for account in Account]


# -- what is on disk ---------------------------------------------------------------------------------------------------


def checkpointed(run: Path) -> int:
    """Return the last step whose checkpoint counts: verl has a file that says so, on TRL a checkpoint must be whole."""
    file = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    if file.exists():
        return int(file.read_text() or 0)
    found = trl_checkpoints(run / "checkpoints")
    return next((step for step, folder in found.items() if torn(folder) is None), 0)


def of_trl(run: Path, step: int) -> Path:
    """Return TRL's checkpoint of a step; a step of these runs is one update."""
    return run / "checkpoints" / f"checkpoint-{step}"


def is_saving(run: Path) -> bool:
    """Return whether the newest checkpoint of a TRL run is being written."""
    newest = next(iter(trl_checkpoints(run / "checkpoints").values()), None)
    return newest is not None and torn(newest) is not None


def logged(run: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the step and the metrics of every update of every life, in the order they were written."""
    files = sorted(run.glob("metrics*.jsonl"), key=lambda file: file.stat().st_mtime_ns)
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    return [(line["step"], line["data"]) for line in lines if "accounts/generated_rollouts" in line["data"]]


def last_logged(run: Path, otherwise: int) -> int:
    """Return the last step that was logged."""
    steps = logged(run)
    return steps[-1][0] if steps else otherwise


def dumped(run: Path, step: int) -> list[str]:
    """Return the group of every row that a step trained, as the last life has dumped it; empty without a dump."""
    try:
        rows = read_records(run / "rollouts" / f"{step}.jsonl")
    except (OSError, ValueError):
        return []
    return [uid for uid in map(group_uid, rows) if not uid.startswith("pad")]


class Step:
    """What a step has trained, and what its checkpoint carries on.

    TRL's rows are dumped before the update, verl's after the checkpoint. A life of verl's that is killed between leaves
    no dump, or half of one; of such a step the checkpoint tells how many rows it trained, and which carried groups.
    """

    def __init__(self, run: Path, number: int, before: Step | None, killed_after: bool) -> None:
        of_verl = run / "checkpoints" / f"global_step_{number}"
        folder = of_verl if of_verl.exists() else of_trl(run, number)
        state = load_state(folder / "goldilocks.npz")["collector"]
        self.kept = {group["uid"] for group in state["judged"]["kept"]}
        self.trained_so_far = state["accounts"]["rollouts"][Account.TRAINED.value]
        uids = dumped(run, number)
        self.uids, self.rows = set(uids), len(uids)
        rows = self.trained_so_far - (before.trained_so_far if before else 0)
        if killed_after and self.rows != rows:
            self.uids, self.rows = (before.kept if before else set()) - self.kept, rows


def read_steps(run: Path, total: int, killed_after: Collection[int]) -> dict[int, Step]:
    """Return every step by its number."""
    steps: dict[int, Step] = {}
    for number in range(1, total + 1):
        steps[number] = Step(run, number, steps.get(number - 1), number in killed_after)
    return steps


# -- what does not hold ------------------------------------------------------------------------------------------------


def history_faults(run: Path, total: int, killed_after: Collection[int] = ()) -> dict[str, list[str]]:
    """Return every fault over all lives together, by check; a life went on from each of the steps ``killed_after``."""
    steps = read_steps(run, total, killed_after)
    trained_in: dict[str, int] = {}
    twice = [
        f"{uid} in steps {trained_in[uid]} and {number}"
        for number, step in steps.items()
        for uid in sorted(step.uids)
        if trained_in.setdefault(uid, number) != number
    ]
    lost = [
        f"{uid} of step {number}"
        for number, step in steps.items()
        for uid in sorted(step.kept - steps[total].kept)
        if trained_in.get(uid, 0) <= number
    ]
    return {
        "groups trained twice": twice,
        "kept groups lost": lost,
        "accounts that do not go on": account_faults(dict(logged(run)), steps),
    }


def account_faults(metrics: dict[int, dict[str, float]], steps: dict[int, Step]) -> list[str]:
    """Return the steps whose classes do not sum to the total, or whose trained rows are not those dumped so far."""
    faults, so_far = [], 0
    for number, step in steps.items():
        so_far += step.rows
        if number not in metrics:  # its life was killed after the checkpoint, before the line was written
            continue
        account = {name: metrics[number][f"accounts/{name}_rollouts"] for name in (*CLASSES, "generated")}
        if sum(account[name] for name in CLASSES) != account["generated"]:
            faults.append(f"step {number}: the classes do not sum to what was generated")
        if account["trained"] != so_far:
            faults.append(f"step {number}: trained_rollouts is {account['trained']:.0f}, the dumps have {so_far}")
    return faults
