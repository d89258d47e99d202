# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A warp as a DeformationGraph message, and back without loss."""

import array

import numpy as np
from numpy.typing import NDArray
from std_msgs.msg import Header

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.msg import DeformationGraph as DeformationGraphMessage
from lepard_ros.registration.deformable.graph import DeformationGraph
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Status

_STATUS_OF_MESSAGE = {
    DeformationGraphMessage.OK: Status.OK,
    DeformationGraphMessage.REJECTED: Status.TOO_FEW_MATCHES,
    DeformationGraphMessage.NOT_CONVERGED: Status.NOT_CONVERGED,
}


def warp_message(warp: Warp, source: Header, target: Header, keyframe_id: int = 0) -> DeformationGraphMessage:
    """The message of a warp. source: stamp and frame of the warped model; target: of the live cloud."""
    graph = warp.graph
    message = DeformationGraphMessage(header=source, target_header=target, keyframe_id=keyframe_id)
    message.status = _message_status(warp.status)
    message.status_text = "" if warp.ok else warp.status.value
    message.gamma, message.neighbours = float(graph.coverage), int(graph.skinning)
    message.nodes = _doubles(graph.nodes)
    message.rotations, message.translations = _doubles(warp.rotations), _doubles(warp.translations)
    message.edges = array.array("i", np.ascontiguousarray(graph.edges, dtype=np.int32).tobytes())
    message.optimised = array.array("B", np.asarray(graph.active, dtype=np.uint8).tobytes())
    support = warp.support if len(warp.support) else np.zeros(len(graph.nodes))
    message.confidence = array.array("f", np.asarray(support, dtype=np.float32).tobytes())
    message.matches, message.inliers = len(warp.match_inliers), int(warp.match_inliers.sum())
    message.residual = float(warp.residual)
    return message


def warp_from_message(message: DeformationGraphMessage) -> Warp:
    """The warp of a message; raises InputError if its arrays are inconsistent."""
    nodes, rotations, translations = (
        _triples(values) for values in (message.nodes, message.rotations, message.translations)
    )
    edges = np.array(message.edges, dtype=np.int64)
    active = np.array(message.optimised, dtype=bool)
    count = len(nodes)
    if not (len(rotations) == len(translations) == len(active) == count) or len(edges) % 2:
        raise InputError("The arrays of the warp message have different lengths; check its publisher.")
    if len(edges) and not 0 <= edges.min() <= edges.max() < count:
        raise InputError("An edge of the warp message refers to a missing node; check its publisher.")
    if message.status not in _STATUS_OF_MESSAGE or not message.gamma > 0 or message.neighbours < 1:
        raise InputError("The warp message has an unknown status, or no coverage radius or neighbours.")
    graph = DeformationGraph(nodes, edges.reshape(-1, 2), active, float(message.gamma), int(message.neighbours))
    support = np.array(message.confidence, dtype=np.float64)
    return Warp(
        graph, rotations, translations, _STATUS_OF_MESSAGE[message.status], support, residual=float(message.residual)
    )


def _message_status(status: Status) -> int:
    if status is Status.OK:
        return int(DeformationGraphMessage.OK)
    unfinished = status in (Status.NOT_CONVERGED, Status.OUT_OF_TIME)
    return int(DeformationGraphMessage.NOT_CONVERGED if unfinished else DeformationGraphMessage.REJECTED)


def _doubles(values: FloatArray) -> "array.array[float]":
    return array.array("d", np.ascontiguousarray(values, dtype=np.float64).tobytes())


def _triples(values: "array.array[float]") -> NDArray[np.float64]:
    flat = np.array(values, dtype=np.float64)
    if len(flat) % 3:
        raise InputError("An array of the warp message does not hold three numbers for each node; check its publisher.")
    return flat.reshape(-1, 3)
