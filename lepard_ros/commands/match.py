# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard match SOURCE TARGET`: aligns two cloud files; output as text, JSON and a picture."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lepard_ros.cloud.files import read_cloud, write_cloud
from lepard_ros.cloud.normals import UNKNOWN
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.report.alignment import deformable_json, deformable_text, rigid_json, rigid_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lepard_ros.matcher import Matcher

Viewpoint = FloatArray | str
VIEWPOINT_HELP = """position of the sensor in the cloud's frame: origin (the default), x,y,z in metres, or unknown (a
fused map, a model, a cloud that was moved); one for both clouds, or one for the source and one for the target"""

HELP = """Match two cloud files (ply, pcd, npy, npz, xyz) and print the alignment of the first to the second.

examples:
  lepard match scan_a.ply scan_b.ply --picture matches.png
  lepard match part.ply cad_model.ply --viewpoint unknown
  lepard match cat_a.npz cat_b.npz --mode deformable --json warp.json --output warped.ply

The exit code is 0 when the alignment is accepted and 1 when it is refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard match`."""
    parser.add_argument("source", type=Path, help="the cloud to align, in metres")
    parser.add_argument("target", type=Path, help="the cloud to align it to, in metres")
    parser.add_argument(
        "--mode", choices=("rigid", "deformable"), default="rigid", help="what may move (default rigid)"
    )
    parser.add_argument("--weights", help="shipped weights by name, or a .safetensors file (default: as the mode)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:0 or onnx (default auto)")
    parser.add_argument("--viewpoint", nargs="+", metavar="V", help=VIEWPOINT_HELP)
    parser.add_argument(
        "--effort", type=int, choices=(0, 1, 2), default=2, help="further tries for a refused rigid pair (default 2)"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write transform, status and matches here")
    parser.add_argument("--picture", type=Path, metavar="F.png", help="draw matches here, and the warp if there is one")
    parser.add_argument("--output", type=Path, metavar="F.ply", help="write the aligned source cloud here")


def run(args: argparse.Namespace) -> int:
    """Match, print and write the requested files."""
    viewpoints = read_viewpoints(args.viewpoint or ["origin"])
    source, target = read_cloud(args.source), read_cloud(args.target)
    from lepard_ros.matcher import Matcher

    matcher = Matcher.from_pretrained(args.weights or args.mode, device=args.device)
    if args.mode == "deformable":
        if args.viewpoint:
            raise InputError("--viewpoint is for --mode rigid: a deformable pair is seen from its origin.")
        return 0 if _run_deformable(args, matcher, source, target) else 1
    return 0 if _run_rigid(args, matcher, source, target, viewpoints) else 1


def read_viewpoints(words: list[str]) -> list[Viewpoint]:
    """The viewpoints of source and target from one word for both, or two."""
    if len(words) > 2:
        raise InputError("--viewpoint takes one value for both clouds, or two: of the source and of the target.")
    places = [_viewpoint(word) for word in words]
    return places * (3 - len(places))


def _viewpoint(word: str) -> Viewpoint:
    if word in (UNKNOWN, "origin"):
        return UNKNOWN if word == UNKNOWN else np.zeros(3)
    try:
        place = np.array([float(number) for number in word.split(",")])
    except ValueError:
        place = np.zeros(0)
    if place.shape != (3,) or not np.isfinite(place).all():
        raise InputError(f"--viewpoint {word} is neither origin nor unknown nor three numbers such as 0,0.5,1.2.")
    return place


def _run_rigid(
    args: argparse.Namespace,
    matcher: "Matcher",
    source: FloatArray,
    target: FloatArray,
    viewpoints: list[Viewpoint],
) -> bool:
    # No viewpoint given: raw clouds, for which a further try rotates the grid and treats the viewpoint as unknown.
    first, second = matcher.encode_all([source, target], viewpoints) if args.viewpoint else (source, target)
    result = matcher.register(first, second, effort=args.effort)
    print(rigid_text(result))
    pose = result.transform
    if args.output:
        _write_aligned(args.output, source, None if pose is None else source @ pose[:3, :3].T + pose[:3, 3])
    _write_json(args.json, rigid_json(result))
    if args.picture:
        from lepard_ros.report.cloud_pictures import matches_figure

        _save(matches_figure(source, target, result.matches, result.inliers, pose), args.picture)
    return result.ok


def _run_deformable(args: argparse.Namespace, matcher: "Matcher", source: FloatArray, target: FloatArray) -> bool:
    from lepard_ros.registration.deformable.nonrigid import WarpSettings, warp_from_matches, without_background

    bodies = (without_background(cloud, WarpSettings().foreground) for cloud in (source, target))
    source, target = (body[np.isfinite(body).all(axis=1)] for body in bodies)
    matches = matcher.match_both_ways(source, target)
    warp = warp_from_matches(source, target, matches)
    warped = warp(source) if warp.ok else None
    print(deformable_text(warp, matches))
    if args.output:
        _write_aligned(args.output, source, warped)
    _write_json(args.json, deformable_json(warp, matches))
    if args.picture:
        from lepard_ros.report.cloud_pictures import deformation_figure

        _save(deformation_figure(source, target, matches, warp.match_inliers, warped), args.picture)
    return warp.ok


def _write_json(path: Path | None, values: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}).") from error


def _write_aligned(path: Path, source: FloatArray, aligned: FloatArray | None) -> None:
    """Write the aligned cloud; nothing for a refused alignment."""
    if aligned is None:
        print(f"{path} was not written: there is no accepted alignment.")
        return
    write_cloud(path, aligned)


def _save(figure: "Figure", path: Path) -> None:
    from lepard_ros.report.figure import save_figure

    save_figure(figure, path)
    print(f"picture: {path}")
