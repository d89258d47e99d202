# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Weights on disk: round trips, refusals, and the authors' checkpoints."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from lepard_ros.commands.weights import run_convert, run_info
from lepard_ros.errors import InputError
from lepard_ros.network.config import SMALL_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import Card, load, load_official, save

TINY = LepardConfig.from_dict({**SMALL_RIGID.to_dict(), "width": 16, "feature_dim": 48})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(Lepard(TINY), Card("tiny", TINY), tmp_path / "tiny")


def test_save_and_load_give_the_same_network(saved: Path) -> None:
    torch.manual_seed(0)
    expected = Lepard(TINY).state_dict()
    network, card = load(saved)
    assert card.config == TINY
    for name, value in network.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_half_precision_halves_the_file(saved: Path, tmp_path: Path) -> None:
    network, card = load(saved)
    half = save(network, card, tmp_path / "half", half=True)
    assert half.stat().st_size < 0.6 * saved.stat().st_size
    assert load(half)[1].sha256 != card.sha256


def damage(path: Path, how: str) -> None:
    data, card = path.read_bytes(), path.with_suffix(".json")
    if how == "flipped":
        path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "no card":
        card.unlink()
    elif how == "card not json":
        card.write_text("{")
    elif how == "card of other sizes":
        values = json.loads(card.read_text())
        values["config"]["feature_dim"] = 72
        card.write_text(json.dumps(values))
    elif how == "newer format":
        card.write_text(json.dumps({**json.loads(card.read_text()), "format": 99}))


@pytest.mark.parametrize(
    "how", ["flipped", "truncated", "empty", "no card", "card not json", "card of other sizes", "newer format"]
)
def test_damaged_weights_are_refused_with_one_sentence(saved: Path, how: str) -> None:
    damage(saved, how)
    with pytest.raises(InputError) as caught:
        load(saved)
    assert "\n" not in str(caught.value)


def test_garbage_with_a_matching_hash_is_refused(saved: Path) -> None:
    import hashlib

    saved.write_bytes(b"not tensors at all")
    card = saved.with_suffix(".json")
    values = json.loads(card.read_text()) | {"sha256": hashlib.sha256(b"not tensors at all").hexdigest()}
    card.write_text(json.dumps(values))
    with pytest.raises(InputError, match="not a safetensors file"):
        load(saved)


def test_unknown_names_list_what_is_shipped() -> None:
    with pytest.raises(InputError, match="shipped"):
        load("no_such_weights")


class Bomb:
    """What a malicious pickle looks like: unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, form: str) -> None:
    mark, path = tmp_path / "was_run", tmp_path / "evil.pth"
    content = {"state_dict": {"a": Bomb(mark)}}
    if form == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    with pytest.raises(InputError):
        load_official(path)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", b"plain text"])
def test_other_files_are_not_checkpoints(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(content)
    with pytest.raises(InputError):
        load_official(path)


def test_a_checkpoint_without_a_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, tmp_path / "x.pth")
    with pytest.raises(InputError, match="state_dict"):
        load_official(tmp_path / "x.pth")


def test_info_prints_the_card_and_times(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from argparse import Namespace

    assert run_info(Namespace(weights=str(saved), no_timing=False)) == 0
    text = capsys.readouterr().out
    assert '"name": "tiny"' in text
    assert "match" in text


def test_convert_writes_what_load_reads(shared_data, tmp_path: Path) -> None:
    from argparse import Namespace

    folder = shared_data().parent / "parity"
    sizes = folder / "parity_a.json"
    arguments = Namespace(checkpoint=folder / "parity_a_official_checkpoint.pth", out=tmp_path / "a.safetensors",
                          preset="paper_rigid", sizes=sizes, half=False)  # fmt: skip
    assert run_convert(arguments) == 0
    network, card = load(tmp_path / "a.safetensors")
    assert card.config.feature_dim == 48
    assert sum(p.numel() for p in network.parameters()) > 0
