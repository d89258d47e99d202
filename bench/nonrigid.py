# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What one Gauss-Newton iteration costs by the number of nodes, what a million warped points cost, and with --pairs the
end-point error of the solver alone, given true matches, on data in the 4DMatch format.

python bench/nonrigid.py [--nodes 250 500 1000 2000 5000 10000] [--picture out.png] [--json out.json]
python bench/nonrigid.py --nodes --pairs ../shared/data/tosca_pairs [--every 5] [--matches 600]

CPU seconds of one thread; each size is run once to warm up and then five times, and the median is given.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from lepard_ros.registration.deformable.block_cholesky import BlockCholesky
from lepard_ros.registration.deformable.fit import NonrigidSettings
from lepard_ros.registration.deformable.graph import CELL, GraphSettings, build_graph
from lepard_ros.registration.deformable.nonrigid import solve_nonrigid
from lepard_ros.registration.deformable.normal_equations import DataTerm, Motion, NormalEquations
from lepard_ros.registration.deformable.surface_contact import thinned_surface
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches, Status

COVERAGE = 0.02
MATCHES_PER_NODE = 0.6


def wavy_sheet(nodes: int) -> np.ndarray:
    """A sheet (N, 3) large enough for about so many nodes at the default coverage."""
    side = np.sqrt(nodes) * CELL * COVERAGE
    x, y = np.meshgrid(*[np.arange(0, side, COVERAGE / 3)] * 2)
    return np.stack([x.ravel(), y.ravel(), 1 + 0.05 * np.sin(6 * x.ravel()) * np.cos(5 * y.ravel())], axis=1)


def median_cpu_seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """The median over `repeats` runs after one that does not count."""
    taken = []
    for _ in range(repeats + 1):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return float(np.median(taken[1:]))


def iteration_cost(nodes: int) -> dict[str, Any]:
    """The cost of assembling and solving one step, and of the energy after it."""
    points, rng = wavy_sheet(nodes), np.random.default_rng(0)
    graph = build_graph(points, GraphSettings(coverage=COVERAGE))
    chosen = points[rng.permutation(len(points))[: int(MATCHES_PER_NODE * len(graph.nodes))]]
    equations = NormalEquations(graph, DataTerm(chosen, graph.skin(chosen)), 0.1)
    solver = BlockCholesky(graph.nodes, equations.first, equations.second)
    targets, weights = chosen + rng.normal(0, 0.01, chosen.shape), np.ones(len(chosen))
    motion = Motion(np.tile(np.eye(3), (len(graph.nodes), 1, 1)), np.zeros_like(graph.nodes))

    def iterate() -> None:
        blocks = equations.blocks(motion, equations.moments(weights))
        blocks[equations.own_slots] += 1e-4 * np.eye(6)
        solver.factorise(blocks)
        step = solver.solve(-equations.gradient(motion, targets, weights))
        equations.energy(motion.step(step), targets, weights)

    return {
        "nodes": len(graph.nodes),
        "edges_both_ways": 2 * len(graph.edges),
        "matches": len(chosen),
        "milliseconds": 1e3 * median_cpu_seconds(iterate),
    }


def warp_cost(points: int = 1_000_000) -> float:
    """CPU seconds to warp so many points with about a thousand nodes."""
    surface, rng = wavy_sheet(1000), np.random.default_rng(0)
    warp = Warp.rest(build_graph(surface, GraphSettings(coverage=COVERAGE)), Status.OK)
    many = surface[rng.integers(0, len(surface), points)] + rng.normal(0, 0.002, (points, 3))
    return median_cpu_seconds(lambda: warp(many), repeats=3)


def true_match_error(path: Path, count: int) -> tuple[float, float]:
    """Mean end-point error in metres on the overlap with `count` true matches: of the warped points, and of all."""
    data = np.load(path)
    source, target, index = data["s_pc"].astype(float), data["t_pc"].astype(float), data["correspondences"]
    truth = (source + data["s2t_flow"]) @ data["rot"].T + data["trans"].reshape(3)
    pairs = np.random.default_rng(0).permutation(index)[:count]
    matches = Matches(source[pairs[:, 0]], target[pairs[:, 1]], np.ones(len(pairs)))
    graph = build_graph(source)
    surfaces = [thinned_surface(cloud, graph.coverage / 3) for cloud in (source, target)]
    warp = solve_nonrigid(graph, surfaces[0], surfaces[1], matches, NonrigidSettings(min_quality=float("-inf")))
    seen = np.unique(index[:, 0])
    moved, warped = warp.apply(source[seen])
    error = np.linalg.norm(moved - truth[seen], axis=1)
    return float(error[warped].mean()) if warped.any() else float("inf"), float(error.mean())


def judge_pairs(folder: str, every: int, count: int) -> list[tuple[float, float]]:
    """The errors of every so-manyth pair, printed one by one, and how many stay within a centimetre."""
    errors = []
    for path in sorted(Path(folder).glob("*/*.npz"))[::every]:
        errors.append(true_match_error(path, count))
        print(f"{path.stem:28s} EPE of warped points {errors[-1][0]:.4f} m, of all {errors[-1][1]:.4f} m", flush=True)
    good = np.mean(np.array(errors) <= 0.01, axis=0)
    print(f"within 0.01 m: {good[0]:.0%} of {len(errors)} pairs (warped points), {good[1]:.0%} (all points)")
    return errors


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Cost against nodes, both logarithmic, with a line of linear growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    nodes, cost = (np.array([row[key] for row in rows]) for key in ("nodes", "milliseconds"))
    figure, axes = plt.subplots(figsize=(5, 4))
    axes.loglog(nodes, cost, "o-", label="one Gauss-Newton iteration")
    axes.loglog(nodes, cost[0] * nodes / nodes[0], "--", color="grey", label="linear")
    axes.set_xlabel("nodes")
    axes.set_ylabel("CPU milliseconds")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[250, 500, 1000, 2000, 5000, 10000])
    parser.add_argument("--pairs", help="folder of pairs in the 4DMatch format")
    parser.add_argument("--every", type=int, default=1, help="take every so-manyth pair")
    parser.add_argument("--matches", type=int, default=600, help="true matches given to the solver")
    parser.add_argument("--picture", help="PNG of cost against nodes")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for nodes in args.nodes:
        rows.append(iteration_cost(nodes))
        print(
            "{nodes:6d} nodes {edges_both_ways:6d} edges {matches:5d} matches {milliseconds:8.1f} ms".format(**rows[-1])
        )
    report: dict[str, Any] = {"iterations": rows}
    if rows:
        report["million_points_seconds"] = warp_cost()
        print(f"a million points warped: {report['million_points_seconds']:.2f} s of CPU")
    if args.pairs:
        report["true_match_errors"] = judge_pairs(args.pairs, args.every, args.matches)
    if args.picture and rows:
        draw(rows, args.picture)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
