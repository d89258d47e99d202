# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Where a bending thing is after it was out of sight: its last shape, moved as a whole to where its matches lead.

Matches alone place every part for itself. Those of the side that is turned away now lead anywhere, and the hidden half
of the body goes with them, while all that can be seen fits. The last shape knows where the hidden half is.
"""

import numpy as np
import torch

from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.geometry.rigid_motion import invert, kabsch, move, rotation_angle, turn
from lepard_ros.registration.deformable.match_filter import chosen
from lepard_ros.registration.deformable.nonrigid import matched_normals
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches, Surface

TRIES = 400  # rigid motions that are tried, each by three matches
LANDING = 0.1  # metres: a body that bends lands its matches this near to a rigid motion of its last shape
SAME_SIDE = 0.0  # cosine between a moved normal and the live one; below, a match shows a side that is turned away
MIN_LANDED = 20  # matches that a motion must land
OTHER_DEGREES, CLEARLY = 60.0, 1.3  # a motion must land so many times as many as one that turns so differently


def moved_by_matches(
    last: Warp, matches: Matches, model: Surface, live: Surface, max_degrees: float = 180.0
) -> Warp | None:
    """The last warp moved rigidly to where most matches (M), from the model at rest to the live cloud, lead.

    max_degrees: the body has not turned more than this. None if no motion lands enough matches, or if quite another
    turn lands nearly as many: the back of a body may look like its front.
    """
    usable = chosen(matches, matches.confidence > 0)
    if len(usable.confidence) < MIN_LANDED:
        return None
    places, normals = last(usable.source), _turned(last, usable, model, live)
    motions = _tried_motions(places, usable)
    landed = _landed(motions, places, normals, usable)
    score = np.where(_degrees(motions) <= max_degrees, landed @ usable.confidence, 0.0)
    first = int(score.argmax())
    apart = _degrees(motions @ invert(motions[first])) > OTHER_DEGREES
    if score[first] < CLEARLY * score[apart].max(initial=0.0):
        return None
    best = landed[first]
    for _ in range(3):
        if best.sum() < MIN_LANDED:
            return None
        motion = _motion(places[best], usable.target[best], usable.confidence[best])
        best = _landed(motion[None], places, normals, usable)[0]
    return last.moved_by(motion)


def _degrees(motions: FloatArray) -> FloatArray:
    """(H,) how far motions (H, 4, 4) turn."""
    return np.degrees(rotation_angle(motions[:, :3, :3]))


def possible_matches(warp: Warp, matches: Matches, model: Surface, live: Surface) -> Matches:
    """The matches (M), with confidence 0 where the warp turns their place on the model away from the sensor.

    A place that is turned away cannot have been seen. The warp need only be roughly right.
    """
    at_rest, now = _turned(warp, matches, model, live)
    seen = (at_rest * now).sum(axis=1) > SAME_SIDE
    return matches._replace(confidence=np.where(seen, matches.confidence, 0.0))


def _turned(last: Warp, matches: Matches, model: Surface, live: Surface) -> tuple[FloatArray, FloatArray]:
    """Normals (M, 3) at the matched places: of the model as the last warp turned them, and of the live cloud."""
    at_rest, now = matched_normals(matches, model, live)
    return last.rotate(matches.source, at_rest), now


def _tried_motions(places: FloatArray, matches: Matches) -> FloatArray:
    """(TRIES, 4, 4): the motions of three matches each, drawn with a fixed seed."""
    share = matches.confidence / matches.confidence.sum()
    drawn = np.random.default_rng(0).choice(len(share), (TRIES, 3), p=share)
    return _motion(places[drawn], matches.target[drawn], np.ones(drawn.shape))


def _motion(source: FloatArray, target: FloatArray, weights: FloatArray) -> FloatArray:
    return kabsch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (source, target, weights))).numpy()


def _landed(
    motions: FloatArray, places: FloatArray, normals: tuple[FloatArray, FloatArray], matches: Matches
) -> BoolArray:
    """(H, M): which matches each motion (H, 4, 4) takes to their target, the right side up."""
    near = np.square(move(motions, places) - matches.target).sum(axis=-1) < LANDING**2
    return np.asarray(near & ((turn(motions, normals[0]) * normals[1]).sum(axis=-1) > SAME_SIDE))
