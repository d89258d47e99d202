"""What one Gauss-Newton iteration costs by the number of nodes, and what a million warped points cost.

python bench/nonrigid.py [--nodes 250 500 1000 2000 5000 10000] [--picture out.png] [--json out.json]

CPU seconds of one thread; each size is run once to warm up and then five times, and the median is given.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from lepard_ros.registration.block_cholesky import BlockCholesky
from lepard_ros.registration.graph import GraphSettings, build_graph
from lepard_ros.registration.normal_equations import DataTerm, Motion, NormalEquations
from lepard_ros.registration.types import Status
from lepard_ros.registration.warp import Warp

COVERAGE = 0.02
MATCHES_PER_NODE = 0.6


def wavy_sheet(nodes: int) -> np.ndarray:
    """A sheet (N, 3) large enough for about so many nodes at the default coverage."""
    side = np.sqrt(nodes * 1.28) * COVERAGE
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
    parser.add_argument("--nodes", type=int, nargs="+", default=[250, 500, 1000, 2000, 5000, 10000])
    parser.add_argument("--picture", help="PNG of cost against nodes")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for nodes in args.nodes:
        rows.append(iteration_cost(nodes))
        print(
            "{nodes:6d} nodes {edges_both_ways:6d} edges {matches:5d} matches {milliseconds:8.1f} ms".format(**rows[-1])
        )
    seconds = warp_cost()
    print(f"a million points warped: {seconds:.2f} s of CPU")
    if args.picture:
        draw(rows, args.picture)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"iterations": rows, "million_points_seconds": seconds}, file, indent=1)


if __name__ == "__main__":
    main()
