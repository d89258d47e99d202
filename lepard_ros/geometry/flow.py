# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Interpolation of flow from anchors to other points."""

import numpy as np
from scipy.spatial import cKDTree

from lepard_ros.geometry.arrays import FloatArray

FLOW_NEIGHBOURS = 3  # anchors whose flow is blended
FLOW_RADIUS = 0.1  # metres: anchors farther away hardly matter to a point that has a nearer one
FAR_AWAY = 1e10  # metres: the distance that the authors give to missing ones


def blend_flow(points: FloatArray, anchors: FloatArray, flow: FloatArray, radius: float = FLOW_RADIUS) -> FloatArray:
    """The flow (N, 3) at `points` (N, 3), blended from that of the three nearest anchors (M, 3) by inverse distance.

    As in the authors' code: if an anchor is within `radius` metres, those beyond it are ignored; if all three are
    beyond it, their mean is used. Zero without anchors.

    >>> anchors = np.array([[0.0, 0, 0], [0.09, 0, 0]]); flow = np.array([[0.0, 0, 0], [3, 0, 0]])
    >>> blend_flow(np.array([[0.06, 0.0, 0.0], [5, 5, 5]]), anchors, flow).round(6).tolist()
    [[2.0, 0.0, 0.0], [1.5, 0.0, 0.0]]
    """
    if len(anchors) == 0 or len(points) == 0:
        return np.zeros((len(points), 3))
    count = min(FLOW_NEIGHBOURS, len(anchors))
    distance, index = cKDTree(anchors).query(points, k=[*range(1, count + 1)])
    weight = 1 / np.where(distance > radius, FAR_AWAY, np.maximum(distance, 1e-10))
    weight /= weight.sum(axis=1, keepdims=True)
    return (weight[..., None] * flow[index]).sum(axis=1)
