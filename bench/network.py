# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Time and memory of the network: `python bench/network.py [--data FOLDER]`. Medians of 5, CPU seconds, one thread.

The authors' implementation, on the same pair of 3DMatch fragments and the same kind of processor, took 13.2 CPU-s and
2.2 GB forward at the paper's size (10.1 s of it in the backbone): those figures are the column "authors".
"""

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lepard_ros.cloud.pyramid import build_pyramid, stack_pyramids
from lepard_ros.matcher import Matcher
from lepard_ros.network.allocator import keep_freed_memory
from lepard_ros.network.config import PAPER_RIGID
from lepard_ros.network.lepard import Lepard, split_pairs

AUTHORS_SECONDS, AUTHORS_BACKBONE, AUTHORS_MEGABYTES = 13.2, 10.1, 2200


def median_cpu(work: Callable[[], Any], repeats: int = 5) -> float:
    """Median CPU seconds of `work` after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return sorted(times)[len(times) // 2]


def peak_megabytes() -> float:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fragments(data: Path | None) -> list[torch.Tensor]:
    """Two real fragments of about 19,000 points on the 0.025 m grid, or made-up ones of that size."""
    if data is not None and (data / "7-scenes-redkitchen.npz").exists():
        with np.load(data / "7-scenes-redkitchen.npz") as scene:
            names = list(scene)[:2]
            return [torch.from_numpy(scene[name].astype(np.float32) * 0.00025) for name in names]
    from lepard_ros.geometry.voxel_grid import grid_subsample

    rng = np.random.default_rng(0)
    clouds = []
    for shift in (0.0, 0.5):
        x, y = rng.uniform(-1.29, 1.29, (2, 200_000))
        z = 2.5 + 0.4 * np.sin(3 * x + shift) * np.cos(4 * y)
        clouds.append(grid_subsample(torch.from_numpy(np.stack([x, y, z], 1).astype(np.float32)), 0.025)[0])
    return clouds


def depth_cloud(shift: float) -> np.ndarray:
    """307,200 points as a 640 x 480 depth camera sees a furnished wall."""
    u, v = np.meshgrid((np.arange(640) - 320) / 525, (np.arange(480) - 240) / 525)
    z = 2.5 + 0.5 * np.sin(3 * u + shift) * np.cos(5 * v) + 0.3 * ((u + shift) % 0.4 > 0.2)
    return np.stack([u * z, v * z, z], axis=-1).reshape(-1, 3).astype(np.float32)


def bench_paper(data: Path | None) -> None:
    """The paper's size: forward pass and backbone."""
    clouds = fragments(data)
    keep_freed_memory(large=True)  # the node and the `lepard` command ask for it too, for small networks
    network = Lepard(PAPER_RIGID).eval()
    before = peak_megabytes()
    with torch.no_grad():
        shape = PAPER_RIGID.pyramid
        pyramid_seconds = median_cpu(lambda: [build_pyramid(c, shape, gridded=True) for c in clouds], 3)
        pyramid = stack_pyramids([build_pyramid(c, shape, gridded=True) for c in clouds])
        encode = median_cpu(lambda: network.encode(pyramid))
        features, _ = network.encode(pyramid)
        match = median_cpu(lambda: network.match(*split_pairs(features, pyramid)))
    total = encode + match
    print(f"paper size, {[len(c) for c in clouds]} points")
    print(f"  pyramid   {pyramid_seconds:6.2f} CPU-s")
    print(f"  backbone  {encode:6.2f} CPU-s   {AUTHORS_BACKBONE / encode:4.1f} x faster than {AUTHORS_BACKBONE}")
    print(f"  match     {match:6.2f} CPU-s")
    print(f"  forward   {total:6.2f} CPU-s   {AUTHORS_SECONDS / total:4.1f} x faster than {AUTHORS_SECONDS} (goal: 4)")
    print(f"  peak      {peak_megabytes():6.0f} MB, {before:.0f} before (authors {AUTHORS_MEGABYTES}; goal 1200)")


def bench_small() -> None:
    """The shipped rigid network on depth-camera clouds, raw points to matches."""
    matcher = Matcher.from_pretrained("rigid", device="cpu")
    source, target = depth_cloud(0.0), depth_cloud(0.3)
    keyframes = [matcher.encode(depth_cloud(0.1 * k)) for k in range(8)]
    encode = median_cpu(lambda: matcher.encode(source))
    pair = median_cpu(lambda: matcher.match(source, target))
    cached = median_cpu(lambda: matcher.match(source, keyframes[3]))
    eight = median_cpu(lambda: matcher.match_many(source, keyframes))
    print(f"small rigid size, 2 x 307,200 raw points, {len(keyframes[0])} coarse points")
    print(f"  encode one cloud           {encode:6.3f} CPU-s")
    print(f"  uncached pair              {pair:6.3f} CPU-s   (goal 0.25)")
    print(f"  against a cached keyframe  {cached:6.3f} CPU-s   {cached / pair:4.0%} of an uncached pair (goal 60 %)")
    print(f"  against 8 cached           {eight:6.3f} CPU-s   {eight / cached:4.1f} x one (goal 3)")


def machine_speed() -> str:
    """What this core can do at the moment: on a shared machine it differs by half from one hour to the next."""
    x, y, out = torch.randn(2000, 2000), torch.randn(2000, 2000), torch.empty(2000, 2000)
    table, copy = torch.randn(10_000_000), torch.empty(10_000_000)
    product, copying = median_cpu(lambda: torch.mm(x, y, out=out)), median_cpu(lambda: copy.copy_(table))
    return f"this core now: {16 / product:.0f} GFLOPS (2000 x 2000 product), {0.04 / copying:.0f} GB/s (40 MB copy)"


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=None, help="folder of compact 3DMatch scenes")
    parser.add_argument("--only", choices=("paper", "small"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine_speed())
    if args.only != "paper":
        bench_small()
    if args.only != "small":
        bench_paper(args.data)
    print(machine_speed())


if __name__ == "__main__":
    main()
