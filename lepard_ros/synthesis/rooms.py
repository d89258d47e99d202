# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Random rooms: footprint, wall details, furniture, clutter; or a part of a whole building, refurnished."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.synthesis import furniture
from lepard_ros.synthesis.meshes import Mesh, MeshLibrary, box, merge, standing
from lepard_ros.synthesis.sensor import Scene

CELL = 0.05  # metres, cell size of the floor plan
MARGIN = 1.0  # metres of plan beyond the walls, so that furniture that crosses a wall is rejected
BUILDING_REACH = 7.0  # metres: size of the part of a building that makes a room


@dataclass(frozen=True)
class Room:
    """The contents of a room. Frame: z up, floor near z = 0, metres.

    meshes: one per object. hole_rate: (M,) share of an object's pixels that a depth camera misses (dark, shiny, glass).
    low, high: (3,) bounds for camera positions.
    """

    meshes: list[Mesh]
    hole_rate: FloatArray
    low: FloatArray
    high: FloatArray


def compose_room(rng: Generator, library: MeshLibrary) -> Room:
    """A random room: furnished, repetitive, or cut out of a building if the library has any."""
    if library.buildings and rng.random() < 0.15:
        meshes, low, high = _part_of_building(rng, library)
    else:
        meshes, low, high = _furnished_room(rng, library)
    meshes += _clutter(rng, library, meshes, low, high)
    rate = np.where(rng.random(len(meshes)) < 0.12, rng.uniform(0.1, 1.0, len(meshes)), 0.0)
    rate[0] = 0.0  # floor, walls and ceiling (or the building) are always visible
    return Room(meshes, rate, low, high)


# ---------------------------------------------------------------- the shell


def _footprint(rng: Generator) -> FloatArray:
    """The corners of a room, (K, 2) metres, counter-clockwise: rectangle, L, T, or with slanted corners."""
    w, d = rng.uniform(2.5, 8.0), rng.uniform(2.5, 6.5)
    style = rng.choice(4, p=[0.4, 0.25, 0.15, 0.2])
    if style == 1:
        x, y = w * rng.uniform(0.35, 0.7), d * rng.uniform(0.35, 0.7)
        corners = [[0, 0], [w, 0], [w, y], [x, y], [x, d], [0, d]]
    elif style == 2:
        x0, x1, y = w * rng.uniform(0.15, 0.4), w * rng.uniform(0.6, 0.85), d * rng.uniform(0.3, 0.7)
        corners = [[0, 0], [w, 0], [w, y], [x1, y], [x1, d], [x0, d], [x0, y], [0, y]]
    elif style == 3:
        a, b, c, e = rng.uniform(0.1, 0.45, 4) * np.array([w, d, w, d])
        corners = [[0, 0], [w - a, 0], [w, b], [w, d], [c, d], [0, d - e]]
    else:
        corners = [[0, 0], [w, 0], [w, d], [0, d]]
    return np.array(corners) - (w / 2, d / 2)


def _panel(x0: float, x1: float, z0: float, z1: float, y: float = 0.0) -> Mesh:
    """An upright rectangle in the plane y."""
    corners = np.array([[x0, y, z0], [x1, y, z0], [x1, y, z1], [x0, y, z1]], np.float32)
    return Mesh(corners, np.array([[0, 1, 2], [0, 2, 3]], np.int32))


def _wall_with_niche(length: float, height: float, span: FloatArray, rise: FloatArray, recess: float) -> list[Mesh]:
    """A wall piece from x = 0 to length with a recess (window, door, alcove) over span (2,) x rise (2,), towards +y."""
    (a, b), (c, d) = span, rise
    parts = [_panel(0, a, 0, height), _panel(b, length, 0, height), _panel(a, b, d, height), _panel(a, b, c, d, recess)]
    if c > 0:
        parts.append(_panel(a, b, 0, c))
    parts += [box(0.01, recess, d - c, (x, recess / 2, c)) for x in (a, b)]
    return [*parts, *(box(b - a, recess, 0.01, ((a + b) / 2, recess / 2, z)) for z in (c, d))]


def _wall_piece(rng: Generator, length: float, height: float) -> list[Mesh]:
    """One to three metres of wall with at most one feature."""
    span = np.sort(rng.uniform(0.08, 0.92, 2)) * length
    kind = rng.choice(["plain", "window", "door", "alcove", "pillar"], p=[0.42, 0.2, 0.16, 0.1, 0.12])
    if kind == "pillar":
        size = rng.uniform(0.1, 0.45, 2)
        pillar = box(size[0], size[1], height, (length * rng.uniform(0.2, 0.8), -size[1] / 2, 0))
        return [_panel(0, length, 0, height), pillar]
    if kind == "plain" or np.ptp(span) < 0.35:
        return [_panel(0, length, 0, height)]
    if kind == "window":
        rise, recess = np.array([rng.uniform(0.3, 1.1), height * rng.uniform(0.75, 0.95)]), rng.uniform(0.05, 0.4)
        bars = [
            _panel(x, x + 0.05, rise[0], rise[1], recess - 0.04)
            for x in np.linspace(span[0], span[1] - 0.05, rng.integers(2, 5))
        ]
        return _wall_with_niche(length, height, span, rise, recess) + bars
    if kind == "door":
        recess = rng.uniform(0.04, 0.25) if rng.random() < 0.6 else rng.uniform(0.8, 2.5)
        return _wall_with_niche(length, height, span, np.array([0.0, rng.uniform(1.95, 2.15)]), recess)
    return _wall_with_niche(
        length, height, span, np.array([0.0, height * rng.uniform(0.6, 0.97)]), rng.uniform(0.2, 0.8)
    )


def walls(rng: Generator, corners: FloatArray, height: float) -> list[Mesh]:
    """All walls of a footprint with details and at times a skirting board."""
    parts: list[Mesh] = []
    skirting = rng.uniform(0.01, 0.04) if rng.random() < 0.5 else 0.0
    for a, b in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        length, yaw = float(np.linalg.norm(b - a)), wall_yaw(a, b)
        cuts = np.linspace(0, length, max(1, round(length / rng.uniform(1.0, 3.0))) + 1)
        for x0, x1 in pairwise(cuts):
            piece = merge(_wall_piece(rng, x1 - x0, height)).placed((x0, 0, 0))
            parts.append(piece.placed((b[0], b[1], 0), yaw))
        if skirting:
            board = box(length, skirting, 0.08, (length / 2, -skirting / 2, 0))
            parts.append(board.placed((b[0], b[1], 0), yaw))
    return parts


def wall_yaw(a: FloatArray, b: FloatArray) -> float:
    """The yaw (radians) that points +y out of the room and x along the wall from corner b to corner a."""
    return float(np.arctan2(a[1] - b[1], a[0] - b[0]))


def _shell(rng: Generator, corners: FloatArray, height: float) -> Mesh:
    """Floor, ceiling (at times with beams) and walls."""
    low, high = corners.min(axis=0) - 3, corners.max(axis=0) + 3
    centre, size = (low + high) / 2, high - low
    floor = box(size[0], size[1], 0.1, (centre[0], centre[1], -0.1))
    ceiling = box(size[0], size[1], 0.1, (centre[0], centre[1], height))
    beams = []
    if rng.random() < 0.25:
        wide, deep = rng.uniform(0.1, 0.3), rng.uniform(0.08, 0.3)
        beams = [
            box(wide, size[1], deep, (x, centre[1], height - deep))
            for x in np.arange(low[0], high[0], rng.uniform(1, 2.5))
        ]
    return merge([floor, ceiling, *beams, *walls(rng, corners, height)])


# ---------------------------------------------------------------- furniture


class FloorPlan:
    """Occupancy of the floor. Footprints are rotated rectangles, (width, depth) metres."""

    def __init__(self, corners: FloatArray) -> None:
        low = corners.min(axis=0) - MARGIN
        shape = np.ceil((np.ptp(corners, axis=0) + 2 * MARGIN) / CELL).astype(int)
        x, y = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
        self.cells = low + (np.stack([x, y], -1) + 0.5) * CELL
        self.taken = ~_inside(corners, self.cells)

    def try_place(self, size: FloatArray, at: FloatArray, yaw: float) -> bool:
        """Occupy the rectangle if it is free; returns whether it was."""
        c, s = np.cos(yaw), np.sin(yaw)
        local = (self.cells - at) @ np.array([[c, -s], [s, c]])
        covered = (np.abs(local) <= np.asarray(size) / 2).all(axis=-1)
        if not covered.any() or (covered & self.taken).any():
            return False
        self.taken |= covered
        return True

    def random_cell(self, rng: Generator) -> FloatArray:
        """A free position (2,), metres."""
        free = self.cells[~self.taken]
        return free[rng.integers(len(free))] if len(free) else self.cells[0, 0]


def _inside(corners: FloatArray, points: FloatArray) -> NDArray[np.bool_]:
    """Whether (..., 2) points lie in a polygon (crossing number)."""
    x, y = points[..., 0], points[..., 1]
    inside = np.zeros(x.shape, bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        if ay != by:
            inside ^= ((ay > y) != (by > y)) & (x < (bx - ax) * (y - ay) / (by - ay) + ax)
    return inside


def _piece(rng: Generator, makers: list[furniture.Maker], meshes: list[Mesh], library_share: float = 0.6) -> Mesh:
    """A procedural object or one from the library, slightly scaled."""
    if meshes and rng.random() < library_share:
        return meshes[rng.integers(len(meshes))].scaled(rng.uniform(0.85, 1.15) * rng.uniform(0.95, 1.05, 3))
    return makers[rng.integers(len(makers))](rng)


def _furnish_walls(
    rng: Generator, plan: FloorPlan, corners: FloatArray, library: MeshLibrary, count: int
) -> list[Mesh]:
    """Furniture with its back to a wall."""
    placed = []
    for _ in range(count):
        index = rng.integers(len(corners))
        a, b = corners[index], corners[(index + 1) % len(corners)]
        mesh = standing(_piece(rng, furniture.AGAINST_WALL, library.floor))
        yaw = wall_yaw(a, b)
        inward = -np.array([-np.sin(yaw), np.cos(yaw)])
        turn = yaw + (rng.choice([0, np.pi / 2, np.pi, -np.pi / 2]) if rng.random() < 0.25 else rng.normal(0, 0.03))
        depth = mesh.size[1] if abs(np.cos(turn - yaw)) > 0.5 else mesh.size[0]
        spot = a + (b - a) * rng.uniform(0.05, 0.95) + inward * (depth / 2 + rng.uniform(0.01, 0.12))
        if plan.try_place(mesh.size[:2] * 0.97, spot, turn):
            placed.append(mesh.placed((spot[0], spot[1], 0), turn))
    return placed


def _furnish_middle(rng: Generator, plan: FloorPlan, library: MeshLibrary, count: int) -> list[Mesh]:
    """Groups of tables with chairs, and single pieces, anywhere on the floor."""
    placed = []
    for _ in range(count):
        spot, yaw = plan.random_cell(rng), rng.choice([0, np.pi / 2, np.pi, -np.pi / 2]) + rng.normal(0, 0.2)
        mesh = standing(_piece(rng, furniture.IN_THE_MIDDLE, library.floor))
        if not plan.try_place(mesh.size[:2], spot, yaw):
            continue
        placed.append(mesh.placed((spot[0], spot[1], 0), yaw))
        if 0.45 < mesh.size[2] < 1.05 and rng.random() < 0.6:
            placed += _chairs_around(rng, plan, mesh.size, spot, yaw)
    return placed


def _chairs_around(rng: Generator, plan: FloorPlan, size: FloatArray, spot: FloatArray, yaw: float) -> list[Mesh]:
    """Identical chairs on the sides of a table, facing it."""
    chair, placed = furniture.chair(rng), []
    c, s = np.cos(yaw), np.sin(yaw)
    for side in (0, 1, 2, 3):
        reach = size[1 - side % 2] / 2 + rng.uniform(0.05, 0.4)
        direction = np.array([np.cos(side * np.pi / 2 - np.pi / 2), np.sin(side * np.pi / 2 - np.pi / 2)])
        at = spot + np.array([[c, -s], [s, c]]) @ (direction * reach)
        turn = yaw + side * np.pi / 2 + np.pi * (rng.random() < 0.05) + rng.normal(0, 0.3)
        if rng.random() < 0.75 and plan.try_place(chair.size[:2] * 0.7, at, turn):
            placed.append(chair.placed((at[0], at[1], 0), turn + np.pi))
    return placed


def _rows(rng: Generator, plan: FloorPlan) -> list[Mesh]:
    """A repetitive room: rows of identical desks and chairs (or shelves) that only context can distinguish."""
    desk = furniture.table(rng, 0.74) if rng.random() < 0.7 else standing(furniture.shelf(rng))
    chair, with_chairs = furniture.chair(rng), rng.random() < 0.8
    step = np.array([desk.size[0] + rng.uniform(0.05, 0.6), desk.size[1] + rng.uniform(0.7, 1.2)])
    low, high = plan.cells[0, 0], plan.cells[-1, -1]
    placed, yaw = [], rng.choice([0.0, np.pi])
    for x in np.arange(low[0] + step[0] / 2, high[0], step[0]):
        for y in np.arange(low[1] + step[1] / 2, high[1], step[1]):
            if plan.try_place(desk.size[:2], np.array([x, y]), yaw):
                placed.append(desk.placed((x, y, 0), yaw))
                if with_chairs:
                    at = (x + rng.normal(0, 0.04), y - np.cos(yaw) * desk.size[1] * 0.6, 0)
                    placed.append(chair.placed(at, yaw + np.pi + rng.normal(0, 0.15)))
    return placed


def _hang(rng: Generator, corners: FloatArray, height: float, library: MeshLibrary, count: int) -> list[Mesh]:
    """Pictures, shelves, curtains and radiators on walls; lamps from the ceiling."""
    placed = []
    for _ in range(count):
        index = rng.integers(len(corners))
        a, b = corners[index], corners[(index + 1) % len(corners)]
        mesh = _piece(rng, furniture.ON_WALLS, library.wall, 0.4)
        yaw, room_above = wall_yaw(a, b), height - mesh.size[2]
        inward = -np.array([-np.sin(yaw), np.cos(yaw)])
        if room_above <= 0:
            continue
        spot = a + (b - a) * rng.uniform(0.1, 0.9) + inward * (float(mesh.vertices[:, 1].max()) + 0.005)
        placed.append(mesh.placed((spot[0], spot[1], room_above * rng.uniform(0.05, 1.0)), yaw))
    for _ in range(rng.integers(0, 4)):
        mesh = _piece(rng, [furniture.vessel, furniture.lamp], library.ceiling, 0.5)
        at = rng.uniform(corners.min(axis=0), corners.max(axis=0))
        upside_down = mesh.scaled(np.array([1.0, -1.0, -1.0]))
        placed.append(upside_down.placed((at[0], at[1], height)))
    return placed


def _furnished_room(rng: Generator, library: MeshLibrary) -> tuple[list[Mesh], FloatArray, FloatArray]:
    """Meshes (the shell first) and the bounds for cameras."""
    corners, height = _footprint(rng), rng.uniform(2.2, 3.3)
    plan, area = FloorPlan(corners), abs(np.prod(np.ptp(corners, axis=0)))
    meshes = [_shell(rng, corners, height)]
    if rng.random() < 0.14:
        meshes += _rows(rng, plan)
    density = rng.uniform(0.7, 2.0)
    meshes += _furnish_walls(rng, plan, corners, library, int(density * (10 + 1.0 * area)))
    meshes += _furnish_middle(rng, plan, library, int(density * (4 + 0.5 * area)))
    meshes += _hang(rng, corners, height, library, int(density * (4 + 0.3 * area)))
    margin = 0.25
    low, high = (
        np.append(corners.min(axis=0) + margin, 0.5),
        np.append(corners.max(axis=0) - margin, min(height - 0.2, 2.2)),
    )
    return meshes, low, high


def _part_of_building(rng: Generator, library: MeshLibrary) -> tuple[list[Mesh], FloatArray, FloatArray]:
    """The surroundings of a random position in a building, randomly scaled and mirrored, with added furniture."""
    building = library.buildings[rng.integers(len(library.buildings))]
    stretch = rng.uniform(0.85, 1.15, 3) * np.array([rng.choice([-1, 1]), rng.choice([-1, 1]), 1])
    building = building.scaled(stretch)
    spot = building.vertices[building.faces[rng.integers(len(building.faces)), 0]]
    centres = building.vertices[building.faces].mean(axis=1)
    near = np.abs(centres[:, :2] - spot[:2]).max(axis=1) < BUILDING_REACH
    used, faces = np.unique(building.faces[near], return_inverse=True)
    part = Mesh(building.vertices[used], faces.reshape(-1, 3).astype(np.int32))
    low = np.maximum(part.vertices.min(axis=0), np.append(spot[:2] - 3.5, 0.5))
    high = np.minimum(part.vertices.max(axis=0), np.append(spot[:2] + 3.5, 2.2))
    return [part, *_drop_furniture(rng, library, part, low, high)], low, high


def _drop_furniture(rng: Generator, library: MeshLibrary, part: Mesh, low: FloatArray, high: FloatArray) -> list[Mesh]:
    """Furniture on the floor of a building, where a ray from above hits it."""
    points, _ = support_points(rng, Scene([part]), low, high, 60)
    on_floor = points[points[:, 2] < 0.15][: rng.integers(2, 9)]
    pieces = (standing(_piece(rng, furniture.IN_THE_MIDDLE, library.floor)) for _ in on_floor)
    return [mesh.placed(at, rng.uniform(0, 6.3)) for mesh, at in zip(pieces, on_floor, strict=True)]


# ---------------------------------------------------------------- clutter


def support_points(
    rng: Generator, scene: Scene, low: FloatArray, high: FloatArray, count: int
) -> tuple[FloatArray, FloatArray]:
    """Hits of vertical rays on level surfaces: points (S, 3), and the free height above them (S,)."""
    start = rng.uniform([low[0], low[1], 0.5], [high[0], high[1], 2.1], (count, 3))
    down = np.broadcast_to([0.0, 0.0, -1.0], start.shape)
    hits = scene.cast(np.concatenate([start, down], axis=1))
    level = np.isfinite(hits.distance) & (np.abs(hits.normals[:, 2]) > 0.97)
    points = start + down * np.where(level, hits.distance, 0)[:, None]
    return points[level], hits.distance[level]


def _clutter(rng: Generator, library: MeshLibrary, meshes: list[Mesh], low: FloatArray, high: FloatArray) -> list[Mesh]:
    """Small objects on tables, shelves and sometimes the floor, in clusters of one to four."""
    wanted = int(rng.uniform(25, 110))
    points, head_room = support_points(rng, Scene(meshes), low, high, 900)
    raised = points[:, 2] > 0.2
    order = np.argsort(rng.random(len(points)) + np.where(raised, 0, rng.uniform(0.3, 1.0)))[:wanted]
    placed = []
    for at, room in zip(points[order], head_room[order], strict=True):
        mesh = _piece(rng, furniture.ON_SURFACES, library.clutter, 0.8)
        scale = rng.uniform(1.2, 3.0) if rng.random() < 0.3 else 1.0
        if at[2] > 0.2:
            scale = min(scale, 0.9 * room / mesh.size[2], 0.5 / mesh.size[:2].max())
        if scale > 0.3:
            placed.append(standing(mesh).scaled(scale).placed(at, rng.uniform(0, 6.3)))
    return placed
