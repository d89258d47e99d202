# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard match SOURCE TARGET`: how two cloud files align, as text, JSON and a picture."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.files import read_cloud, write_cloud
from lepard_ros.errors import InputError
from lepard_ros.registration.types import Matches, Registration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lepard_ros.matcher import Matcher
    from lepard_ros.registration.warp import Warp

FloatArray = NDArray[np.floating]

HELP = """Match two cloud files (ply, pcd, npy, npz, xyz) and print how the first aligns with the second.

examples:
  lepard match scan_a.ply scan_b.ply --picture matches.png
  lepard match cat_a.npz cat_b.npz --mode deformable --json warp.json --output warped.ply

The exit code is 0 when the alignment is accepted and 1 when it is refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard match`."""
    parser.add_argument("source", type=Path, help="the cloud that is moved, in metres")
    parser.add_argument("target", type=Path, help="the cloud that it is moved to, in metres")
    parser.add_argument(
        "--mode", choices=("rigid", "deformable"), default="rigid", help="what may move (default rigid)"
    )
    parser.add_argument("--weights", help="shipped weights by name, or a .safetensors file (default: as the mode)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:0 (default auto)")
    parser.add_argument("--json", type=Path, metavar="F", help="write transform, status and matches here")
    parser.add_argument("--picture", type=Path, metavar="F.png", help="draw matches here, and the warp if there is one")
    parser.add_argument("--output", type=Path, metavar="F.ply", help="write the aligned source cloud here")


def run(args: argparse.Namespace) -> int:
    """Match, print and write what was asked for."""
    source, target = read_cloud(args.source), read_cloud(args.target)
    from lepard_ros.matcher import Matcher

    matcher = Matcher.from_pretrained(args.weights or args.mode, device=args.device)
    run_mode = _run_rigid if args.mode == "rigid" else _run_deformable
    return 0 if run_mode(args, matcher, source, target) else 1


def _run_rigid(args: argparse.Namespace, matcher: "Matcher", source: FloatArray, target: FloatArray) -> bool:
    result = matcher.register(source, target)
    print(rigid_text(result))
    pose = result.transform
    if args.output:
        _write_aligned(args.output, source, None if pose is None else source @ pose[:3, :3].T + pose[:3, 3])
    _write_json(args.json, rigid_json(result))
    if args.picture:
        from lepard_ros.evaluation.pictures import matches_figure

        _save(matches_figure(source, target, result.matches, result.inliers, pose), args.picture)
    return result.ok


def _run_deformable(args: argparse.Namespace, matcher: "Matcher", source: FloatArray, target: FloatArray) -> bool:
    from lepard_ros.registration.nonrigid import warp_from_matches

    matches = matcher.match(source, target)
    warp = warp_from_matches(source, target, matches)
    warped = warp(source) if warp.ok else None
    print(deformable_text(warp, matches))
    if args.output:
        _write_aligned(args.output, source, warped)
    _write_json(args.json, deformable_json(warp, matches))
    if args.picture:
        from lepard_ros.evaluation.pictures import deformation_figure

        _save(deformation_figure(source, target, matches, warp.match_inliers, warped), args.picture)
    return warp.ok


def rigid_text(result: Registration) -> str:
    """What a person wants to read of a registration."""
    count = f"{int(result.inliers.sum())} of {len(result.inliers)} matches agree"
    if result.transform is None:
        return f"refused: {result.status.value} ({count})."
    matrix = "\n".join("  " + " ".join(f"{value:10.6f}" for value in row) for row in result.transform)
    lines = [f"accepted: {count}, overlap {100 * result.overlap:.0f} %, residual {100 * result.rmse:.1f} cm."]
    lines += ["source to target:", matrix]
    if result.covariance is not None:
        spread = np.sqrt(np.diag(result.covariance))
        turn = np.degrees(spread[3:]).max()
        lines.append(f"standard deviation: at most {100 * spread[:3].max():.2f} cm and {turn:.2f} degrees an axis.")
    return "\n".join([*lines, _time_text(result.seconds)])


def deformable_text(warp: "Warp", matches: Matches) -> str:
    """What a person wants to read of a warp."""
    count = f"{int(warp.match_inliers.sum())} of {len(matches.source)} matches agree"
    if not warp.ok:
        return f"refused: {warp.status.value} ({count})."
    surface = f"overlap {100 * warp.overlap:.0f} %, residual {100 * warp.residual:.1f} cm"
    return f"accepted: {count}, {len(warp.graph.nodes)} nodes, {surface}.\n{_time_text(warp.seconds)}"


def _time_text(seconds: dict[str, float]) -> str:
    return "seconds: " + ", ".join(f"{stage} {value:.2f}" for stage, value in seconds.items()) + "."


def rigid_json(result: Registration) -> dict[str, Any]:
    """A registration as plain JSON values; what is not known is null."""
    return {
        "mode": "rigid",
        "status": result.status.name,
        "transform": _listed(result.transform),
        "covariance": _listed(result.covariance),
        "rmse": result.rmse if np.isfinite(result.rmse) else None,
        "overlap": result.overlap,
        "seconds": result.seconds,
        "matches": _matches_json(result.matches, result.inliers),
    }


def deformable_json(warp: "Warp", matches: Matches) -> dict[str, Any]:
    """A warp as plain JSON values: its nodes, where they went and how they turned."""
    return {
        "mode": "deformable",
        "status": warp.status.name,
        "nodes": warp.graph.nodes.tolist(),
        "translations": warp.translations.tolist(),
        "rotation_vectors": warp.rotations.tolist(),
        "residual": warp.residual if np.isfinite(warp.residual) else None,
        "overlap": warp.overlap,
        "seconds": warp.seconds,
        "matches": _matches_json(matches, warp.match_inliers),
    }


def _matches_json(matches: Matches, inliers: NDArray[np.bool_]) -> dict[str, Any]:
    lists = {name: np.round(getattr(matches, name), 5).tolist() for name in ("source", "target", "confidence")}
    return {**lists, "inlier": inliers.tolist()}


def _listed(array: FloatArray | None) -> list[Any] | None:
    return None if array is None else array.tolist()


def _write_json(path: Path | None, values: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}).") from error


def _write_aligned(path: Path, source: FloatArray, aligned: FloatArray | None) -> None:
    """The aligned cloud; a refused alignment writes nothing rather than the source as it was."""
    if aligned is None:
        print(f"{path} was not written: there is no accepted alignment.")
        return
    write_cloud(path, aligned)


def _save(figure: "Figure", path: Path) -> None:
    from lepard_ros.evaluation.pictures import save_figure

    save_figure(figure, path)
    print(f"picture: {path}")
