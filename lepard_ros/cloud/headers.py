# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Checks the headers of PLY and PCD files against their data, because Open3D trusts them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from lepard_ros.errors import InputError

LONGEST_HEADER = 65_536  # bytes
MAX_COMPRESSION = 100  # LZF makes at most 264 bytes of 3
_PLY_SIZES = {
    **dict.fromkeys(("char", "uchar", "int8", "uint8"), 1),
    **dict.fromkeys(("short", "ushort", "int16", "uint16"), 2),
    **dict.fromkeys(("int", "uint", "float", "int32", "uint32", "float32"), 4),
    **dict.fromkeys(("double", "float64"), 8),
}


class Promise(NamedTuple):
    """A header. end: start of the data, in bytes. min_size: minimum size of the data, in bytes or numbers."""

    end: int
    min_size: int
    text: bool


def check_header(path: Path) -> None:
    """Raise InputError if the header of a .ply or .pcd file is invalid or promises more data than the file holds."""
    with path.open("rb") as file:
        start = file.read(LONGEST_HEADER)
    try:
        promise = _pcd(start) if path.suffix.lower() == ".pcd" else _ply(start)
    except (ValueError, IndexError, KeyError) as error:
        raise InputError(f"{path} is damaged: its header cannot be read ({error}).") from error
    held = _count_words(path, promise.end) if promise.text else path.stat().st_size - promise.end
    if promise.min_size > held:
        unit = "numbers" if promise.text else "bytes"
        raise InputError(f"{path} is damaged: its header promises {promise.min_size} {unit} or more, {held} follow.")


def _pcd(start: bytes) -> Promise:
    """What a PCD header promises."""
    lines, end = _header_lines(start, b"DATA")
    words = {line[0].upper(): line[1:] for line in lines if not line[0].startswith("#")}
    sizes = [_number(word, 8) for word in words["SIZE"]]
    counts = [_number(word, 65_536) for word in words.get("COUNT", ["1"] * len(sizes))]
    if not len(words["FIELDS"]) == len(sizes) == len(counts) == len(words["TYPE"]) > 0:
        raise ValueError("FIELDS, SIZE, TYPE and COUNT do not fit together")
    points = _number(words["POINTS"][0])
    if _number(words["WIDTH"][0]) * _number(words["HEIGHT"][0]) != points:
        raise ValueError("WIDTH x HEIGHT is not POINTS")
    stored = points * sum(one * count for one, count in zip(sizes, counts, strict=True))
    kind = words["DATA"][0].lower()
    if kind == "ascii":
        return Promise(end, points * sum(counts), text=True)
    if kind == "binary":
        return Promise(end, stored, text=False)
    if kind == "binary_compressed":
        return Promise(end, stored // MAX_COMPRESSION, text=False)
    raise ValueError(f"DATA is {kind!r}")


def _ply(start: bytes) -> Promise:
    """What a PLY header promises; a list may be empty, so that only its length counts."""
    lines, end = _header_lines(start, b"end_header")
    if lines[0] != ["ply"]:
        raise ValueError("it does not begin with ply")
    formats = [line[1] for line in lines if line[0] == "format"]
    if len(formats) != 1:
        raise ValueError("there is no format")
    text = formats[0] == "ascii"
    elements: list[list[int]] = []  # how many, and the bytes (in a text: numbers) of each
    for line in lines:
        if line[0] == "element":
            elements.append([_number(line[2]), 0])
        elif line[0] == "property":
            elements[-1][1] += 1 if text else _PLY_SIZES[line[2] if line[1] == "list" else line[1]]
    return Promise(end, sum(number * each for number, each in elements), text)


def _count_words(path: Path, position: int) -> int:
    """How many words the text holds from a position on."""
    inside = np.frombuffer(b" " + path.read_bytes()[position:], np.uint8) > ord(" ")
    return int(np.count_nonzero(inside[1:] & ~inside[:-1]))


def _header_lines(start: bytes, last: bytes) -> tuple[list[list[str]], int]:
    """The words of the header's lines, up to the one that begins with `last`, and where the data begins."""
    lines: list[list[str]] = []
    position = 0
    while position < len(start):
        end = start.find(b"\n", position)
        end = len(start) if end < 0 else end
        words = start[position:end].decode("ascii", errors="replace").split()
        position = end + 1
        lines += [words] if words else []
        if words and words[0] == last.decode():
            return lines, position
    raise ValueError(f"there is no {last.decode()}")


def _number(word: str, limit: int = 2**40) -> int:
    """A whole number from 0 to `most`; int() alone would take signs, underscores and other digits."""
    if not (word.isascii() and word.isdigit()) or len(word) > 20 or int(word) > limit:
        raise ValueError(f"{word!r} is not a valid number there")
    return int(word)
