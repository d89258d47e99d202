# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Deformable mode: the deformation of an object since it was first seen, as a warp."""

from pathlib import Path
from typing import Any, ClassVar

from sensor_msgs.msg import PointCloud2
from visualization_msgs.msg import MarkerArray

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.msg import Correspondences, DeformationGraph, TrackingStatus
from lepard_ros.registration.deformable.foreground import ForegroundSettings
from lepard_ros.ros import conversion
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.frames import FramePlan
from lepard_ros.ros.markers import graph_markers
from lepard_ros.ros.modes import LATCHED, Output, Result, Topic
from lepard_ros.ros.parameters import NodeSettings, parse_box
from lepard_ros.ros.status import status_message
from lepard_ros.ros.warp_message import warp_message
from lepard_ros.tracking.deformable import DeformableTrack, DeformableTracker
from lepard_ros.tracking.deformable_settings import DeformableSettings
from lepard_ros.tracking.matching_worker import MatchingWorker


def tracker_settings(settings: NodeSettings) -> DeformableSettings:
    """Tracker settings from the node's parameters."""
    planes, gap = settings.min_plane_area, settings.part_gap
    body = ForegroundSettings(min_plane_area=planes, gap=gap, box=parse_box(settings.foreground_box))
    return DeformableSettings(
        max_range=settings.max_range,
        foreground=body if settings.foreground == "body" else None,
        background_clouds=settings.match_delay,
        threaded=True,
    )


class DeformableMode:
    """Feeds clouds to a DeformableTracker and converts its results to messages. No TF: nothing is rigid."""

    topics: ClassVar[dict[str, Topic]] = {
        "correspondences": Topic(Correspondences),
        "markers": Topic(MarkerArray),
        "warp": Topic(DeformationGraph),
        "warped_points": Topic(PointCloud2),
        "model": Topic(PointCloud2, LATCHED),
    }

    coarse_grid: float | None = None  # a coarse cloud would degrade the model

    def __init__(
        self,
        matcher: Any,
        settings: NodeSettings,
        plan: FramePlan,
        description: str = "",
        tracker: DeformableTracker | None = None,
        worker: MatchingWorker | None = None,
    ) -> None:
        """Start without a model: the first cloud becomes the model. tracker: an external one, fed by the caller.

        matcher or worker: the owner of the network.
        """
        self.description = description
        self._settings, self._plan = settings, plan
        self._tracker = tracker or DeformableTracker(matcher, tracker_settings(settings), worker)
        self._model_ns = 0
        self._model_due_ns = 0

    def keyframe_count(self) -> int:
        """None: past clouds of the model are not keyframes of a map."""
        return 0

    def process(self, frame: Frame, wanted: set[str]) -> Result:
        """Warp the model to the cloud and report the result."""
        return self.report(self._tracker.process(frame.points, frame.stamp_ns * 1e-9), frame, wanted)

    def report(self, track: DeformableTrack, frame: Frame, wanted: set[str]) -> Result:
        """The messages for a tracked cloud."""
        if track.reset:
            self._model_ns, self._model_due_ns = frame.stamp_ns, 0
        outputs = self._warp_outputs(track, frame, wanted) if track.warp is not None else []
        outputs += self._match_outputs(track, frame)
        outputs += self._model_outputs(track, frame)
        return Result(self._status(track, frame), outputs)

    def apply(self, settings: NodeSettings) -> None:
        """Apply parameters that changed at runtime."""
        self._settings = self._plan.settings = settings
        self._tracker.settings = tracker_settings(settings)

    def reset(self) -> None:
        """Clear the model."""
        self._tracker.reset()
        self._model_ns = self._model_due_ns = 0

    def relocalise(self) -> None:
        """Nothing to do: every cloud is matched with the model, wherever it was before."""

    def hint(self, pose: FloatArray) -> None:
        """Nothing to do: there is no pose."""

    def unsaved(self) -> bool:
        """Never: a model is temporary, not a map to return to."""
        return False

    def save(self, directory: Path) -> str:
        """Write the model in its rest shape as a PLY cloud."""
        from lepard_ros.cloud.files import write_cloud

        model = self._tracker.model
        if model is None:
            raise InputError("There is no model to save yet; send clouds first.")
        path = directory.with_suffix(".ply")
        temporary = directory.with_suffix(".part.ply")
        write_cloud(temporary, model.points)
        temporary.replace(path)
        return f"The model of {len(model.points)} points was written to {path}"

    def close(self) -> None:
        """Stop the background worker."""
        self._tracker.close()

    def facts(self) -> dict[str, str]:
        """Values for the diagnostics."""
        model = self._tracker.model
        return {
            "model points": str(len(model.points) if model else 0),
            "graph nodes": str(len(model.graph.nodes) if model else 0),
        }

    def _warp_outputs(self, track: DeformableTrack, frame: Frame, wanted: set[str]) -> list[Output]:
        """The warp, the warped model, and the graph as lines."""
        if track.warp is None:
            return []
        source = conversion.header(self._model_ns, frame.frame_id)
        target = conversion.header(frame.stamp_ns, frame.frame_id)
        message = warp_message(track.warp, source, target)
        message.matches, message.inliers = len(track.inliers), int(track.inliers.sum())
        message.residual = float(track.residual)
        support = {"support": track.support}
        cloud = conversion.cloud_message(track.warped_points, frame.stamp_ns, frame.frame_id, support)
        outputs = [Output("warp", message), Output("warped_points", cloud)]
        if "markers" in wanted:
            graph = track.warp.graph
            limit = self._settings.marker_lines
            lines = graph_markers(track.warp.moved_nodes, graph.edges, frame.stamp_ns, frame.frame_id, limit)
            outputs.append(Output("markers", lines))
        return outputs

    def _match_outputs(self, track: DeformableTrack, frame: Frame) -> list[Output]:
        """Matches between the live cloud (source) and the model in its rest shape (target)."""
        if not len(track.matches.confidence):
            return []
        turned = track.matches._replace(source=track.matches.target, target=track.matches.source)
        live = conversion.header(frame.stamp_ns, frame.frame_id)
        rest = conversion.header(self._model_ns, frame.frame_id)
        inliers = track.inliers if len(track.inliers) == len(turned.confidence) else turned.confidence < 0
        message = conversion.correspondences_message(turned, inliers, live, rest, 0)
        message.accepted, message.method = track.warp is not None, "lepard"
        return [Output("correspondences", message)]

    def _model_outputs(self, track: DeformableTrack, frame: Frame) -> list[Output]:
        """The model in its rest shape, at most once per `map_period`."""
        if not len(track.model_points) or frame.stamp_ns < self._model_due_ns:
            return []
        self._model_due_ns = frame.stamp_ns + int(self._settings.map_period * 1e9)
        return [Output("model", conversion.cloud_message(track.model_points, self._model_ns, frame.frame_id))]

    def _status(self, track: DeformableTrack, frame: Frame) -> TrackingStatus:
        message = status_message(frame.stamp_ns, frame.frame_id, track.state.name, "deformable")
        message.matches, message.inliers = len(track.inliers), int(track.inliers.sum())
        message.inlier_ratio = message.inliers / max(message.matches, 1)
        message.residual, message.overlap = float(track.residual), float(track.overlap)
        message.keyframe_id = 0 if track.warp is not None else -1
        message.keyframe_stamp = conversion.stamp_from_ns(self._model_ns)
        message.new_keyframe = track.new_keyframe or track.reset
        message.method = track.method
        if track.warp is None:
            message.reason, message.reason_text = int(TrackingStatus.REASON_OTHER), track.reason
        message.stage_names = list(track.seconds)
        message.stage_seconds = [float(value) for value in track.seconds.values()]
        return message
