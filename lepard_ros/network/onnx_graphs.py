# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Export of the network as ONNX graphs with dynamic sizes, and inference with onnxruntime.

Three graphs, as the three methods of `Lepard`: `encoder` (a pyramid's tensors -> features), `attention` (the first self
attention, which needs one cloud only and is done once for it; some networks have none) and `matcher` (two clouds ->
confidences). Pyramid, neighbours and fine matching are not network and stay outside.
"""

import io
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lepard_ros.cloud.pyramid import Pyramid, build_pyramid
from lepard_ros.errors import InputError
from lepard_ros.network.backbone import Relations
from lepard_ros.network.config import MATCH_LEVEL
from lepard_ros.network.lepard import CoarseCloud, Lepard, LepardOutput
from lepard_ros.network.procrustes import RigidFit

OPSET = 17
GRAPHS = ("encoder", "attention", "matcher")
IDENTITY = "weights_sha256"  # metadata key for the SHA-256 of the weights
CLOUD = ("features", "points", "normals")
EXAMPLE_SIDES = (40, 31)  # points along the traced sheets: two sizes, so that the exporter does not merge their axes


# --- inputs ----------------------------------------------------------------------------------------------------------


def pyramid_tensors(pyramid: Pyramid) -> dict[str, Tensor]:
    """All tensors of a pyramid by name, as `points_0` or `variation`."""
    named: dict[str, Tensor] = {}
    for f in fields(pyramid):
        value = getattr(pyramid, f.name)
        if isinstance(value, Tensor):
            named[f.name] = value
        elif isinstance(value, list):
            named |= {f"{f.name}_{k}": item for k, item in enumerate(value) if isinstance(item, Tensor)}
    return named


def with_tensors(pyramid: Pyramid, tensors: dict[str, Tensor]) -> Pyramid:
    """A pyramid with other tensors, named as by `pyramid_tensors`."""
    changed: dict[str, Any] = {}
    for f in fields(pyramid):
        value = getattr(pyramid, f.name)
        if isinstance(value, Tensor):
            changed[f.name] = tensors[f.name]
        elif isinstance(value, list):
            changed[f.name] = [tensors.get(f"{f.name}_{k}", item) for k, item in enumerate(value)]
    return replace(pyramid, **changed)


def cloud_tensors(cloud: CoarseCloud, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of one cloud by name: features (1, n, d), points (1, n, 3), normals (1, n, 3) if it has any."""
    values = {name: getattr(cloud, name) for name in CLOUD}
    return {prefix + name: value for name, value in values.items() if value is not None}


def coarse_cloud(tensors: dict[str, Tensor], prefix: str = "", prepared: bool = False) -> CoarseCloud:
    """The reverse of `cloud_tensors`: a cloud without padding."""
    features, points, normals = (tensors.get(prefix + name) for name in CLOUD)
    assert features is not None and points is not None
    mask = torch.ones_like(points[..., 0], dtype=torch.bool)
    return CoarseCloud(features, points, normals, mask, prepared)


# --- writing ---------------------------------------------------------------------------------------------------------


class _Traced(nn.Module):
    """One method of the network as a function of plain tensors, as the exporter needs it.

    It calls the methods of `Lepard`, even for an `OnnxLepard`, whose own methods run the graphs.
    """

    def __init__(self, network: Lepard, names: Iterable[str]) -> None:
        super().__init__()
        self.network, self.names = network, list(names)

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.names, tensors, strict=True))


class _Encoder(_Traced):
    def __init__(self, network: Lepard, pyramid: Pyramid) -> None:
        super().__init__(network, pyramid_tensors(pyramid))
        self.pyramid = pyramid

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        features, fine = Lepard.encode(self.network, with_tensors(self.pyramid, self.named(tensors)))
        return (features,) if fine is None else (features, fine)


class _Attention(_Traced):
    def forward(self, *tensors: Tensor) -> Tensor:
        return Lepard.prepare(self.network, coarse_cloud(self.named(tensors))).features


class _Matcher(_Traced):
    def forward(self, *tensors: Tensor) -> Tensor:
        named, prepared = self.named(tensors), self.network.can_prepare()
        source, target = (coarse_cloud(named, side, prepared) for side in ("source_", "target_"))
        return Lepard.match(self.network, source, target).confidence


def example_pyramid(network: Lepard, side: int) -> Pyramid:
    """The pyramid of a wavy sheet of side x side points, for tracing."""
    steps = torch.arange(side) * network.config.grid
    x, y = torch.meshgrid(steps, steps, indexing="ij")
    z = 1 + 3 * network.config.grid * (x / (4 * network.config.grid)).sin() * (y / (5 * network.config.grid)).cos()
    return build_pyramid(torch.stack([x, y, z], dim=-1).reshape(-1, 3), network.config.pyramid, torch.zeros(3))


def example_cloud(network: Lepard, side: int) -> CoarseCloud:
    """Coarse points of that sheet with made-up features, as a batch of one."""
    pyramid = example_pyramid(network, side)
    points = pyramid.points[MATCH_LEVEL][None]
    normals = pyramid.normals[MATCH_LEVEL][None] if pyramid.normals else None
    generator = torch.Generator().manual_seed(side)
    features = torch.randn(1, points.shape[1], network.config.feature_dim, generator=generator)
    return CoarseCloud(features, points, normals, torch.ones_like(points[..., 0], dtype=torch.bool))


def graph_bytes(network: Lepard, graph: str, identity: str) -> bytes:
    """One of the GRAPHS as the content of an ONNX file. identity: SHA-256 of the weights, kept in the file."""
    module, tensors, outputs = _traced(network, graph)
    # Features of clouds and the first axis of everything else count points: a size of their own in every call.
    axis = 0 if graph == "encoder" else 1
    sizes = {name: {axis: f"{name}_size"} for name in tensors}
    sizes |= {name: {axis: f"{name}_size"} for name in outputs}
    if graph == "matcher":
        sizes["confidence"] = {1: "source_points_size", 2: "target_points_size"}
    file = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing fixes branches on settings and types, which is intended
        torch.onnx.export(
            module.eval(), tuple(tensors.values()), file, input_names=list(tensors), output_names=outputs,  # type: ignore[arg-type]
            dynamic_axes=sizes, opset_version=OPSET, dynamo=False,
        )  # fmt: skip
    onnx: Any = import_module("onnx")
    model = onnx.load_from_string(file.getvalue())
    model.metadata_props.add(key=IDENTITY, value=identity)
    return bytes(model.SerializeToString())


def _traced(network: Lepard, graph: str) -> tuple[_Traced, dict[str, Tensor], list[str]]:
    """The inputs of tracing: the module, example tensors by name, names of the outputs."""
    if graph == "encoder":
        pyramid = example_pyramid(network, EXAMPLE_SIDES[0])
        outputs = ["features", "fine_features"] if network.config.fine_dim else ["features"]
        return _Encoder(network, pyramid), pyramid_tensors(pyramid), outputs
    first, second = (example_cloud(network, side) for side in EXAMPLE_SIDES)
    if graph == "attention":
        tensors = cloud_tensors(first)
        return _Attention(network, tensors), tensors, ["prepared_features"]
    tensors = cloud_tensors(first, "source_") | cloud_tensors(second, "target_")
    return _Matcher(network, tensors), tensors, ["confidence"]


def export_graphs(network: Lepard, identity: str, folder: Path) -> list[Path]:
    """Write the graphs of a network into a folder, as `encoder.onnx`; returns the files."""
    written = []
    for graph in GRAPHS:
        if graph != "attention" or network.can_prepare():
            written.append(folder / f"{graph}.onnx")
            written[-1].write_bytes(graph_bytes(network, graph, identity))
    return written


# --- running ---------------------------------------------------------------------------------------------------------


class OnnxLepard(Lepard):
    """The network on onnxruntime: one cloud or one pair at a time, on any of its execution providers.

    Given motions (`match` with `truth`) are not part of the graph; torch runs those.
    """

    def __init__(self, network: Lepard, identity: str, folder: Path | None = None) -> None:
        """identity: SHA-256 of the weights; folder: location of exported graphs. Missing ones are made on first use."""
        super().__init__(network.config)
        self.load_state_dict(network.state_dict())
        self.identity, self.folder = identity, folder
        self.sessions: dict[str, Any] = {}

    def encode(self, pyramid: Pyramid, relations: Relations | None = None) -> tuple[Tensor, Tensor | None]:
        """See `Lepard.encode`."""
        features, *fine = self._run("encoder", pyramid_tensors(pyramid))
        return features, fine[0] if fine else None

    def prepare(self, cloud: CoarseCloud) -> CoarseCloud:
        """See `Lepard.prepare`."""
        if cloud.prepared or not self.can_prepare():
            return cloud
        (features,) = self._run("attention", cloud_tensors(cloud))
        return replace(cloud, features=features, prepared=True)

    def match(self, source: CoarseCloud, target: CoarseCloud, truth: RigidFit | None = None) -> LepardOutput:
        """See `Lepard.match`; pair by pair."""
        if truth is not None:
            return super().match(source, target, truth)
        sources, targets = ([self.prepare(cloud) for cloud in single_clouds(batch)] for batch in (source, target))
        sources = sources * (len(targets) // len(sources))
        confidence = source.points.new_zeros(len(targets), source.points.shape[1], target.points.shape[1])
        for table, x, y in zip(confidence, sources, targets, strict=True):
            (found,) = self._run("matcher", cloud_tensors(x, "source_") | cloud_tensors(y, "target_"))
            table[: found.shape[1], : found.shape[2]] = found[0]
        source = source.repeated(len(targets)) if len(source.features) == 1 else source
        return LepardOutput(confidence, lambda values: self.rigid_fit(values, source, target))

    def _run(self, graph: str, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Run a graph; inputs that it does not use are ignored."""
        session = self.sessions.get(graph)
        if session is None:
            session = self.sessions[graph] = self._open(graph)
        wanted = [value.name for value in session.get_inputs()]
        arrays = session.run(None, {name: tensors[name].detach().contiguous().numpy() for name in wanted})
        return [torch.from_numpy(array) for array in arrays]

    def _open(self, graph: str) -> Any:
        """A session of onnxruntime with as many threads as torch has."""
        runtime: Any = import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        path = None if self.folder is None else self.folder / f"{graph}.onnx"
        model = path.read_bytes() if path is not None and path.exists() else graph_bytes(self, graph, self.identity)
        session = runtime.InferenceSession(model, options, providers=runtime.get_available_providers())
        known = session.get_modelmeta().custom_metadata_map.get(IDENTITY)
        if known != self.identity:
            raise InputError(f"{path} was exported from other weights: run `lepard export` again.")
        return session


def single_clouds(batch: CoarseCloud) -> list[CoarseCloud]:
    """The clouds of a batch one by one, without padding."""
    clouds = []
    for number, count in enumerate(batch.mask.sum(1).tolist()):
        row = slice(number, number + 1), slice(count)
        normals = None if batch.normals is None else batch.normals[row]
        clouds.append(
            CoarseCloud(batch.features[row], batch.points[row], normals, batch.mask[row], prepared=batch.prepared)
        )
    return clouds


def run_by_onnx(network: Lepard, identity: str, folder: Path | None = None) -> OnnxLepard:
    """The network on onnxruntime; raises InputError if that is not installed. Arguments as for `OnnxLepard`."""
    if isinstance(network, OnnxLepard):
        return network
    for package in ("onnx", "onnxruntime"):
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise InputError(
                f"device onnx needs the Python package {package}: pip install 'lepard_ros[onnx]'."
            ) from None
    return OnnxLepard(network, identity, folder)
