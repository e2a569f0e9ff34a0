"""The batch filter against a loop over groups: the same rows, and what each costs.

    python benchmarks/batch_filter.py                   # CPU
    python benchmarks/batch_filter.py --device cuda     # needs torch and numpy only: PYTHONPATH=src is enough

Prints two Markdown tables. The loop is written as such filters usually are, a few tensor operations on each group; it
always runs on the CPU, so on a GPU its equal results also show that the device changes nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.filtering.batch_filter import TwoGateRejectionFilter
from goldilocks.filtering.rows import Segments
from goldilocks.filtering.selection import Draws

GENERATED, TARGET, TOKENS = 16, 8, 64
CONFIG = PPOFilterConfig(target_group_size=TARGET, sample_selection_strategy="efficiency_stochastic")


def make_batch(samples: int, device: str) -> tuple[dict[str, Tensor], list[str]]:
    """Groups of 16 with a pass rate of their own each, and answers of 1 to 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    pass_rate = torch.rand(samples // GENERATED, 1, generator=generator)
    rewards = (torch.rand(samples // GENERATED, GENERATED, generator=generator) < pass_rate).float().flatten()
    mask = torch.arange(TOKENS)[None] < torch.randint(1, TOKENS + 1, (samples, 1), generator=generator)
    uids = [uid for group in range(samples // GENERATED) for uid in [f"prompt-{group:08d}"] * GENERATED]
    return {"rewards": rewards.to(device), "response_mask": mask.to(device)}, uids


def loop_over_groups(batch: dict[str, Tensor], uids: list[str], draws: Tensor) -> list[int]:
    """Stages 1 and 3, group by group."""
    members: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        members.setdefault(uid, []).append(row)
    lengths = batch["response_mask"].sum(-1)
    selected: list[int] = []
    for rows in members.values():
        index = torch.tensor(rows)
        reward, length = batch["rewards"][index].double(), lengths[index]
        if len(rows) < CONFIG.min_group_size or reward.std() < 1e-3:
            continue
        if len(rows) > TARGET:
            kept = draw_samples(reward, length, draws[index])
            index, reward = index[kept], reward[kept]
        if reward.std() >= 1e-3:
            selected.extend(index.tolist())
    return selected


def draw_samples(reward: Tensor, length: Tensor, draws: Tensor) -> Tensor:
    """``efficiency_stochastic`` on one group, as its definition reads."""
    positives, negatives = (reward > 0).nonzero().squeeze(1), (reward <= 0).nonzero().squeeze(1)
    per_token = (reward[positives] / length[positives]).float()
    positives = positives[torch.sort(-per_token, stable=True).indices]  # best first
    negatives = negatives[torch.sort(1 / length[negatives], stable=True).indices]  # best last
    noise = -torch.log(-torch.log(draws))
    wanted = (2 * TARGET * len(positives) + len(reward)) // (2 * len(reward))
    if len(positives) and len(negatives):
        wanted = min(max(wanted, 1), TARGET - 1)
    depth = torch.arange(len(positives)) / len(positives)
    score = noise[: len(positives)] - depth / CONFIG.selection_temperature
    kept = positives[torch.sort(score, descending=True, stable=True).indices[:wanted]]
    depth = torch.arange(len(negatives)).flip(0) / len(negatives)
    score = noise[len(positives) :] - depth / CONFIG.selection_temperature
    return torch.cat([kept, negatives[torch.sort(score, descending=True).indices[: TARGET - wanted]]]).sort().values


def draws_of_the_first_call(batch: dict[str, Tensor]) -> Tensor:
    """The numbers a filter with seed 1 draws first: given to the loop, which is not timed for making them."""
    salt = int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(1)))
    groups = Segments.from_sorted(torch.arange(len(batch["rewards"])) // GENERATED)
    lengths = batch["response_mask"].sum(-1)
    return Draws.keyed_by_content(salt, batch["rewards"].double(), lengths, groups).row


def seconds(work: Callable[[], object], device: str, repeat: int) -> float:
    """The best of several runs, after one that warms up."""
    took = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return min(took[1:])


def bench_selection(sizes: list[int], loop_up_to: int, device: str) -> None:
    """16 → 8 samples a group, lengths counted from a mask of 64 tokens."""
    print(f"| samples | filter | per sample | loop over groups | ratio |\n|{'---:|' * 5}")
    for samples in sizes:
        batch, uids = make_batch(samples, device)
        took = seconds(lambda b=batch, u=uids: PPOBatchFilter(CONFIG).filter_batch(b, u, True), device, 7)
        row = [f"{samples:,}", f"{took * 1e3:.1f} ms", f"{took / samples * 1e9:.0f} ns", "", ""]
        if samples <= loop_up_to:
            on_cpu = {name: value.cpu() for name, value in batch.items()}
            draws = draws_of_the_first_call(on_cpu)
            start = time.perf_counter()
            wanted = loop_over_groups(on_cpu, uids, draws)
            loop = time.perf_counter() - start
            if PPOBatchFilter(CONFIG).filter_batch(batch, uids, True)[0].tolist() != wanted:
                raise SystemExit(f"{samples} samples: the filter and the loop chose different rows")
            row[3:] = [f"{loop:.2f} s", f"{loop / took:.0f} ×"]
        print(f"| {' | '.join(row)} |", flush=True)


class Temporaries(TorchDispatchMode):
    """Remembers the most bytes that any one operation made anew."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


def bench_two_gate(rows: int, tokens: int, device: str) -> None:
    """Both gates with their statistics, on float32 log-probs and a boolean mask."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(rows, tokens, generator=generator)
    batch = {
        "response_mask": torch.arange(tokens)[None] < torch.randint(1, tokens + 1, (rows, 1), generator=generator),
        "rollout_log_probs": rollout,
        "old_log_probs": rollout + 0.05 * torch.randn(rows, tokens, generator=generator),
        "top_log_probs": rollout + 20 * (torch.rand(rows, tokens, generator=generator) < 1e-5),
    }
    batch = {name: value.to(device) for name, value in batch.items()}
    judged = torch.ones(rows, dtype=torch.bool, device=device)
    gates = TwoGateRejectionFilter(CONFIG)
    took = seconds(lambda: gates.judge(batch, judged), device, 7)
    with Temporaries() as temporaries:
        metrics = gates.judge(batch, judged).metrics
    share = temporaries.largest / (rollout.numel() * rollout.element_size())
    print("\n| rows × tokens | two gates | accepted | largest temporary |\n|---|---:|---:|---:|")
    accepted = metrics["filter/acceptance_rate"]
    print(f"| {rows:,} × {tokens} | {took * 1e3:.1f} ms | {accepted:.1%} | {share:.2f} of a token tensor |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2, help="of torch, on the CPU")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--loop-up-to", type=int, default=1_000_000, help="largest size the loop is run on")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {args.threads} threads"
    print(f"torch {torch.__version__}, {name}\n")
    bench_selection([size - size % GENERATED for size in args.sizes], args.loop_up_to, args.device)
    bench_two_gate(10_000, 512, args.device)


if __name__ == "__main__":
    main()
