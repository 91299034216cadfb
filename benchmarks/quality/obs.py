"""Seconds that backward elimination of an MLP takes, blocked and plain, and what swaps add.

    python benchmarks/quality/obs.py --output benchmarks/results/obs.json

Synthetic GELU features (a quarter as many inner directions as channels). `plain` updates the whole inverse and weights
for every channel; it is run where that takes seconds, and its kept sets are compared with the blocked ones.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from corp_deploy.algebra.channels import affine
from corp_deploy.algebra.obs import Elimination, obs
from corp_deploy.algebra.scores import combined, kept_from_scores
from corp_deploy.algebra.swap import ExchangedSet, swap
from corp_deploy.reduction import pool as site_pool
from perf.timing.watch import cpu_name

RIDGE_REL = 1e-4


def layer(channels: int, outputs: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, second moment and output weights."""
    generator = torch.Generator().manual_seed(seed)
    inner = channels // 4
    mix = torch.randn(inner, channels, generator=generator, dtype=torch.float64) / inner**0.5
    shift = 0.3 * torch.randn(channels, generator=generator, dtype=torch.float64)
    x = torch.nn.functional.gelu(torch.randn(tokens, inner, generator=generator, dtype=torch.float64) @ mix + shift)
    weight = torch.randn(outputs, channels, generator=generator, dtype=torch.float64) / channels**0.5
    return x.mean(dim=0), x.T @ x / tokens, weight


def plain_greedy(covariance_FF: Tensor, weight_OF: Tensor, ridge: float) -> list[int]:
    channels = covariance_FF.shape[0]
    inverse_FF = torch.linalg.inv(covariance_FF + ridge * torch.eye(channels, dtype=torch.float64))
    current_OF = weight_OF.clone()
    gone_F = torch.zeros(channels, dtype=torch.bool)
    order = []
    for _ in range(channels):
        score_F = (current_OF.square().sum(dim=0) / inverse_FF.diagonal()).masked_fill(gone_F, torch.inf)
        pick = int(score_F.argmin())
        row_F = inverse_FF[pick] / inverse_FF[pick, pick]
        current_OF -= torch.outer(current_OF[:, pick], row_F)
        inverse_FF -= torch.outer(inverse_FF[pick].clone(), row_F)
        inverse_FF[pick], inverse_FF[:, pick], inverse_FF[pick, pick] = 0.0, 0.0, 1.0
        gone_F[pick] = True
        order.append(pick)
    return order


def timed(repeats: int, work: Callable[[], object]) -> dict[str, list[float]]:
    """Wall seconds and, to see what a busy machine adds, CPU seconds of this process over all threads."""
    wall_seconds, cpu_seconds = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        work()
        wall_seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    return {"wall_seconds": wall_seconds, "cpu_seconds": cpu_seconds}


def measured(channels: int, outputs: int, repeats: int, *, plain: bool, swaps: bool) -> dict[str, object]:
    mean_F, second_FF, weight_OF = layer(channels, outputs, 4 * channels, seed=0)
    covariance_FF = second_FF - torch.outer(mean_F, mean_F)

    def eliminate() -> Elimination:
        return obs(covariance_FF, weight_OF, ridge_rel=RIDGE_REL)

    result, half = eliminate(), channels // 2
    row: dict[str, object] = {
        "channels": channels,
        "outputs": outputs,
        "obs": timed(repeats, eliminate),
    }
    kept_K = {"combined": kept_from_scores(combined(second_FF.diagonal(), weight_OF), half), "obs": result.kept(half)}
    if plain:
        orders: list[list[int]] = []
        row["plain"] = timed(1, lambda: orders.append(plain_greedy(covariance_FF, weight_OF, result.ridge)))
        row["same_order_as_plain"] = orders == [result.order_F.tolist()]
    if swaps:
        found: list[ExchangedSet] = []
        row["swap"] = timed(1, lambda: found.append(swap(covariance_FF, weight_OF, kept_K["obs"], ridge_rel=RIDGE_REL)))
        row["swaps"] = found[0].swaps
        kept_K["obs and swaps"] = found[0].kept_K
    row["residual_at_half"] = {
        name: affine(mean_F, second_FF, weight_OF, None, kept, ridge_rel=RIDGE_REL).residual
        for name, kept in kept_K.items()
    }
    return row


def whole_model(blocks: int, channels: int, outputs: int) -> dict[str, object]:
    """Seconds for the elimination, and for the swaps at half the width, of every MLP of a model, side by side as
    `reduce` does it.
    """
    sites = []
    for seed in range(blocks):
        mean_F, second_FF, weight_OF = layer(channels, outputs, 2 * channels, seed=seed)
        sites.append((second_FF - torch.outer(mean_F, mean_F), weight_OF))
    device = torch.device("cpu")
    start = time.perf_counter()
    with site_pool.mapping(len(sites), device) as each:
        kept = list(each(lambda site: obs(*site, ridge_rel=RIDGE_REL).kept(channels // 2), sites))
    middle = time.perf_counter()
    pairs = list(zip(sites, kept, strict=True))
    with site_pool.mapping(len(pairs), device) as each:
        list(each(lambda pair: swap(*pair[0], pair[1], ridge_rel=RIDGE_REL), pairs))
    return {
        "blocks": blocks,
        "channels": channels,
        "outputs": outputs,
        "obs_seconds": middle - start,
        "swap_seconds": time.perf_counter() - middle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record = {
        "version": 1,
        "kind": "obs-benchmark",
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpu": cpu_name(),
            "threads": arguments.threads,
            "load_before": os.getloadavg()[0],
        },
        "ridge_rel": RIDGE_REL,
        "rows": [
            measured(384, 96, arguments.repeats, plain=True, swaps=True),
            measured(768, 192, arguments.repeats, plain=True, swaps=True),
            measured(1536, 384, arguments.repeats, plain=False, swaps=True),
            measured(3072, 768, arguments.repeats, plain=False, swaps=True),
        ],
        "deit_base": whole_model(12, 3072, 768),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
