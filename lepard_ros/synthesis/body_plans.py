# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Random body plans: people and apes, four-legged animals, centaurs, crawlers, snakes, hands."""

from collections.abc import Callable, Sequence

import numpy as np

from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.synthesis.creatures import BodyPlan, Limits, Vector

SPINE = ((-30, 45), (-30, 30), (-25, 25))
NECK = ((-35, 40), (-50, 50), (-25, 25))
SHOULDER = ((-60, 60), (-100, 35), (-80, 75))
ELBOW = ((-40, 40), (-135, 0), (0, 0))
WRIST = ((-30, 30), (-30, 30), (-50, 50))
HIP = ((-115, 35), (-30, 30), (-10, 55))
KNEE = ((0, 140), (0, 0), (0, 0))
ANKLE = ((-25, 35), (-15, 15), (-10, 10))
TAIL = ((-35, 35), (-35, 35), (-10, 10))


def _vector(x: float, y: float, z: float) -> FloatArray:
    """A vector (left, up, forward) in metres."""
    return np.array([x, y, z], float)


def _twins(rng: Generator) -> tuple[Generator, Generator]:
    """Two generators with the same draws, so that left and right limbs are symmetric."""
    seed = int(rng.integers(2**32))
    return np.random.default_rng(seed), np.random.default_rng(seed)


def _limb(
    plan: BodyPlan,
    parent: int,
    places: Sequence[FloatArray],
    radii: Sequence[float],
    limits: Sequence[Limits],
    natural: Sequence[Vector],
    mirrored: bool,
) -> int:
    """Add a chain of bones through the given positions, each with a round cone of flesh; returns the last bone."""
    for index, (turn, at_ease) in enumerate(zip(limits, natural, strict=True)):
        parent = plan.add_bone(parent, places[index], turn, at_ease, mirrored)
        plan.add_part(parent, places[index], places[index + 1], radii[index], radii[index + 1])
    return parent


def _tail(plan: BodyPlan, parent: int, base: FloatArray, direction: FloatArray, rng: Generator, thick: float) -> None:
    count, length = int(rng.integers(3, 7)), rng.uniform(0.25, 0.9)
    step = direction / np.linalg.norm(direction) * length / count
    places = [base + step * index for index in range(count + 1)]
    radii = list(np.linspace(thick, thick * rng.uniform(0.25, 1.0), count + 1))
    _limb(plan, parent, places, radii, [TAIL] * count, [(0, 0, 0)] * count, False)


def _head(plan: BodyPlan, bone: int, centre: FloatArray, size: float, rng: Generator, snout: float) -> None:
    """Add a skull with a jaw or snout of length `snout`, and sometimes a nose, ears, horns and hair."""
    up, forward = np.array([0, size, 0]), np.array([0, 0, size])
    side = np.array([size, 0, 0])
    plan.add_part(bone, centre - 0.25 * forward, centre + 0.15 * forward + 0.2 * up, size * 0.95, size * 0.9)
    tip = centre + (0.55 + snout) * forward - (0.45 + 0.2 * snout) * up
    plan.add_part(bone, centre + 0.1 * forward - 0.35 * up, tip, size * 0.7, size * rng.uniform(0.3, 0.5))
    if snout < 0.4:
        plan.add_part(bone, centre + 0.9 * forward, centre + 1.15 * forward - 0.25 * up, size * 0.14, size * 0.22)
    ear = rng.uniform(0.0, 0.25) if snout < 0.4 and rng.random() < 0.85 else rng.uniform(0.2, 1.0)
    flare = 0.3 * rng.uniform(0.4, 1.2)
    for sign in (-1, 1):
        root = centre + sign * 0.75 * side + 0.3 * up * ear
        end = root + sign * flare * side + ear * up
        plan.add_part(bone, root, end, size * 0.22, size * 0.14)
    if rng.random() < 0.3:
        plan.add_part(bone, centre - 0.3 * forward, centre - 0.7 * forward - rng.uniform(0, 1.5) * up, size, size * 0.6)
    if snout > 0.4 and rng.random() < 0.25:
        for sign in (-1, 1):
            root = centre + sign * 0.5 * side + 0.8 * up
            plan.add_part(bone, root, root + sign * side * 1.2 + 1.5 * up, size * 0.2, size * 0.12)


def _arm(
    plan: BodyPlan, chest: int, shoulder: FloatArray, length: float, thick: float, rng: Generator, sign: int
) -> None:
    """Add an arm that points sideways in the rest pose, with a mitten or fingers."""
    out = np.array([sign, 0.0, 0.0])
    elbow, wrist = shoulder + 0.30 * length * out, shoulder + 0.57 * length * out
    palm = wrist + 0.09 * length * out
    _limb(plan, chest, [shoulder, elbow], [0.058 * thick, 0.042 * thick], [SHOULDER], [(0, -15, -70)], sign < 0)
    last = _limb(
        plan, len(plan.bones) - 1, [elbow, wrist], [0.044 * thick, 0.030 * thick], [ELBOW], [(0, -20, 0)], sign < 0
    )
    hand = plan.add_bone(last, wrist, WRIST, (0, 0, 0), sign < 0)
    plan.add_part(hand, wrist, palm, 0.032 * thick, 0.040 * thick)
    spread, reach, fat = rng.uniform(0.02, 0.04), rng.uniform(0.07, 0.11) * length, rng.uniform(0.009, 0.014) * thick
    plan.add_part(hand, wrist + 0.02 * out, palm + np.array([0, 0, 0.06 * thick]), 0.018 * thick, 0.013 * thick)
    for finger in np.linspace(-1, 1, 4) if rng.random() < 0.7 else (-0.3, 0.3):
        tip = palm + reach * out * (1 - 0.12 * abs(finger)) + np.array([0, 0, spread * finger])
        plan.add_part(hand, palm + np.array([0, 0, 0.02 * finger]), tip, 1.2 * fat, fat)


def _torso(
    plan: BodyPlan, root: int, hips: FloatArray, scale: float, bulk: float, rng: Generator
) -> tuple[int, FloatArray]:
    """Belly, chest and shoulders on top of `hips`; returns the chest bone and the base of the neck."""
    waist, belly, broad = rng.uniform(0.07, 0.09), rng.uniform(0.0, 0.06) * bulk, rng.uniform(0.13, 0.19)
    bust = 0.03 + rng.uniform(0.0, 0.06)
    lower = plan.add_bone(root, hips + _vector(0, 0.08 * scale, 0), SPINE)
    upper = plan.add_bone(lower, hips + _vector(0, 0.24 * scale, 0), SPINE)
    cones = [  # one side: bone, start, end, radius at the start and at the end
        (root, (0.07, 0, 0), (0.05, 0.1, 0), 0.085, waist),
        (root, (0.07, 0, -0.05), (0.07, -0.03, 0), 0.07, 0.07),
        (lower, (0.05, 0.1, 0), (0.06, 0.26, 0), waist, 0.09),
        (upper, (0.06, 0.26, 0), (0.5 * broad, 0.44, 0), 0.09, 0.08),
        (upper, (0.3 * broad, 0.46, 0), (broad, 0.47, 0), 0.06, 0.055),
        (upper, (0.06, 0.35, 0), (0.08, 0.36, bust), 0.06, 0.045),
    ]
    for sign in (-1, 1):
        mirror = scale * _vector(sign, 1, 1)
        for bone, start, end, first, last in cones:
            plan.add_part(bone, hips + mirror * start, hips + mirror * end, first * bulk, last * bulk)
    front = hips + scale * _vector(0, 0.16, 0.03 + belly)
    plan.add_part(lower, hips + _vector(0, 0.1 * scale, 0), front, waist * bulk, waist * bulk)
    return upper, hips + _vector(0, 0.5 * scale, 0)


def _upper_body(plan: BodyPlan, root: int, hips: FloatArray, rng: Generator) -> None:
    """A person's torso, arms and head above `hips`."""
    bulk, arms, thick = rng.uniform(0.8, 1.4), rng.uniform(0.85, 1.35), rng.uniform(0.75, 1.5)
    chest, neck_base = _torso(plan, root, hips, rng.uniform(0.9, 1.1), bulk, rng)
    broad = rng.uniform(0.17, 0.23) * np.sqrt(bulk)
    for sign, same in zip((-1, 1), _twins(rng), strict=True):
        shoulder = neck_base + np.array([sign * broad, -0.04, 0])
        _arm(plan, chest, shoulder, arms, thick * bulk**0.3, same, sign)
    neck, size = rng.uniform(0.05, 0.14), rng.uniform(0.085, 0.12)
    base = plan.add_bone(chest, neck_base, NECK)
    plan.add_part(base, neck_base, neck_base + np.array([0, neck, 0.01]), 0.055 * bulk, 0.05 * bulk**0.5)
    head = plan.add_bone(base, neck_base + np.array([0, neck, 0.01]), NECK)
    snout = rng.choice([0.0, 0.1, 0.3, 0.8], p=[0.5, 0.2, 0.2, 0.1])
    _head(plan, head, neck_base + np.array([0, neck + 0.8 * size, 0.02]), size, rng, snout)


def _human_leg(plan: BodyPlan, root: int, hip: FloatArray, thick: float, toes: float, sign: int) -> None:
    """Thigh, shin with its calf, and foot, from `hip` down to the ground."""
    knee = hip + _vector(sign * 0.03, -0.46 * hip[1], 0.01)
    ankle = hip + _vector(sign * 0.05, -0.92 * hip[1], -0.02)
    radii = [0.085 * thick, 0.055 * thick, 0.036 * thick]
    shin = _limb(plan, root, [hip, knee, ankle], radii, [HIP, KNEE], [(-5, 0, 3), (8, 0, 0)], sign < 0)
    top, bottom = knee + _vector(0, -0.12, -0.02), knee + _vector(0, -0.25, -0.025)
    plan.add_part(shin, top, bottom, 0.05 * thick, 0.035 * thick)
    foot = plan.add_bone(shin, ankle, ANKLE, (0, 0, 0), sign < 0)
    heel = ankle + _vector(0, -0.04 * thick, -0.03)
    tip = heel + _vector(sign * 0.02, -0.005, 0.03 + 0.17 * toes)
    plan.add_part(foot, heel, tip, 0.036 * thick, 0.028 * thick)


def biped(rng: Generator) -> BodyPlan:
    """A person, an ape, a child, an upright beast."""
    plan = BodyPlan(blend=rng.uniform(0.02, 0.05))
    legs, thick, wide = rng.uniform(0.6, 1.1), rng.uniform(0.75, 1.5), rng.uniform(0.08, 0.11)
    height = 0.9 * legs
    root = plan.add_bone(-1, (0, height, 0), ((-25, 25), (-40, 40), (-15, 15)))
    toes = rng.uniform(0.8, 1.3)
    for sign in (-1, 1):
        _human_leg(plan, root, np.array([sign * wide, height - 0.02, 0]), thick, toes, sign)
    _upper_body(plan, root, np.array([0, height, 0]), rng)
    if rng.random() < 0.15:
        _tail(plan, root, np.array([0, height, -0.08]), np.array([0, -0.4, -1.0]), rng, rng.uniform(0.02, 0.06))
    return plan


def _trunk(plan: BodyPlan, rng: Generator, height: float, length: float, girth: float) -> tuple[int, int]:
    """The body of a four-legged animal along z; returns the bones of the hips and of the shoulders."""
    fat, sag = girth * rng.uniform(0.9, 1.3), rng.uniform(0, 0.06)
    back, middle, front = (
        np.array([0, height, -length / 2]),
        np.array([0, height - sag, 0]),
        np.array([0, height + rng.uniform(-0.05, 0.08), length / 2]),
    )
    root = plan.add_bone(-1, middle, ((-15, 15), (-40, 40), (-15, 15)))
    hips = plan.add_bone(root, middle * 0.6 + back * 0.4, SPINE)
    shoulders = plan.add_bone(root, middle * 0.6 + front * 0.4, SPINE)
    plan.add_part(root, middle * 0.6 + back * 0.4, middle * 0.6 + front * 0.4, fat, fat)
    plan.add_part(hips, middle * 0.6 + back * 0.4, back, fat, girth * rng.uniform(0.8, 1.05))
    plan.add_part(shoulders, middle * 0.6 + front * 0.4, front, fat, girth * rng.uniform(0.85, 1.15))
    return hips, shoulders


def _leg(plan: BodyPlan, bone: int, top: FloatArray, thick: float, rng: Generator, sign: int, hind: bool) -> None:
    """A four-legged animal's leg from `top` down to the ground, three segments and a paw or hoof."""
    bend, reach = (0.10 if hind else -0.04) * rng.uniform(0.5, 1.5), top[1]
    knee = top + _vector(sign * 0.01, -0.42 * reach, bend)
    hock = top + _vector(sign * 0.02, -0.68 * reach, -0.9 * bend)
    toe = top + _vector(sign * 0.02, -0.95 * reach, -0.5 * bend)
    limits = [((-75, 60), (-15, 15), (-8, 30)), ((-30, 80), (0, 0), (0, 0)), ((-75, 30), (0, 0), (0, 0))]
    if hind:
        limits[1:] = [((-45, 70), (0, 0), (0, 0)), ((-60, 45), (0, 0), (0, 0))]
    radii = [0.1 * thick, 0.055 * thick, 0.036 * thick, 0.032 * thick]
    last = _limb(plan, bone, [top, knee, hock, toe], radii, limits, [(0, 0, 0)] * 3, sign < 0)
    paw = plan.add_bone(last, toe, ANKLE, (0, 0, 0), sign < 0)
    plan.add_part(paw, toe, toe + _vector(0, -0.03 * reach, 0.05 * thick), 0.034 * thick, 0.034 * thick)


def _four_legs(plan: BodyPlan, rng: Generator) -> tuple[int, FloatArray, float]:
    """Trunk, legs and tail; returns the shoulders' bone, the base of the neck and the girth."""
    height, length, girth = rng.uniform(0.4, 0.85), rng.uniform(0.55, 0.95), rng.uniform(0.09, 0.19)
    thick = rng.uniform(0.7, 1.5)
    hips, shoulders = _trunk(plan, rng, height, length, girth)
    for sign, same in zip((-1, 1), _twins(rng), strict=True):
        for bone, z, hind in ((hips, -0.46 * length, True), (shoulders, 0.44 * length, False)):
            top = np.array([sign * girth * 0.6, height - 0.2 * girth, z])
            _leg(plan, bone, top, thick, same, sign, hind)
    if rng.random() < 0.9:
        base = np.array([0, height + 0.4 * girth, -length / 2 - 0.8 * girth])
        _tail(plan, hips, base, np.array([0, rng.uniform(-0.8, 0.8), -1.0]), rng, rng.uniform(0.015, 0.07))
    return shoulders, np.array([0, height + 0.3 * girth, 0.5 * length]), girth


def quadruped(rng: Generator) -> BodyPlan:
    """A dog, a cat, a horse, a sauropod, or a mixture."""
    plan = BodyPlan(blend=rng.uniform(0.02, 0.06))
    shoulders, base, girth = _four_legs(plan, rng)
    length, rise = rng.choice([rng.uniform(0.12, 0.35), rng.uniform(0.35, 0.6)]), np.radians(rng.uniform(10, 80))
    step = np.array([0, np.sin(rise), np.cos(rise)]) * length / 2
    thick = girth * rng.uniform(0.5, 0.75)
    places = [base, base + step, base + 2 * step]
    neck = _limb(plan, shoulders, places, [thick * 1.15, thick, thick * 0.85], [NECK, NECK], [(0, 0, 0)] * 2, False)
    size = rng.uniform(0.06, 0.11)
    head = plan.add_bone(neck, places[-1], NECK)
    _head(plan, head, places[-1] + _vector(0, 0.4 * size, 0.4 * size), size, rng, rng.uniform(0.2, 2.0))
    return plan


def centaur(rng: Generator) -> BodyPlan:
    """A four-legged body with a person's torso."""
    plan = BodyPlan(blend=rng.uniform(0.02, 0.05))
    shoulders, base, _ = _four_legs(plan, rng)
    _upper_body(plan, shoulders, base + _vector(0, 0.05, 0.02), rng)
    return plan


def crawler(rng: Generator) -> BodyPlan:
    """A body with four to eight limbs all around it: spider, starfish, octopus."""
    plan = BodyPlan(blend=rng.uniform(0.02, 0.05))
    root = plan.add_bone(-1, (0, 0.4, 0), ((-20, 20), (-40, 40), (-20, 20)))
    size = rng.uniform(0.08, 0.17)
    plan.add_part(root, (0, 0.4, -0.5 * size), (0, 0.42, 0.7 * size), size, size * rng.uniform(0.6, 1.0))
    plan.add_part(
        root, (0, 0.42, -size), (0, 0.45, -2.2 * size), size * rng.uniform(0.3, 1.2), size * rng.uniform(0.2, 1.3)
    )
    count, segments, length = int(rng.integers(4, 9)), int(rng.integers(2, 5)), rng.uniform(0.4, 0.75)
    turn = ((-40, 40), (-40, 40), (-40, 40))
    for angle in 2 * np.pi * (np.arange(count) + 0.5 + rng.uniform(-0.15, 0.15, count)) / count:
        out = np.array([np.sin(angle), 0.0, np.cos(angle)])
        lift = rng.uniform(-0.5, 0.4) * np.array([0, 1.0, 0])
        places = [
            np.array([0, 0.4, 0]) + 0.7 * size * out + step * length * (out + lift)
            for step in np.linspace(0, 1, segments + 1)
        ]
        thick = rng.uniform(0.03, 0.06)
        radii = list(np.linspace(thick, thick * rng.uniform(0.3, 0.9), segments + 1))
        _limb(plan, root, places, radii, [turn] * segments, [(0, 0, 0)] * segments, False)
    return plan


def snake(rng: Generator) -> BodyPlan:
    """A long body without limbs."""
    plan = BodyPlan(blend=0.03)
    count, length, thick = int(rng.integers(7, 14)), rng.uniform(1.2, 1.8), rng.uniform(0.04, 0.09)
    places = [np.array([0, 0, length * (index / count - 0.5)]) for index in range(count + 1)]
    swell = 1 + rng.uniform(-0.25, 0.35, count + 1)
    radii = list(thick * swell * np.linspace(rng.uniform(0.3, 0.9), 1, count + 1))
    root = plan.add_bone(-1, places[0])
    turn = ((-30, 30), (-45, 45), (-15, 15))
    last = _limb(plan, root, places, radii, [turn] * count, [(0, 0, 0)] * count, False)
    _head(plan, last, places[-1] + _vector(0, 0, thick), thick * rng.uniform(0.9, 1.5), rng, rng.uniform(0.2, 1.5))
    return plan


def hand(rng: Generator) -> BodyPlan:
    """A hand with a piece of forearm, six times its natural size so that its details survive the grid."""
    plan = BodyPlan(blend=rng.uniform(0.02, 0.03))
    arm, size, fat = rng.uniform(0.2, 0.6), 1.0, rng.uniform(0.8, 1.3)
    root = plan.add_bone(-1, (0, -arm, 0))
    plan.add_part(root, (0, -arm, 0), (0, 0, 0), 0.18 * fat, 0.14 * fat)
    palm = plan.add_bone(root, (0, 0, 0), ((-50, 50), (-20, 20), (-25, 25)))
    for x in np.linspace(-0.16, 0.16, 4):
        plan.add_part(palm, (0.6 * x, 0.05, 0), (x, 0.42, 0), 0.1 * fat, 0.075 * fat)
    lengths = rng.uniform(0.9, 1.1, 5) * [0.36, 0.46, 0.5, 0.46, 0.38]
    for x, length in zip(np.linspace(-0.18, 0.18, 4), lengths[1:], strict=True):
        places = [np.array([x * (1.05 + 0.4 * s), 0.42 + size * length * s, 0]) for s in (0, 0.45, 0.75, 1.0)]
        limits = [((-10, 90), (0, 0), (-12, 12)), ((0, 100), (0, 0), (0, 0)), ((0, 70), (0, 0), (0, 0))]
        _limb(plan, palm, places, [0.07 * fat, 0.062 * fat, 0.056 * fat, 0.048 * fat], limits, [(5, 0, 0)] * 3, False)
    thumb = [np.array([0.14, 0.1, 0.03]) + length * np.array([0.75, 0.6, 0.2]) for length in (0, 0.17, 0.32, 0.45)]
    turns = [((-25, 40), (-40, 30), (-25, 40)), ((0, 50), (0, 0), (0, 40)), ((0, 60), (0, 0), (0, 40))]
    _limb(plan, palm, thumb, [0.1 * fat, 0.075 * fat, 0.065 * fat, 0.055 * fat], turns, [(5, 0, 5)] * 3, False)
    return plan


PLANS: dict[str, Callable[[Generator], BodyPlan]] = {
    "biped": biped,
    "quadruped": quadruped,
    "centaur": centaur,
    "crawler": crawler,
    "snake": snake,
    "hand": hand,
}
