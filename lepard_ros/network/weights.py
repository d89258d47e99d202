# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Weights on disk: a safetensors file with a JSON card next to it, and the authors' checkpoints."""

import hashlib
import json
import os
import pickle
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lepard_ros.errors import InputError
from lepard_ros.network.config import LepardConfig
from lepard_ros.network.lepard import Lepard

SHIPPED = Path(__file__).resolve().parent.parent / "weights"
FORMAT = 1
# Tensors of an authors' checkpoint that its forward pass never uses.
UNUSED = ("backbone.decoder_blocks.3.", "backbone.decoder_blocks.5.", "backbone.coarse_in.", "backbone.fine_out.")


@dataclass
class Card:
    """Description of a weights file: network settings, origin, quality.

    sha256: of the safetensors file, and the identity of the weights.
    """

    name: str
    config: LepardConfig
    mode: str = "rigid"
    sha256: str = ""
    licence: str = "Apache-2.0"
    training: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The card's text."""
        values = {"format": FORMAT, **self.__dict__, "config": self.config.to_dict()}
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str) -> "Card":
        """Read a card; `origin` names it in an error."""
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                raise InputError(
                    f"{origin} has another format than {FORMAT}: update lepard_ros or convert the weights again."
                )
            return cls(**{**values, "config": LepardConfig.from_dict(values["config"])})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{origin} is not a card of Lepard weights ({error}): convert or train them again."
            ) from error


def find_weights(name: str | os.PathLike[str]) -> Path:
    """The safetensors file of shipped weights ("rigid", "deformable") or of a path."""
    shipped = SHIPPED / f"{name}.safetensors"
    path = Path(name)
    if path.suffix != ".safetensors" and shipped.exists():
        return shipped
    if path.suffix == ".safetensors" and path.exists():
        return path
    known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.safetensors"))) or "none"
    raise InputError(f"no weights {str(name)!r}: give a .safetensors file, or one of the shipped ones ({known}).")


def load(name: str | os.PathLike[str]) -> tuple[Lepard, Card]:
    """A network with its card, checked against each other and against the card's SHA-256."""
    path = find_weights(name)
    card_path = path.with_suffix(".json")
    if not card_path.exists():
        raise InputError(f"{path.name} has no card {card_path.name} next to it: copy both files together.")
    card = Card.from_json(card_path.read_text(encoding="utf-8"), card_path.name)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != card.sha256:
        raise InputError(
            f"{path.name} is damaged or does not belong to {card_path.name}: its SHA-256 differs from the card's."
        )
    from safetensors.torch import load as load_tensors

    try:
        tensors = load_tensors(data)
    except Exception as error:  # safetensors raises its own types for every kind of damage
        raise InputError(f"{path.name} is not a safetensors file ({error}).") from error
    network = Lepard(card.config)
    _fill(network, {key: value.float() for key, value in tensors.items()}, path.name)
    return network.eval(), card


def save(network: Lepard, card: Card, path: str | os.PathLike[str], half: bool = False) -> Path:
    """Write weights and card, each atomically; half: in half precision."""
    from safetensors.torch import save as save_tensors

    path = Path(path).with_suffix(".safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {k: (v.half() if half else v).detach().cpu().contiguous() for k, v in network.state_dict().items()}
    data = save_tensors(tensors)
    card = Card(**{**card.__dict__, "sha256": hashlib.sha256(data).hexdigest()})
    write_atomically(path, data)
    write_atomically(path.with_suffix(".json"), card.to_json().encode())
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _fill(network: Lepard, tensors: dict[str, Tensor], origin: str) -> None:
    """Load tensors by name; raises InputError for a missing, extra or wrong-sized one."""
    wanted = network.state_dict()
    for name in sorted(set(wanted) | set(tensors)):
        if name not in tensors or name not in wanted:
            raise InputError(
                f"{origin} {'lacks' if name in wanted else 'has an unknown'} tensor {name}: wrong sizes or file."
            )
        if tensors[name].shape != wanted[name].shape:
            found, expected = list(tensors[name].shape), list(wanted[name].shape)
            raise InputError(f"{origin}: tensor {name} has shape {found}, the card expects {expected}.")
        if not torch.isfinite(tensors[name]).all():
            raise InputError(f"{origin}: tensor {name} holds values that are not finite; the file is damaged.")
    network.load_state_dict(tensors)


def load_official(path: str | os.PathLike[str], **sizes: Any) -> Lepard:
    """A network from an authors' checkpoint.

    sizes: first_feats_dim, feature_dim, first_subsampling_dl, heads, voxel_size, vol_origin, neighbour_limits,
    conv_radius, kernel_extent, kernel_points, temperature, sinkhorn_iterations, layers (as in the recorded cases),
    max_condition_number, matching, position_code, entangled. Missing values default to those of 3DMatch.
    """
    network = Lepard(official_config(**sizes))
    tensors = rename_official(read_official(path), network.config)
    # A checkpoint trained with dual softmax has no bin scores: Sinkhorn then starts from the initial ones.
    tensors |= {k: v for k, v in network.state_dict().items() if k.endswith("bin_score") and k not in tensors}
    _fill(network, tensors, Path(path).name)
    return network.eval()


def official_config(**sizes: Any) -> LepardConfig:
    """Our settings from the names of the reference's configuration."""
    names = {"first_feats_dim": "width", "first_subsampling_dl": "grid"}
    values = {names.get(key, key): value for key, value in sizes.items() if key != "gt_match_radius"}
    if isinstance(values.get("max_condition_number"), dict):
        values["max_condition_number"] = values["max_condition_number"]["reposition"]
    return LepardConfig.from_dict(values)


def read_official(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of an authors' checkpoint; the unpickler allows only tensors."""
    name = Path(path).name
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"there is no checkpoint {name}: check the path.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{name} is not a checkpoint of plain tensors, and nothing in it was run ({reason})."
        ) from error
    tensors = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(tensors, dict) or not all(isinstance(v, Tensor) for v in tensors.values()):
        raise InputError(f"{name} holds no 'state_dict' of tensors: it is not an authors' checkpoint.")
    return tensors


def rename_official(tensors: dict[str, Tensor], config: LepardConfig) -> dict[str, Tensor]:
    """Rename the reference's tensors to our names, and drop those that it never uses."""
    places = _encoder_places(config)
    renamed = {}
    for name, value in tensors.items():
        if name.startswith(UNUSED) or "tgt_proj" in name:
            continue
        parts = name.removeprefix("module.").split(".")
        if parts[:2] == ["backbone", "encoder_blocks"] and parts[2].isdigit() and int(parts[2]) in places:
            place = places[int(parts[2])]
            parts = [
                "backbone",
                place,
                *(["convolution"] if "KPConv" in parts and "stages" in place else []),
                *parts[3:],
            ]
        elif parts[:2] == ["backbone", "decoder_blocks"]:
            parts = ["backbone", "decoder", str(len(config.neighbour_limits) - 2), *parts[3:]]
        elif parts[0] == "coarse_transformer":
            parts = _layer_name(name)
        elif parts[0] == "coarse_matching":
            parts[0] = "matching"
        renamed[".".join(parts)] = value.squeeze(-1) if name.endswith("coarse_out.weight") else value
    return renamed


def _layer_name(name: str) -> list[str]:
    """coarse_transformer.layers.2.0.src_proj.weight -> layers.2.src_proj.weight; attention layers keep their names."""
    parts = name.split(".")[1:]
    if parts[2] == "0":
        del parts[2]
    return parts


def _encoder_places(config: LepardConfig) -> dict[int, str]:
    """Where each of the reference's numbered encoder blocks is in ours."""
    places, number, levels = {0: "first"}, 1, len(config.neighbour_limits)
    for level in range(levels):
        for block in range(1 + (level > 0) + (level + 1 < levels)):
            places[number] = f"stages.{level}.{block}"
            number += 1
    return places


def grown(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """Extend the weights of a smaller network to a larger one that starts as (nearly) the same function.

    old: tensors of the smaller network; new: freshly initialised tensors of the larger one. It may have chirality,
    wider bottlenecks, a smooth decoder, context, handedness or a dustbin. New channels have random inputs and zero
    outputs. Tensors that differ in any other way are kept, so that the loader rejects them.
    """
    result = {name: value for name, value in new.items() if name.startswith(NEW_BLOCKS)} | old
    for name in result:
        if name.startswith(NEW_BLOCKS) and name.endswith("unary2.mlp.weight") and name not in old:
            result[name] = torch.zeros_like(new[name])  # a block that adds nothing yet
    for name, before in old.items():
        if name in new and before.shape != new[name].shape and name.endswith(GROWING):
            result[name] = _grown(name, before, new[name])
    return result


NEW_BLOCKS = ("backbone.decoder_blocks.", "backbone.context.", "backbone.handed.", "fine_matching.nothing")
GROWING = ("KPConv.weights", "unary1.mlp.weight", "unary2.mlp.weight", "bias.mlp.0.weight")


def _grown(name: str, before: Tensor, after: Tensor) -> Tensor:
    """A tensor in the upper left corner of a larger one; the rest is fresh for new output channels, else zero."""
    if any(a < b for a, b in zip(after.shape, before.shape, strict=True)):
        return before
    result = after.clone() if name.endswith(("KPConv.weights", "unary1.mlp.weight")) else torch.zeros_like(after)
    if name.endswith("KPConv.weights"):
        result[:, :, : before.shape[2]] = 0  # old channels get no input from new channels or kernel functions
        result[before.shape[0] :] = 0
    result[tuple(slice(size) for size in before.shape)] = before
    return result


def with_further_blocks(
    old: dict[str, Tensor], before: tuple[str, ...], after: tuple[str, ...], heads: int
) -> dict[str, Tensor]:
    """The weights of a network whose transformer has further blocks: copies of the last one, as if it ran again.

    before, after: the kinds of layers of both. Each new positioning layer starts as the final matching. If `after` is
    no such network, the weights are returned as they are, so that the loader rejects them.
    """
    last = len(before) - 1 - before[::-1].index("positioning") if "positioning" in before else 0
    block, further = before[last:], after[len(before) :]
    if not last or after[: len(before)] != before or further != block * (len(further) // len(block)):
        return old
    result = dict(old)
    for number, kind in enumerate(after[len(before) :], len(before)):
        origin = "matching." if kind == "positioning" else f"layers.{last + (number - last) % len(block)}."
        result |= {
            f"layers.{number}.{name.removeprefix(origin)}": value
            for name, value in old.items()
            if name.startswith(origin)
        }
    copied = heads * block.count("self")  # rows of the pair bias: one for each head of each self attention
    for name in ("pair_bias.mlp.2.weight", "pair_bias.mlp.2.bias"):
        if name in old and copied:
            result[name] = torch.cat([old[name], *[old[name][-copied:]] * (len(further) // len(block))])
    return result
