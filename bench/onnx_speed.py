# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What onnxruntime gains over torch on this machine: CPU seconds of encoder and matcher, in turns, one thread.

python bench/onnx_speed.py [--rounds 5] [--paper]     (--paper: also the published sizes, with random weights)
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lepard_ros.network.config import MATCH_LEVEL, PAPER_RIGID
from lepard_ros.network.lepard import Lepard, pad_clouds
from lepard_ros.network.onnx_graphs import OnnxLepard, example_pyramid
from lepard_ros.network.weights import load

SIDE = 85  # points along the sheet: 7,225 in all, about a room on the rigid grid


def seconds_of(work: Callable[[], Any]) -> float:
    """CPU seconds of a piece of work."""
    started = time.process_time()
    work()
    return time.process_time() - started


@torch.no_grad()
def compare(name: str, network: Lepard, rounds: int) -> None:
    """Print the medians of both, and how far their confidences are apart."""
    both = {"torch": network, "onnx": OnnxLepard(network, name).eval()}
    pyramid = example_pyramid(network, SIDE)
    normals = [pyramid.normals[MATCH_LEVEL]] if pyramid.normals else []
    cloud = pad_clouds([network.encode(pyramid)[0]], [pyramid.points[MATCH_LEVEL]], normals)
    started = time.process_time()
    both["onnx"].encode(pyramid)
    both["onnx"].match(cloud, cloud)
    ready = time.process_time() - started
    rows = [
        {
            (part, by): seconds_of(
                lambda n=n, part=part: n.encode(pyramid) if part == "encoder" else n.match(cloud, cloud)
            )
            for part in ("encoder", "matcher")
            for by, n in both.items()
        }
        for _ in range(rounds)
    ]
    apart = [n.match(cloud, cloud).confidence for n in both.values()]
    print(
        f"{name}: {len(pyramid.points[0]):,} points, {cloud.points.shape[1]} coarse; graphs made in {ready:.1f} CPU-s"
    )
    for part in ("encoder", "matcher"):
        by_torch, by_onnx = (1e3 * float(np.median([row[part, by] for row in rows])) for by in both)
        print(f"  {part}: torch {by_torch:.0f} ms, onnx {by_onnx:.0f} ms")
    print(f"  confidences apart by at most {float((apart[0] - apart[1]).abs().max()):.1e}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paper", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("rigid", "deformable"):
        compare(name, load(name)[0], args.rounds)
    if args.paper:
        torch.manual_seed(0)
        compare("paper_rigid", Lepard(PAPER_RIGID).eval(), min(args.rounds, 3))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
