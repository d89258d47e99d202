# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The paper's timing table on this machine's GPU: seconds of each part of the network, and its memory.

python bench/gpu.py [--pairs 20] [--device cuda]     (a cuda.py here would hide the package of that name from torch)

The published sizes (F = 256, d = 528) with random weights, on made-up pairs of the size of 4DLoMatch's. The paper, on
an A100: KPFCN 0.0109, self attention 0.0016, cross attention 0.0014, matching 0.0023, Procrustes 0.0191 s; 0.10 s and
6,595 MB a pair.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from lepard_ros.cloud.pyramid import Pyramid, build_pyramid, stack_pyramids
from lepard_ros.network.config import PAPER_DEFORMABLE
from lepard_ros.network.lepard import Lepard, split_pairs

PUBLISHED = {"KPFCN": 0.0109, "transformer and matching": 2 * (0.0016 + 0.0014 + 0.0023), "Procrustes": 2 * 0.0191}


def made_up_cloud(rng: np.random.Generator, points: int) -> torch.Tensor:
    """A wavy surface (N, 3) of about a metre, on the network's grid."""
    side = PAPER_DEFORMABLE.grid * np.arange(int(points**0.5))
    x, y = (axis.ravel() for axis in np.meshgrid(side, side))
    z = 1.5 + 0.1 * np.sin(rng.uniform(3, 9) * x) * np.cos(rng.uniform(3, 9) * y)
    return torch.from_numpy(np.stack([x, y, z], axis=1).astype(np.float32))


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall seconds of a piece of work that may run on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


@torch.no_grad()
def measure(network: Lepard, pyramid: Pyramid, device: torch.device) -> dict[str, float]:
    """Seconds of each part for one stacked pair."""
    seconds: dict[str, float] = {}
    seconds["KPFCN"], (features, _) = timed(device, lambda: network.encode(pyramid))
    source, target = split_pairs(features, pyramid)
    whole, output = timed(device, lambda: network.match(source, target))
    fit, _ = timed(device, lambda: network.rigid_fit(output.confidence, source, target))
    seconds["Procrustes"] = 2 * fit
    seconds["transformer and matching"] = whole - 2 * fit
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--points", type=int, default=8000, help="of a cloud")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device, rng = torch.device(args.device), np.random.default_rng(0)
    network = Lepard(PAPER_DEFORMABLE).to(device).eval()
    rows = []
    for _ in range(args.pairs + 1):
        clouds = [made_up_cloud(rng, args.points).to(device) for _ in range(2)]
        build = partial(build_pyramid, shape=PAPER_DEFORMABLE.pyramid, gridded=True)
        grids, parts = timed(device, lambda c=clouds, b=build: [b(cloud) for cloud in c])
        rows.append({"pyramids": grids, **measure(network, stack_pyramids(parts), device)})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, {args.pairs} pairs of {args.points} points; seconds (the paper's on an A100)\n")
    for part in rows[0]:
        mean = float(np.mean([row[part] for row in rows[1:]]))  # the first one warms up
        print(f"{part:>26}  {mean:8.4f}  {PUBLISHED.get(part, float('nan')):8.4f}")
    if device.type == "cuda":
        print(f"{'memory, MB':>26}  {torch.cuda.max_memory_allocated(device) / 2**20:8.0f}  {6595:8d}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
