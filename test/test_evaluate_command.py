# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard evaluate pairs` from end to end with a real baseline, its log, its tables and its refusals."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lepard_ros import cli
from lepard_ros.data.readers import RigidPair, open_set
from lepard_ros.errors import InputError
from lepard_ros.evaluation import metrics, tables
from lepard_ros.evaluation import pairs as pairs_module
from lepard_ros.evaluation.methods import MethodResult, make_method
from lepard_ros.evaluation.pairs import Task, evaluate_pair, run_pairs
from lepard_ros.evaluation.ransac import _triples, ransac
from lepard_ros.registration.types import Matches
from pair_files import motion, write_corner_pairs


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two scenes, three small motions each, in the compact layout."""
    return write_corner_pairs(tmp_path / "data")


def test_the_command_prints_a_table_and_resumes(data: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    output = tmp_path / "out" / "result.json"
    arguments = ["evaluate", "3dmatch", str(data), "--methods", "icp", "--json", str(output), "--jobs", "1", "--quiet"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| icp" in printed
    assert "100.0 [100.0, 100.0]" in printed
    result = json.loads(output.read_text())
    assert result["summaries"]["icp"]["pairs"] == 6
    assert max(record["rre"] for record in result["records"]) < 1.0
    monkeypatch.setattr(pairs_module, "evaluate_pair", None)  # a second run must not register anything
    assert cli.main(arguments) == 0
    assert json.loads(output.read_text())["records"] == result["records"]


def test_an_interrupted_log_goes_on(data: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    task = Task(data, "3DMatch", ["icp"], count=4, seed=1)
    pairs, records = run_pairs(task, log, progress=False)
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) == 5
    log.write_text("".join(lines[:3]) + lines[3][:40])  # the power failed in the middle of a line
    again, resumed = run_pairs(task, log, progress=False)
    assert [pair.name for pair in again] == [pair.name for pair in pairs]
    for first, second in zip(resumed, records, strict=True):
        np.testing.assert_allclose(first["transform"], second["transform"], atol=1e-6)
    assert len(log.read_text().splitlines()) == 5


def test_several_processes_give_the_same(data: Path) -> None:
    one = run_pairs(Task(data, "3DMatch", ["icp"], jobs=1), progress=False)[1]
    two = run_pairs(Task(data, "3DMatch", ["icp"], jobs=2), progress=False)[1]
    assert [record["source"] for record in one] == [record["source"] for record in two]
    for first, second in zip(one, two, strict=True):
        np.testing.assert_allclose(first["transform"], second["transform"], atol=1e-6)


def test_a_stopped_run_has_every_method_on_the_same_pairs(data: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    run_pairs(Task(data, "3DMatch", ["icp", "gicp"]), log, progress=False)
    records = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert [record["method"] for record in records[:4]] == ["icp", "gicp"] * 2
    assert records[0]["source"] == records[1]["source"]


def test_unrelated_pairs_measure_false_accepts(data: Path, capsys) -> None:
    arguments = ["evaluate", "pairs", str(data), "--set", "unrelated", "--methods", "icp", "--count", "3", "--quiet"]
    assert cli.main([*arguments, "--jobs", "1"]) == 0
    assert "| icp    | 3     | 100.0 [100.0, 100.0]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["3dmatch", "{data}", "--methods", "magic"], "unknown method magic"),
        (["3dlomatch", "{data}", "--methods", "icp"], "neither gt_3DLoMatch.npz"),
        (["tum", "{data}", "--methods", "icp"], "depth"),
        (["3dmatch", "{data}/nowhere", "--methods", "icp"], "not a folder"),
    ],
)
def test_bad_data_ends_with_code_2_and_one_sentence(data: Path, capsys, arguments: list[str], sentence: str) -> None:
    filled = [argument.replace("{data}", str(data)) for argument in arguments]
    assert cli.main(["evaluate", *filled, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_log_of_another_set_is_refused(data: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    run_pairs(Task(data, "unrelated", ["icp"], count=1), log, progress=False)
    with pytest.raises(InputError, match="another --json"):
        run_pairs(Task(data, "3DMatch", ["icp"], count=1), log, progress=False)
    log.write_text("no json\n{}\n")
    with pytest.raises(InputError, match="line 1"):
        run_pairs(Task(data, "3DMatch", ["icp"], count=1), log, progress=False)


@pytest.mark.parametrize("name", ["fpfh+ransac", "fpfh+fgr", "icp", "gicp", "kiss-matcher"])
def test_every_baseline_registers_an_easy_pair(data: Path, name: str) -> None:
    if name == "kiss-matcher":
        pytest.importorskip("kiss_matcher", reason="the package kiss-matcher is not installed")
    source = open_set(data, "3DMatch")
    record = evaluate_pair(name, make_method(name), source, source.pairs(None, 0)[0])
    assert tables.is_success(record)
    assert record["accepted"]
    assert record["cpu_seconds"] > 0


def test_ransac_finds_the_motion_of_a_fifth_of_the_matches() -> None:
    random = np.random.default_rng(0)
    truth = motion([0.3, -0.2, 1.0], [0.5, 0.1, -0.3])
    source = random.uniform(-1, 1, size=(200, 3))
    target = source @ truth[:3, :3].T + truth[:3, 3] + random.normal(0, 0.005, size=(200, 3))
    target[40:] = random.uniform(-1, 1, size=(160, 3))
    found = ransac(Matches(source, target, np.ones(200)), iterations=4000)
    assert metrics.rotation_error(found, truth) < 3
    assert metrics.translation_error(found, truth) < 0.05
    np.testing.assert_array_equal(ransac(Matches(source[:2], target[:2], np.ones(2))), np.eye(4))


def test_triples_are_of_three_different_matches() -> None:
    triples = _triples(5, 3000, torch.Generator().manual_seed(0)).sort(1).values
    assert (triples.diff(dim=1) > 0).all()
    assert len(torch.unique(triples, dim=0)) == 10  # every one of the 5 over 3


def test_the_estimator_of_the_paper_never_refuses(data: Path, monkeypatch) -> None:
    monkeypatch.setattr("lepard_ros.evaluation.ransac.ITERATIONS", 2000)
    source = open_set(data, "3DMatch")
    (pair,) = source.pairs(None, 0)[:1]
    unrelated = RigidPair(pair.source, "hotel/0", "kitchen", None, 0.0)
    for name, chosen in (("lepard:rigid+ransac", unrelated), ("lepard:rigid+ransac+icp", pair)):
        record = evaluate_pair(name, make_method(name), source, chosen)
        assert record["accepted"] and record["transform"] is not None
    assert tables.is_success(record)
    assert record["rte"] < 0.01  # after ICP


@pytest.mark.parametrize("suffix", ["+x0.1", "+x10", "+moved", "+x10+moved"])
def test_disturbed_pairs_are_measured_as_the_pairs_they_were(data: Path, suffix: str) -> None:
    """Another scale or another frame changes neither the motion in metres nor which matches are right."""
    source = open_set(data, "3DMatch")
    (pair,) = source.pairs(None, 0)[:1]
    plain, disturbed = (
        evaluate_pair(n, make_method(n), source, pair) for n in ("lepard:rigid", f"lepard:rigid{suffix}")
    )
    assert tables.is_success(plain) and tables.is_success(disturbed)
    assert disturbed["rte"] < 0.1 and disturbed["rre"] < 5
    assert disturbed["inlier_ratio"] > 0.1 * plain["inlier_ratio"]  # an unknown viewpoint costs matches
    assert disturbed["transform"] != plain["transform"]


class Fixed:
    """A method with a known answer."""

    def __init__(self, result: MethodResult) -> None:
        self.result = result

    def register(self, source: np.ndarray, target: np.ndarray) -> MethodResult:
        return self.result


def test_a_record_holds_what_the_tables_need(data: Path) -> None:
    source = open_set(data, "3DMatch")
    pair = source.pairs(None, 0)[0]
    assert pair.truth is not None
    points = source.cloud(pair.source)[:10].astype(float)
    landed = points @ pair.truth[:3, :3].T + pair.truth[:3, 3]
    landed[:4] += 1.0
    matches = Matches(points, landed, np.linspace(0, 1, 10))
    found = MethodResult(pair.truth, True, 0.2, 0.1, "OK", matches, covariance=np.eye(6), stages={"match": 0.1})
    record = evaluate_pair("lepard:x", Fixed(found), source, pair)
    assert record["inlier_ratio"] == record["inlier_ratio_surest"] == pytest.approx(0.6)
    assert record["rre"] == pytest.approx(0, abs=1e-6)
    assert record["nees"] == pytest.approx(0, abs=1e-9)
    assert sum(row[0] for row in record["confidence_bins"]) == 10
    refused = evaluate_pair("lepard:x", Fixed(MethodResult(None, False, 0.2, 0.1, "LOW_OVERLAP")), source, pair)
    assert not tables.is_success(refused)
    assert refused["rre"] is None
    json.dumps([record, refused], allow_nan=False)
    summary = tables.summarise([record, refused])
    assert summary["recall"].mean == 0.5
    assert summary["statuses"] == {"LOW_OVERLAP": 1, "OK": 1}
    assert summary["stages"] == {"match": 0.05}


def test_the_surest_and_the_consistent_matches_have_inlier_ratios_of_their_own(data: Path) -> None:
    """Matches come most confident first; the first 250 of these 500 are correct."""
    source = open_set(data, "3DMatch")
    pair = source.pairs(None, 0)[0]
    assert pair.truth is not None
    points = np.resize(source.cloud(pair.source), (500, 3)).astype(float)
    landed = points @ pair.truth[:3, :3].T + pair.truth[:3, 3]
    landed[250:] += 1.0
    matches = Matches(points, landed, np.linspace(1, 0, 500))
    found = MethodResult(pair.truth, True, 0.2, 0.1, "OK", matches, trust=np.repeat([0.0, 0.5], [150, 350]))
    record = evaluate_pair("lepard:x", Fixed(found), source, pair)
    summary = tables.summarise([record])
    assert (summary["inlier_ratio"], summary["inlier_ratio_surest"]) == (0.5, 1.0)
    assert summary["inlier_ratio_consistent"] == pytest.approx(100 / 350)  # the first 150 are not trusted
    assert summary["fmr_surest"] == summary["fmr_consistent"] == 1.0


def records(method: str, successes: list[bool]) -> list[dict]:
    base = {"method": method, "scene": "s", "overlap": 0.25, "accepted": True, "status": "ok", "seconds": 1.0}
    return [
        {**base, "cpu_seconds": 1.0, "rre": 1.0, "rte": 0.1, "rmse": 0.1, "information_rmse": 0.1 if good else 0.3}
        for good in successes
    ]


def test_ours_is_compared_with_the_best_baseline_pair_by_pair() -> None:
    rows = records("lepard:rigid", [True] * 40) + records("icp", [False] * 40) + records("gicp", [True, False] * 20)
    summaries = tables.summarise_all("3DMatch", rows)
    assert summaries["lepard:rigid"]["against"]["method"] == "gicp"
    (line,) = tables.comparison_lines(summaries)
    assert "+50.0 points" in line
    assert "more than noise" in line
    close = tables.summarise_all("3DMatch", records("lepard:rigid", [True] * 4) + records("icp", [True] * 3 + [False]))
    assert "within noise" in tables.comparison_lines(close)[0]
    text = tables.format_table(tables.rigid_rows("3DMatch", summaries))
    assert len({len(line) for line in text.splitlines()}) == 1
    assert "20-30 % (n=40)" in text


def test_tum_counts_within_15_degrees_and_30_cm() -> None:
    record = {"rre": 14.9, "rte": 0.29}
    assert tables.is_success(record)
    assert not tables.is_success({**record, "rre": 15.1})
    assert not tables.is_success({**record, "rte": 0.31})
    assert not tables.is_success({"rre": None, "rte": None})


def test_pairs_survive_their_json() -> None:
    pair = RigidPair("a", "b", "s", np.eye(4), 0.3, np.eye(6))
    back = pairs_module._pair_of_json(json.loads(json.dumps(pairs_module._pair_json(pair))))
    assert back.name == pair.name
    np.testing.assert_array_equal(back.truth, pair.truth)


POOL = """
import time
from lepard_ros.evaluation.runner import run_parallel

if __name__ == "__main__":
    print("started", flush=True)
    list(run_parallel(time.sleep, [60, 60], 2, print, ()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are looked up in /proc")
def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    flushing = {**os.environ, "PYTHONUNBUFFERED": "1"}  # else the lines come when the work is done
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=flushing) as parent:
        assert parent.stdout is not None
        for _ in range(3):  # "started", then an empty line of `print` from each process that is ready
            parent.stdout.readline()
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
    assert len(children) >= 2
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
