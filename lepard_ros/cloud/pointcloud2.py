# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The sensor_msgs/PointCloud2 layout, read and written with numpy only.

Nothing here imports ROS: a message is any object with the attributes of sensor_msgs/PointCloud2, from rclpy or a bag.
Every number of a message is checked against the received bytes before anything is allocated from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.ranges import thinned
from lepard_ros.errors import InputError

# sensor_msgs/PointField datatype -> numpy type without byte order.
_DATATYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 8: "f8"}
FLOAT32 = 7
_AXES = ("x", "y", "z")


@dataclass(frozen=True)
class Field:
    """One field of a point, as sensor_msgs/PointField."""

    name: str
    offset: int
    datatype: int
    count: int


class EncodedPoints(NamedTuple):
    """The members of a sensor_msgs/PointCloud2 except its header; `data` is row-major bytes."""

    height: int
    width: int
    fields: list[Field]
    is_bigendian: bool
    point_step: int
    row_step: int
    data: bytes
    is_dense: bool


class _Layout(NamedTuple):
    """The layout of the coordinates, after all checks."""

    height: int
    width: int
    point_step: int
    row_step: int
    offsets: list[int]
    types: list[np.dtype[Any]]
    data: memoryview


def decode_points(message: Any, max_points: int | None = None) -> NDArray[np.float32]:
    """The coordinates of a PointCloud2.

    message: anything with height, width, fields, is_bigendian, point_step, row_step and data; `is_dense` is not used.
    max_points: a larger organised cloud is downsampled by `thinned` before anything is copied.
    Returns float32 metres: (H, W, 3) for an organised cloud, with NaN in all three where a point is not finite;
    (N, 3) otherwise, without the points that are not finite. Raises InputError for a message that contradicts itself.
    """
    layout = _check_layout(message)
    points = _gather(layout, max_points if min(layout.height, layout.width) > 1 else None)
    finite = _finite_points(points)
    if layout.height <= 1 or layout.width <= 1:
        points, finite = points.reshape(-1, 3), finite.reshape(-1)
        return points if finite.all() else points[finite]
    if not finite.all():
        points[~finite] = np.nan
    return points


def encode_points(
    points: NDArray[np.floating],
    colours: NDArray[np.uint8] | None = None,
    scalars: Mapping[str, NDArray[np.floating]] | None = None,
) -> EncodedPoints:
    """The PointCloud2 layout of points, little-endian float32.

    points: (N, 3) or (H, W, 3) metres; NaN is kept. colours: same leading shape + (3,) as RGB in 0..255, or None.
    scalars: further fields by name, one value per point.
    """
    points = np.asarray(points)
    if points.ndim not in (2, 3) or points.shape[-1] != 3:
        raise InputError(f"Points to encode have shape {points.shape}; give (N, 3) or (H, W, 3).")
    height, width = (1, points.shape[0]) if points.ndim == 2 else points.shape[:2]
    further = {name: np.ravel(numbers) for name, numbers in (scalars or {}).items()}
    if colours is not None:
        further["rgb"] = _packed_colours(colours, height * width)
    fields = [Field(name, 4 * place, FLOAT32, 1) for place, name in enumerate((*_AXES, *further))]
    values = np.empty((height * width, len(fields)), dtype="<f4")
    values[:, :3] = points.reshape(-1, 3)
    for column, (name, numbers) in enumerate(further.items(), 3):
        if len(numbers) != height * width:
            raise InputError(
                f"{len(numbers)} values of {name!r} were given for {height * width} points; give one each."
            )
        values[:, column] = numbers
    step = 4 * values.shape[1]
    dense = bool(np.isfinite(values[:, :3]).all())
    return EncodedPoints(height, width, fields, False, step, step * width, values.tobytes(), dense)


def _packed_colours(colours: NDArray[np.uint8], count: int) -> NDArray[np.float32]:
    """RGB as RViz and PCL expect it: the bytes 0RGB of an integer, read as a float. (N,)"""
    rgb = np.asarray(colours, dtype=np.uint32).reshape(-1, 3)
    if len(rgb) != count:
        raise InputError(f"{len(rgb)} colours were given for {count} points; give one colour for each point.")
    return (rgb[:, 0] << 16 | rgb[:, 1] << 8 | rgb[:, 2]).astype("<u4").view("<f4")


def _check_layout(message: Any) -> _Layout:
    """Check every number of the message against the others and against the length of its data."""
    height, width, point_step = int(message.height), int(message.width), int(message.point_step)
    if min(height, width, point_step) < 0:
        raise InputError("The cloud has a negative height, width or point_step; check the driver that publishes it.")
    coordinates = _coordinate_fields(message.fields, point_step)
    order = ">" if message.is_bigendian else "<"
    types = [np.dtype(order + _DATATYPES[field.datatype]) for field in coordinates]
    data = _bytes_of(message.data)
    row_step = _checked_row_step(height, width, point_step, int(message.row_step), len(data))
    return _Layout(height, width, point_step, row_step, [int(field.offset) for field in coordinates], types, data)


def _coordinate_fields(fields: Sequence[Any], point_step: int) -> list[Any]:
    """The fields x, y and z, each of a known type and inside the point."""
    chosen = []
    for name in _AXES:
        named = [field for field in fields if field.name == name]
        if not named:
            found = ", ".join(str(field.name) for field in fields) or "none"
            raise InputError(f"The cloud has no field '{name}' (its fields: {found}); publish x, y and z.")
        if len(named) > 1:
            raise InputError(f"The cloud has {len(named)} fields named '{name}'; publish each of x, y and z once.")
        _check_field(named[0], point_step)
        chosen.append(named[0])
    return chosen


def _check_field(field: Any, point_step: int) -> None:
    """Raise InputError unless the field is one number of a known type inside the point."""
    if int(field.datatype) not in _DATATYPES:
        raise InputError(f"Field '{field.name}' has the unknown datatype {field.datatype}; use FLOAT32 (7).")
    # Some drivers leave count at 0 for a single number; more than one would make the coordinate ambiguous.
    if int(field.count) not in (0, 1):
        raise InputError(f"Field '{field.name}' holds {field.count} numbers; a coordinate must be one.")
    end = int(field.offset) + np.dtype(_DATATYPES[int(field.datatype)]).itemsize
    if int(field.offset) < 0 or end > point_step:
        raise InputError(
            f"Field '{field.name}' ends at byte {end} of a point of {point_step} bytes; correct offset or point_step."
        )


def _bytes_of(data: Any) -> memoryview:
    """The data as flat bytes, without a copy."""
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise InputError(f"The cloud's data is not a contiguous byte buffer ({error}); publish uint8[].") from error


def _checked_row_step(height: int, width: int, point_step: int, row_step: int, available: int) -> int:
    """The bytes from one row to the next, after checking that all rows lie inside the data.

    Data beyond the last point is padding and ignored. The row_step of a single row says nothing and drivers often leave
    it at 0, so it is ignored.
    """
    row = width * point_step
    if height == 0 or width == 0:
        return 0
    if height == 1:
        row_step = row
    if row_step < row:
        raise InputError(f"row_step is {row_step} but a row of {width} points needs {row} bytes; correct row_step.")
    needed = (height - 1) * row_step + row
    if available < needed:
        raise InputError(
            f"A cloud of {width} x {height} points needs {needed} bytes but {available} came; check width."
        )
    return row_step


def _gather(layout: _Layout, max_points: int | None) -> NDArray[np.float32]:
    """The raw coordinates (H, W, 3), optionally downsampled, possibly not finite. The message is not modified."""
    if layout.height == 0 or layout.width == 0:
        return np.empty((1, 0, 3), np.float32)
    steps = (layout.row_step, layout.point_step)
    if _is_plain_triple(layout):
        shape = (layout.height, layout.width, 3)
        triple = np.ndarray(shape, layout.types[0], layout.data, layout.offsets[0], (*steps, 4))
        return (triple if max_points is None else thinned(triple, max_points)).astype(np.float32, order="C")
    points = np.empty((layout.height, layout.width, 3), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 becomes infinite, thus not finite
        for axis, (offset, kind) in enumerate(zip(layout.offsets, layout.types, strict=True)):
            points[..., axis] = np.ndarray(points.shape[:2], kind, layout.data, offset, steps)
    return points if max_points is None else np.ascontiguousarray(thinned(points, max_points))


def _finite_points(points: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which points have three finite coordinates, (H, W). `all` over so short an axis would take five times as long."""
    x, y, z = np.moveaxis(np.isfinite(points), -1, 0)
    return x & y & z


def _is_plain_triple(layout: _Layout) -> bool:
    """Whether x, y, z follow each other as float32: the usual case, read in one copy."""
    start = layout.offsets[0]
    return layout.offsets == [start, start + 4, start + 8] and {kind.str[1:] for kind in layout.types} == {"f4"}
