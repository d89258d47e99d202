# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Warps whose result is known exactly."""

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.deformable.graph import build_graph
from lepard_ros.registration.deformable.warp import Warp


def rigid_warp(points: FloatArray, transform: FloatArray) -> Warp:
    """The warp of a cloud (N, 3) that moves as one rigid body by transform (4, 4)."""
    graph = build_graph(points)
    turn = np.tile(transform[:3, :3], (len(graph.nodes), 1, 1))
    shift = graph.nodes @ transform[:3, :3].T + transform[:3, 3] - graph.nodes
    return Warp.from_motion(graph, turn, shift)
