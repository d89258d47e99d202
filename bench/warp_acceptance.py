# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Fit the rule that accepts or refuses a warp, and print the constants for registration/deformable/acceptance.py.

python bench/warp_acceptance.py ../shared/data/tosca_pairs ../runs/creatures/val [--weights NAME] [--log rows.jsonl]

Every pair is matched and warped with the rule switched off; a warp is right if its mean end-point error on the overlap
is at most 10 cm. A creature (a folder) is judged by a rule that was fitted on all others, of every set, so the table of
false accepts is of creatures the rule has not seen. The constants printed last are fitted on all pairs. With --choose,
features are added one by one while the cross-validated loss falls, and dropped if it falls without them; without it,
those of the shipped rule are used.
"""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from tqdm import tqdm

from lepard_ros.data.fourdmatch import list_pairs, load_pair
from lepard_ros.matcher import Matcher
from lepard_ros.registration.deformable.acceptance import FEATURES, WarpEvidence, feature
from lepard_ros.registration.deformable.fit import NonrigidSettings
from lepard_ros.registration.deformable.nonrigid import WarpSettings, warp_from_matches

WRONG = 0.10  # metres of mean end-point error
SIGNS = {"inliers": 1, "agreeing": 1, "overlap": 1, "covered": 1, "supported": 1, "aligned": 1} | dict.fromkeys(
    ("flip", "conflict", "residual", "strain", "torn", "twist", "turning"), -1
)
Names = tuple[str, ...]
MIN_GAIN = 0.002  # of the loss, for one more feature
RIDGE = 1.0  # of the standardised coefficients: there are a hundred and a half pairs only


@dataclass(frozen=True)
class Case:
    """One pair: its set and creature, the error of its warp in metres, the CPU seconds, and the evidence or None."""

    folder: str
    creature: str
    pair: str
    epe: float
    cpu_seconds: float
    evidence: list[float] | None


def measure(matcher: Matcher, folder: Path, path: Path) -> Case:
    """Warp one pair with the rule switched off."""
    pair = load_pair(path)
    matches = matcher.match_both_ways(pair.source, pair.target)
    began = time.process_time()
    settings = WarpSettings(solver=NonrigidSettings(min_quality=float("-inf")))
    warp = warp_from_matches(pair.source, pair.target, matches, settings)
    spent = time.process_time() - began
    seen = np.unique(pair.matches[:, 0])
    error = np.linalg.norm(warp(pair.source[seen].astype(float)) - pair.warped[seen], axis=1)
    evidence = list(warp.evidence) if warp.ok and warp.evidence is not None else None
    return Case(folder.name, path.parent.name, path.stem, float(error.mean()), spent, evidence)


def table_of(cases: list[Case], names: Names) -> np.ndarray:
    """(N, F) features of the cases with evidence."""
    known = [WarpEvidence(*case.evidence) for case in cases if case.evidence is not None]
    return np.array([[feature(evidence, name) for name in names] for evidence in known])


def fit_logistic(x: np.ndarray, good: np.ndarray, names: Names) -> tuple[np.ndarray, np.ndarray, float]:
    """Centre (F,), coefficients (F,) and bias of the log-odds that a case (N, F) is good (N,), by ridge regression.

    A coefficient of the wrong sign, such as one that rewards torn edges, is set to zero and the others fitted again.
    """
    centre, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-9)
    signs, used = np.array([SIGNS[name] for name in names]), np.arange(x.shape[1])
    while True:
        beta = _newton((x[:, used] - centre[used]) / scale[used], good)
        right = beta[:-1] * signs[used] >= 0
        if right.all():
            break
        used = used[right]
    coefficients = np.zeros(x.shape[1])
    coefficients[used] = beta[:-1] / scale[used]
    return centre, coefficients, float(beta[-1])


def _newton(x: np.ndarray, good: np.ndarray) -> np.ndarray:
    """Coefficients (F + 1,), the bias last, of standardised features (N, F)."""
    design = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    ridge = np.diag([*[RIDGE] * x.shape[1], 1e-6])
    beta = np.zeros(design.shape[1])
    for _ in range(20):
        chance = 1 / (1 + np.exp(-design @ beta))
        gradient = design.T @ (good - chance) - ridge @ beta
        hessian = (design * (chance * (1 - chance))[:, None]).T @ design + ridge
        beta = beta + np.linalg.solve(hessian, gradient)
    return beta


def cross_validate(cases: list[Case], names: Names) -> np.ndarray:
    """(N,) log-odds of each case by a rule fitted without its creature; -inf where there was no warp to judge."""
    log_odds = np.full(len(cases), -np.inf)
    judged = np.array([case.evidence is not None for case in cases])
    good = np.array([case.epe <= WRONG for case in cases], dtype=float)
    table = np.zeros((len(cases), len(names)))
    table[judged] = table_of(cases, names)
    groups = np.array([f"{case.folder}/{case.creature}" for case in cases])
    for group in np.unique(groups):
        train, test = judged & (groups != group), judged & (groups == group)
        if test.any():
            centre, coefficients, bias = fit_logistic(table[train], good[train], names)
            log_odds[test] = bias + (table[test] - centre) @ coefficients
    return log_odds


def loss_of(cases: list[Case], names: Names) -> float:
    """Cross-validated loss of a rule with these features: mean negative log-likelihood of the judged cases."""
    log_odds = cross_validate(cases, names)
    judged = np.isfinite(log_odds)
    good = np.array([case.epe <= WRONG for case in cases])
    return float(np.logaddexp(0.0, np.where(good, -log_odds, log_odds)[judged]).mean())


def choose_features(cases: list[Case]) -> Names:
    """Features added one by one, always the one that lowers the cross-validated loss most, while it falls.

    Then those are dropped without which it is lower still: an early one may say what later ones say better.
    """
    names: Names = ()
    best = np.inf
    while True:
        losses = {name: loss_of(cases, (*names, name)) for name in SIGNS if name not in names}
        name = min(losses, key=lambda key: losses[key])
        if losses[name] > best - MIN_GAIN:
            return drop_features(cases, names, best)
        names, best = (*names, name), losses[name]
        print(f"+ {name}: loss {best:.4f}")


def drop_features(cases: list[Case], names: Names, best: float) -> Names:
    """The features without those whose absence lowers the cross-validated loss `best`."""
    for name in names:
        fewer = tuple(other for other in names if other != name)
        loss = loss_of(cases, fewer)
        if loss < best:
            print(f"- {name}: loss {loss:.4f}")
            return drop_features(cases, fewer, loss)
    return names


def report(cases: list[Case], log_odds: np.ndarray, title: str) -> None:
    """Wrong ones among the accepted, and good ones kept, by threshold."""
    epe = np.array([case.epe for case in cases])
    good = epe <= WRONG
    print(f"\n{title}: {len(cases)} pairs, {good.sum()} good; EPE mean {100 * epe.mean():.1f} cm, median", end=" ")
    print(f"{100 * np.median(epe):.1f} cm; {np.mean([case.cpu_seconds for case in cases]):.2f} CPU-s a warp")
    print("min_quality  accepted  wrong among them  good ones kept")
    for limit in (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0):
        accepted = log_odds >= limit
        wrong, kept = int((accepted & ~good).sum()), int((accepted & good).sum())
        share, kept_share = wrong / max(accepted.sum(), 1), kept / max(good.sum(), 1)
        print(f"{limit:11.1f}  {accepted.sum():8d}  {wrong:3d} ({share:5.1%})       {kept:3d} ({kept_share:.0%})")


def print_constants(cases: list[Case], names: Names) -> None:
    """The constants of a rule fitted on all cases."""
    judged = [case for case in cases if case.evidence is not None]
    good = np.array([case.epe <= WRONG for case in judged], float)
    centre, coefficients, bias = fit_logistic(table_of(judged, names), good, names)
    print("\nfor registration/deformable/acceptance.py:")
    print(f"FEATURES = {names}")
    print(f"CENTRE = np.array([{', '.join(f'{value:.4f}' for value in centre)}])")
    print(f"COEFFICIENTS = np.array([{', '.join(f'{value:.3f}' for value in coefficients)}])")
    print(f"BIAS = {bias:.2f}")


def read_or_measure(args: argparse.Namespace) -> list[Case]:
    """The cases of a log, or of all folders, written to the log."""
    if args.log and args.log.exists():
        return [Case(**json.loads(line)) for line in args.log.read_text().splitlines()]
    matcher = Matcher.from_pretrained(args.weights)
    work = [(folder, path) for folder in args.folders for path in list_pairs(folder)[:: args.every]]
    cases = [measure(matcher, *item) for item in tqdm(work, desc="warps")]
    if args.log:
        args.log.write_text("\n".join(json.dumps(asdict(case)) for case in cases) + "\n")
    return cases


def main() -> None:
    """Measure, cross-validate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", type=Path, nargs="+", help="sets of pairs in the 4DMatch format, a folder a creature"
    )
    parser.add_argument("--weights", default="deformable")
    parser.add_argument("--every", type=int, default=1, help="take every so-manyth pair")
    parser.add_argument("--choose", action="store_true", help="choose the features again")
    parser.add_argument("--log", type=Path, help="JSON lines: written, or read if the file is there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = read_or_measure(args)
    names = choose_features(cases) if args.choose else FEATURES
    log_odds = cross_validate(cases, names)
    for folder in args.folders:
        own = np.array([case.folder == folder.name for case in cases])
        report([case for case, mine in zip(cases, own, strict=True) if mine], log_odds[own], folder.name)
    print_constants(cases, names)


if __name__ == "__main__":
    main()
