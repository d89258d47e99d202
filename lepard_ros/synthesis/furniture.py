# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Procedural furniture: every function draws one random piece, standing on z = 0, its back towards +y. Metres."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from lepard_ros.geometry.arrays import Generator
from lepard_ros.synthesis.meshes import Mesh, blob, box, cylinder, grid_mesh, lathe, merge


def table(rng: Generator, height: float | None = None) -> Mesh:
    """A table or desk on four legs, two panels or one column."""
    width, depth = rng.uniform(0.6, 1.9), rng.uniform(0.45, 1.0)
    height = rng.uniform(0.4, 1.0) if height is None else height
    top = rng.uniform(0.02, 0.07)
    parts = [box(width, depth, top, (0, 0, height - top))]
    style = rng.integers(3)
    if style == 0:
        leg = rng.uniform(0.03, 0.09)
        x, y = width / 2 - leg, depth / 2 - leg
        parts += [box(leg, leg, height - top, (sx * x, sy * y, 0)) for sx in (-1, 1) for sy in (-1, 1)]
    elif style == 1:
        parts += [box(0.03, depth * 0.95, height - top, (sx * width * 0.47, 0, 0)) for sx in (-1, 1)]
        parts.append(box(width * 0.9, 0.02, height * rng.uniform(0.2, 0.8), (0, depth * 0.4, height * 0.1)))
    else:
        parts += [cylinder(rng.uniform(0.03, 0.08), height - top), cylinder(depth * 0.35, 0.04)]
    if rng.random() < 0.3:
        parts.append(box(width * 0.35, depth * 0.9, height * 0.75, (width * 0.28, 0, height * 0.05)))
    return merge(parts)


def chair(rng: Generator) -> Mesh:
    """A chair with a slab or slat back, at times with arms, or an office chair."""
    width, depth, seat = rng.uniform(0.38, 0.55), rng.uniform(0.38, 0.52), rng.uniform(0.38, 0.5)
    back = rng.uniform(0.3, 0.65)
    parts = [box(width, depth, rng.uniform(0.03, 0.1), (0, 0, seat - 0.03))]
    if rng.random() < 0.5:
        parts.append(box(width, rng.uniform(0.02, 0.08), back, (0, depth / 2, seat + rng.choice([0.0, 0.12]))))
    else:
        parts += [
            box(0.03, 0.03, back, (x, depth / 2, seat)) for x in np.linspace(-0.45, 0.45, rng.integers(3, 6)) * width
        ]
        parts.append(box(width, 0.03, 0.07, (0, depth / 2, seat + back)))
    if rng.random() < 0.4:
        arm = rng.uniform(0.18, 0.26)
        parts += [box(0.05, depth * 0.8, 0.03, (sx * width / 2, 0, seat + arm)) for sx in (-1, 1)]
        parts += [box(0.04, 0.04, arm, (sx * width / 2, -depth * 0.35, seat)) for sx in (-1, 1)]
    if rng.random() < 0.35:
        parts += [cylinder(0.04, seat)] + [
            box(width * 1.1, 0.05, 0.06).placed((0, 0, 0.03), a) for a in (0.0, 1.05, 2.1)
        ]
    else:
        parts += [box(0.04, 0.04, seat, (sx * width * 0.45, sy * depth * 0.45, 0)) for sx in (-1, 1) for sy in (-1, 1)]
    return merge(parts)


def _row_of_things(rng: Generator, width: float, depth: float, height: float, base: float) -> list[Mesh]:
    """Books, folders and boxes on a shelf board of `width` x `depth` at height `base`, below `height`."""
    things, x = [], -width / 2
    while x < width / 2 - 0.03:
        if rng.random() < 0.25:
            x += rng.uniform(0.03, 0.3)
            continue
        thick, tall = rng.choice([rng.uniform(0.02, 0.06), rng.uniform(0.1, 0.3)]), height * rng.uniform(0.4, 0.92)
        deep = depth * rng.uniform(0.4, 0.95)
        if x + thick > width / 2:
            break
        things.append(box(thick, deep, tall, (x + thick / 2, (depth - deep) / 2 * rng.uniform(-1, 1), base)))
        x += thick
    return things


def shelf(rng: Generator) -> Mesh:
    """A bookcase with random boards, filled at random."""
    width, depth, height = rng.uniform(0.5, 1.8), rng.uniform(0.22, 0.5), rng.uniform(0.7, 2.3)
    parts = [box(0.025, depth, height, (sx * width / 2, 0, 0)) for sx in (-1, 1)]
    if rng.random() < 0.7:
        parts.append(box(width, 0.015, height, (0, depth / 2, 0)))
    levels = np.cumsum(rng.uniform(0.2, 0.5, 12))
    boards = np.concatenate([[0.05], levels[levels < height - 0.15], [height]])
    fill = rng.uniform(0.2, 1.0)
    for low, high in pairwise(boards):
        parts.append(box(width, depth, 0.025, (0, 0, low)))
        if rng.random() < fill:
            parts += _row_of_things(rng, width * 0.95, depth, high - low - 0.05, low + 0.025)
    parts.append(box(width, depth, 0.025, (0, 0, height - 0.025)))
    return merge(parts)


def cabinet(rng: Generator) -> Mesh:
    """A cupboard, chest, refrigerator or kitchen unit with fronts and handles, at times an open door."""
    width, depth, height = rng.uniform(0.4, 2.0), rng.uniform(0.35, 0.7), rng.uniform(0.4, 2.1)
    parts = [box(width, depth, height - 0.06, (0, 0, 0.06)), box(width * 0.95, depth * 0.9, 0.06)]
    columns, rows = rng.integers(1, 5), rng.integers(1, 5)
    w, h = width / columns, (height - 0.1) / rows
    for i in range(columns):
        for j in range(rows):
            x, z = (i + 0.5) * w - width / 2, 0.08 + j * h
            parts.append(box(w * 0.92, 0.02, h * 0.92, (x, -depth / 2 - 0.01, z)))
            parts.append(box(min(0.12, w * 0.4), 0.03, 0.02, (x, -depth / 2 - 0.03, z + h * 0.7)))
    if rng.random() < 0.4:
        parts.append(box(width + 0.06, depth + 0.05, 0.04, (0, 0, height)))
    if rng.random() < 0.25:
        door = box(w, 0.02, height * 0.9, (w / 2, 0, 0.05)).placed((width / 2, -depth / 2, 0), -rng.uniform(0.5, 2.0))
        parts.append(door)
    return merge(parts)


def sofa(rng: Generator) -> Mesh:
    """A sofa or armchair with cushions."""
    seats, seat_width, depth = rng.integers(1, 4), rng.uniform(0.5, 0.8), rng.uniform(0.7, 1.0)
    width, seat, back, arm = seats * seat_width, rng.uniform(0.3, 0.45), rng.uniform(0.25, 0.5), rng.uniform(0.08, 0.25)
    parts = [box(width, depth, seat - 0.08, (0, 0, 0.08)), box(width, 0.2, seat + back, (0, depth / 2 - 0.1, 0))]
    parts += [box(arm, depth, seat + back * rng.uniform(0.3, 0.7), (sx * (width + arm) / 2, 0, 0)) for sx in (-1, 1)]
    for i in range(seats):
        x = (i + 0.5) * seat_width - width / 2
        parts.append(blob(rng, np.array([seat_width * 1.05, depth * 0.75, 0.2]), 0.06).placed((x, -0.1, seat - 0.05)))
        if rng.random() < 0.6:
            cushion = blob(rng, np.array([0.45, 0.16, 0.4]), 0.12)
            parts.append(cushion.placed((x, depth / 2 - 0.3, seat + 0.08), rng.normal(0, 0.3)))
    return merge(parts)


def cloth(rng: Generator, width: float, depth: float, height: float) -> Mesh:
    """A wrinkled sheet over a block of the given size, its edge hanging down."""
    x, y = np.meshgrid(np.linspace(-0.62, 0.62, 36), np.linspace(-0.62, 0.62, 36))
    inside = np.clip(1 - 8 * (np.maximum(np.abs(x), np.abs(y)) - 0.5), rng.uniform(0.1, 0.6), 1)
    ripples = sum(np.sin(x * a + y * b + c) for a, b, c in rng.uniform(-18, 18, (5, 3))) * rng.uniform(0.004, 0.02)
    span_x, span_y = np.clip(x, -0.52, 0.52) * width, np.clip(y, -0.52, 0.52) * depth
    return grid_mesh(np.stack([span_x + ripples, span_y + ripples, height * inside + ripples], -1))


def bed(rng: Generator) -> Mesh:
    """A bed with a head board, a duvet and pillows."""
    width, length, height = rng.uniform(0.8, 1.9), rng.uniform(1.8, 2.1), rng.uniform(0.3, 0.6)
    parts = [
        box(width, length, height - 0.1, (0, 0, 0.1)),
        box(width, 0.06, height + rng.uniform(0.1, 0.7), (0, length / 2, 0)),
    ]
    parts.append(cloth(rng, width, length * rng.uniform(0.6, 0.9), height + 0.05).placed((0, -0.15 * length, 0)))
    for x in np.linspace(-0.25, 0.25, 1 + int(width > 1.2)) * width:
        parts.append(
            blob(rng, np.array([0.6, 0.4, 0.18]), 0.15).placed((x, length / 2 - 0.3, height), rng.normal(0, 0.2))
        )
    return merge(parts)


def lamp(rng: Generator) -> Mesh:
    """A standing or table lamp."""
    height, foot, shade = rng.uniform(0.35, 1.8), rng.uniform(0.08, 0.18), rng.uniform(0.1, 0.28)
    profile = [[0, 0], [foot, 0], [foot, 0.03], [0.015, 0.05], [0.015, height - 0.2], [shade, height - 0.25]]
    return lathe(np.array([*profile, [shade * rng.uniform(0.4, 1), height], [0, height]]))


def vessel(rng: Generator) -> Mesh:
    """A bottle, vase, bowl, bin or stool: a random revolved profile."""
    height, radius = rng.uniform(0.08, 0.6), rng.uniform(0.04, 0.22)
    steps = rng.integers(3, 8)
    radii = radius * np.clip(1 + np.cumsum(rng.normal(0, 0.3, steps)), 0.25, 1.6)
    heights = np.linspace(0, height, steps)
    return lathe(np.column_stack([np.r_[0, radii, 0], np.r_[0, heights, height * rng.choice([1.0, 0.2])]]))


def plant(rng: Generator) -> Mesh:
    """A pot with many curved leaves."""
    pot, leaves, reach = rng.uniform(0.1, 0.25), rng.integers(15, 50), rng.uniform(0.2, 0.7)
    parts = [lathe(np.array([[0, 0], [pot * 0.7, 0], [pot, pot * 1.6], [0, pot * 1.5]]))]
    t = np.linspace(0, 1, 5)
    for _ in range(leaves):
        length, rise, yaw, width = (
            reach * rng.uniform(0.5, 1),
            rng.uniform(0.2, 1.5),
            rng.uniform(0, 6.3),
            rng.uniform(0.01, 0.06),
        )
        spine = np.stack([length * t, 0 * t, rise * reach * t - 0.7 * length * t**2], -1)
        side = np.stack([0 * t, width * np.sin(np.pi * t), 0 * t], -1)
        parts.append(grid_mesh(np.stack([spine - side, spine + side])).placed((0, 0, pot * 1.5), yaw))
    return merge(parts)


def stairs(rng: Generator) -> Mesh:
    """A flight of steps, a stepped stand or a ladder rack."""
    steps, rise, tread, width = (
        rng.integers(2, 9),
        rng.uniform(0.12, 0.25),
        rng.uniform(0.18, 0.35),
        rng.uniform(0.5, 1.4),
    )
    boxes = [box(width, tread, rise * (i + 1), (0, (i - steps / 2) * tread, 0)) for i in range(steps)]
    return merge(boxes)


def curtain(rng: Generator) -> Mesh:
    """A wavy curtain in the xz plane."""
    width, height, waves = rng.uniform(0.5, 2.0), rng.uniform(1.2, 2.5), rng.uniform(8, 30)
    x, z = np.meshgrid(np.linspace(-width / 2, width / 2, 60), np.linspace(0, height, 6))
    fold = rng.uniform(0.02, 0.07) * np.sin(waves * x + 0.3 * np.sin(2 * z)) * (1.2 - 0.5 * z / height)
    return grid_mesh(np.stack([x, fold, z], -1))


def radiator(rng: Generator) -> Mesh:
    """A ribbed radiator, or a blind or grille."""
    width, height, ribs = rng.uniform(0.5, 1.6), rng.uniform(0.4, 0.8), rng.integers(6, 20)
    step = width / ribs
    parts = [box(step * 0.6, 0.08, height, ((i + 0.5) * step - width / 2, -0.05, 0.1)) for i in range(ribs)]
    return merge([*parts, box(width, 0.03, height * 0.9, (0, -0.02, 0.12))])


def screen(rng: Generator) -> Mesh:
    """A monitor or television on a foot."""
    width = rng.uniform(0.35, 1.3)
    height, lift = width * rng.uniform(0.5, 0.75), rng.uniform(0.04, 0.2)
    return merge(
        [box(width, 0.04, height, (0, 0, lift)), box(0.06, 0.05, lift + 0.1, (0, 0.04, 0)), box(width * 0.4, 0.2, 0.02)]
    )


def carton(rng: Generator) -> Mesh:
    """A cardboard box, at times open, or a stack of them."""
    w, d, h = rng.uniform(0.08, 0.6, 3)
    if rng.random() < 0.4:
        flap = rng.uniform(0.3, 0.5) * d
        sides = [box(w, 0.01, h, (0, sy * d / 2, 0)) for sy in (-1, 1)] + [
            box(0.01, d, h, (sx * w / 2, 0, 0)) for sx in (-1, 1)
        ]
        flaps = [box(w, flap, 0.01, (0, sy * (d + flap) / 2, h - 0.03 * rng.random())) for sy in (-1, 1)]
        return merge([*sides, *flaps, box(w, d, 0.01)])
    stack, base = [], 0.0
    for _ in range(rng.integers(1, 4)):
        stack.append(box(w, d, h).placed((0, 0, base), rng.normal(0, 0.2)))
        base, w, d, h = base + h, w * rng.uniform(0.7, 1), d * rng.uniform(0.7, 1), h * rng.uniform(0.5, 1)
    return merge(stack)


def lump(rng: Generator) -> Mesh:
    """A bag, cushion, heap of clothes or toy."""
    return blob(rng, rng.uniform(0.12, 0.6, 3) * np.array([1, 1, 0.8]), rng.uniform(0.1, 0.45))


def wedge_pile(rng: Generator) -> Mesh:
    """A heap of thin leaning boards, papers or tiles."""
    pieces = []
    for i in range(rng.integers(2, 8)):
        w, d = rng.uniform(0.1, 0.35, 2)
        pieces.append(
            box(w, d, rng.uniform(0.01, 0.05)).placed((*rng.normal(0, 0.04, 2), 0.03 * i), rng.uniform(0, 6.3))
        )
    return merge(pieces)


def picture(rng: Generator) -> Mesh:
    """A framed picture, board, clock or switch box: a slab with a rim, centred on its back."""
    width, height, rim = rng.uniform(0.15, 1.5), rng.uniform(0.15, 1.0), rng.uniform(0.01, 0.06)
    parts = [box(width, 0.02, height, (0, -0.01, 0))]
    parts += [box(width, 0.03 + rim, rim, (0, -0.02, z)) for z in (0, height - rim)]
    parts += [box(rim, 0.03 + rim, height, (sx * (width - rim) / 2, -0.02, 0)) for sx in (-1, 1)]
    return merge(parts)


def wall_shelf(rng: Generator) -> Mesh:
    """A board on a wall with things on it, or a hanging cupboard."""
    width, depth = rng.uniform(0.4, 1.6), rng.uniform(0.15, 0.35)
    if rng.random() < 0.4:
        return box(width, depth, rng.uniform(0.3, 0.8), (0, -depth / 2, 0))
    board = box(width, depth, 0.025, (0, -depth / 2, 0))
    things = _row_of_things(rng, width, depth, rng.uniform(0.15, 0.4), 0.025)
    return merge([board, *(thing.placed((0, -depth / 2, 0)) for thing in things)])


Maker = Callable[[Generator], Mesh]
AGAINST_WALL: list[Maker] = [shelf, shelf, cabinet, cabinet, table, sofa, bed, stairs, plant, lamp, carton, chair]
IN_THE_MIDDLE: list[Maker] = [table, chair, chair, sofa, carton, lump, vessel, plant, cabinet, lamp, bed]
ON_SURFACES: list[Maker] = [carton, vessel, lump, wedge_pile, screen, lamp, plant]
ON_WALLS: list[Maker] = [picture, picture, wall_shelf, wall_shelf, curtain, radiator]
