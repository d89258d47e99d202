# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Recovery of a lost deforming object: its last shape is moved rigidly to agree with the matches.

Matches alone place every part independently. Matches on the side that now faces away are wrong and would pull the
hidden half with them, while the visible half fits. The last shape constrains the hidden half.
"""

import numpy as np
import torch

from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.geometry.rigid_motion import invert, kabsch, move, rotation_angle, turn
from lepard_ros.registration.deformable.match_filter import chosen
from lepard_ros.registration.deformable.nonrigid import matched_normals
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches, Surface

TRIES = 400  # rigid hypotheses, each from three matches
INLIER_DISTANCE = 0.1  # metres: allows for deformation relative to the last shape
SAME_SIDE = 0.0  # minimum cosine between the moved normal and the live one; below, the matched side faces away
MIN_INLIERS = 20
# A motion needs CLEARLY times the inlier score of any motion that differs by more than OTHER_DEGREES.
OTHER_DEGREES, CLEARLY = 60.0, 1.3


def moved_by_matches(
    last: Warp, matches: Matches, model: Surface, live: Surface, max_degrees: float = 180.0
) -> Warp | None:
    """Move the last warp rigidly to agree with most matches (M), from the rest shape to the live cloud.

    max_degrees: maximum rotation of the object. None if no motion has enough inliers, or if a very different rotation
    has nearly as many: front and back may look alike.
    """
    usable = chosen(matches, matches.confidence > 0)
    if len(usable.confidence) < MIN_INLIERS:
        return None
    positions, normals = last(usable.source), _rotated_normals(last, usable, model, live)
    motions = _hypotheses(positions, usable)
    inliers = _inliers(motions, positions, normals, usable)
    score = np.where(_degrees(motions) <= max_degrees, inliers @ usable.confidence, 0.0)
    first = int(score.argmax())
    apart = _degrees(motions @ invert(motions[first])) > OTHER_DEGREES
    if score[first] < CLEARLY * score[apart].max(initial=0.0):
        return None
    best = inliers[first]
    for _ in range(3):
        if best.sum() < MIN_INLIERS:
            return None
        motion = _motion(positions[best], usable.target[best], usable.confidence[best])
        best = _inliers(motion[None], positions, normals, usable)[0]
    return last.moved_by(motion)


def _degrees(motions: FloatArray) -> FloatArray:
    """Rotation angles (H,) of motions (H, 4, 4)."""
    return np.degrees(rotation_angle(motions[:, :3, :3]))


def possible_matches(warp: Warp, matches: Matches, model: Surface, live: Surface) -> Matches:
    """Set the confidence of matches (M) to 0 where the warped model faces away from the sensor.

    Such points cannot have been observed. An approximate warp is sufficient.
    """
    at_rest, now = _rotated_normals(warp, matches, model, live)
    seen = (at_rest * now).sum(axis=1) > SAME_SIDE
    return matches._replace(confidence=np.where(seen, matches.confidence, 0.0))


def _rotated_normals(last: Warp, matches: Matches, model: Surface, live: Surface) -> tuple[FloatArray, FloatArray]:
    """Normals (M, 3) at the matched points: of the model, rotated by the last warp, and of the live cloud."""
    at_rest, now = matched_normals(matches, model, live)
    return last.rotate(matches.source, at_rest), now


def _hypotheses(positions: FloatArray, matches: Matches) -> FloatArray:
    """Hypotheses (TRIES, 4, 4) from three matches each, sampled with a fixed seed."""
    share = matches.confidence / matches.confidence.sum()
    drawn = np.random.default_rng(0).choice(len(share), (TRIES, 3), p=share)
    return _motion(positions[drawn], matches.target[drawn], np.ones(drawn.shape))


def _motion(source: FloatArray, target: FloatArray, weights: FloatArray) -> FloatArray:
    return kabsch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (source, target, weights))).numpy()


def _inliers(
    motions: FloatArray, positions: FloatArray, normals: tuple[FloatArray, FloatArray], matches: Matches
) -> BoolArray:
    """Inliers (H, M) of each motion (H, 4, 4): near their target, with agreeing normals."""
    near = np.square(move(motions, positions) - matches.target).sum(axis=-1) < INLIER_DISTANCE**2
    return np.asarray(near & ((turn(motions, normals[0]) * normals[1]).sum(axis=-1) > SAME_SIDE))
