# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""CPU time of each stage of a network on this machine."""

import time
from typing import Any

import numpy as np
import torch

from lepard_ros.cloud.pyramid import build_pyramid, stack_pyramids
from lepard_ros.geometry.voxel_grid import grid_subsample
from lepard_ros.network.lepard import Lepard, split_pairs


def stage_times(network: Lepard, points: int = 307_200, repeats: int = 3) -> dict[str, float]:
    """Median CPU seconds of each stage for a synthetic pair of depth-camera clouds with `points` points."""
    config = network.config
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1.5, 1.5, (2, points)).astype(np.float32)
    z = 2.5 + 0.3 * np.sin(3 * x) * np.cos(4 * y)
    raw = torch.from_numpy(np.stack([x, y, z], axis=1)) * (config.grid / 0.05)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Any) -> Any:
        started = time.process_time()
        value = work()
        times.setdefault(name, []).append(time.process_time() - started)
        return value

    for _ in range(repeats):
        with torch.no_grad():
            grid = timed("grid", lambda: grid_subsample(raw, config.grid)[0])
            pyramid = timed("pyramid", lambda grid=grid: build_pyramid(grid, config.pyramid, gridded=True))
            features = timed("encode", lambda pyramid=pyramid: network.encode(pyramid)[0])
            pair = split_pairs(torch.cat([features, features]), stack_pyramids([pyramid, pyramid]))
            timed("match", lambda pair=pair: network.match(*pair))
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}
