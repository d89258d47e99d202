# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""One floor of a building: a furnished corridor around a core, and a camera path of several laps."""

import numpy as np

from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.synthesis import furniture
from lepard_ros.synthesis.fragments import camera_pose
from lepard_ros.synthesis.meshes import Mesh, box, merge, standing
from lepard_ros.synthesis.rooms import wall_yaw, walls

LENGTH, WIDTH, HEIGHT = 22.0, 15.0, 2.7  # metres, outer walls
CORRIDOR = 3.2  # metres
CORNER = 1.0  # metres, radius of the walked path at its corners
PIECE_EVERY = 1.3  # metres of wall per piece of furniture
PILLARS = 0.3  # share of the pieces that are pillars
DEEPEST_PIECE = 0.9  # maximum depth in metres; the middle of the corridor stays free
CAMERA_HEIGHT = 1.3  # metres above the floor
TURN_BACK = 0.06  # share of a lap in which the camera turns to face backwards
# Times that the camera looks to both sides on a lap. Not a whole number: nobody looks the same way at the same place on
# each lap, and on the third one it looks to the other side than on the first.
SWAYS = 11.25


def floor_meshes(rng: Generator) -> list[Mesh]:
    """The corridor walls (first mesh) and the furniture; metres, z up, floor at z = 0."""
    outer, inner = _rectangle(LENGTH, WIDTH), _rectangle(LENGTH - 2 * CORRIDOR, WIDTH - 2 * CORRIDOR)[::-1]
    slabs = [box(LENGTH + 6, WIDTH + 6, 0.1, (0.0, 0.0, z)) for z in (-0.1, HEIGHT)]
    shell = merge([*slabs, *walls(rng, outer, HEIGHT), *walls(rng, inner, HEIGHT)])
    return [shell, *_furniture(rng, outer), *_furniture(rng, inner)]


def rounds(clouds: int, count: int) -> FloatArray:
    """Camera poses (clouds, 4, 4) of `count` laps through the corridor; every second lap looks backwards."""
    phase = np.linspace(0.0, count, clouds, endpoint=False)
    places, headings = _middle_line(phase % 1.0)
    backwards = _turned_back(phase)
    yaw = np.unwrap(headings) + np.pi * backwards + 0.35 * np.sin(2 * np.pi * SWAYS * phase)
    pitch = -0.15 + 0.08 * np.sin(2 * np.pi * 7 * phase)
    height = CAMERA_HEIGHT + 0.04 * np.sin(2 * np.pi * 31 * phase)
    views = zip(places, height, yaw, pitch, strict=True)
    return np.stack([camera_pose(np.array([*place, z]), turn, nod, 0.0) for place, z, turn, nod in views])


def random_views(rng: Generator, count: int) -> FloatArray:
    """Random camera poses (count, 4, 4) along the corridor, off its centre line, looking forwards or backwards."""
    places, headings = _middle_line(rng.uniform(0, 1, count))
    yaw = headings + np.pi * rng.integers(0, 2, count) + rng.uniform(-0.5, 0.5, count)
    places = places + rng.uniform(-0.4, 0.4, places.shape)
    heights = rng.uniform(CAMERA_HEIGHT - 0.2, CAMERA_HEIGHT + 0.2, count)
    views = zip(places, heights, yaw, rng.uniform(-0.25, 0.0, count), strict=True)
    return np.stack([camera_pose(np.array([*place, z]), turn, nod, 0.0) for place, z, turn, nod in views])


def _rectangle(length: float, width: float) -> FloatArray:
    """Corners (4, 2), counter-clockwise around the origin."""
    return np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (length / 2, width / 2)


def _furniture(rng: Generator, corners: FloatArray) -> list[Mesh]:
    """Furniture and pillars along the inner side of the walls of a footprint (K, 2)."""
    placed = []
    for a, b in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        yaw, length = wall_yaw(a, b), float(np.linalg.norm(b - a))
        inward = np.array([np.sin(yaw), -np.cos(yaw)])
        for along in np.arange(0.5, length - 0.5, PIECE_EVERY):
            piece = _pillar(rng) if rng.random() < PILLARS else _piece(rng)
            spot = a + (b - a) * (along + rng.uniform(-0.2, 0.2)) / length + inward * (piece.size[1] / 2 + 0.03)
            placed.append(piece.placed((spot[0], spot[1], 0.0), yaw + rng.normal(0, 0.03)))
    return placed


def _piece(rng: Generator) -> Mesh:
    """A piece of furniture that leaves the middle of the corridor free."""
    while True:
        piece = standing(furniture.AGAINST_WALL[rng.integers(len(furniture.AGAINST_WALL))](rng))
        if piece.size[1] <= DEEPEST_PIECE:
            return piece


def _pillar(rng: Generator) -> Mesh:
    """A pillar, shaft or door frame up to the ceiling; it makes each stretch of wall distinct."""
    return box(rng.uniform(0.2, 0.9), rng.uniform(0.1, 0.4), HEIGHT)


def _middle_line(phase: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Positions (N, 2) and headings (N,) in radians on the rounded centre line; phase: (N,) in laps."""
    sides = np.array([LENGTH - CORRIDOR, WIDTH - CORRIDOR] * 2) - 2 * CORNER
    arc = np.pi / 2 * CORNER
    ends = np.cumsum(sides + arc)
    at = phase * ends[-1]
    side = np.searchsorted(ends, at, side="right").clip(0, 3)
    along = at - (ends - sides - arc)[side]
    bend = np.clip((along - sides[side]) / CORNER, 0.0, None)  # radians into the corner that ends the side
    straight = np.minimum(along, sides[side]) + CORNER
    in_side = np.stack([straight + CORNER * np.sin(bend), CORNER * (1 - np.cos(bend))], axis=1)
    start = _rectangle(LENGTH - CORRIDOR, WIDTH - CORRIDOR)[side]
    turn = side * np.pi / 2
    across = np.stack([np.cos(turn), np.sin(turn), -np.sin(turn), np.cos(turn)], axis=1).reshape(-1, 2, 2)
    return start + np.einsum("ni,nij->nj", in_side, across), turn + bend


def _turned_back(phase: FloatArray) -> FloatArray:
    """View direction (N,): 0 ahead, 1 back, with a smooth transition; phase: laps since the start."""
    number, within = np.divmod(phase, 1.0)
    turning = 0.5 - 0.5 * np.cos(np.pi * np.clip(within / TURN_BACK, 0.0, 1.0))
    return np.where(number % 2 == 1, turning, np.where(number > 0, 1.0 - turning, 0.0))
