# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The report and its pictures, drawn for real and opened in a real browser where there is one; `lepard match`."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from browser import assert_sound, look_at
from lepard_ros import cli
from lepard_ros.cloud.files import read_cloud, write_cloud
from lepard_ros.errors import InputError
from lepard_ros.evaluation import tables
from lepard_ros.matcher import Matcher
from lepard_ros.network.config import SMALL_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import Card, save
from lepard_ros.registration.types import Matches
from lepard_ros.report import cloud_pictures, curves
from lepard_ros.report.figure import save_figure
from lepard_ros.report.page import Page

TINY = LepardConfig.from_dict({**SMALL_RIGID.to_dict(), "width": 16, "feature_dim": 48, "confidence_threshold": 0.0})


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained network on the disc."""
    torch.manual_seed(0)
    return save(Lepard(TINY), Card("tiny", TINY), tmp_path_factory.mktemp("weights") / "tiny.safetensors")


def corner(seed: int) -> np.ndarray:
    """The corner of a room with boxes, 2 m before a camera."""
    random = np.random.default_rng(seed)
    flat = random.uniform(0, 1.5, size=(2400, 2))
    walls = [np.insert(flat[axis::3], axis, 0, axis=1) for axis in range(3)]
    boxes = [random.uniform(0, 0.3, size=(150, 3)) + random.uniform(0.2, 1.1, size=3) for _ in range(3)]
    return np.concatenate([*walls, *boxes]) + np.array([-0.7, -0.7, 1.5])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two scenes in the compact layout, in each one easy pair and one that no method solves."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows: dict[str, list] = {key: [] for key in ("src", "tgt", "rot", "trans", "overlap", "gt_cov")}
    for number, scene in enumerate(("kitchen", "hotel")):
        clouds = {"0": corner(number), "1": corner(number) - np.array([0.03, 0, 0]), "2": corner(number + 10)}
        np.savez(folder / f"{scene}.npz", **{k: np.round(c / 0.00025).astype(np.int16) for k, c in clouds.items()})
        for source, shift, overlap in (("1", 0.03, 0.9), ("2", 5.0, 0.15)):
            values = (f"{scene}/{source}", f"{scene}/0", np.eye(3), [[shift], [0], [0]], overlap, 100 * np.eye(6))
            for key, value in zip(rows, values, strict=True):
                rows[key].append(value)
    np.savez(folder / "gt_3DMatch.npz", **{key: np.array(values) for key, values in rows.items()})
    return folder


def test_the_report_stands_alone_and_shows_failures_first(data: Path, weights: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "report"
    methods = ["--methods", f"lepard:{weights}", "icp"]
    arguments = ["evaluate", "3dmatch", str(data), *methods, "--jobs", "1", "--quiet", "--report", str(folder)]
    assert cli.main(arguments) == 0
    assert str(folder / "index.html") in capsys.readouterr().out
    page = (folder / "index.html").read_text()
    assert "://" not in page
    assert page.count("data:image/png;base64,") == page.count("<img") >= 6
    assert page.index("Failures of lepard:") < page.index("Successes of lepard:")
    assert [path.name for path in folder.iterdir()] == ["index.html"]
    assert str(tmp_path) not in re.sub(r"lepard:\S+", "", page)
    assert_sound(folder / "index.html", tmp_path, images=6, rows=5)


def test_the_browser_sees_what_is_wrong_with_a_page(tmp_path: Path) -> None:
    """Otherwise the checks of the pages could not fail."""
    page = Page("a broken page")
    page.text("nothing to see")
    broken = '<img src="data:image/png;base64,AAAA"><script>console.error("a thing that went wrong")</script>'
    (tmp_path / "bad.html").write_text(page.html().replace("</body>", broken + "</body>"))
    seen = look_at(tmp_path / "bad.html", tmp_path)
    assert seen.images == [False]
    assert len(seen.console) == 1 and "a thing that went wrong" in seen.console[0]


def test_a_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    page = Page("<b>title</b>")
    page.heading("a < b")
    page.text("<script>alert(1)</script>")
    page.table([["method", "x"], ["lepard:<y>", "1"], ["icp", "2"]])
    page.facts([("<i>", "&")])
    page.details("<u>", [["<s>"], ["<s>"]])
    text = page.write(tmp_path / "new" / "folder" / "index.html").read_text()
    assert not re.search("<[bius]>", text)
    assert "<script>" not in text
    assert "&lt;b&gt;title" in text
    assert text.count('class="ours"') == 1
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="folder"):
        page.write(tmp_path / "file" / "index.html")


def records(method: str, count: int = 12) -> list[dict]:
    random = np.random.default_rng(len(method))
    return [
        {"method": method, "scene": "s", "overlap": random.uniform(), "accepted": True, "status": "ok", "rmse": 0.1,
         "rre": None if i == 0 else random.uniform(0, 20), "rte": None if i == 0 else random.uniform(0, 0.5),
         "seconds": 1.0, "cpu_seconds": 0.9, "stages": {"encode": 0.4, "match": 0.6}}
        for i in range(count)
    ]  # fmt: skip


def pixels(figure: object) -> np.ndarray:
    figure.canvas.draw()  # type: ignore[attr-defined]
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)  # type: ignore[attr-defined]


def test_curves_are_drawn() -> None:
    grouped = {name: records(name) for name in ("lepard:rigid", "icp")}
    summaries = {name: tables.summarise(own) for name, own in grouped.items()}
    figures = [
        curves.recall_figure(grouped, tables.BANDS),
        curves.error_figure(grouped),
        curves.histogram_figure({"icp": [0.1, 0.9, 3.0]}, "inlier ratio", 1.0),
        curves.timing_figure(summaries),
        curves.calibration_figure(np.array([[10, 2.0, 3], [0, 0, 0], [5, 4.0, 5]])),
    ]
    for figure in figures:
        assert (pixels(figure) < 250).any(axis=2).mean() > 0.005


def test_right_matches_are_blue_and_wrong_ones_red() -> None:
    source, target = corner(0), corner(0)
    matches = Matches(source[:60], target[:60], np.ones(60))

    def counts(inliers: np.ndarray) -> tuple[int, int]:
        red, green, blue = np.moveaxis(pixels(cloud_pictures.matches_figure(source, target, matches, inliers)), 2, 0)
        return int(((red > green + 70) & (red > blue + 70)).sum()), int(((blue > red + 60) & (blue > green + 30)).sum())

    red_of_wrong, blue_of_wrong = counts(np.zeros(60, dtype=bool))
    red_of_right, blue_of_right = counts(np.ones(60, dtype=bool))
    assert blue_of_right > blue_of_wrong + 200
    assert red_of_wrong > red_of_right + 200


def test_pictures_of_clouds_take_any_amount(tmp_path: Path) -> None:
    none = Matches(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))
    few = corner(0)[:5]
    figure = cloud_pictures.matches_figure(few, few, none, np.zeros(0, dtype=bool), title="a few")
    assert save_figure(figure, tmp_path / "sub" / "few.png").stat().st_size > 1000
    many = np.random.default_rng(0).normal(size=(60_000, 3))
    pixels(cloud_pictures.alignment_figure(many, many, np.eye(4)))
    pixels(cloud_pictures.warp_figure(corner(0), corner(1), corner(0), np.linspace(0, 0.1, len(corner(0)))))
    for warped in (None, corner(0) + 0.01):
        matches, right = Matches(corner(0)[:9], corner(1)[:9], np.ones(9)), np.arange(9) > 4
        drawn = cloud_pictures.deformation_figure(corner(0), corner(1), matches, right, warped)
        assert ("refused" in drawn.axes[1].get_title()) == (warped is None)
        pixels(drawn)
    with pytest.raises(InputError, match="cannot be written"):
        save_figure(figure, tmp_path / "few.nonsense")


def test_features_of_one_cloud_have_one_set_of_colours(weights: Path) -> None:
    matcher = Matcher.from_pretrained(weights, device="cpu")
    cloud = matcher.encode(corner(0))
    first, second = cloud_pictures.feature_colours(cloud, cloud)
    assert first.shape == cloud.surface.points.shape
    assert first.min() >= 0
    assert first.max() <= 1
    assert np.ptp(first, axis=0).min() > 0.3
    np.testing.assert_allclose(first, second)
    pixels(cloud_pictures.features_figure(cloud, cloud, np.eye(4), "features"))


# --- lepard match ----------------------------------------------------------------------------------------------------


def match(tmp_path: Path, weights: Path, *more: str) -> int:
    for name, seed in (("a.ply", 0), ("b.npy", 1)):
        write_cloud(tmp_path / name, corner(seed))
    files = [str(tmp_path / name) for name in ("a.ply", "b.npy")]
    return cli.main(["match", *files, "--weights", str(weights), "--device", "cpu", *more])


def test_match_refuses_unlike_clouds_and_writes_what_it_saw(tmp_path: Path, weights: Path, capsys) -> None:
    out = [str(tmp_path / name) for name in ("out.json", "out.png", "out.ply")]
    assert match(tmp_path, weights, "--json", out[0], "--picture", out[1], "--output", out[2]) == 1
    printed = capsys.readouterr().out
    assert "refused: " in printed
    assert "was not written" in printed
    result = json.loads(Path(out[0]).read_text())
    assert result["transform"] is None
    assert result["status"] != "OK"
    assert len(result["matches"]["source"]) == len(result["matches"]["inlier"])
    assert Path(out[1]).read_bytes().startswith(b"\x89PNG")
    assert not Path(out[2]).exists()


def test_match_in_deformable_mode(tmp_path: Path, weights: Path, capsys) -> None:
    code = match(tmp_path, weights, "--mode", "deformable", "--json", str(tmp_path / "warp.json"))
    result = json.loads((tmp_path / "warp.json").read_text())
    assert (code == 0) == (result["status"] == "OK")
    assert len(result["nodes"]) == len(result["translations"]) > 0
    assert ("accepted" if code == 0 else "refused") in capsys.readouterr().out


def test_an_accepted_match_is_written(tmp_path: Path) -> None:
    from lepard_ros.commands import match as match_command
    from lepard_ros.registration.types import Registration, Status

    motion = np.eye(4)
    motion[:3, 3] = [1, 2, 3]
    none = Matches(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))
    found = Registration(motion, Status.OK, none, np.zeros(0, dtype=bool), 0.01, 0.5, 1e-4 * np.eye(6), {"match": 0.1})

    class Knowing:
        def register(self, source: np.ndarray, target: np.ndarray, effort: int) -> Registration:
            return found

    names = ("source", "target", "json", "picture", "output", "viewpoint", "effort")
    args = type("Args", (), dict.fromkeys(names))()
    args.output, args.json = tmp_path / "moved.ply", tmp_path / "moved.json"
    cloud = corner(0)
    assert match_command._run_rigid(args, Knowing(), cloud, cloud, [None, None])  # type: ignore[arg-type]
    np.testing.assert_allclose(read_cloud(args.output), cloud + np.array([1, 2, 3]), atol=1e-5)
    assert json.loads(args.json.read_text())["transform"] == motion.tolist()
    text = match_command.rigid_text(found)
    assert "overlap 50 %" in text
    assert "1.00 cm and 0.57 degrees" in text


def test_match_refuses_bad_files_with_code_2(tmp_path: Path, weights: Path, capsys) -> None:
    (tmp_path / "bad.ply").write_text("no cloud")
    write_cloud(tmp_path / "good.ply", corner(0))
    arguments = ["match", str(tmp_path / "bad.ply"), str(tmp_path / "good.ply"), "--weights", str(weights)]
    assert cli.main(arguments) == 2
    assert "bad.ply" in capsys.readouterr().err
