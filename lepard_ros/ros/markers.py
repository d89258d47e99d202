# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Lines for RViz: matches (inliers blue, outliers red, as in the paper) and deformation graphs (green)."""

import numpy as np
from geometry_msgs.msg import Point
from numpy.typing import NDArray
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from lepard_ros.ros.conversion import header

_BLUE = ColorRGBA(r=0.1, g=0.35, b=0.95, a=0.9)
_RED = ColorRGBA(r=0.9, g=0.15, b=0.1, a=0.9)
_GREEN = ColorRGBA(r=0.2, g=0.75, b=0.3, a=0.9)
LINE_WIDTH = 0.005


def match_markers(
    starts: NDArray[np.floating],
    ends: NDArray[np.floating],
    inliers: NDArray[np.bool_],
    stamp_ns: int,
    frame_id: str,
    limit: int,
) -> MarkerArray:
    """Lines from (M, 3) to (M, 3) metres in `frame_id`; at most `limit`, evenly spaced over the matches.

    The limit exists because rclpy is slow on lists of points.
    """
    chosen = np.linspace(0, max(len(starts) - 1, 0), min(limit, len(starts))).astype(int)
    ends_of = np.stack([starts[chosen], ends[chosen]], axis=1)
    agree = inliers[chosen]
    lines = [("inliers", ends_of[agree], _BLUE), ("outliers", ends_of[~agree], _RED)]
    return MarkerArray(markers=[_line_list(name, pairs, colour, stamp_ns, frame_id) for name, pairs, colour in lines])


def graph_markers(
    nodes: NDArray[np.floating], edges: NDArray[np.integer], stamp_ns: int, frame_id: str, limit: int
) -> MarkerArray:
    """A deformation graph: at most `limit` of its edges (E, 2) between nodes (n, 3) metres, evenly spaced."""
    chosen = np.linspace(0, max(len(edges) - 1, 0), min(limit, len(edges))).astype(int)
    return MarkerArray(markers=[_line_list("graph", nodes[edges[chosen]], _GREEN, stamp_ns, frame_id)])


def _line_list(name: str, pairs: NDArray[np.floating], colour: ColorRGBA, stamp_ns: int, frame_id: str) -> Marker:
    """One marker with a line for each of (K, 2, 3) pairs; an empty marker removes the previous lines."""
    marker = Marker(header=header(stamp_ns, frame_id), ns=name, id=0, type=Marker.LINE_LIST, color=colour)
    marker.action = Marker.ADD if len(pairs) else Marker.DELETE
    marker.scale.x = LINE_WIDTH
    marker.pose.orientation.w = 1.0
    marker.points = [Point(x=x, y=y, z=z) for x, y, z in pairs.reshape(-1, 3).astype(float).tolist()]
    return marker
