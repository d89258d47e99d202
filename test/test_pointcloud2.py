# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""PointCloud2 and depth image decoding against a slow reader written with struct, and against broken messages."""

import struct
import sys
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from lepard_ros.cloud.depth import Camera
from lepard_ros.cloud.depth_image import camera_from_info, decode_depth
from lepard_ros.cloud.pointcloud2 import Field, decode_points, encode_points
from lepard_ros.cloud.ranges import thinned
from lepard_ros.errors import InputError

CODES = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 8: "d"}


@dataclass
class Cloud:
    """A message without ROS."""

    height: int
    width: int
    fields: list[Field]
    is_bigendian: bool
    point_step: int
    row_step: int
    data: Any
    is_dense: bool = True


@dataclass
class Case:
    """A valid message and what it must decode to, (H, W, 3) float64 before any dropping."""

    message: Cloud
    truth: np.ndarray


def numbers_of(datatype: int) -> st.SearchStrategy[float]:
    if datatype in (7, 8):
        return st.floats(width=32 if datatype == 7 else 64, allow_nan=True, allow_infinity=True)
    size = 8 * struct.calcsize(CODES[datatype])
    low, high = (-(2 ** (size - 1)), 2 ** (size - 1) - 1) if datatype % 2 else (0, 2**size - 1)
    return st.integers(low, high)


@st.composite
def clouds(draw: st.DrawFn) -> Case:
    """Any field order, gaps, types, padding in points and rows, byte order, extra fields, trailing bytes."""
    names = draw(st.permutations(["x", "y", "z", *draw(st.sets(st.sampled_from(["rgb", "ring", "time", "i"])))]))
    offset, fields = 0, []
    for name in names:
        datatype = draw(st.sampled_from(sorted(CODES)))
        offset += draw(st.integers(0, 5))
        fields.append(Field(name, offset, datatype, draw(st.sampled_from([0, 1]))))
        offset += struct.calcsize(CODES[datatype])
    point_step = offset + draw(st.integers(0, 7))
    height, width = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    row_step = width * point_step + draw(st.integers(0, 9))
    data = bytearray(draw(st.binary(min_size=height * row_step, max_size=height * row_step)))
    order = draw(st.sampled_from("<>"))
    truth = np.zeros((height, width, 3))
    for row in range(height):
        for column in range(width):
            for axis, name in enumerate("xyz"):
                one = next(f for f in fields if f.name == name)
                value = draw(numbers_of(one.datatype))
                at = row * row_step + column * point_step + one.offset
                struct.pack_into(order + CODES[one.datatype], data, at, value)
                truth[row, column, axis] = value
    data += draw(st.binary(max_size=4))
    buffer = np.frombuffer(data, np.uint8) if draw(st.booleans()) else bytes(data)
    message = Cloud(height, width, fields, order == ">", point_step, row_step, buffer, draw(st.booleans()))
    return Case(message, truth)


def expected_of(truth: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        points = truth.astype(np.float32)
    finite = np.isfinite(points).all(axis=-1)
    if points.shape[0] > 1 and points.shape[1] > 1:
        points[~finite] = np.nan
        return points
    return points.reshape(-1, 3)[finite.reshape(-1)]


@settings(max_examples=150, deadline=None)
@given(clouds())
def test_any_valid_layout_is_decoded_as_struct_reads_it(case: Case) -> None:
    before = bytes(case.message.data)
    points = decode_points(case.message)
    assert points.dtype == np.float32 and points.flags.c_contiguous
    np.testing.assert_array_equal(points, expected_of(case.truth))
    assert bytes(case.message.data) == before, "the message was changed"


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        Cloud,
        height=st.integers(-1, 2**32),
        width=st.integers(-1, 2**32),
        fields=st.lists(
            st.builds(
                Field,
                st.sampled_from(["x", "y", "z", "", "rgb"]),
                st.integers(-4, 2**32 - 1),
                st.integers(0, 255),
                st.integers(0, 2**32 - 1) | st.just(1),
            ),
            max_size=5,
        )
        | st.just([Field("x", 0, 7, 1), Field("y", 4, 7, 1), Field("z", 8, 7, 1)]),
        is_bigendian=st.booleans(),
        point_step=st.integers(-1, 40) | st.integers(0, 2**32 - 1),
        row_step=st.integers(-1, 200) | st.integers(0, 2**32 - 1),
        data=st.binary(max_size=256),
    )
)
def test_any_broken_message_is_refused_with_a_sentence_or_decoded_small(message: Cloud) -> None:
    try:
        points = decode_points(message)
    except InputError as error:
        assert str(error).endswith(".") and "\n" not in str(error)
        return
    assert points.nbytes <= 12 * max(len(message.data), 1)


XYZ = [Field("x", 0, 7, 1), Field("y", 4, 7, 1), Field("z", 8, 7, 1)]
GOOD = Cloud(2, 3, XYZ, False, 12, 36, bytes(72))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fields": XYZ[:2]}, "no field 'z'"),
        ({"fields": []}, "none"),
        ({"fields": [*XYZ, Field("x", 0, 7, 1)]}, "2 fields named 'x'"),
        ({"fields": [*XYZ[:2], Field("z", 8, 9, 1)]}, "unknown datatype 9"),
        ({"fields": [*XYZ[:2], Field("z", 8, 7, 3)]}, "holds 3 numbers"),
        ({"fields": [*XYZ[:2], Field("z", 10, 7, 1)]}, "ends at byte 14"),
        ({"fields": [*XYZ[:2], Field("z", 8, 8, 1)]}, "ends at byte 16"),
        ({"point_step": 0}, "point of 0 bytes"),
        ({"row_step": 35}, "row_step is 35"),
        ({"row_step": 0}, "row_step is 0"),
        ({"data": bytes(71)}, "72 bytes but 71 came"),
        ({"data": b""}, "72 bytes but 0 came"),
        ({"width": 2**32 - 1, "height": 2**32 - 1, "row_step": 12 * (2**32 - 1)}, "came"),
        ({"height": -1}, "negative"),
        ({"data": [0] * 72}, "byte buffer"),
    ],
)
def test_a_contradiction_is_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        decode_points(replace(GOOD, **change))


def test_empty_and_one_point() -> None:
    assert decode_points(replace(GOOD, width=0, row_step=0, data=b"")).shape == (0, 3)
    assert decode_points(replace(GOOD, height=0, data=b"")).shape == (0, 3)
    one = replace(GOOD, height=1, width=1, row_step=0, data=struct.pack("<fff", 1, 2, 3))
    np.testing.assert_array_equal(decode_points(one), [[1, 2, 3]])


def test_a_column_of_points_is_not_an_organised_cloud() -> None:
    column = replace(GOOD, height=6, width=1, row_step=12)
    assert decode_points(column).shape == (6, 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 5), st.integers(2, 5), st.booleans(), st.integers(0, 2**31))
def test_what_is_encoded_is_decoded(height: int, width: int, coloured: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = (height, width, 3) if height > 1 else (width, 3)
    points = generator.normal(size=shape).astype(np.float32)
    colours = generator.integers(0, 256, shape, dtype=np.uint8) if coloured else None
    message = encode_points(points, colours)
    np.testing.assert_array_equal(decode_points(message), points)
    assert len(message.data) == message.row_step * message.height
    if colours is not None:
        packed = np.frombuffer(message.data, "<u4").reshape(-1, 4)[:, 3]
        np.testing.assert_array_equal(packed >> 16, colours.reshape(-1, 3)[:, 0])
        np.testing.assert_array_equal(packed & 255, colours.reshape(-1, 3)[:, 2])


def test_encode_says_whether_it_is_dense_and_refuses_other_shapes() -> None:
    assert encode_points(np.zeros((4, 3))).is_dense
    assert not encode_points(np.full((4, 3), np.nan)).is_dense
    with pytest.raises(InputError, match="shape"):
        encode_points(np.zeros((4, 2)))
    with pytest.raises(InputError, match="3 colours"):
        encode_points(np.zeros((4, 3)), np.zeros((3, 3), np.uint8))


def test_ten_million_points_take_a_second_at_most() -> None:
    message = replace(GOOD, height=1, width=10_000_000, data=bytes(120_000_000))
    start = time.process_time()
    assert decode_points(message).shape == (10_000_000, 3)
    assert time.process_time() - start < 2.0


def test_sensor_msgs_py_agrees_on_ordinary_clouds() -> None:
    point_cloud2 = pytest.importorskip("sensor_msgs_py.point_cloud2", reason="sensor_msgs_py is not installed here")
    messages = pytest.importorskip("sensor_msgs.msg")
    points = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    encoded = encode_points(points)
    message = messages.PointCloud2(height=1, width=50, point_step=12, row_step=600, data=encoded.data, is_dense=True)
    message.fields = [messages.PointField(name=f.name, offset=f.offset, datatype=7, count=1) for f in encoded.fields]
    theirs = point_cloud2.read_points_numpy(message, ("x", "y", "z"))
    np.testing.assert_array_equal(decode_points(message), theirs)


@dataclass
class Image:
    height: int
    width: int
    encoding: str
    is_bigendian: int
    step: int
    data: bytes


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("encoding", "kind", "unit"), [("16UC1", "u2", 0.001), ("32FC1", "f4", 1.0)])
def test_depth_images_in_both_units_and_byte_orders(encoding: str, kind: str, unit: float, order: str) -> None:
    values = np.array([[0, 1500, 2], [3, 40000, 5]]).astype(order + kind)
    padded = np.zeros((2, 3 * values.itemsize + 4), np.uint8)
    padded[:, : 3 * values.itemsize] = values.view(np.uint8).reshape(2, -1)
    depth = decode_depth(Image(2, 3, encoding, order == ">", padded.shape[1], padded.tobytes()))
    truth = values.astype(np.float32) * np.float32(unit)
    truth[0, 0] = np.nan
    np.testing.assert_allclose(depth, truth, rtol=1e-6)


def test_float_depth_that_is_not_a_distance_becomes_nan() -> None:
    values = np.array([[-1, np.nan, np.inf, 0, 2]], np.float32)
    depth = decode_depth(Image(1, 5, "32FC1", 0, 20, values.tobytes()))
    np.testing.assert_array_equal(depth, np.array([[np.nan, np.nan, np.nan, np.nan, 2]], np.float32))


@pytest.mark.parametrize(
    ("image", "word"),
    [
        (Image(2, 2, "rgb8", 0, 6, bytes(12)), "rgb8"),
        (Image(2, 2, "16UC1", 0, 4, bytes(7)), "7 bytes"),
        (Image(2, 2, "16UC1", 0, 3, bytes(8)), "step 3"),
        (Image(0, 2, "16UC1", 0, 4, b""), "empty"),
        (Image(2**31, 2**31, "16UC1", 0, 2**32, bytes(8)), "8 bytes"),
    ],
)
def test_a_broken_depth_image_is_named(image: Image, word: str) -> None:
    with pytest.raises(InputError, match=word):
        decode_depth(image)


@dataclass
class Info:
    width: int = 4
    height: int = 3
    k: list[float] = field(default_factory=lambda: [2.0, 0, 1, 0, 3, 1.5, 0, 0, 1])
    p: list[float] = field(default_factory=lambda: [0.0] * 12)


def test_the_camera_comes_from_p_or_else_from_k() -> None:
    assert camera_from_info(Info()).fy == 3
    assert camera_from_info(Info(p=[5.0, 0, 1, 0, 0, 6, 2, 0, 0, 0, 1, 0])).fy == 6
    with pytest.raises(InputError, match="focal length"):
        camera_from_info(Info(k=[0.0] * 9))
    with pytest.raises(InputError, match="wrong size"):
        camera_from_info(Info(k=[0.0] * 8))


def test_decoding_needs_no_ros() -> None:
    import subprocess

    code = "import sys, lepard_ros.cloud.pointcloud2; assert not [m for m in sys.modules if m.startswith('rclpy')]"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_lens_is_undistorted() -> None:
    lens = (0.1, -0.05, 0.002, -0.001, 0.01)
    plain = Camera(64, 48, 50.0, 50.0, 31.5, 23.5)
    x, y = (plain.rays()[..., axis].astype(np.float64) for axis in (0, 1))
    r2 = x**2 + y**2
    radial = 1 + r2 * (lens[0] + r2 * (lens[1] + r2 * lens[4]))
    u = 50.0 * (x * radial + 2 * lens[2] * x * y + lens[3] * (r2 + 2 * x**2)) + 31.5  # where the lens shows each ray
    v = 50.0 * (y * radial + lens[2] * (r2 + 2 * y**2) + 2 * lens[3] * x * y) + 23.5
    bent = Camera(64, 48, 50.0, 50.0, 31.5, 23.5, lens=lens).rays()
    inside = (u > 4) & (u < 59) & (v > 4) & (v < 43)  # splines are less exact at the border
    for axis, truth in enumerate((x, y)):
        shown = map_coordinates(bent[..., axis].astype(np.float64), [v[inside], u[inside]], order=3)
        np.testing.assert_allclose(shown, truth[inside], atol=1e-4)


def test_a_lens_that_is_not_known_is_refused_and_a_rectified_image_needs_none() -> None:
    k, p = [50.0, 0, 31.5, 0, 50.0, 23.5, 0, 0, 1], [49.0, 0, 31.0, 0, 0, 49.0, 23.0, 0, 0, 0, 1, 0]
    info = SimpleNamespace(k=k, p=p, d=[0.1] * 4, distortion_model="equidistant", width=64, height=48)
    assert camera_from_info(info).fx == 49.0
    with pytest.raises(InputError, match="'equidistant'"):
        camera_from_info(info, rectified=False)
    info.distortion_model = "plumb_bob"
    assert camera_from_info(info, rectified=False) == Camera(64, 48, 50.0, 50.0, 31.5, 23.5, lens=(0.1,) * 4)
    info.d = [0.0] * 5
    assert camera_from_info(info, rectified=False).fx == 49.0


def test_a_large_image_is_thinned_as_the_tracker_would_thin_it() -> None:
    points = np.random.default_rng(0).normal(size=(120, 160, 3)).astype(np.float32)
    points[::3] = np.nan
    encoded = encode_points(points)
    thin = decode_points(encoded, max_points=3000)
    np.testing.assert_array_equal(thin, thinned(points, 3000))
    assert thin.shape == (60, 80, 3), "two thirds of 19,200 points are finite: every second row and column"
    assert decode_points(encoded, max_points=100_000).shape == points.shape


def test_a_small_thing_in_a_wide_image_keeps_its_points() -> None:
    points = np.full((480, 640, 3), np.nan, np.float32)
    points[100:200, 100:200] = 1.0
    assert thinned(points, 70_000).shape == points.shape
    assert thinned(np.ones((210_000, 3), np.float32), 70_000).shape == (70_000, 3)
