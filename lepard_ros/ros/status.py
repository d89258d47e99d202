# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""TrackingStatus messages."""

from lepard_ros.msg import TrackingStatus
from lepard_ros.registration.types import Registration, Status
from lepard_ros.ros.conversion import header
from lepard_ros.tracking.track import Track


def status_message(
    stamp_ns: int, frame_id: str, state: str, mode: str, registration: Registration | None = None
) -> TrackingStatus:
    """A status with the quality of a registration. state: a name of TrackingState, which the message shares."""
    message = TrackingStatus(header=header(stamp_ns, frame_id), state=getattr(TrackingStatus, state), mode=mode)
    message.keyframe_id = -1
    message.residual = float("nan")
    if registration is not None:
        message.matches, message.inliers = len(registration.inliers), int(registration.inliers.sum())
        message.inlier_ratio = message.inliers / max(message.matches, 1)
        message.residual, message.overlap = float(registration.rmse), float(registration.overlap)
        message.method = registration.method if registration.ok else ""
    return message


def reason_code(track: Track) -> int:
    """Why the state is not OK, or that part of the pose was predicted, as a constant of TrackingStatus."""
    if track.pose is not None and track.registration is not None and track.registration.predicted:
        return int(TrackingStatus.REASON_DEGENERATE)
    if track.pose is not None or not track.reason:
        return int(TrackingStatus.REASON_NONE)
    if track.registration is None or track.registration.status is Status.OK:
        return int(TrackingStatus.REASON_OTHER)
    return int(getattr(TrackingStatus, f"REASON_{track.registration.status.name}", TrackingStatus.REASON_OTHER))
