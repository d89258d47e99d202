# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Decoding of ROS depth images and camera info, with numpy only."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import Camera
from lepard_ros.errors import InputError

# encoding -> numpy type without byte order, metres per unit (REP-118).
_ENCODINGS = {"16UC1": ("u2", 0.001), "mono16": ("u2", 0.001), "32FC1": ("f4", 1.0)}


def decode_depth(message: Any) -> NDArray[np.float32]:
    """The depth of a sensor_msgs/Image in metres, (H, W) float32, with NaN for missing pixels."""
    if message.encoding not in _ENCODINGS:
        known = ", ".join(_ENCODINGS)
        raise InputError(f"A depth image has the encoding '{message.encoding}'; publish one of {known}.")
    name, metres = _ENCODINGS[message.encoding]
    kind = np.dtype((">" if message.is_bigendian else "<") + name)
    height, width, step = int(message.height), int(message.width), int(message.step)
    data = memoryview(message.data).cast("B")
    if height < 1 or width < 1:
        raise InputError(f"A depth image of {width} x {height} pixels is empty; check the camera driver.")
    if step < width * kind.itemsize or len(data) < (height - 1) * step + width * kind.itemsize:
        raise InputError(
            f"A depth image of {width} x {height} pixels, step {step}, does not fit in {len(data)} bytes; check step."
        )
    raw = np.ndarray((height, width), kind, data, 0, (step, kind.itemsize))
    depth = raw.astype(np.float32) * np.float32(metres)
    depth[~(np.isfinite(depth) & (depth > 0))] = np.nan
    return depth


def camera_from_info(message: Any, rectified: bool = True) -> Camera:
    """The camera of a sensor_msgs/CameraInfo.

    The projection matrix P describes rectified images, which most depth drivers publish; K is used where P is zero.
    An image that is not rectified has K and the coefficients of the lens, if there are any.
    """
    p, k = [float(v) for v in message.p], [float(v) for v in message.k]
    if len(p) != 12 or len(k) != 9:
        raise InputError("The camera info has matrices of the wrong size; P needs 12 numbers and K 9.")
    lens = () if rectified else _lens(message)
    use_p = not lens and p[0] > 0 and p[5] > 0
    fx, fy, cx, cy = (p[0], p[5], p[2], p[6]) if use_p else (k[0], k[4], k[2], k[5])
    if not (np.isfinite([fx, fy, cx, cy]).all() and fx > 0 and fy > 0):
        raise InputError("The camera info has no focal length; calibrate the camera or publish a filled camera_info.")
    return Camera(int(message.width), int(message.height), fx, fy, cx, cy, lens=lens)


def _lens(message: Any) -> tuple[float, ...]:
    """The coefficients of the lens as OpenCV orders them: k1, k2, p1, p2, k3, k4, k5, k6; empty if all are zero."""
    lens = tuple(float(value) for value in message.d)
    if not any(lens):
        return ()
    if message.distortion_model not in ("plumb_bob", "rational_polynomial") or len(lens) not in (4, 5, 8):
        raise InputError(
            f"The camera info has {len(lens)} coefficients of the model '{message.distortion_model}', which is not "
            "known here; publish rectified depth images (depth_image_proc, image_proc)."
        )
    return lens
