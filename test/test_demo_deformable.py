# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The deformable demonstration: its figures against made-up words of a node, and once for real."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from browser import assert_sound
from lepard_ros.cloud.depth import Camera
from lepard_ros.demo.deformable import FRAME_COLUMNS, measure, table_rows, what_went_wrong, write_report
from lepard_ros.demo.story import Film, FrameNote, NodeRun, RecordedWarps, WarpNote, WarpRun, make_film
from lepard_ros.synthesis.creature_sequences import CreatureSequence
from rigid_warps import rigid_warp

CAMERA = Camera(48, 36, 60.0, 60.0, 23.5, 17.5)
FRAMES, STEP = 20, 0.01  # a wall that goes away from the camera by a centimetre a frame


def made_up_film() -> Film:
    """The wall, with a covered lens in frames 10 to 12."""
    away = STEP * np.arange(FRAMES)
    depths = np.ones((FRAMES, 36, 48), np.float32) + away[:, None, None].astype(np.float32)
    clouds = CAMERA.rays() * depths[..., None]
    shift = np.zeros((FRAMES, 1, 1, 3))
    shift[..., 2] = away[:, None, None]
    poses = np.tile(np.eye(4), (FRAMES, 1, 1))
    at_first, first_now = ((clouds - shift), (clouds[:1] + shift))
    sequence = CreatureSequence(
        CAMERA, np.arange(FRAMES) / 10, depths, poses, at_first.astype(np.float32), first_now.astype(np.float32)
    )
    covered = (np.arange(FRAMES) >= 10) & (np.arange(FRAMES) < 13)
    stamps = [10**12 + index * 100_000_000 for index in range(FRAMES)]
    return Film(CAMERA, stamps, depths, poses, covered, sequence)


def made_up_run(rest: int = 0, offset: float = 0.0, silent: bool = False, memory: float = 0.0) -> WarpRun:
    """A node that publishes the truth, moved by `offset` metres in the last frame.

    Its model begins at frame `rest`. With `memory` it grows by so many megabytes a cloud.
    """
    film, recorded, notes = made_up_film(), RecordedWarps(), []
    for index, stamp in enumerate(film.stamps_ns):
        lost = silent or film.covered[index] or index < rest
        state = "LOST" if lost else "RELOCALISED" if index == 13 else "OK"
        notes.append(FrameNote(stamp, state, "", "lepard", 20, 15, 1, False, False, {"warp": 0.1}, 0))
        if not lost:
            transform = np.eye(4)
            transform[:3, 3] = [offset * (index == FRAMES - 1), 0, STEP * (index - rest)]
            warp = rigid_warp(film.cloud(rest), transform)
            recorded.warps[stamp] = WarpNote(stamp, film.stamps_ns[rest], warp)
            recorded.warped[stamp] = film.cloud(index).astype(np.float32)
    node = NodeRun(10.0, 3.0, 0, [400.0 + memory * index for index in range(FRAMES + 1)])
    return WarpRun(film, recorded, notes, node, "deformable")


def test_the_figures_of_a_perfect_node() -> None:
    run = made_up_run()
    figures = measure(run)
    assert (figures.followed, figures.seen, figures.covered, figures.silent_when_covered) == (17, 17, 3, 3)
    assert figures.clouds_until_found == 1 and figures.false_warps == 0 and figures.memory_growth == 0
    assert max(one.error(95) for one in figures.frames if one.has_warp) < 1e-5
    assert figures.frames[-1].motion == pytest.approx(STEP * (FRAMES - 1))
    assert what_went_wrong(run, figures) == []
    assert dict(table_rows(run, figures))["clouds answered / dropped"] == "20 / 0"


def test_a_model_that_began_later_is_compared_with_the_same_places() -> None:
    figures = measure(made_up_run(rest=4))
    assert figures.followed == 13
    last = figures.frames[-1]
    assert len(last.errors) > 100
    assert last.motion == pytest.approx(STEP * (FRAMES - 1 - 4), abs=0.008)
    assert last.error(95) < 0.009  # a pixel that shows the same place lies that near


def test_a_short_film_does_not_judge_memory() -> None:
    run = made_up_run(memory=10.0)
    assert what_went_wrong(run, measure(run)) == []


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (made_up_run(offset=0.5), "far from the truth"),
        (made_up_run(silent=True), "Too few clouds"),
        (made_up_run(memory=10.0), "memory grew"),
    ],
)
def test_what_a_working_node_does_not_do_is_named(
    run: WarpRun, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lepard_ros.demo.deformable.MIN_FLAT_FRAMES", FRAMES)
    assert any(complaint in sentence for sentence in what_went_wrong(run, measure(run)))


def test_the_page_stands_alone_and_every_cloud_has_its_line(tmp_path: Path) -> None:
    run = made_up_run()
    words = write_report(run, measure(run), tmp_path, 12.0)
    page = (tmp_path / "report.html").read_text()
    for name in ("storyboard", "error", "graph"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert str(tmp_path / f"{name}.png") in words
    assert page.count("data:image/png;base64,") == 3 and "://" not in page
    with (tmp_path / "frames.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == FRAME_COLUMNS and len(rows) == FRAMES
    assert rows[11]["state"] == "LOST" and rows[11]["error_mean_m"] == "" and rows[12]["error_mean_m"] == ""
    assert float(rows[-1]["error_mean_m"]) < 1e-3
    assert_sound(tmp_path / "report.html", tmp_path, images=3, rows=5)


def test_a_node_that_says_nothing_still_gives_a_page(tmp_path: Path) -> None:
    run = made_up_run(silent=True)
    assert "not found again" in write_report(run, measure(run), tmp_path, 1.0)
    assert (tmp_path / "report.html").is_file() and not (tmp_path / "graph.png").exists()


@pytest.mark.slow
def test_the_film_covers_the_lens_and_its_truth_moves() -> None:
    film = make_film(seed=0, frames=12)
    assert film.covered.sum() == 3 and not film.covered[-1] and not film.covered[0]
    assert (film.depths[film.covered] < 0.3).all()
    rest, now = film.truth(0, 11)
    assert len(rest) == len(film.cloud(0)) == len(now) > 1000
    assert np.linalg.norm(now - rest, axis=1).max() > 0.05


@pytest.mark.slow
def test_the_demonstration_for_real(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The shipped deformable weights through the node: within 10 cm, silent with a covered lens."""
    pytest.importorskip("rclpy", reason="ROS 2 is not installed here")
    from lepard_ros.cli import main

    code = main(["demo", "--mode", "deformable", "--output", str(tmp_path), "--frames", "30", "--pace", "wait"])
    words, complaints = capfd.readouterr()
    assert code == 0, complaints[-2000:] + (tmp_path / "node.log").read_text()
    assert "3 of 3 clouds" in words
    answered, dropped = (int(word) for word in re.findall(r"answered / dropped +(\d+) / (\d+)", words)[0])
    assert (answered, dropped) == (30, 0), "a player that waits loses none"
    with (tmp_path / "frames.csv").open() as file:
        states = [row["state"] for row in csv.DictReader(file)]
    assert set(states) <= {"OK", "RELOCALISED", "LOST", "dropped"} and states[0] == "OK"
    assert states.count("dropped") == dropped and set(states[20:23]) <= {"LOST", "dropped"}
    assert (tmp_path / "report.html").is_file()
